"""How large values become in a model that writes, along texts of its own: what leaves the range of fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import DECODER, ENCODER
from hasten.core.errors import StageError
from hasten.core.tensors import IntArray
from hasten.graph import read_graph
from hasten.quantize.overflow import Overflow, overflows
from hasten.quantize.session import open_changed


@dataclass(frozen=True, slots=True)
class Text:
    """What a decoder reads at once, and what an encoder read for it, if there is one."""

    ids: IntArray
    prompt: IntArray | None = None


def overflows_written(graphs: Mapping[str, Path], texts: Sequence[Text]) -> dict[str, tuple[Overflow, ...]]:
    """Of each graph, in fp32."""
    found = {DECODER: overflows(graphs[DECODER], _DecoderFeeds(graphs, texts))}
    if ENCODER in graphs:
        found[ENCODER] = overflows(graphs[ENCODER], _EncoderFeeds(texts))
    return found


@dataclass(frozen=True, slots=True)
class _EncoderFeeds:
    texts: Sequence[Text]

    def feeds(self) -> Iterator[dict[str, Any]]:
        for text in self.texts:
            yield {"input_ids": np.asarray(text.prompt, np.int32)[None]}


@dataclass(frozen=True, slots=True)
class _DecoderFeeds:
    """A text at a time, with nothing before it."""

    graphs: Mapping[str, Path]
    texts: Sequence[Text]

    def feeds(self) -> Iterator[dict[str, Any]]:
        caches = [
            (entry.name, [size.dim_value for size in entry.type.tensor_type.shape.dim])
            for entry in read_graph(self.graphs[DECODER], with_weights=False).graph.input
            if entry.name.startswith("past.")
        ]
        crossed = self._crossed() if ENCODER in self.graphs else ({} for _ in self.texts)
        for text, others in zip(self.texts, crossed, strict=True):
            length = len(text.ids)
            feeds = {
                "input_ids": np.asarray(text.ids, np.int32)[None],
                "seqlens_k": np.array([length - 1], np.int32),
                "total_sequence_length": np.array(length, np.int32),
            }
            empty = {name: np.zeros((1, sizes[1], length, sizes[3]), np.float32) for name, sizes in caches}
            yield feeds | empty | others

    def _crossed(self) -> Iterator[dict[str, Any]]:
        """What the encoder makes of each prompt."""
        file = self.graphs[ENCODER]
        session = open_changed(read_graph(file), file.parent)
        names = [entry.name for entry in session.get_outputs()]
        for feeds in _EncoderFeeds(self.texts).feeds():
            try:
                found = session.run(names, feeds)
            except Exception as error:  # the binding raises its own unrelated classes
                raise StageError(f"how large values become cannot be measured: {error}") from error
            yield dict(zip(names, found, strict=True)) | {"cross_lengths": np.array([found[0].shape[2]], np.int32)}
