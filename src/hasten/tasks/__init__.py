"""The task contract. Each task is a file that exposes `TASK`; the file's name is its registry key and CLI name.

A task encodes a payload into rows of tokens, decodes outputs into answers, and compares outputs with a reference
(`agree`) or with labels (`item_scores`, and the `metric` computed from them). It is stateless and independent of the
runtime: everything that depends on the model is in a `TaskSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from tokenizers import Encoding

from hasten.core.errors import InputError
from hasten.core.registry import Registry, did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import Batch, FloatArray, IntArray, Outputs
from hasten.core.text.pair_template import PairTemplate
from hasten.core.text.tokenizer import Tokenizer, Tokens

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Options = TypeVar("Options")
Rows = TypeVar("Rows", bound="Encoded")
Row: TypeAlias = Mapping[str, object]


class Pooling(StrEnum):
    """Pooling modes, under sentence-transformers' names."""

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST_TOKEN = "lasttoken"


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """The settings by which a multi-vector model tokenizes queries and documents, and selects tokens to score."""

    # The maximum lengths in tokens; the tokenizer's if None.
    query_length: int | None = None
    document_length: int | None = None
    # Queries are filled up to this length with this token; 0 if they are not.
    expansion_length: int = 0
    expansion_id: int = 0
    # Whether the tokens of a query attend to those that fill it.
    is_expansion_attended: bool = False
    # Tokens that are not scored, and in which texts: queries, documents or both.
    skipped_ids: tuple[int, ...] = ()
    skipped_sides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The settings of one model for its task, stored in the manifest."""

    name: str
    labels: tuple[str, ...] = ()
    problem: str = ""
    pooling: tuple[Pooling, ...] = ()
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    # Whether the pooling includes the tokens of a prompt, and if not, the ids of which one may follow a prompt.
    pools_prompt: bool = True
    special_ids: tuple[int, ...] = ()
    mask_token: str = ""
    # The function that turns a ranking model's logit into its score.
    activation: str = ""
    # The chat template of a ranking model, for a pair and for a pair with an instruction (a prompt).
    template: PairTemplate | None = None
    instructed_template: PairTemplate | None = None
    # The function that compares two embeddings: "dot" or "cosine", of multi-vector models "maxsim" or "meanmaxsim".
    similarity: str = ""
    late_interaction: LateInteraction | None = None
    # The number of terms that a sparse embedding keeps; all of them if None.
    max_active_dims: int | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Unpadded rows, and the item that each belongs to."""

    batch: Batch
    item_of_row: IntArray
    items: int
    truncated: tuple[int, ...]
    encodings: Sequence[Encoding]

    @classmethod
    def of(cls, tokens: Tokens) -> Encoded:
        """Return tokenized rows, one item per row."""
        items = len(tokens.batch)
        return Encoded(tokens.batch, np.arange(items), items, tokens.truncated, tokens.encodings)

    def split(self, rows: FloatArray) -> list[FloatArray]:
        """Split rows by item; the rows of an item must be adjacent."""
        ends = np.cumsum(np.bincount(self.item_of_row, minlength=self.items))
        return np.split(rows, ends[:-1])


def narrow_rows(encoded: Encoded, kind: type[Rows]) -> Rows:
    """Return the rows if they are of this kind; raise TypeError for rows that another task encoded."""
    if not isinstance(encoded, kind):
        raise TypeError(f"decode needs the result of this task's encode: {kind.__name__}")
    return encoded


class Task(Protocol[Item, Answer, Options]):
    """A task: how payloads become rows, outputs become answers, and answers are judged.

    Tasks inherit from this class for its defaults; a task of another package may also only have the same members.
    """

    # The registry key and CLI name.
    name: str
    # The transformers Auto class that loads a model for this task.
    auto_class: str
    # The suffixes of the model classes that fit this task; empty if a model without a head does.
    heads: tuple[str, ...]
    # The names of the parts of an item: a text, or several.
    fields: tuple[str, ...]
    # The names of all columns of a data file, labels included, which `--columns` accepts.
    columns: tuple[str, ...]
    # Whether a row may hold two texts. If not, token types that are always zero are left out.
    takes_pairs: bool
    # Whether a model with such a head belongs to this task by default.
    is_detected: bool
    # The names of the graph's outputs, which are the model's own names unless they are pooled.
    outputs: tuple[str, ...]
    # The axes of the outputs: per row (BATCH,), per token (BATCH, SEQUENCE) or per mask (MASKS,).
    axes: tuple[str, ...]
    # The minimum agreement of a variant of reduced precision, by default.
    min_agreement: float

    def parse(self, payload: object) -> list[Item]:
        """Check and normalise a payload; raise InputError with the position of an invalid item."""

    def options(self, spec: TaskSpec, values: Mapping[str, object]) -> Options:
        """Return the options from keyword arguments or JSON; raise InputError for invalid ones."""

    def encode(self, items: Sequence[Item], tokenizer: Tokenizer, options: Options) -> Encoded:
        """Tokenize the items into rows."""

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]:
        """Return one answer per item. `encoded` must come from this task's `encode`."""

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """Return the answers in the shape of the payload: an answer for an item, a list for a list."""
        return answers if isinstance(payload, list | tuple) else answers[0]

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Return data rows made from plain texts, to verify a model when the user has no data."""
        return [{"text": text} for text in texts]

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """Return the labels of data rows, or None if they have none, as in a task without labels."""
        return None

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        """Return the names of the metrics for these labels, the main one first; raise InputError if there is none."""
        return ()

    def item_scores(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """Return the numbers that metrics are computed from, a row for each item that can be judged by itself."""
        raise TypeError(f"{self.name} has no labels")

    def metric(self, item_scores: FloatArray, spec: TaskSpec) -> Metric:
        """Return the metric of any rows of item scores; resampled rows give its confidence interval."""
        raise TypeError(f"{self.name} has no labels")

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement:
        """Compare raw outputs with the reference, so that an error that flips no label is still seen."""


AnyTask: TypeAlias = Task[Any, Any, Any]

TASKS: Registry[AnyTask] = Registry("task", "hasten.tasks", "TASK")


def read_options(kind: type[Options], values: Mapping[str, object], *, any_case: str = "") -> Options:
    """Return a task's options from keyword arguments or JSON; raise InputError for unknown names and wrong types.

    `any_case` is an option whose value transformers' pipeline accepts in upper case too.
    """
    if isinstance(value := values.get(any_case), str):
        values = {**values, any_case: value.lower()}
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise InputError(
                f"unknown option '{name}'{did_you_mean(name, known)}",
                hint=f"known: {', '.join(known) or 'none'}",
            )
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        # For example: Expected `int | null`, got `str` - at `$.top_k`
        problem, _, option = str(error).replace("`", "").partition(" - at $.")
        raise InputError(f"invalid option: {problem}" + (f" for '{option}'" if option else "")) from error
