"""Measure encoders with rotary attention and sliding windows on CPUs: ModernBERT-base with random weights.

    python benchmarks/cpu/modern_encoders.py --work DIR [--layers 22] [--long-layers 3]

Short texts are timed in alternating rounds with stock ONNX Runtime and OpenVINO on the export that tutorials make. A
text of 8,192 tokens runs in a model of fewer layers, a third of them global as in the whole one: the stock graph takes
five seconds and half of 16 GB for each. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from alternating_rounds import time_shapes
from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.core.plan import Plan
from hasten.core.system.hardware import peak_memory_bytes, usable_cores
from hasten.core.tensors import Batch, Shape, Signature
from hasten.core.variant import Precision, Variant
from hasten.metrics.statistics import median_ratio
from provenance import provenance, run_main
from stock_runtimes import export_stock, register
from support.models import tiny_encoders

BENCHMARKS = Path(__file__).parents[1]
BASE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "local_attention": 128,
    "vocab_size": 50_368,
    "layer_types": None,
    "initializer_range": 0.02,
}
SHAPES = [Shape(1, 128), Shape(8, 128), Shape(1, 16), Shape(1, 512)]
LONG = Shape(1, 8192)
SHORT = Shape(1, 16)
RUNS = 3
LONG_RUNS = 2
CONTENDERS = "contenders.pickle"
STOCK = "plain_onnxruntime-fp32"
LONG_CONTENDERS = (STOCK, "plain_openvino-fp32", "onnxruntime-fp32")


def main() -> None:
    """Run the study or a part of it, write the result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for models and graphs")
    parser.add_argument("--part", choices=("prepare", "short", "long"), help="default: all, one after another")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--long-layers", type=int, default=3)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of timing of short texts")
    parser.add_argument("-o", "--output", type=Path, default=BENCHMARKS / "results" / "modern_encoders.json")
    parser.add_argument("--long-run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    register()
    short, long = args.work / f"layers{args.layers}", args.work / f"layers{args.long_layers}"
    if args.long_run is not None:
        print(json.dumps(run_long(read_contenders(long)[args.long_run])))
        return
    if args.part in (None, "prepare"):
        for folder, layers in ((short, args.layers), (long, args.long_layers)):
            prepare(folder, layers)
    results = json.loads(args.output.read_bytes()) if args.part in ("short", "long") and args.output.exists() else {}
    if args.part in (None, "short"):
        results["short"] = provenance() | {"layers": args.layers} | time_short(read_contenders(short), args.budget)
    if args.part in (None, "long"):
        results["long"] = provenance() | {"layers": args.long_layers} | time_long(args.work, args.long_layers)
    if results:
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        report(json.loads(args.output.read_bytes()))


def prepare(folder: Path, layers: int) -> None:
    """Make the model, its stock export, and hasten's variants."""
    options = {**BASE, "num_hidden_layers": layers, "positions": LONG.sequence, "tokenizer_max_length": LONG.sequence}
    tiny_encoders.save("modernbert", "Model", folder / "model", **options)
    plan = Plan(str(folder / "model"), task="feature-extraction")
    loaded = load_model(find_model(plan), plan)
    stock = export_stock(loaded, folder / "stock")
    export(loaded, folder / "exported.onnx")
    (folder / "passes").mkdir()
    graphs = apply_passes(folder / "exported.onnx", folder / "passes", loaded.config)
    contenders = [stock, replace(stock, variant=Variant("plain_openvino", Precision.FP32))]
    for name, graph in (("onnxruntime", graphs.fused), ("openvino", graphs.plain)):
        variant = Variant(name, Precision.FP32)
        (folder / name).mkdir()
        contenders.append(BACKENDS.get(name).make(Source(loaded.signature, {MODEL: graph}), variant, folder / name))
    (folder / CONTENDERS).write_bytes(pickle.dumps({artifact.variant.name: artifact for artifact in contenders}))


def read_contenders(folder: Path) -> dict[str, Artifact]:
    """Return the contenders that `prepare` has made; the stock export in ONNX Runtime comes first."""
    contenders: dict[str, Artifact] = pickle.loads((folder / CONTENDERS).read_bytes())
    return contenders


def random_rows(signature: Signature, shape: Shape) -> Batch:
    """Return a batch of rows of random tokens."""
    ids = np.random.default_rng(0).integers(5, 300, shape.batch * shape.sequence).astype(np.int32)
    values = {spec.name: ids if spec.name == "input_ids" else np.ones_like(ids) for spec in signature.inputs}
    return Batch(values, np.full(shape.batch, shape.sequence, np.int32))


def time_short(contenders: Mapping[str, Artifact], budget_s: float) -> dict[str, Any]:
    """Return times, ratios to stock ONNX Runtime, and the largest difference from its outputs."""
    outputs: dict[str, Any] = {}
    for name, artifact in contenders.items():
        with BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions(usable_cores())) as session:
            [outputs[name]] = session.run(random_rows(artifact.signature, Shape(3, 200))).values()
    rows = random_rows(contenders[STOCK].signature, Shape(8, 512))
    commands = {name: [sys.executable, str(BENCHMARKS / "stock_runtimes.py")] for name in contenders}
    timed = time_shapes(list(contenders.values()), SHAPES, rows, budget_s, commands, RUNS)
    return {
        "shapes": {
            str(shape): {
                name: {
                    "p50_ms": float(np.median(times)),
                    "over_stock": median_ratio(medians[STOCK], times),
                    "round_medians_ms": times.tolist(),
                }
                for name, times in medians.items()
            }
            for shape, medians in timed.items()
        },
        "max_difference": {name: float(np.abs(values - outputs[STOCK]).max()) for name, values in outputs.items()},
        "max_output": float(np.abs(outputs[STOCK]).max()),
    }


def time_long(work: Path, layers: int) -> dict[str, Any]:
    """Run the long text in a fresh process for each contender, for its peak memory."""
    results: dict[str, Any] = {}
    for name in LONG_CONTENDERS:
        command = [sys.executable, __file__, "--work", str(work), "--long-layers", str(layers), "--long-run", name]
        results[name] = json.loads(subprocess.check_output(command))
    return {"shape": str(LONG), "contenders": results}


def run_long(artifact: Artifact) -> dict[str, Any]:
    """Return the seconds of the long text, the memory it needs beyond a short one, and some of its outputs."""
    with BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions(usable_cores())) as session:
        session.run(random_rows(artifact.signature, SHORT))
        before, seconds = peak_memory_bytes(), []
        rows = random_rows(artifact.signature, LONG)
        for _ in range(LONG_RUNS):
            begin = time.perf_counter()
            [output] = session.run(rows).values()
            seconds.append(time.perf_counter() - begin)
    sample = np.asarray(output).reshape(-1, np.shape(output)[-1])[:: LONG.sequence // 8, 0]
    return {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes() - before, "sample": sample.tolist()}


def report(results: Mapping[str, Any]) -> None:
    """Print times, ratios and differences."""
    for shape, contenders in results.get("short", {}).get("shapes", {}).items():
        for name, timing in contenders.items():
            ratio, difference = timing["over_stock"], results["short"]["max_difference"][name]
            interval = f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"
            print(f"{shape:>7} {name:<24} {timing['p50_ms']:9.1f} ms  {interval} of stock, difference {difference:.1e}")
    for name, run in results.get("long", {}).get("contenders", {}).items():
        print(f"{LONG} {name:<24} {min(run['seconds']):7.1f} s  {run['peak_memory_bytes'] / 2**20:7.0f} MB")


if __name__ == "__main__":
    run_main(main)
