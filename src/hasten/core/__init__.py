"""What every layer shares: errors, tensors, plan, report, registry, hardware, tokenizer."""
