"""Compare tokens chosen in fp16 with the original: they may differ only at a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of the largest logit: random weights of this size round so badly in fp16, and a wrong graph is off by all of it.
NEAR = 0.05


def assert_same_greedy_tokens(module: Any, prompt: Sequence[int], ours: Sequence[int]) -> None:
    """Assert equality with transformers' greedy answer, up to the first near tie."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        whole = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=len(ours),
            min_new_tokens=len(ours),
            eos_token_id=None,
        )
        theirs = whole[0, -len(ours) :].tolist()
        parting = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), None)
        if parting is None:
            return
        before = torch.tensor([theirs[:parting]], dtype=torch.long)
        starts = whole[:, : whole.shape[1] - len(ours)]
        if module.config.is_encoder_decoder:
            feeds = {"input_ids": ids, "decoder_input_ids": torch.cat([starts, before], dim=1)}
        else:
            feeds = {"input_ids": torch.cat([ids, before], dim=1)}
        logits = module(**feeds, use_cache=False).logits[0, -1]
    lost = float(logits.max() - logits[ours[parting]])
    allowed = NEAR * float(logits.abs().max())
    assert lost <= allowed, f"token {parting} of {list(ours)} is {lost:.3g} less likely than of {theirs}"
