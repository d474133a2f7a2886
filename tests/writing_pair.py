"""A tiny model that writes, twice: as hasten.transformers loads it, and as transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hasten.transformers
from untimed import untimed


@dataclass
class Pair:
    ours: Any
    theirs: Any
    tokenizer: Any
    folder: Path

    def inputs(self, prompts: list[str]) -> Any:
        """Padded where no text goes on."""
        side = "right" if self.theirs.config.is_encoder_decoder else "left"
        found = self.tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}


def load_pair(kind: str, folder: Path, data: Path) -> Pair:
    """By the class of that name in both; ours is built for it, judged on the texts of a file."""
    import transformers

    with untimed():
        ours = getattr(hasten.transformers, kind).from_pretrained(folder, data=data, threads=1)
    theirs = getattr(transformers, kind).from_pretrained(folder).eval()
    return Pair(ours, theirs, transformers.AutoTokenizer.from_pretrained(folder), folder)
