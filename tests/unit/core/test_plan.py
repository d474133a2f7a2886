"""Test plans: names of variants, ranges, shapes, gates, and options of the command line."""

from __future__ import annotations

import argparse
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import PlanError
from hasten.core.options import add_options, changed_options, read_options
from hasten.core.plan import Gate, Keep, Plan, Range, Shapes, parse_columns, parse_duration
from hasten.core.tensors import Shape
from hasten.core.variant import CPU, Precision, Support, Variant

# Registry names of backends: a file's name with hyphens for underscores, or the name of an entry point.
backend_names = st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("onnxruntime-int8", Variant("onnxruntime", Precision.INT8)),
        ("openvino-bf16", Variant("openvino", Precision.BF16, CPU)),
        ("fused-fp8@cuda", Variant("fused", Precision.FP8, "cuda")),
        ("tensorrt-fp16@cuda:1", Variant("tensorrt", Precision.FP16, "cuda:1")),
    ],
)
def test_variant_name_round_trips(name: str, variant: Variant) -> None:
    assert Variant.parse(name) == variant
    assert variant.name == str(variant) == name


@given(backend_names, st.sampled_from(Precision), st.sampled_from([CPU, "cuda", "cuda:1"]))
def test_every_variant_name_can_be_parsed(backend: str, precision: Precision, device: str) -> None:
    variant = Variant(backend, precision, device)
    assert Variant.parse(variant.name) == variant


@pytest.mark.parametrize(
    "name",
    ["", "onnxruntime", "onnxruntime-", "-fp32", "onnxruntime-fp64", "onnxruntime-fp32@", "ONNXRuntime-FP32",
     "onnx runtime-fp32", "onnxruntime-fp32 ", "onnxruntime-fp32\n", "onnxruntime-fp32@../x"],
)  # fmt: skip
def test_invalid_variant_name_is_rejected_with_the_syntax(name: str) -> None:
    with pytest.raises(PlanError, match="is not the name of a variant") as caught:
        Variant.parse(name)
    assert "BACKEND-PRECISION" in (caught.value.hint or "")
    assert "bf16" in (caught.value.hint or "")


def test_only_fp32_is_full_precision() -> None:
    assert [precision for precision in Precision if not precision.is_reduced] == [Precision.FP32]


def test_support_has_reason_and_hint() -> None:
    assert Support.yes().ok
    assert Support.no("needs a GPU", "buy one") == Support(False, "needs a GPU", "buy one")


@pytest.mark.parametrize(("values", "expected"), [((8,), Range(8, 8, 8)), ((1, 8, 32), Range(1, 8, 32))])
def test_range_is_one_number_or_three(values: tuple[int, ...], expected: Range) -> None:
    assert Range.of("--batch-size", values) == expected


@pytest.mark.parametrize("values", [(), (1, 2), (1, 2, 3, 4), (0,), (0, 1, 2), (2, 1, 3), (1, 3, 2), (-1, 1, 1)])
def test_invalid_range_is_rejected_by_option_name(values: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="--batch-size"):
        Range.of("--batch-size", values)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(512, Range(16, 128, 256)), (256, Range(16, 128, 256)), (100, Range(16, 100, 100)), (8, Range(8, 8, 8))],
)
def test_range_is_limited_to_the_model_length(limit: int, expected: Range) -> None:
    assert Range(16, 128, 256).at_most(limit) == expected


def test_corners_are_the_optimum_and_the_extremes() -> None:
    assert [str(shape) for shape in Shapes().corners()] == ["8×128", "1×16", "1×256", "32×16", "32×256"]


def test_grid_is_every_combination_with_the_optimum_first() -> None:
    grid = Shapes().grid()
    assert grid[0] == Shapes().optimal == Shape(8, 128)
    assert len(grid) == len(set(grid)) == 9
    assert {shape.batch for shape in grid} == {1, 8, 32}
    assert {shape.sequence for shape in grid} == {16, 128, 256}


@pytest.mark.parametrize(("batch", "sequence"), [(999_999_999, 16), (1, 999_999_999), (8193, 512)])
def test_sizes_beyond_any_memory_are_rejected(batch: int, sequence: int) -> None:
    with pytest.raises(PlanError, match=f"--batch-size {batch} and --seq-len {sequence} make a batch of more than"):
        Shapes(Range(1, 1, batch), Range(1, 1, sequence))


def test_large_sizes_are_accepted() -> None:
    assert Shapes(Range(1, 1, 8192), Range(1, 1, 512)).batch.max == 8192


def test_equal_shapes_are_listed_once() -> None:
    shapes = Shapes(Range.of("batch", (4,)), Range.of("sequence", (64,)))
    assert shapes.corners() == shapes.grid() == [Shape(4, 64)]


@pytest.mark.parametrize("gate", [{"min_agreement": 0}, {"min_agreement": 1.0}, {"max_drop": 0}, {"max_drop": 2.5}])
def test_valid_gates_are_accepted(gate: dict[str, float]) -> None:
    assert Gate(**gate) == Gate(**gate)


