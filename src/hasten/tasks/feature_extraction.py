"""The vector of every token of a text: the numbers of transformers' pipeline of the same name, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement, Metric
from hasten.core.statistics import row_cosines
from hasten.core.tensors import BATCH, SEQUENCE, FloatArray, Outputs
from hasten.core.tokenizer import Tokenizer
from hasten.tasks import Encoded, Row, TaskSpec, by_cosine, not_finite, parse_texts, read_options

HIDDEN = "last_hidden_state"

Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    # The pipeline fails on a text that is too long unless this is given; here only False makes it fail.
    truncation: bool = True


class FeatureExtraction:
    name = "feature-extraction"
    auto_class = "AutoModel"
    heads = ()
    fields = ("text",)
    columns = ("text", "text_pair")
    takes_pairs = True
    is_detected = False
    outputs = (HIDDEN,)
    axes = (BATCH, SEQUENCE)
    min_agreement = 0.999

    def parse(self, payload: object) -> list[Text]:
        return parse_texts(payload)

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options:
        return read_options(Options, given)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        tokens = tokenizer.encode(items)
        if tokens.truncated and not options.truncation:
            raise InputError(
                f"text {tokens.truncated[0] + 1} is longer than the model's limit of {tokenizer.spec.max_length} tokens"
            )
        return Encoded(tokens.batch, np.arange(len(items)), len(items), tokens.truncated, tokens.encodings)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[FloatArray]:
        """An array of (1, tokens, width) a text: indexed like the pipeline's nested lists, special tokens included."""
        vectors = outputs[HIDDEN].astype(np.float32, copy=False)
        return [own[None] for own in np.split(vectors, np.cumsum(encoded.batch.lengths)[:-1])]

    def present(self, payload: object, answers: list[FloatArray], options: Options) -> object:
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        return [{"text": text} for text in texts]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Vectors have no right or wrong by themselves."""
        return None

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        return ()

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        raise TypeError(f"{self.name} has no labels to be judged by")

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        raise TypeError(f"{self.name} has no labels to be judged by")

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Token by token, special ones too: their vectors are part of the answer."""
        ours, theirs = outputs[HIDDEN].astype(np.float64), reference[HIDDEN].astype(np.float64)
        owners = np.repeat(encoded.item_of_row, encoded.batch.lengths)
        broken = ~np.isfinite(ours).all(axis=1)
        if broken.any():
            agreement = not_finite("mean cosine", ours, theirs, replace(encoded, item_of_row=owners))
            return replace(agreement, worst=tuple(dict.fromkeys(owners[broken].tolist()))[:3])
        cosines = row_cosines(ours, theirs)
        worst = dict.fromkeys(owners[np.argsort(cosines, kind="stable")].tolist())
        return by_cosine(ours, theirs, cosines, [*worst][:3])


TASK = FeatureExtraction()
