"""Shared by every layer: errors, tensors, plan, report, registry, hardware, tokenizer."""
