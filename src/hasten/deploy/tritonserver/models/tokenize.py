"""Convert texts to the model's tensors, padding all waiting requests to the same length.

In the next model, tritonserver batches only requests of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import InputError
from hasten.core.tensors import pad
from hasten.deploy.tritonserver.models.request import ModelConfig, Tensors, answer_requests, read_columns

Text = str | tuple[str, str]


class TritonPythonModel:
    """Tokenizes texts or pairs of texts."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the configuration and open the tokenizer."""
        config = ModelConfig.read(args)
        self._signature, self._tokenizer = config.signature, config.tokenizer
        self._prompt: str = config.values["prompt"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Tokenize the texts of all requests."""
        return answer_requests(requests, self._parse, self._tensors)

    def _parse(self, request: Any) -> list[Text]:
        columns = read_columns(request, ("TEXT", "TEXT_PAIR"))
        for column in columns.values():
            for number, text in enumerate(column, 1):
                if not text.strip():
                    raise InputError(f"text {number} is empty")
        texts = [self._prompt + text for text in columns["TEXT"]]
        return list(zip(texts, columns["TEXT_PAIR"], strict=True)) if "TEXT_PAIR" in columns else list(texts)

    def _tensors(self, requests: list[list[Text]]) -> Iterator[Tensors]:
        tokens = self._tokenizer.encode([text for texts in requests for text in texts])
        feeds = pad(tokens.batch, self._signature)
        ends = np.cumsum([len(texts) for texts in requests])
        for end, texts in zip(ends, requests, strict=True):
            yield {name: feed[end - len(texts) : end] for name, feed in feeds.items()}
