"""Tiny bundles that write: a Llama of random weights with room for long texts, built as any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import writers
from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.core.report import Bench, Footprint, Timing
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape

CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(folder: Path, template: str | None = TEMPLATE, seed: int = 1) -> Path:
    backend = writers.byte_level()
    module = writers.model("llama", writers.vocabulary_of(backend), seed)
    module.config.max_position_embeddings = CONTEXT
    # It never ends a text by itself: long ones are as long as they are asked for.
    module.lm_head.weight.data[module.config.eos_token_id] = 0
    module.save_pretrained(folder)
    writers.theirs(backend, model_max_length=CONTEXT, chat_template=template).save_pretrained(folder)
    return folder


@contextmanager
def timed_at_once() -> Iterator[None]:
    """Builds meanwhile have a benchmark that is answered at once."""

    def timed(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
        names = [artifact.variant.name for artifact in contenders]
        one = Interval(1.0, 1.0, 1.0)
        timings = tuple(Timing(name, shape, 1, 1.0, 1.0, None, 1e3, one, (1.0,)) for name in names for shape in shapes)
        return Bench(names[0], timings, tuple(Footprint(name, 1.0, 1, 1) for name in names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.builder.paces.bench", timed)
        yield


def build(model: Path, target: Path, **options: Any) -> Bundle:
    import hasten

    with timed_at_once():
        return hasten.build(model, target, **({"threads": 1, "variants": ["onnxruntime-fp32"]} | options))
