"""Generate with transformers: transformers_worker.py MODEL DTYPE DEVICE."""

from __future__ import annotations

import sys
from typing import Any

from worker import THREADS, Generate, serve


def load(model: str, dtype: str, device: str) -> Generate:
    """Return transformers' generate; all prompts of a batch have the same length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()

    def generate(prompts: list[list[int]], tokens: int, eos_ids: list[int]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "eos_token_id": eos_ids}
        with torch.inference_mode():
            generated = module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
            )
        return list(generated[:, ids.shape[1] :].tolist())

    return generate


if __name__ == "__main__":
    serve(lambda: load(*sys.argv[1:4]))
