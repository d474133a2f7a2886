"""Compare variants of a bundle with the limit of the CPU: the time of their GEMMs at the rate of one large GEMM.

    python benchmarks/cpu/limits.py BUNDLE [--batch 8] [--tokens 128] [--seconds 1.5]

For each runtime and precision three times are measured: one large GEMM (its rate is the limit), the GEMMs of an encoder
layer one by one at the shapes of the model, and the whole variant. The first two bound what a better kernel could gain;
the rest of the whole is attention, normalization, activations and the conversions of quantized graphs. int8 is measured
with inputs that are quantized already and with ONNX Runtime's dynamic quantization of each input. Contenders alternate.
Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

sys.path.append(str(Path(__file__).parents[1]))

from hasten.backends import RunOptions
from hasten.bundle import Bundle, open_bundle
from hasten.core.system.hardware import usable_cores
from hasten.core.tensors import Batch
from hasten.predictor import open_session, probe
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "cpu_limits.json"
LARGE = (2048, 2048, 2048)
ROUNDS = 5
ORT_FP32, ORT_INT8, ORT_DYNAMIC, OPENVINO_FP32 = (
    "onnxruntime fp32",
    "onnxruntime int8",
    "onnxruntime int8, dynamic quantization",
    "openvino fp32",
)
Run = Callable[[], object]


def main() -> None:
    """Run the study, write its result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each row")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each measurement")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    config = gemm_config(bundle)
    rows, hidden, inner = args.batch * args.tokens, config["hidden"], config["intermediate"]
    # Inputs, columns and outputs of a layer's GEMMs: QKV, attention output, and the feed-forward network.
    shapes = [(rows, hidden, 3 * hidden), (rows, hidden, hidden), (rows, hidden, inner), (rows, inner, hidden)]
    runs: dict[tuple[str, str], Run] = {}
    for shape in (LARGE, *shapes):
        for name, run in gemms(shape):
            runs[name, str(shape)] = run
    for name, run in variants(bundle, args.batch, args.tokens):
        runs["variant", name] = run
    seconds = time_all(runs, args.seconds)
    flops = config["layers"] * sum(2 * float(np.prod(shape)) for shape in shapes)
    rates = {name: 2 * float(np.prod(LARGE)) / seconds[name, str(LARGE)] / 1e9 for name in (*_gemm_names(),)}
    results = provenance() | {
        "model": config,
        "batch": args.batch,
        "tokens": args.tokens,
        "gemm_gflop": flops / 1e9,
        "limits": {
            name: {
                "gflop_per_s": rate,
                "limit_ms": flops / rate / 1e6,
                "gemms_ms": config["layers"] * sum(seconds[name, str(shape)] for shape in shapes) * 1e3,
            }
            for name, rate in rates.items()
        },
        "gemms": {f"{name} {shape}": value * 1e3 for (name, shape), value in seconds.items() if name != "variant"},
        "variants_ms": {shape: value * 1e3 for (name, shape), value in seconds.items() if name == "variant"},
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    report(results)


def gemm_config(bundle: Bundle) -> dict[str, int]:
    """Return the sizes of the encoder, read from the weights of the bundle's graph."""
    model = onnx.load(bundle.graph().path(), load_external_data=False)
    sizes = [tuple(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) == 2]
    squares = [size for size in sizes if size[0] == size[1] and size[0] > 1]
    hidden = max({size[0] for size in squares}, key=lambda width: sum(size[0] == width for size in squares))
    inner = max(max(size) for size in sizes if hidden in size and max(size) <= 8 * hidden)
    layers = sum(sorted(size) == sorted((hidden, inner)) for size in sizes) // 2
    return {"hidden": hidden, "intermediate": inner, "layers": layers}


def _gemm_names() -> tuple[str, ...]:
    return ORT_FP32, ORT_INT8, ORT_DYNAMIC, OPENVINO_FP32


def gemms(shape: tuple[int, int, int]) -> list[tuple[str, Run]]:
    """Return a function per runtime and precision that runs a GEMM of this shape with constant weights."""
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, inner), dtype=np.float32)
    weights = random.standard_normal((inner, columns), dtype=np.float32)
    quantized = random.integers(-127, 128, (inner, columns)).astype(np.int8)
    float_graph = _graph("MatMul", {"x": x}, {"w": weights})
    int8_graph = _graph("MatMulInteger", {"x": random.integers(0, 256, x.shape).astype(np.uint8)}, {"w": quantized})
    scale = {"w": quantized, "scale": np.array([0.01], np.float32)}
    dynamic_graph = _graph("DynamicQuantizeMatMul", {"x": x}, scale, domain="com.microsoft")
    compiled = openvino.Core().compile_model(
        openvino.Core().read_model(float_graph.SerializeToString()),
        "CPU",
        {"INFERENCE_NUM_THREADS": usable_cores(), "INFERENCE_PRECISION_HINT": "f32"},
    )
    request = compiled.create_infer_request()
    integers = random.integers(0, 256, x.shape).astype(np.uint8)
    return [
        (ORT_FP32, _onnxruntime(float_graph, {"x": x})),
        (ORT_INT8, _onnxruntime(int8_graph, {"x": integers})),
        (ORT_DYNAMIC, _onnxruntime(dynamic_graph, {"x": x})),
        (OPENVINO_FP32, lambda: request.infer([x], share_inputs=True, share_outputs=True)),
    ]


