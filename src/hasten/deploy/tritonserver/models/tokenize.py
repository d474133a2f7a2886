"""Texts to the tensors of the model, for all requests that wait together: padded alike, so that they can run together.

tritonserver puts only requests of the same shape into one batch of the model that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import InputError
from hasten.core.tensors import pad
from hasten.deploy.tritonserver.models.request import Tensors, Told, answered, columns

Text = str | tuple[str, str]


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        told = Told.read(args)
        self._signature, self._tokenizer = told.signature, told.tokenizer
        self._prompt: str = told.about["prompt"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answered(requests, self._texts, self._tensors)

    def _texts(self, request: Any) -> list[Text]:
        given = columns(request, ("TEXT", "TEXT_PAIR"))
        for column in given.values():
            for place, text in enumerate(column, 1):
                if not text.strip():
                    raise InputError(f"text {place} is empty")
        texts = [self._prompt + text for text in given["TEXT"]]
        return list(zip(texts, given["TEXT_PAIR"], strict=True)) if "TEXT_PAIR" in given else list(texts)

    def _tensors(self, asked: list[list[Text]]) -> Iterator[Tensors]:
        tokens = self._tokenizer.encode([text for texts in asked for text in texts])
        feeds = pad(tokens.batch, self._signature)
        ends = np.cumsum([len(texts) for texts in asked])
        for end, texts in zip(ends, asked, strict=True):
            yield {name: feed[end - len(texts) : end] for name, feed in feeds.items()}
