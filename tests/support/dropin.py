"""A tiny generative model, loaded by hasten.transformers and by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hasten.transformers
from support.fake_bench import fake_benchmark


@dataclass
class Pair:
    """The same model of hasten and of transformers, with their tokenizer."""

    ours: Any
    theirs: Any
    tokenizer: Any
    folder: Path

    def inputs(self, prompts: list[str]) -> Any:
        """Return the tokens of prompts, padded on the left for decoders and on the right for encoder-decoders."""
        side = "right" if self.theirs.config.is_encoder_decoder else "left"
        encoded = self.tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def load_pair(kind: str, folder: Path, data: Path) -> Pair:
    """Load a model with the class of this name of both libraries; that of hasten is built and judged on `data`."""
    import transformers

    with fake_benchmark():
        ours = getattr(hasten.transformers, kind).from_pretrained(folder, data=data, threads=1)
    theirs = getattr(transformers, kind).from_pretrained(folder).eval()
    return Pair(ours, theirs, transformers.AutoTokenizer.from_pretrained(folder), folder)
