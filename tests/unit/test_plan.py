from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import PlanError
from hasten.core.plan import Gate, Keep, Plan, Range, Shapes, parse_columns, parse_duration
from hasten.core.tensors import Shape
from hasten.core.variant import CPU, Precision, Support, Variant

# Registry names of backends: a file's name with hyphens for underscores, or whatever an entry point calls itself.
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
def test_a_variant_reads_as_it_prints(name: str, variant: Variant) -> None:
    assert Variant.parse(name) == variant
    assert variant.name == str(variant) == name


@given(backend_names, st.sampled_from(Precision), st.sampled_from([CPU, "cuda", "cuda:1"]))
def test_every_variants_name_can_be_parsed(backend: str, precision: Precision, device: str) -> None:
    variant = Variant(backend, precision, device)
    assert Variant.parse(variant.name) == variant


@pytest.mark.parametrize(
    "name",
    ["", "onnxruntime", "onnxruntime-", "-fp32", "onnxruntime-fp64", "onnxruntime-fp32@", "ONNXRuntime-FP32",
     "onnx runtime-fp32", "onnxruntime-fp32 ", "onnxruntime-fp32\n", "onnxruntime-fp32@../x"],
)  # fmt: skip
def test_what_is_not_a_variant_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(PlanError, match="is not the name of a variant") as caught:
        Variant.parse(name)
    assert "BACKEND-PRECISION" in (caught.value.hint or "")
    assert "bf16" in (caught.value.hint or "")


def test_only_fp32_is_full_precision() -> None:
    assert [precision for precision in Precision if not precision.is_reduced] == [Precision.FP32]


def test_support_says_why_not() -> None:
    assert Support.yes().ok
    assert Support.no("needs a GPU", "buy one") == Support(False, "needs a GPU", "buy one")


@pytest.mark.parametrize(("values", "expected"), [((8,), Range(8, 8, 8)), ((1, 8, 32), Range(1, 8, 32))])
def test_a_range_is_one_number_or_three(values: tuple[int, ...], expected: Range) -> None:
    assert Range.of("--batch-size", values) == expected


@pytest.mark.parametrize("values", [(), (1, 2), (1, 2, 3, 4), (0,), (0, 1, 2), (2, 1, 3), (1, 3, 2), (-1, 1, 1)])
def test_other_ranges_are_refused_by_name(values: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="--batch-size"):
        Range.of("--batch-size", values)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(512, Range(16, 128, 256)), (256, Range(16, 128, 256)), (100, Range(16, 100, 100)), (8, Range(8, 8, 8))],
)
def test_a_range_is_cut_to_what_the_model_takes(limit: int, expected: Range) -> None:
    assert Range(16, 128, 256).at_most(limit) == expected


def test_corners_are_the_optimum_and_the_extremes() -> None:
    assert [str(shape) for shape in Shapes().corners()] == ["8×128", "1×16", "1×256", "32×16", "32×256"]


def test_the_grid_is_every_combination_the_optimum_first() -> None:
    grid = Shapes().grid()
    assert grid[0] == Shapes().optimal == Shape(8, 128)
    assert len(grid) == len(set(grid)) == 9
    assert {shape.batch for shape in grid} == {1, 8, 32}
    assert {shape.sequence for shape in grid} == {16, 128, 256}


@pytest.mark.parametrize(("batch", "sequence"), [(999_999_999, 16), (1, 999_999_999), (8193, 512)])
def test_sizes_that_no_memory_holds_are_refused(batch: int, sequence: int) -> None:
    with pytest.raises(PlanError, match=f"--batch-size {batch} and --seq-len {sequence} make a batch of more than"):
        Shapes(Range(1, 1, batch), Range(1, 1, sequence))


def test_large_sizes_may_be_asked_for() -> None:
    assert Shapes(Range(1, 1, 8192), Range(1, 1, 512)).batch.max == 8192


def test_one_shape_is_measured_once() -> None:
    shapes = Shapes(Range.of("batch", (4,)), Range.of("sequence", (64,)))
    assert shapes.corners() == shapes.grid() == [Shape(4, 64)]


@pytest.mark.parametrize("gate", [{"min_agreement": 0}, {"min_agreement": 1.0}, {"max_drop": 0}, {"max_drop": 2.5}])
def test_sound_gates(gate: dict[str, float]) -> None:
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
def test_impossible_gates_are_refused_by_option(gate: dict[str, float]) -> None:
    option = "--" + next(iter(gate)).replace("_", "-")
    with pytest.raises(PlanError, match=option):
        Gate(**gate)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"threads": 0}, "--threads 0"),
        ({"bench_budget_s": 0.0}, "budget"),
        ({"bench_budget_s": -1.0}, "budget"),
        ({"bench_budget_s": math.nan}, "budget"),
        ({"gate": Gate(max_drop=1.0)}, "--max-drop needs labelled data"),
        ({"gate": Gate(metric="macro-f1")}, "--metric needs labelled data"),
        ({"columns": {"text": "sentence"}}, "--columns is about a data file"),
        ({"data": "rows.jsonl", "calibration": "rows.jsonl"}, "both rows.jsonl"),
        ({"data": "-", "calibration": "-"}, "both -"),
        ({"precision": "fp9"}, "unknown precision 'fp9'"),
        ({"precision": "fp8", "variants": ("fused-fp8@cuda",)}, "--precision is for a search"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan("acme/model", **wrong)  # type: ignore[arg-type]


def test_columns_may_be_those_of_calibration_data_alone() -> None:
    assert Plan("acme/model", calibration="train.csv", columns={"text": "sentence"}).data is None


@pytest.mark.parametrize(
    ("batch", "sizes"), [(Range(1, 8, 32), (1, 8, 32)), (Range(4, 4, 4), (1, 4)), (Range(1, 1, 1), (1,))]
)
def test_batches_are_judged_alone_too(batch: Range, sizes: tuple[int, ...]) -> None:
    assert Shapes(batch).batches == sizes


def test_a_drop_may_be_bounded_where_there_is_data() -> None:
    assert Plan("acme/model", data="rows.jsonl", gate=Gate(max_drop=1.0)).gate.max_drop == 1.0


def test_a_plan_survives_json() -> None:
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
def test_columns(text: str, columns: dict[str, str]) -> None:
    assert parse_columns(text) == columns


@pytest.mark.parametrize(
    ("text", "said"),
    [("sentence", "'sentence' is not NAME=COLUMN"), ("text=", "'text='"), ("=a", "'=a'"), ("text=a,", "''"),
     ("text=a,text=b", "names 'text' twice")],
)  # fmt: skip
def test_what_is_not_a_mapping_of_columns(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_columns(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("30", 30), ("5m", 300), ("1h", 3600), ("1.5 m", 90), (" 2s ", 2), ("0.25", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5d", "5min", "1h30m", "1e3", "nan", "inf", "5 5"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(PlanError, match="is not a duration"):
        parse_duration(text)