@pytest.mark.parametrize(
    "gate",
    [
        {"min_agreement": 1.01},
        {"min_agreement": 99.5},
        {"min_agreement": -0.1},
        {"min_agreement": math.nan},
        {"max_drop": -0.5},
        {"max_drop": math.nan},
    ],
)
def test_invalid_gate_is_rejected_by_option_name(gate: dict[str, float]) -> None:
    option = "--" + next(iter(gate)).replace("_", "-")
    with pytest.raises(PlanError, match=option):
        Gate(**gate)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threads": 0}, "--threads 0"),
        ({"bench_budget_s": 0.0}, "budget"),
        ({"bench_budget_s": -1.0}, "budget"),
        ({"bench_budget_s": math.nan}, "budget"),
        ({"gate": Gate(max_drop=1.0)}, "--max-drop needs labelled data"),
        ({"gate": Gate(metric="macro-f1")}, "--metric needs labelled data"),
        ({"columns": {"text": "sentence"}}, "--columns renames the columns of a data file"),
        ({"data": "rows.jsonl", "calibration": "rows.jsonl"}, "both rows.jsonl"),
        ({"data": "-", "calibration": "-"}, "both -"),
        ({"precision": "fp9"}, "unknown precision 'fp9'"),
        ({"precision": "fp8", "variants": ("fused-fp8@cuda",)}, "--precision limits a search"),
    ],
)
def test_contradictory_plan_is_rejected(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan("acme/model", **wrong)  # type: ignore[arg-type]


def test_columns_apply_to_calibration_data_alone() -> None:
    assert Plan("acme/model", calibration="train.csv", columns={"text": "sentence"}).data is None


@pytest.mark.parametrize(
    ("batch", "sizes"), [(Range(1, 8, 32), (1, 8, 32)), (Range(4, 4, 4), (1, 4)), (Range(1, 1, 1), (1,))]
)
def test_batch_sizes_include_one(batch: Range, sizes: tuple[int, ...]) -> None:
    assert Shapes(batch).batches == sizes


def test_max_drop_is_accepted_with_data() -> None:
    assert Plan("acme/model", data="rows.jsonl", gate=Gate(max_drop=1.0)).gate.max_drop == 1.0


def test_plan_round_trips_through_json() -> None:
    plan = Plan(
        "acme/model",
        variants=("onnxruntime-int8",),
        data="rows.csv",
        calibration="train.csv",
        columns={"text": "sentence"},
        gate=Gate(0.99, metric="macro-f1"),
        threads=2,
        keep=Keep.ALL,
    )
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("text=sentence", {"text": "sentence"}),
        (" text = review text , label=stars", {"text": "review text", "label": "stars"}),
        ("text=a=b", {"text": "a=b"}),
    ],
)
def test_columns_are_parsed(text: str, columns: dict[str, str]) -> None:
    assert parse_columns(text) == columns


@pytest.mark.parametrize(
    ("text", "message"),
    [("sentence", "'sentence' is not NAME=COLUMN"), ("text=", "'text='"), ("=a", "'=a'"), ("text=a,", "''"),
     ("text=a,text=b", "names 'text' twice")],
)  # fmt: skip
def test_invalid_columns_are_rejected(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_columns(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("30", 30), ("5m", 300), ("1h", 3600), ("1.5 m", 90), (" 2s ", 2), ("0.25", 0.25)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5d", "5min", "1h30m", "1e3", "nan", "inf", "5 5"])
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(PlanError, match="is not a duration"):
        parse_duration(text)


def parse(words: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_options(parser, Plan)
    return read_options(Plan, vars(parser.parse_args(words.split())), model="acme/model")


def test_plan_without_options_has_its_defaults() -> None:
    assert parse("") == Plan("acme/model")


def test_plan_is_read_from_the_command_line() -> None:
    plan = parse("-b 1 2 4 --seq-len 64 --data rows.csv --columns text=a --max-drop 0.5 --metric f1")
    assert plan.shapes == Shapes(Range(1, 2, 4), Range(64, 64, 64))
    assert (plan.columns, plan.gate) == ({"text": "a"}, Gate(max_drop=0.5, metric="f1"))
    plan = parse("--variants a-fp32 b-fp32 --keep all --search-budget 2m --threads 3 --allow-pickle")
    assert (plan.variants, plan.keep, plan.search_budget_s) == (("a-fp32", "b-fp32"), Keep.ALL, 120)
    assert (plan.threads, plan.allow_pickle, plan.trust_remote_code) == (3, True, False)
    assert parse("--precision auto").precision is None


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--task text-ranking --revision main --threads 3",
        "--batch-size 1 2 4 --seq-len 64 64 64 --search-budget 90 --bench-budget 0.5",
        "--data rows.csv --columns text=a,label=b --max-drop 0.5 --metric f1",
        "--variants a-fp32 b-int8 --keep all --allow-pickle",
        "--data rows.csv --max-drop 0 --min-agreement 0.99999999 --bench-budget 0.00005",
    ],
)
def test_changed_options_make_the_plan_again(words: str) -> None:
    assert sorted(changed_options(parse(words))) == sorted(words.split())
    assert parse(" ".join(changed_options(parse(words)))) == parse(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--threads two", "--threads: 'two' is not a whole number"),
        ("--min-agreement high", "--min-agreement: 'high' is not a number"),
        ("--batch-size 1 2", "--batch-size takes one number or three"),
        ("--search-budget 0s", "--search-budget: '0s' is not a positive duration"),
    ],
)
def test_invalid_option_is_rejected_by_flag(words: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(words)
