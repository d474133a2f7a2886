"""Generate with one variant of a hasten bundle: hasten_worker.py BUNDLE VARIANT."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from worker import BATCH_SIZE, Generate, serve

from hasten.backends import BACKENDS, RunOptions, SupportsDecoding
from hasten.bundle import open_bundle


def load(folder: Path, variant: str) -> Generate:
    """Return greedy decoding with a variant of the bundle."""
    bundle, backend = open_bundle(folder), BACKENDS.get("onnxruntime")
    assert isinstance(backend, SupportsDecoding)
    decoder = backend.open_decoder(bundle.artifact(bundle.entry(variant)), RunOptions(), BATCH_SIZE)

    def generate(prompts: list[list[int]], tokens: int, eos_ids: list[int]) -> list[list[int]]:
        logits = np.stack([decoder.prefill(slot, np.array(prompt, np.int32)) for slot, prompt in enumerate(prompts)])
        generated: list[list[int]] = [[] for _ in prompts]
        while True:
            logits[:, eos_ids] = -np.inf
            chosen = logits.argmax(axis=-1)
            for sequence, token in zip(generated, chosen, strict=True):
                sequence.append(int(token))
            if len(generated[0]) == tokens:
                break
            logits = decoder.decode(range(len(prompts)), chosen)
        for slot in range(len(prompts)):
            decoder.free(slot)
        return generated

    return generate


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), sys.argv[2]))
