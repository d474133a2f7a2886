"""The plan of a build, complete and consistent before any work starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Annotated

from hasten.core.errors import PlanError
from hasten.core.options import Option, parse_number, parse_whole
from hasten.core.system.cpu_targets import find_target
from hasten.core.variant import CPU, CUDA, Precision

if TYPE_CHECKING:
    from hasten.core.tensors import Shape


class Keep(StrEnum):
    """The variants that a bundle stores."""

    BEST = "best"  # the chosen variant and the next fastest eligible one
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes a model will see: the smallest, the most frequent and the largest."""

    min: int
    opt: int
    max: int

    @classmethod
    def of(cls, name: str, values: tuple[int, ...]) -> Range:
        """Make a range from one number, which stands for all three, or from three in order."""
        if len(values) == 1:
            values = values * 3
        if len(values) != 3:
            raise PlanError(f"{name} takes one number or three (min opt max), not {len(values)}")
        low, opt, high = values
        if not 1 <= low <= opt <= high:
            hint = "write min opt max, with 1 ≤ min ≤ opt ≤ max"
            raise PlanError(f"{name} {low} {opt} {high} is out of order", hint=hint)
        return cls(low, opt, high)

    def at_most(self, limit: int) -> Range:
        """Return the range with its sizes limited."""
        return Range(min(self.min, limit), min(self.opt, limit), min(self.max, limit))

    def __str__(self) -> str:
        return f"{self.min} {self.opt} {self.max}"


def parse_columns(text: str) -> dict[str, str]:
    """Parse `text=sentence,label=stars`: the task's names of columns and those of the data file."""
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
    """Parse `200ms`, `30s`, `5m`, `1h` or a number in the unit `bare`; return seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|[smh]?)", text.strip())
    if not match:
        raise PlanError(f"'{text}' is not a duration", hint="write 500ms, 30s, 5m or 1h")
    seconds = float(match[1]) * _UNITS[match[2] or bare]
    if seconds <= 0:
        raise PlanError(f"'{text}' is not a positive duration", hint="write 500ms, 30s, 5m or 1h")
    return seconds


def _parse_batch(values: Sequence[str]) -> Range:
    return Range.of("--batch-size", tuple(map(parse_whole, values)))


def _parse_sequence(values: Sequence[str]) -> Range:
    return Range.of("--seq-len", tuple(map(parse_whole, values)))


def _parse_precision(text: str) -> str | None:
    return None if text == "auto" else text


def _shapes(*sizes: tuple[int, int]) -> list[Shape]:
    # Imported late because it brings numpy, which `hasten build --help` does not need.
    from hasten.core.tensors import Shape

    return list(dict.fromkeys(Shape(batch, sequence) for batch, sequence in sizes))


# A batch of 8192 texts of 512 tokens. A model's activations for it are tens of gigabytes.
_MAX_TOKENS = 2**22
_SIZES, _ACCURACY = "sizes the model will see", "accuracy"


@dataclass(frozen=True, slots=True)
class Shapes:
    """The batch sizes and sequence lengths that a build optimizes and measures."""

    batch: Annotated[
        Range,
        Option(
            _parse_batch, "N", "rows in a batch: N, or MIN OPT MAX", _SIZES, flags=("-b", "--batch-size"), has_many=True
        ),
    ] = Range(1, 8, 32)
    sequence: Annotated[
        Range,
        Option(
            _parse_sequence, "N", "tokens in a row: N, or MIN OPT MAX", _SIZES, flags=("-s", "--seq-len"), has_many=True
        ),
    ] = Range(16, 128, 256)

    def __post_init__(self) -> None:
        if self.batch.max * self.sequence.max > _MAX_TOKENS:
            raise PlanError(
                f"--batch-size {self.batch.max} and --seq-len {self.sequence.max} make a batch of more than"
                f" {_MAX_TOKENS} tokens",
                hint="it would not fit into memory: give sizes that requests really have",
            )

    @property
    def optimal(self) -> Shape:
        """Return the most frequent shape."""
        return _shapes((self.batch.opt, self.sequence.opt))[0]

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the batch sizes 1, most frequent and largest."""
        return tuple(sorted({1, self.batch.opt, self.batch.max}))

    def corners(self) -> list[Shape]:
        """Return the optimal shape, then the combinations of smallest and largest sizes."""
        batch, sequence = self.batch, self.sequence
        return _shapes((batch.opt, sequence.opt), *product((batch.min, batch.max), (sequence.min, sequence.max)))

    def grid(self) -> list[Shape]:
        """Return the optimal shape, then every combination of min, opt and max."""
        batch, sequence = self.batch, self.sequence
        sizes = product((batch.min, batch.opt, batch.max), (sequence.min, sequence.opt, sequence.max))
        return _shapes((batch.opt, sequence.opt), *sizes)


