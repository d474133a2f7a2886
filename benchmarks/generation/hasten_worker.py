"""Generate with one variant of a hasten bundle: hasten_worker.py BUNDLE VARIANT."""

from __future__ import annotations

import sys
from pathlib import Path

from worker import BATCH_SIZE, THREADS, Generate, serve

from hasten.backends import RunOptions
from hasten.bundle import open_bundle
from hasten.core.generation_types import SamplingParams
from hasten.generation.generator import open_decoder
from hasten.generation.scheduler import DecodeScheduler


def load(folder: Path, variant: str) -> Generate:
    """Return greedy decoding with a variant of the bundle, through hasten's scheduler, which also makes the text."""
    bundle = open_bundle(folder)
    spec = bundle.manifest.generation
    assert spec is not None
    decoder = open_decoder(bundle.artifact(bundle.entry(variant)), RunOptions(THREADS), BATCH_SIZE)
    scheduler = DecodeScheduler(decoder, spec, bundle.tokenizer(), prefills_per_step=BATCH_SIZE)

    def generate(prompts: list[list[int]], tokens: int, _: list[int]) -> list[list[int]]:
        # The minimum suppresses the end-of-text ids of the model.
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)
        sequences = [scheduler.new_sequence(prompt, sampling, lambda _: None, continues=True) for prompt in prompts]
        for sequence in sequences:
            scheduler.add(sequence)
        while not all(sequence.is_over for sequence in sequences):
            scheduler.step()
        return [sequence.ids for sequence in sequences]

    return generate


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), sys.argv[2]))
