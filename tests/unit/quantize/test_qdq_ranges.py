"""Histograms, the clipping range of each method, and fake quantization against its definition."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hasten.core.errors import InputError, PlanError, StageError  # noqa: E402
from hasten.core.variant import Precision  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer  # noqa: E402
from hasten.quantize.qdq.ranges import Histogram, RangeMethod, check_method, find_range  # noqa: E402


def histogram_of(values: torch.Tensor, parts: int = 1) -> Histogram:
    histogram = Histogram()
    for part in values.chunk(parts):
        histogram.update(part)
    return histogram


def with_outliers() -> torch.Tensor:
    torch.manual_seed(0)
    values = torch.randn(200_000)
    values[:4] = 50.0
    return values


def test_streamed_histogram_equals_the_whole() -> None:
    values = with_outliers().flip(0)  # outliers come last, so the range has to grow
    whole, streamed = histogram_of(values), histogram_of(values, 7)
    assert streamed.largest == whole.largest == 50.0
    assert streamed.counts.sum() == whole.counts.sum() == len(values)
    for method in (RangeMethod.MAX, RangeMethod.PERCENTILE, RangeMethod.MSE):
        ranges = [find_range(each, method, None, Precision.INT8) for each in (whole, streamed)]
        assert ranges[0] == pytest.approx(ranges[1], rel=0.03)


def test_histogram_counts_beyond_fp32_precision() -> None:
    """Attention probabilities look like this: most are close to zero."""
    values = torch.full((2**24 + 1000,), 1e-4)
    values[:10] = 1.0
    histogram = histogram_of(values)
    assert histogram.counts.sum() == len(values)
    assert histogram.counts.max() == len(values) - 10


def test_each_method_clips_at_its_threshold() -> None:
    histogram = histogram_of(with_outliers())
    expected = float(np.percentile(with_outliers().abs().numpy(), 99.9))
    assert find_range(histogram, RangeMethod.MAX, None, Precision.INT8) == 50.0
    assert find_range(histogram, RangeMethod.PERCENTILE, 99.9, Precision.INT8) == pytest.approx(expected, abs=0.03)
    entropy = find_range(histogram, RangeMethod.ENTROPY, None, Precision.INT8)
    assert 2.0 < entropy < 25.0


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_mse_range_has_the_smallest_error(precision: Precision) -> None:
    values = with_outliers()
    best = find_range(histogram_of(values), RangeMethod.MSE, None, precision)

    def error(amax: float) -> float:
        quantizer = Quantizer(precision)
        quantizer.set_range(amax)
        return float((quantizer(values) - values).square().mean())

    assert all(error(best) <= 1.05 * error(amax) for amax in (1.0, 3.0, 5.0, 10.0, 20.0, 50.0))


def test_unsupported_methods_and_values_are_rejected() -> None:
    for method, value, precision in [
        ("median", None, Precision.INT8),
        ("max", 99.0, Precision.INT8),
        ("percentile", 101.0, Precision.INT8),
        ("entropy", None, Precision.FP8),
    ]:
        with pytest.raises(PlanError):
            check_method(method, value, precision)
    with pytest.raises(InputError, match="no rows"):
        find_range(Histogram(), RangeMethod.MAX, None, Precision.INT8)
    with pytest.raises(StageError, match="a value at a tensor is not finite"):
        histogram_of(torch.tensor([1.0, float("inf")]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.9999, r"0\.9999 is not a valid percentile \(percentiles go up to 100: pass 99\.99, not 0\.9999\)"),
        (1.0, r"percentiles go up to 100: pass 100, not 1\.0"),
        ("99", r"'99' is not a percentile: it is not a number \(as in 99\.99\)"),
        (50.0, r"50\.0 is not a valid percentile \(more than 50 and at most 100, as in 99\.99\)"),
        (100.5, r"more than 50"),
        (0.0, r"more than 50"),
        (-99.99, r"more than 50"),
        (float("nan"), r"more than 50"),
    ],
)
def test_invalid_percentiles_are_rejected(value: float, message: str) -> None:
    with pytest.raises(PlanError, match=message), qdq.calibration("percentile", value):
        pass


@pytest.mark.parametrize("value", [50.1, 99.99, 100, None])
def test_valid_percentiles_are_accepted(value: float | None) -> None:
    with qdq.calibration("percentile", value):
        pass


def test_int8_linear_equals_integer_matmul() -> None:
    torch.manual_seed(1)
    layer = QuantizedLinear(64, 48, precision=Precision.INT8).eval()
    values = torch.randn(5, 64) * 3
    layer.input_quantizer.set_range(4.0)  # below the largest value: some are clipped
    layer.measure_weight()
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    scale = np.float32(4.0) / np.float32(127)
    left = np.clip(np.rint(values.numpy() / scale), -128, 127).astype(np.int64)
    right = np.rint(weight / scales[:, None]).astype(np.int64)
    exact = (left @ right.T).astype(np.float64) * np.float64(scale) * scales.astype(np.float64) + bias
    assert values.abs().max() > 4.0
    np.testing.assert_allclose(layer(values).detach().numpy(), exact, rtol=0, atol=2e-5)


def test_fp8_linear_equals_matmul_of_rounded_operands() -> None:
    torch.manual_seed(1)
    layer = QuantizedLinear(64, 48, bias=False, precision=Precision.FP8).eval()
    values = torch.randn(5, 64) * 3
    layer.input_quantizer.set_range(4.0)
    layer.measure_weight()

    def nearest(array: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Search all e4m3 numbers for the nearest, ties to the even mantissa."""
        bits = np.arange(256, dtype=np.uint8)
        grid = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
        bits, grid = bits[np.isfinite(grid)], grid[np.isfinite(grid)].astype(np.float64)
        distances = np.abs((array / scale).astype(np.float64)[..., None] - grid)
        ties = distances == distances.min(axis=-1, keepdims=True)
        return grid[np.where(ties, 1 - bits.astype(int) % 2, -1).argmax(axis=-1)] * scale.astype(np.float64)

    weight = layer.weight.detach().numpy()
    scales = (np.abs(weight).max(axis=1) / np.float32(448))[:, None]
    exact = nearest(values.numpy(), np.full(1, 4 / 448, np.float32)) @ nearest(weight, scales).T
    np.testing.assert_allclose(layer(values).detach().numpy(), exact, rtol=0, atol=2e-5)


