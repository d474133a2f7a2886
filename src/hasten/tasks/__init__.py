"""What a task is. One file per task exposes `TASK`; the file's name is its registry key and its command-line word.

A task turns a payload into rows of tokens and outputs into answers, and judges outputs against a reference (`agree`)
or against labels (`marks`, and the `metric` made of them). It knows no runtime and keeps no state: what a model adds
is a `TaskSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import msgspec
import numpy as np
from tokenizers import Encoding

from hasten.core.errors import InputError
from hasten.core.registry import Registry, did_you_mean
from hasten.core.report import Agreement, Metric
from hasten.core.statistics import relative_error
from hasten.core.tensors import Batch, FloatArray, IntArray, Outputs
from hasten.core.tokenizer import Tokenizer

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Options = TypeVar("Options")
Row: TypeAlias = Mapping[str, object]

_HUGE = 1e300


class Pooling(StrEnum):
    """How token vectors become one: sentence-transformers' names."""

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST_TOKEN = "lasttoken"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What one model brings to its task; stored in the manifest."""

    name: str
    labels: tuple[str, ...] = ()
    problem: str = ""
    pooling: tuple[Pooling, ...] = ()
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    mask_token: str = ""
    # What turns a ranking model's logit into its score.
    activation: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Unpadded rows and which item each belongs to."""

    batch: Batch
    item_of_row: IntArray
    items: int
    truncated: tuple[int, ...]
    encodings: Sequence[Encoding]


class Task(Protocol[Item, Answer, Options]):
    @property
    def name(self) -> str: ...

    @property
    def auto_class(self) -> str:
        """The transformers Auto class that loads a model for this task."""
        ...

    @property
    def heads(self) -> tuple[str, ...]:
        """How the names of model classes that fit this task end; none where the bare model is enough."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """What an item consists of: a text, or several things by these names."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """All that a row of a data file may hold, labels too: the names that `--columns` knows."""
        ...

    @property
    def takes_pairs(self) -> bool:
        """Whether a row may hold two texts: if not, and the model's token types are zero, they are left out."""
        ...

    @property
    def is_detected(self) -> bool:
        """Whether a model with such a head is taken to be for this task when nobody says otherwise."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the graph calls its outputs, which are also the model's own names for them unless they are pooled."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """What the outputs have an entry for: each row (BATCH,), each token (BATCH, SEQUENCE), each mask (MASKS,)."""
        ...

    @property
    def min_agreement(self) -> float:
        """The agreement a variant of reduced precision must keep by default."""
        ...

    def parse(self, payload: object) -> list[Item]:
        """Check and normalise what a user sent; raises InputError with the position of the bad item."""
        ...

    def options(self, spec: TaskSpec, given: Mapping[str, object]) -> Options: ...

    def encode(self, items: Sequence[Item], tokenizer: Tokenizer, options: Options) -> Encoded: ...

    def decode(self, outputs: Outputs, encoded: Encoded, options: Options) -> list[Answer]: ...

    def present(self, payload: object, answers: list[Answer], options: Options) -> object:
        """The answers in the shape that fits the payload: one for one, a list for a list."""
        ...

    def sample(self, texts: Sequence[str], spec: TaskSpec) -> list[Row]:
        """Rows of a data file made from plain texts, to judge a model on when the user has no data."""
        ...

    def gold(self, rows: Sequence[Row], spec: TaskSpec) -> list[object] | None:
        """The labels in a data file, or None if it has none."""
        ...

    def metrics(self, gold: Sequence[object], spec: TaskSpec) -> tuple[str, ...]:
        """The names of the metrics that such labels allow, the main one first; InputError where they allow none."""
        ...

    def marks(self, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> FloatArray:
        """The numbers that the metrics are made of, a row for each item that can be judged by itself."""
        ...

    def metric(self, marks: FloatArray, spec: TaskSpec) -> Metric:
        """Of any rows of marks, some left out, some there twice: drawn at random, they tell how sure the metric is."""
        ...

    def agree(self, outputs: Outputs, reference: Outputs, encoded: Encoded, spec: TaskSpec) -> Agreement: ...


AnyTask: TypeAlias = Task[Any, Any, Any]

TASKS: Registry[AnyTask] = Registry("task", "hasten.tasks", "TASK")


def not_finite(measure: str, ours: FloatArray, theirs: FloatArray, encoded: Encoded) -> Agreement:
    """The agreement of outputs of which some are no numbers: errors of the rows that are, the broken ones named."""
    broken = ~np.isfinite(ours).all(axis=1)
    error = np.abs(ours[~broken] - theirs[~broken])
    return Agreement(
        measure=measure,
        value=0.0,
        rows=len(ours),
        max_error=float(error.max(initial=0.0)),
        relative_error=relative_error(ours[~broken], theirs[~broken]),
        scale=float(np.abs(theirs).max()),
        is_finite=False,
        worst=tuple(int(encoded.item_of_row[row]) for row in np.flatnonzero(broken)[:3]),
    )


def by_cosine(ours: FloatArray, theirs: FloatArray, cosines: FloatArray, worst: Sequence[int]) -> Agreement:
    """The agreement of vectors that are to point the same way; `worst` are items."""
    return Agreement(
        measure="mean cosine",
        value=float(cosines.mean()),
        rows=len(ours),
        max_error=float(np.abs(ours - theirs).max()),
        relative_error=relative_error(ours, theirs),
        scale=float(np.abs(theirs).max()),
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        worst=tuple(worst),
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, finite, and not an integer that no float can hold."""
    return isinstance(value, int | float) and -_HUGE < value < _HUGE


def check_spread(gold: Sequence[object]) -> None:
    """Numbers to correlate with must differ."""
    if len(set(gold)) == 1:
        raise InputError(f"no correlation can be measured: the only score in all rows is {gold[0]}")


def read_options(kind: type[Options], given: Mapping[str, object], *, any_case: str = "") -> Options:
    """A task's options from keyword arguments or JSON, unknown names and wrong types refused.

    `any_case` names the option whose words transformers' pipeline takes in capitals too.
    """
    if isinstance(word := given.get(any_case), str):
        given = {**given, any_case: word.lower()}
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise InputError(
                f"unknown option '{name}'{did_you_mean(name, known)}",
                hint=f"known: {', '.join(known) or 'none'}",
            )
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        # As in: Expected `int | null`, got `str` - at `$.top_k`
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        raise InputError(f"bad option: {what}" + (f" for '{where}'" if where else "")) from error


def parse_texts(payload: object) -> list[str | tuple[str, str]]:
    """Texts and pairs: "…", {"text": …, "text_pair": …}, or a list of those."""
    if isinstance(payload, list | tuple) and not payload:
        raise InputError("no text given: the list is empty")
    entries = payload if isinstance(payload, list | tuple) else [payload]
    return [_parse_text(entry, place) for place, entry in enumerate(entries, 1)]


def _parse_text(entry: object, place: int) -> str | tuple[str, str]:
    if isinstance(entry, Mapping):
        if "text" not in entry:
            raise InputError(f'item {place} has no "text": {{{", ".join(map(str, entry))}}}')
        pair = entry.get("text_pair")
        text = checked_text(entry["text"], f"text {place}")
        return text if pair is None else (text, checked_text(pair, f"text_pair {place}"))
    return checked_text(entry, f"text {place}")


def checked_text(text: object, what: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(text, str):
        raise InputError(f"{what} is {type(text).__name__}, not a string")
    if not may_be_empty and not text.strip():
        raise InputError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not valid Unicode: lone surrogate at character {error.start}") from error
    return text