def _graph(operator: str, inputs: Mapping[str, Any], weights: Mapping[str, Any], domain: str = "") -> Any:
    node = helper.make_node(operator, [*inputs, *weights], ["y"], domain=domain)
    output = TensorProto.INT32 if operator == "MatMulInteger" else TensorProto.FLOAT
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph = helper.make_graph(
        [node],
        "gemm",
        values,
        [helper.make_tensor_value_info("y", output, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _onnxruntime(model: Any, feeds: Mapping[str, Any]) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def variants(bundle: Bundle, batch: int, tokens: int) -> list[tuple[str, Run]]:
    """Return a function per variant of the bundle that runs here, which runs a full batch."""
    found = []
    for entry in bundle.manifest.variants:
        if probe(entry).ok:
            session = open_session(bundle.artifact(entry), RunOptions(usable_cores()))
            ids = np.random.default_rng(0).integers(1000, 20_000, batch * tokens).astype(np.int32)
            values = {spec.name: np.zeros_like(ids) for spec in session.spec.signature.inputs} | {"input_ids": ids}
            values.pop("attention_mask", None)
            rows = Batch(values, np.full(batch, tokens))
            found.append((entry.name, lambda session=session, rows=rows: session.run(rows)))
    return found


def time_all(runs: Mapping[Any, Run], seconds: float) -> dict[Any, float]:
    """Return the median of each function's rounds, in seconds; a round is the median of its runs."""
    rounds: dict[Any, list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for key, run in runs.items():
            times, end = [], time.perf_counter() + seconds / ROUNDS
            while time.perf_counter() < end or len(times) < 3:
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            rounds[key].append(float(np.median(times)))
    return {key: float(np.median(values)) for key, values in rounds.items()}


def report(results: Mapping[str, Any]) -> None:
    """Print the limits, and the variants beside them."""
    print(json.dumps(results["model"]), f"{results['batch']}×{results['tokens']}", f"{results['gemm_gflop']:.1f} GFLOP")
    for name, limit in results["limits"].items():
        print(
            f"{name:<40} {limit['gflop_per_s']:6.0f} GFLOP/s  limit {limit['limit_ms']:6.1f} ms"
            f"  the model's GEMMs {limit['gemms_ms']:6.1f} ms"
        )
    for name, value in results["variants_ms"].items():
        print(f"{name:<60} {value:6.1f} ms")


if __name__ == "__main__":
    main()