def test_gradients_pass_straight_through_values_that_are_not_clipped() -> None:
    quantizer = Quantizer(Precision.INT8)
    quantizer.set_range(1.0)
    values = torch.tensor([0.3, -0.9, 2.0, -3.0], requires_grad=True)
    quantizer(values).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_ranges_stay_in_fp32_when_a_model_is_cast() -> None:
    """fp16 cannot represent the range of an all-zero channel, and bf16 has only three digits."""
    layer = QuantizedLinear(4, 2, bias=False, precision=Precision.INT8).eval()
    with torch.no_grad():
        layer.weight[0] = 0.0
    layer.input_quantizer.set_range(1.2345678)
    layer.measure_weight()
    before = layer.weight_quantizer.amax.clone()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        layer.to(dtype)
        assert torch.equal(layer.weight_quantizer.amax, before)
        assert float(layer.input_quantizer.amax) == pytest.approx(1.2345678)
        output = layer(torch.ones(1, 4, dtype=dtype))
        assert output.dtype is dtype
        assert output.isfinite().all()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)  # as transformers loads a model in half precision
    try:
        assert Quantizer(Precision.INT8).amax.dtype is torch.float32
    finally:
        torch.set_default_dtype(previous)


def test_weights_are_measured_after_the_last_training_step() -> None:
    layer = QuantizedLinear(4, 2, bias=False, precision=Precision.INT8).train()
    layer.input_quantizer.set_range(1.0)
    layer.measure_weight()
    layer(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    layer.eval()
    assert torch.equal(layer.weight_quantizer.amax, layer.weight.detach().abs().amax(dim=1))


def test_layer_on_the_meta_device_is_not_calibrated() -> None:
    """accelerate constructs models on the meta device before their weights are placed."""
    layer = QuantizedLinear(4, 2, precision=Precision.INT8).to("meta").eval()
    assert not layer.input_quantizer.is_active


def test_ranges_are_restored_from_a_state_dict() -> None:
    first, second = Quantizer(Precision.INT8), Quantizer(Precision.INT8)
    assert not first.is_calibrated
    first.set_range(2.5)
    assert not second.is_active
    second.load_state_dict(first.state_dict())
    assert second.is_active
    assert float(second.amax) == 2.5
    second.forget()
    assert not second.is_calibrated


def test_training_does_not_read_ranges_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every read by the host would synchronize."""
    layer = QuantizedLinear(4, 2, precision=Precision.INT8)
    layer.input_quantizer.set_range(1.0)
    layer.measure_weight()
    reads: list[None] = []
    isnan = torch.Tensor.isnan
    monkeypatch.setattr(torch.Tensor, "isnan", lambda tensor: reads.append(None) or isnan(tensor))
    for _ in range(3):
        layer.train()(torch.randn(3, 4))
    assert not reads


@pytest.mark.parametrize("channels", [None, 64])
def test_modules_round_like_graphs(channels: int | None) -> None:
    """Values halfway between two steps, and their neighbours, round to the same step."""
    onnx, ort = (pytest.importorskip(name, reason="runs the graphs") for name in ("onnx", "onnxruntime"))
    steps = torch.arange(-140, 140) + 0.5
    ranges = torch.linspace(0.1, 9.0, 64)
    midpoints = steps * (ranges / 127)[:, None]
    values = torch.cat([midpoints, *(midpoints.nextafter(torch.tensor(limit)) for limit in (torch.inf, -torch.inf))], 1)
    for index in range(1 if channels else len(ranges)):
        quantizer = Quantizer(Precision.INT8, channels)
        quantizer.set_range(ranges if channels else ranges[index])
        scale = (quantizer.amax / 127).numpy()
        axis = {"axis": 0} if channels else {}
        names = ["values", "scale", "zero"]
        nodes = [
            onnx.helper.make_node("QuantizeLinear", names, ["bits"], **axis),
            onnx.helper.make_node("DequantizeLinear", ["bits", *names[1:]], ["back"], **axis),
        ]
        source, result = (onnx.helper.make_tensor_value_info(name, 1, values.shape) for name in ("values", "back"))
        constants = [onnx.numpy_helper.from_array(scale, "scale")]
        constants += [onnx.numpy_helper.from_array(np.zeros_like(scale, np.int8), "zero")]
        graph = onnx.helper.make_graph(nodes, "pair", [source], [result], constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        [back] = ort.InferenceSession(model.SerializeToString()).run(None, {"values": values.numpy()})
        np.testing.assert_array_equal(quantizer(values).numpy(), back)
