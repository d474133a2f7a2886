"""What was asked: a plan is complete and consistent before any work starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from hasten.core.errors import PlanError
from hasten.core.targets import find_target
from hasten.core.tensors import Shape
from hasten.core.variant import CPU, CUDA, Precision


class Keep(StrEnum):
    """Which variants a bundle stores."""

    BEST = "best"  # the chosen one and the next eligible one
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Range:
    """A size the model will see: at least, most often, at most."""

    min: int
    opt: int
    max: int

    @classmethod
    def of(cls, name: str, values: tuple[int, ...]) -> Range:
        """One number for all three, or three in order."""
        if len(values) == 1:
            values = values * 3
        if len(values) != 3:
            raise PlanError(f"{name} takes one number or three (min opt max), not {len(values)}")
        low, opt, high = values
        if not 1 <= low <= opt <= high:
            raise PlanError(
                f"{name} {low} {opt} {high} is out of order",
                hint="write min opt max, with 1 ≤ min ≤ opt ≤ max",
            )
        return cls(low, opt, high)

    def at_most(self, limit: int) -> Range:
        return Range(min(self.min, limit), min(self.opt, limit), min(self.max, limit))


# Of one batch: 8192 texts of 512. A model's activations for it are tens of gigabytes.
_MOST_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class Shapes:
    batch: Range = Range(1, 8, 32)
    sequence: Range = Range(16, 128, 256)

    def __post_init__(self) -> None:
        if self.batch.max * self.sequence.max > _MOST_TOKENS:
            raise PlanError(
                f"--batch-size {self.batch.max} and --seq-len {self.sequence.max} make a batch of more than"
                f" {_MOST_TOKENS} tokens",
                hint="no memory would hold it: give sizes that requests really have",
            )

    @property
    def optimal(self) -> Shape:
        return Shape(self.batch.opt, self.sequence.opt)

    @property
    def batches(self) -> tuple[int, ...]:
        """How many rows come at a time: one, most often, at most."""
        return tuple(sorted({1, self.batch.opt, self.batch.max}))

    def corners(self) -> list[Shape]:
        """The optimal shape first, then smallest and largest of each size."""
        sizes = product((self.batch.min, self.batch.max), (self.sequence.min, self.sequence.max))
        return list(dict.fromkeys([self.optimal, *(Shape(*size) for size in sizes)]))

    def grid(self) -> list[Shape]:
        """The optimal shape first, then every combination of min, opt and max."""
        batch, sequence = self.batch, self.sequence
        sizes = product((batch.min, batch.opt, batch.max), (sequence.min, sequence.opt, sequence.max))
        return list(dict.fromkeys([self.optimal, *(Shape(*size) for size in sizes)]))


@dataclass(frozen=True, slots=True)
class Gate:
    """The accuracy a variant must keep. Left out, the task's own default applies."""

    min_agreement: float | None = None
    max_drop: float | None = None
    # Which of the task's metrics may drop by that; None stands for its main one.
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise PlanError(f"--min-agreement {self.min_agreement} is not between 0 and 1")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise PlanError(
                f"--max-drop {self.max_drop} is not zero or more", hint="it is a loss in points, such as 0.5"
            )

    @property
    def needing_labels(self) -> str | None:
        """The option that can be met only where there are labels, if one was given."""
        asked = {"--max-drop": self.max_drop, "--metric": self.metric}
        return next((flag for flag, value in asked.items() if value is not None), None)


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    revision: str | None = None
    task: str | None = None
    pooling: str | None = None
    # An ONNX graph in the model's directory, to be taken instead of its weights.
    file_name: str | None = None
    shapes: Shapes = field(default_factory=Shapes)
    variants: tuple[str, ...] = ()
    # Whose variants are tried: cpu or cuda; None stands for a GPU where there is one that can be used.
    device: str | None = None
    # What variants that are tried compute in; None stands for all that there is, of which the gate decides.
    precision: str | None = None
    data: str | None = None
    # Rows to quantize by, which need no labels; without them some of the data's are set aside.
    calibration: str | None = None
    # What the task calls a column to what the data calls it.
    columns: dict[str, str] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    # A recipe to repeat, instead of a search.
    recipe: str | None = None
    budget_s: float = 300.0
    bench_budget_s: float = 30.0
    threads: int | None = None
    # Memory that TensorRT may build for, beside weights and tensors; None leaves it to TensorRT.
    workspace_mib: int | None = None
    keep: Keep = Keep.BEST
    # The processor graphs are quantized for; None stands for this one.
    target: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.target is not None:
            find_target(self.target)
        if self.device not in (None, CPU, CUDA):
            raise PlanError(f"unknown device '{self.device}'", hint=f"--device takes {CPU} or {CUDA}")
        known = [precision.value for precision in Precision]
        if self.precision is not None and self.precision not in known:
            raise PlanError(f"unknown precision '{self.precision}'", hint=f"auto, or one of {', '.join(known)}")
        if self.precision is not None and (self.variants or self.recipe is not None):
            raise PlanError(
                "--precision is for a search, and --variants or --recipe say what is made", hint="leave one of them out"
            )
        if self.device == CUDA and self.recipe is not None:
            raise PlanError("a recipe makes int8 for processors, and --device is cuda", hint="leave one of them out")
        if self.threads is not None and self.threads < 1:
            raise PlanError(f"--threads {self.threads} is less than one")
        if self.workspace_mib is not None and self.workspace_mib < 1:
            raise PlanError(f"--workspace-size {self.workspace_mib} is less than one MiB")
        if not self.budget_s > 0:
            raise PlanError("the search's budget must be more than nothing", hint="--budget 5m")
        if self.recipe is not None and self.variants:
            raise PlanError("--recipe names its variant, and --variants another", hint="leave one of them out")
        if not self.bench_budget_s > 0:
            raise PlanError("the benchmark's budget must be more than nothing", hint="--bench-budget 30s")
        if (option := self.gate.needing_labels) is not None and self.data is None:
            raise PlanError(f"{option} needs labelled data to measure it on", hint="--data file.jsonl")
        if self.columns and self.data is None and self.calibration is None:
            raise PlanError("--columns is about a data file, and there is none", hint="--data file.csv")
        if self.calibration is not None and self.calibration == self.data:
            raise PlanError(
                f"--calibration and --data are both {self.data}: what is calibrated on proves nothing",
                hint="--data alone sets rows aside",
            )


def parse_columns(text: str) -> dict[str, str]:
    """`text=sentence,label=stars`: what the task calls a column to what the data calls it."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        name, separator, column = (word.strip() for word in part.partition("="))
        if not (name and separator and column):
            raise PlanError(f"'{part.strip()}' is not NAME=COLUMN", hint="--columns text=sentence,label=stars")
        if name in columns:
            raise PlanError(f"--columns names '{name}' twice")
        columns[name] = column
    return columns


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str, bare: str = "s") -> float:
    """Seconds from `200ms`, `30s`, `5m`, `1h` or a bare number, which is of the unit `bare`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|[smh]?)", text.strip())
    if not match:
        raise PlanError(f"'{text}' is not a duration", hint="write 500ms, 30s, 5m or 1h")
    seconds = float(match[1]) * _UNITS[match[2] or bare]
    if seconds <= 0:
        raise PlanError(f"'{text}' is no time at all", hint="write 500ms, 30s, 5m or 1h")
    return seconds