@dataclass(frozen=True, slots=True)
class Gate:
    """The accuracy a variant must keep; bounds that are None default to the task's own."""

    min_agreement: Annotated[
        float | None,
        Option(
            parse_number,
            "SHARE",
            "minimum agreement with the reference: share of equal labels, or mean cosine",
            _ACCURACY,
        ),
    ] = None
    max_drop: Annotated[
        float | None, Option(parse_number, "POINTS", "maximum drop of the metric, in points; needs labels", _ACCURACY)
    ] = None
    metric: Annotated[
        str | None, Option(str, "NAME", "metric that --max-drop bounds: macro-f1, … (default: the task's)", _ACCURACY)
    ] = None

    def __post_init__(self) -> None:
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise PlanError(f"--min-agreement {self.min_agreement} is not between 0 and 1")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise PlanError(
                f"--max-drop {self.max_drop} is not zero or more", hint="it is a loss in points, such as 0.5"
            )

    @property
    def needing_labels(self) -> str | None:
        """Return the first option that was set and needs labelled data."""
        options = {"--max-drop": self.max_drop, "--metric": self.metric}
        return next((name for name, value in options.items() if value is not None), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a build is asked to do; fields with an option are flags of `hasten build`."""

    model: str
    task: Annotated[str | None, Option(str, "TASK", "task of the model (default: from its configuration)")] = None
    revision: Annotated[str | None, Option(str, "REVISION", "branch, tag or commit on the hub")] = None
    file_name: Annotated[
        str | None, Option(str, "ONNX", "build from this ONNX graph of the model, such as onnx/model.onnx")
    ] = None
    pooling: Annotated[
        str | None, Option(str, "POOLING", "pooling of embeddings: mean, cls, … (default: the model's)")
    ] = None
    shapes: Shapes = field(default_factory=Shapes)
    data: Annotated[
        str | None,
        Option(
            str,
            "FILE",
            "evaluation data: jsonl, json, csv, tsv, parquet, a folder or datasets:NAME:SPLIT"
            " (default: a built-in sample)",
            _ACCURACY,
        ),
    ] = None
    calibration: Annotated[
        str | None,
        Option(str, "FILE", "rows for calibration, without labels (default: some rows of --data)", _ACCURACY),
    ] = None
    columns: Annotated[
        dict[str, str],
        Option(parse_columns, "NAME=COLUMN,…", "column names of the data: text=sentence,label=stars", _ACCURACY),
    ] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    variants: Annotated[
        tuple[str, ...], Option(tuple, "NAME", "try only these variants: onnxruntime-fp32 …", has_many=True)
    ] = ()
    device: Annotated[
        str | None,
        Option(str, "DEVICE", "device to build for (default: a usable GPU, else the CPU)", choices=(CPU, CUDA)),
    ] = None
    precision: Annotated[
        str | None,
        Option(
            _parse_precision, "NAME", "search only in fp32, fp16, bf16, fp8, int8 or int4 (default: auto, all of them)"
        ),
    ] = None
    keep: Annotated[
        Keep, Option(Keep, "WHICH", "variants to store: the best two, or all", choices=tuple(map(str, Keep)))
    ] = Keep.BEST
    recipe: Annotated[str | None, Option(str, "TOML", "make the variant of this recipe again instead of searching")] = (
        None
    )
    search_budget_s: Annotated[float, Option(parse_duration, "TIME", "time for the search")] = 300.0
    target: Annotated[
        str | None,
        Option(str, "CPU", "CPU to quantize for: amx, avx512_vnni, avx512, avx2 or arm64 (default: this machine's)"),
    ] = None
    bench_budget_s: Annotated[float, Option(parse_duration, "TIME", "time for the benchmark")] = 20.0
    threads: Annotated[
        int | None, Option(parse_whole, "N", "threads (default: all cores that this process may use)")
    ] = None
    # The memory in which TensorRT may build, in addition to weights and tensors; None leaves it to TensorRT.
    workspace_mib: int | None = None
    allow_pickle: Annotated[bool, Option(bool, "", "load pickled weights, which can run any code")] = False
    trust_remote_code: Annotated[bool, Option(bool, "", "run code that comes with the model")] = False

    def __post_init__(self) -> None:
        if self.target is not None:
            find_target(self.target)
        if self.device not in (None, CPU, CUDA):
            raise PlanError(f"unknown device '{self.device}'", hint=f"--device takes {CPU} or {CUDA}")
        precisions = [precision.value for precision in Precision]
        if self.precision is not None and self.precision not in precisions:
            raise PlanError(f"unknown precision '{self.precision}'", hint=f"auto, or one of {', '.join(precisions)}")
        if self.precision is not None and (self.variants or self.recipe is not None):
            raise PlanError(
                "--precision limits a search, and --variants or --recipe replace the search",
                hint="leave one of them out",
            )
        if self.device == CUDA and self.recipe is not None:
            raise PlanError("a recipe makes int8 for CPUs, and --device is cuda", hint="leave one of them out")
        if self.threads is not None and self.threads < 1:
            raise PlanError(f"--threads {self.threads} is less than one")
        if self.workspace_mib is not None and self.workspace_mib < 1:
            raise PlanError(f"--workspace-size {self.workspace_mib} is less than one MiB")
        if not self.search_budget_s > 0:
            raise PlanError("the budget of the search is not positive", hint="--search-budget 5m")
        if self.recipe is not None and self.variants:
            raise PlanError("--recipe names its own variant, and --variants names others", hint="leave one of them out")
        if not self.bench_budget_s > 0:
            raise PlanError("the budget of the benchmark is not positive", hint="--bench-budget 30s")
        if (option := self.gate.needing_labels) is not None and self.data is None:
            raise PlanError(f"{option} needs labelled data", hint="--data file.jsonl")
        if self.columns and self.data is None and self.calibration is None:
            raise PlanError("--columns renames the columns of a data file, and there is none", hint="--data file.csv")
        if self.calibration is not None and self.calibration == self.data:
            raise PlanError(
                f"--calibration and --data are both {self.data}: rows used for calibration prove nothing",
                hint="--data alone sets rows aside",
            )
