"""Return the vector of every token of a text: the numbers of transformers' pipeline of the same name, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hasten.core.errors import InputError
from hasten.core.report import Agreement
from hasten.core.tensors import BATCH, SEQUENCE, FloatArray, Outputs
from hasten.core.text.input_checks import parse_texts
from hasten.core.text.tokenizer import Tokenizer
from hasten.metrics.agreement import compare_vectors
from hasten.tasks import Encoded, Task, TaskSpec, read_options

HIDDEN = "last_hidden_state"

Text: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request."""

    # The pipeline fails on a text that is too long unless this is set; here only False makes it fail.
    truncation: bool = True


class FeatureExtraction(Task[Text, FloatArray, Options]):
    """The vectors of all tokens, special tokens included."""

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

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        return read_options(Options, values)

    def encode(self, items: Sequence[Text], tokenizer: Tokenizer, options: Options) -> Encoded:
        tokens = tokenizer.encode(items)
        if tokens.truncated and not options.truncation:
            raise InputError(
                f"text {tokens.truncated[0] + 1} is longer than the model's limit of {tokenizer.spec.max_length} tokens"
            )
        return Encoded.of(tokens)

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[FloatArray]:
        """Return an array (1, tokens, width) per text, which is indexed like the pipeline's nested lists."""
        vectors = outputs[HIDDEN].astype(np.float32, copy=False)
        return [text[None] for text in encoded.batch.split(vectors)]

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Compare token by token, special tokens included, since they are part of the answer."""
        ours, theirs = outputs[HIDDEN].astype(np.float64), reference[HIDDEN].astype(np.float64)
        owners = np.repeat(encoded.item_of_row, encoded.batch.lengths)
        return compare_vectors(ours, theirs, owners)


TASK = FeatureExtraction()
