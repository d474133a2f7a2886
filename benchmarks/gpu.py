"""GPU: PyTorch in its usual ways and the fused backend, on the same random weights and batches.

    python benchmarks/gpu.py [--lengths FILE] [--only MiniLM-L6 RoBERTa-base …]

Correctness first: outputs are compared with PyTorch in fp32, and what errs by more than 1e-2 is not timed. Medians over
alternating rounds, the device synchronised; what a contender's call takes from ids on the host to scores on the host
stands beside what the device alone takes. FILE holds the token counts of a mixed stream, one a line.
Nothing else may run on the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from hasten.backends import BACKENDS, RunOptions, Source
from hasten.builder.head import Exportable
from hasten.core.hardware import this_machine
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Shape, Signature, TensorSpec, pad
from hasten.core.variant import Variant

HERE = Path(__file__).parent
INPUTS = ("input_ids", "attention_mask")
LARGEST_ERROR = 1e-2
ROUNDS, RUNS, WARM = 7, 30, 5
# Cycles, about 0.2 ms.
_AHEAD = 400_000
_BERT = {"vocab_size": 30522, "type_vocab_size": 2}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclass(frozen=True, slots=True)
class Study:
    family: str
    config: dict[str, int]
    shapes: tuple[Shape, ...]
    # What was asked of the fused backend, in ms of the device.
    asked: tuple[float | None, ...] = ()


STUDIES = {
    "MiniLM-L6": Study("Bert", _BERT | _MINI, (Shape(1, 16), Shape(1, 128), Shape(16, 384)), (0.085, 0.13, 0.55)),
    "RoBERTa-base": Study("Roberta", _ROBERTA, (Shape(1, 16), Shape(16, 384), Shape(32, 256)), (0.22, 2.5, 3.2)),
    "RoBERTa-large": Study("Roberta", _ROBERTA | _LARGE, (Shape(16, 384),), (8.3,)),
    "BERT-base": Study("Bert", _BERT, (Shape(32, 384),), (None,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--lengths", type=Path, help="token counts of a mixed stream, one a line")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "gpu.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that PyTorch can use")
    machine = this_machine()
    results: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "rows": [],
    }
    for name in args.only:
        for row in study(name, STUDIES[name]):
            results["rows"].append(row)
            print(show(row), flush=True)
    if args.lengths is not None:
        results["stream"] = stream([int(line) for line in args.lengths.read_text().split()])
        print(results["stream"], flush=True)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def study(name: str, about: Study) -> Iterator[dict[str, Any]]:
    model, ours = contenders(about)
    for shape, asked in zip(about.shapes, about.asked, strict=True):
        batch = random_batch([shape.sequence] * shape.batch)
        feeds = {key: torch.from_numpy(value).cuda() for key, value in pad(batch, SIGNATURE).items()}
        with torch.inference_mode():
            expected = model(**feeds).logits.float().cpu().numpy()
        lanes = dict(torch_lanes(model, feeds)) | {"fused-fp16": lambda batch=batch: ours.run(batch)["logits"]}
        errors = {lane: error(ask(), expected) for lane, ask in lanes.items()}
        times: dict[str, list[float]] = {lane: [] for lane in lanes if errors[lane] <= LARGEST_ERROR}
        for _ in range(ROUNDS):
            for lane in times:
                times[lane] += timed(lanes[lane])
        device = device_ms(ours)
        yield {
            "model": name,
            "shape": str(shape),
            "asked_ms": asked,
            "fused_device_ms": device[0],
            "fused_device_p99_ms": device[1],
            "memory_bytes": torch.cuda.max_memory_allocated(),
            "errors": errors,
            "call_ms": {lane: {"p50": pick(all_, 50), "p99": pick(all_, 99)} for lane, all_ in times.items()},
        }
    ours.close()
    torch.cuda.empty_cache()


def _signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    return Signature(inputs, (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),), max_length=512)


SIGNATURE = _signature()


def contenders(about: Study) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{about.family}Config")(**about.config)
    model = getattr(transformers, f"{about.family}ForSequenceClassification")(config).eval()
    fused, variant = BACKENDS.get("fused"), Variant.parse("fused-fp16@cuda")
    with tempfile.TemporaryDirectory() as folder:
        source = Source(SIGNATURE, {}, Exportable(model, INPUTS, ["logits"]))
        session = fused.open(fused.make(source, variant, Path(folder)), RunOptions())
    return model.cuda(), session


def torch_lanes(model: Any, feeds: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    import copy

    def lane(module: Any) -> Callable[[], Any]:
        def ask() -> Any:
            with torch.inference_mode():
                return module(**feeds).logits.float().cpu().numpy()

        return ask

    half = copy.deepcopy(model).half()
    yield "torch-fp32", lane(model)
    yield "torch-fp16", lane(half)
    yield "torch-fp16, CUDA graph", graphed(half, feeds)
    compiled = torch.compile(half, mode="reduce-overhead")
    yield "torch.compile-fp16", lane(compiled)


def graphed(module: Any, feeds: dict[str, Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            module(**feeds)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        logits = module(**feeds).logits

    def ask() -> Any:
        graph.replay()
        return logits.float().cpu().numpy()

    return ask


def timed(ask: Callable[[], Any]) -> list[float]:
    for _ in range(WARM):
        ask()
    seconds = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        ask()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) * 1e3)
    return seconds


def device_ms(session: Any) -> tuple[float, float]:
    """Of the graph that ran last, with its copies from and to the host."""
    taken = []
    last, on = session.replay.last, session.replay.stream
    for _ in range(200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(on):
            # Meanwhile the host has queued the rest: what is timed is the device alone.
            torch.cuda._sleep(_AHEAD)
        begin.record(on)
        last.replay()
        end.record(on)
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return pick(taken, 50), pick(taken, 99)


def stream(lengths: Sequence[int]) -> dict[str, Any]:
    """Texts of mixed lengths through RoBERTa-base: packed by us; for PyTorch sorted, in padded batches of 32."""
    model, ours = contenders(STUDIES["RoBERTa-base"])
    half = model.half()
    compiled = torch.compile(half, mode="reduce-overhead")
    batch = random_batch(lengths)
    order = np.argsort(batch.lengths, kind="stable")
    parts = [batch.take(rows) for rows in np.array_split(order, max(1, len(order) // 32))]
    padded = [_padded(part) for part in parts]

    def theirs(module: Any) -> None:
        with torch.inference_mode():
            for feeds in padded:
                module(**feeds).logits.float().cpu()

    whole = batch.take(order)
    lanes: dict[str, Callable[[], Any]] = {
        "torch-fp16": lambda: theirs(half),
        "torch.compile-fp16": lambda: theirs(compiled),
        "fused-fp16": lambda: ours.run(whole),
    }
    times: dict[str, list[float]] = {lane: [] for lane in lanes}
    for ask in lanes.values():
        ask()
        ask()
    for _ in range(ROUNDS):
        for lane, ask in lanes.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            ask()
            torch.cuda.synchronize()
            times[lane].append((time.perf_counter() - begin) * 1e3)
    return {"texts": len(lengths), "tokens": batch.tokens, "ms": {lane: pick(all_, 50) for lane, all_ in times.items()}}


def _padded(part: Batch) -> dict[str, Any]:
    """To a multiple of 32 tokens, so that there are few widths, and each is compiled once."""
    feeds = {key: torch.from_numpy(value) for key, value in pad(part, SIGNATURE).items()}
    missing = -int(part.lengths.max()) % 32
    return {key: torch.nn.functional.pad(value, (0, missing)).cuda() for key, value in feeds.items()}


def random_batch(lengths: Sequence[int]) -> Batch:
    ids = np.random.default_rng(0).integers(5, 30000, sum(lengths)).astype(np.int32)
    return Batch({"input_ids": ids}, np.array(lengths, np.int32))


def error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def pick(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile))


def show(row: dict[str, Any]) -> str:
    calls = ", ".join(f"{lane} {time_['p50']:.3f}" for lane, time_ in row["call_ms"].items())
    asked = "" if row["asked_ms"] is None else f" (asked ≤ {row['asked_ms']})"
    error_ = row["errors"]["fused-fp16"]
    head = (
        f"{row['model']} {row['shape']}: fused {row['fused_device_ms']:.4f} ms of the device{asked}, error {error_:.1e}"
    )
    return f"{head}; calls, ms: {calls}"


if __name__ == "__main__":
    main()
