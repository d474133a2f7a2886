"""Tiny generation bundles: a Llama with random weights and room for long texts, built like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.core.report import Bench, Footprint, Interval, Timing
from hasten.core.tensors import Shape
from support.models import tiny_decoders

CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(folder: Path, template: str | None = TEMPLATE, seed: int = 1) -> Path:
    backend = tiny_decoders.byte_level()
    module = tiny_decoders.model("llama", tiny_decoders.vocabulary_of(backend), seed)
    module.config.max_position_embeddings = CONTEXT
    # It never generates the end-of-sequence token: texts are as long as requested.
    module.lm_head.weight.data[module.config.eos_token_id] = 0
    module.save_pretrained(folder)
    tiny_decoders.theirs(backend, model_max_length=CONTEXT, chat_template=template).save_pretrained(folder)
    return folder


@contextmanager
def fake_generation_bench() -> Iterator[None]:
    """Replace the benchmark of builds by one that returns at once."""

    def timed(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
        names = [artifact.variant.name for artifact in contenders]
        equal = Interval(1.0, 1.0, 1.0)
        timings = tuple(
            Timing(name, shape, 1, 1.0, 1.0, None, 1e3, equal, (1.0,)) for name in names for shape in shapes
        )
        return Bench(names[0], timings, tuple(Footprint(name, 1.0, 1, 1) for name in names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.builder.generation.bench.bench", timed)
        yield


def build(model: Path, target: Path, **options: Any) -> Bundle:
    import hasten

    with fake_generation_bench():
        return hasten.build(model, target, **({"threads": 1, "variants": ["onnxruntime-fp32"]} | options))
