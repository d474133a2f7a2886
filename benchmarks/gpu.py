"""GPU: every backend that runs here, on the same random weights and batches.

    python benchmarks/gpu.py [--only MiniLM-L6 RoBERTa-base …] [--variants fused-fp16@cuda …] [--lengths FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run    # on the CPU: the script runs, and its times mean nothing

In the environment of `make .venv/.dev`, or with the extras `build` and `fused` and the runtimes to compare with: for
ONNX Runtime `pip uninstall --yes onnxruntime`, then `pip install 'onnxruntime-gpu[cuda,cudnn]'`. What is missing, or
cannot be made, is named and left out.
Correctness first: outputs are compared with PyTorch in fp32, and what errs by more than 1e-2 (0.05 in bf16, 0.1 in
int8, 0.25 in fp8) is not timed; the error stands beside every time, and what memory of the GPU each has taken so far.
Two times for each, medians over alternating rounds: a call, from ids on the host to scores on the host; and alone, from
tensors on the device to tensors on the device, synchronised. Of the fused backend also what the device itself takes, by
its own clock, its copies from and to the host with it; and the same with its last layer pruned, which is off in all
else; and the time of each kernel.
Who draws all the power that the GPU may is given a slower clock after some tenths of a second, and the next one begins
with it: every round of every variant begins after a moment of rest; beside the device's own times stand sustained ones,
of runs in a row.
FILE holds the token counts of a mixed stream of texts, one a line; without it they are those of the results. It is
computed by each after a rest; and then over and over, with the clock and the power that the GPU settles at.
What the file of results holds of other models, shapes and variants is kept, with the time that it is from. Nothing else
may run on the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Session, Source, dialect_of
from hasten.backends.fused import BACKEND
from hasten.backends.fused.session import FusedSession, read_about
from hasten.backends.torch import ModuleSession
from hasten.builder.export import export
from hasten.builder.head import Exportable
from hasten.builder.passes import apply_passes
from hasten.core.errors import HastenError
from hasten.core.hardware import this_machine
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Shape, Signature, TensorSpec, pad
from hasten.core.variant import Precision, Variant
from hasten.kernels.counters import recorded as graph_of
from hasten.kernels.dependent import IS_INTERPRETED
from hasten.kernels.instances import fastest
from hasten.quantize.half import halve
from origin import needs_gpu, origin, run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.json"
INPUTS = ("input_ids", "attention_mask")
LANES = (
    "torch-fp32@cuda", "torch-fp16@cuda", "torch-bf16@cuda", "inductor-fp16@cuda",
    "onnxruntime-fp16@cuda", "tensorrt-fp16@cuda", "onnxruntime-tensorrt-fp16@cuda",
    "fused-fp16@cuda", "fused-fp16+gelu@cuda",
    "fused-fp8@cuda", "fused-fp8+gelu@cuda", "fused-fp8+gelu+fast@cuda", "fused-int8@cuda",
)  # fmt: skip
LARGEST_ERROR = 1e-2
# Random weights say nothing about accuracy: this is there to see another function than the model's. Rounding the
# weights of RoBERTa-base to fp8 in PyTorch, and nothing else, moves these logits by 0.06 to 0.08.
LARGEST_ERRORS = {Precision.BF16: 5e-2, Precision.INT8: 1e-1, Precision.FP8: 0.25}
ROUNDS, RUNS = 7, 30
# Of what takes long there are fewer runs in a round: as many as half a second holds, and a few at least.
_LONGEST_S, _FEWEST, _WARM = 0.5, 5, 2
# Cycles, about 0.2 ms.
_AHEAD = 400_000
_REST_S, _SUSTAINED_S = 0.3, 2.5
# After a rest the host and the GPU take a while to be as fast as before.
_WARM_S = 0.03
_BERT = {"vocab_size": 30522, "type_vocab_size": 2}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclass(frozen=True, slots=True)
class Study:
    family: str
    config: dict[str, int]
    # To what was asked of the fused backend, in ms of the device; in fp16, and in fp8 where that was asked for.
    shapes: dict[Shape, float | None]
    in_fp8: dict[Shape, float] = field(default_factory=dict)


STUDIES = {
    "MiniLM-L6": Study("Bert", _BERT | _MINI, {Shape(1, 16): 0.085, Shape(1, 128): 0.13, Shape(16, 384): 0.55}),
    "RoBERTa-base": Study(
        "Roberta",
        _ROBERTA,
        {Shape(1, 16): 0.22, Shape(16, 384): 2.5, Shape(32, 256): 3.2},
        {Shape(16, 384): 1.9, Shape(32, 256): 2.3},
    ),
    "BERT-base": Study("Bert", _BERT, {Shape(32, 384): None}),
    "RoBERTa-large": Study("Roberta", _ROBERTA | _LARGE, {Shape(16, 384): 8.3}, {Shape(16, 384): 5.4}),
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DRY = Study("Bert", _BERT | _TINY, {Shape(1, 4): None, Shape(2, 12): None})
STREAMED = "RoBERTa-base"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--variants", nargs="+", default=list(LANES))
    parser.add_argument(
        "--lengths", type=Path, help="of the stream's texts, in tokens, one a line (default: as before)"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="fused variants of a tiny model, on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        if not IS_INTERPRETED:
            parser.error("--dry-run is of Triton's interpreter: TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run")
        dry_run([Variant.parse(name) for name in args.variants])
        return
    needs_gpu()
    known: dict[str, Any] = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    told, results = origin(), {"rows": [], "notes": [], **known}
    results |= {**told, "cuda": torch.version.cuda, "triton": __import__("triton").__version__}
    when = {name: told.get(name) for name in ("created", "commit")}
    earlier = known.get("stream") or msgspec.json.decode(RESULTS.read_bytes())["stream"]
    lengths = [int(line) for line in args.lengths.read_text().split()] if args.lengths else earlier["lengths"]
    wanted = [Variant.parse(name) for name in args.variants]
    supports = {variant: BACKENDS.get(variant.backend).probe(this_machine(), variant) for variant in wanted}
    results["missing"] = {variant.name: support.reason for variant, support in supports.items() if not support.ok}
    variants = [variant for variant in wanted if supports[variant].ok]
    if not variants:
        raise SystemExit("\n".join(f"error: {name}: {reason}" for name, reason in results["missing"].items()))
    for lane, reason in results["missing"].items():
        print(f"{lane} is left out: {reason}", flush=True)
    for name in args.only:
        with ExitStack() as opened, tempfile.TemporaryDirectory(prefix="hasten-") as work:
            model, sessions, memory = prepare(STUDIES[name], variants, Path(work), missing=results["missing"])
            for session in sessions.values():
                opened.enter_context(session)
            for row in study(name, STUDIES[name], model, sessions, memory):
                rows = {(kept["model"], kept["shape"]): kept for kept in results["rows"]}
                place = row["model"], row["shape"]
                results["rows"] = list((rows | {place: joined(when | row, rows.get(place, {}))}).values())
                print(show(row), flush=True)
                # After each, so that one that fails takes no other with it.
                write(results, args.output)
            if name == STREAMED:
                found = stream(lengths, model, sessions)
                print({name: value for name, value in found.items() if name not in ("kernels", "lengths")}, flush=True)
                results["stream"] = joined(when | found, results.get("stream", {}))
                write(results, args.output)
        torch.compiler.reset()


def joined(new: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """What was not timed now is kept, with the time that it is from."""
    earlier = {lane: old.get("created") for lane in old.get("errors", {})} | old.get("earlier", {})
    earlier = {lane: created for lane, created in earlier.items() if lane not in new["errors"]}
    found = dict(new)
    for name, values in new.items():
        if isinstance(values, dict):
            before = old.get(name)
            kept = {lane: before[lane] for lane in earlier if lane in before} if isinstance(before, dict) else {}
            found[name] = kept | values
    return found | {"earlier": earlier}


def write(results: Mapping[str, Any], file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT32, (BATCH, SEQUENCE), int(name == "input_ids")) for name in INPUTS)
    return Signature(inputs, (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),), max_length=512)


SIGNATURE = _signature()


def opened(artifact: Artifact) -> Session:
    return BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions())


def prepare(
    about: Study,
    variants: Sequence[Variant],
    work: Path,
    opening: Callable[[Artifact], Session] = opened,
    missing: dict[str, str] | None = None,
) -> tuple[Any, dict[str, Session], dict[str, int]]:
    """The model in fp32, a session of every variant of it, and what that has taken of the GPU's memory.

    What cannot be made goes into `missing`, where there is one, with the reason.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{about.family}Config")(**about.config, num_labels=2)
    model = getattr(transformers, f"{about.family}ForSequenceClassification")(config).eval()
    module = Exportable(model, INPUTS, ["logits"])
    graphs: Mapping[Dialect, Path] = {}
    if any(BACKENDS.get(variant.backend).dialect is not Dialect.MODULE for variant in variants):
        loaded: Any = SimpleNamespace(
            module=module, signature=SIGNATURE, tokenizer=SimpleNamespace(pad_id=1), config=config
        )
        export(loaded, work / "model.onnx")
        apply_passes(work / "model.onnx", work, config, external_data=False)
        # As they were before they were pruned.
        graphs = {Dialect.ONNX: work / "folded" / "model.onnx", Dialect.ORT_CUDA: work / "whole" / "model.onnx"}
    sessions: dict[str, Session] = {}
    memory: dict[str, int] = {}
    for variant in variants:
        backend, folder = BACKENDS.get(variant.backend), work / variant.name
        folder.mkdir()
        begin = time.perf_counter()
        try:
            artifact = backend.make(_source(variant, module, graphs, work, about), variant, folder)
            before = used_bytes()
            sessions[variant.name] = opening(artifact)
        except HastenError as error:
            if missing is None:
                raise
            missing[variant.name] = str(error)
            print(f"{variant} is left out: {error}", flush=True)
            continue
        memory[variant.name] = used_bytes() - before
        print(f"{variant} made and opened in {time.perf_counter() - begin:.1f} s", flush=True)
    return model, sessions, memory


def used_bytes() -> int:
    """Of the whole GPU, whoever has them; what PyTorch only keeps in reserve it gives back first."""
    if not torch.cuda.is_available():
        return 0
    synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _source(variant: Variant, module: Any, graphs: Mapping[Dialect, Path], work: Path, about: Study) -> Source:
    backend = BACKENDS.get(variant.backend)
    if backend.dialect is Dialect.MODULE:
        # Other rows than those that are timed.
        is_dry = module.model.config.hidden_size == _TINY["hidden_size"]
        lengths = [5, 9] if is_dry else np.random.default_rng(1).integers(4, 384, 32).tolist()
        return Source(SIGNATURE, {}, module, calibration=random_batch(lengths, seed=1))
    graph = graphs[dialect_of(variant)]
    if variant.precision is Precision.FP16 and variant.backend == "onnxruntime":
        halved = work / f"{variant.name}.onnx"
        halve(graph, halved, frozenset(), external_data=False)
        graph = halved
    # Engines are tuned for the largest of the shapes.
    rows, tokens = ([getattr(shape, size) for shape in about.shapes] for size in ("batch", "sequence"))
    ranges = (Range(min(sizes), max(sizes), max(sizes)) for sizes in (rows, tokens))
    return Source(SIGNATURE, {MODEL: graph}, shapes=Shapes(*ranges))


def dry_run(variants: Sequence[Variant]) -> None:
    """Made, opened, held against PyTorch and asked: all of the script that needs no GPU."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        ours = [variant for variant in variants if variant.backend == BACKEND.name]
        model, sessions, memory = prepare(DRY, ours, Path(work), opening=on_cpu)
        for row in study("dry run", DRY, model, sessions, memory):
            print(show(row), flush=True)
        print(stream([3, 9, 1, 5], model, sessions), flush=True)


def on_cpu(artifact: Artifact) -> FusedSession:
    """Through Triton's interpreter, in fp32 but for weights of eight bits."""
    narrow = (torch.float8_e4m3fn, torch.int8)
    weights = {
        name: value if value.dtype in narrow else value.float() for name, value in load_file(artifact.path()).items()
    }
    return FusedSession(read_about(artifact), weights, artifact, device="cpu", is_dependent=False)


def largest_error(lane: str) -> float:
    return LARGEST_ERRORS.get(Variant.parse(lane).precision, LARGEST_ERROR)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def fed(batch: Batch) -> dict[str, Any]:
    return {key: torch.from_numpy(value).to(device()) for key, value in pad(batch, SIGNATURE).items()}


def expected_of(model: Any, batch: Batch) -> Any:
    with torch.inference_mode():
        return model.to(device())(**fed(batch)).logits.float().cpu().numpy()


def study(
    name: str, about: Study, model: Any, sessions: Mapping[str, Session], memory: dict[str, int]
) -> Iterator[dict[str, Any]]:
    is_gpu = torch.cuda.is_available()
    rounds = ROUNDS if is_gpu else 1
    for shape, asked in about.shapes.items():
        batch = random_batch([shape.sequence] * shape.batch)
        feeds, expected = fed(batch), expected_of(model, batch)
        set_pruning(sessions, prunes=False)
        errors: dict[str, float] = {}
        for lane, session in sessions.items():
            before, begin = used_bytes(), time.perf_counter()
            errors[lane] = error(session.run(batch)["logits"], expected)
            # Compiling, tuning and recording are in it, and may take longer than all that is timed.
            print(f"{lane} answered {shape} for the first time in {time.perf_counter() - begin:.1f} s", flush=True)
            memory[lane] += used_bytes() - before
        fair = {lane: session for lane, session in sessions.items() if errors[lane] <= largest_error(lane)}
        calls: dict[str, list[float]] = {lane: [] for lane in fair}
        alone: dict[str, list[float]] = {lane: [] for lane in fair}
        between = {lane: on_device(session, batch, feeds) for lane, session in fair.items() if is_gpu}
        for _ in range(rounds):
            for lane, session in fair.items():
                if (ask := between.get(lane)) is not None:
                    rest()
                    alone[lane] += timed(ask)
                rest()
                calls[lane] += timed(partial(session.run, batch))
        own = {lane: session for lane, session in fair.items() if isinstance(session, FusedSession) and is_gpu}
        by_clock = {lane: device_ms(session, batch) for lane, session in own.items()}
        in_a_row = {lane: device_ms(session, batch, rests=False) for lane, session in own.items()}
        set_pruning(sessions, prunes=True)
        pruned = {lane: device_ms(session, batch) for lane, session in own.items()}
        set_pruning(sessions, prunes=False)
        yield {
            "model": name,
            "shape": str(shape),
            "asked_ms": asked,
            "asked_fp8_ms": about.in_fp8.get(shape),
            "errors": errors,
            "call_ms": {lane: spread(values) for lane, values in calls.items()},
            "alone_ms": {lane: spread(values) for lane, values in alone.items() if values},
            "device_ms": by_clock,
            "sustained_device_ms": in_a_row,
            "pruned_device_ms": pruned,
            "kernels": {lane: kernels(replaying(session, batch)) for lane, session in own.items()},
            "memory_bytes": dict(memory),
        }


def on_device(session: Any, batch: Batch, feeds: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What a session does between its borders; of TensorRT's, which are one with it, that is not told apart."""
    if isinstance(session, FusedSession):
        return recorded(session, batch)
    if isinstance(session, ModuleSession):

        def ask() -> None:
            with torch.inference_mode():
                session._module(**feeds)

        return ask
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.core.buckets import bucket_of

    if isinstance(session, CudaSession):
        bucket = session._bucket(bucket_of(batch, SIGNATURE))
        return lambda: bucket._session.run_with_iobinding(bucket._binding, bucket._options)
    return None


def recorded(session: FusedSession, batch: Batch) -> Callable[[], Any]:
    """Its graph without the copies from and to the host: as for all the others, the tensors are there already."""
    stream = session.lane.replay.stream
    instance = fastest(captured(session, batch), stream)
    return lambda: instance.launch(stream)


def captured(session: FusedSession, batch: Batch) -> Any:
    session.run(batch)
    lane = session.lane
    bucket, made = next(reversed(lane.replay._graphs.items()))
    with torch.inference_mode(), graph_of(lane.replay.stream, lane.products) as graph:
        session._compute(lane.encoder, made._there, bucket)
    return graph


def set_pruning(sessions: Mapping[str, Session], *, prunes: bool) -> None:
    for session in sessions.values():
        if isinstance(session, FusedSession):
            session.prunes = prunes
            for lane in session._lanes:
                lane.replay.clear()


def timed(ask: Callable[[], Any]) -> list[float]:
    is_gpu = torch.cuda.is_available()
    warm, runs = (_WARM, RUNS) if is_gpu else (0, 1)
    until = time.perf_counter() + (_WARM_S if is_gpu else 0.0)
    while warm > 0 or time.perf_counter() < until:
        ask()
        synchronize()
        warm -= 1
    taken: list[float] = []
    until = time.perf_counter() + _LONGEST_S
    while len(taken) < runs and (len(taken) < _FEWEST or time.perf_counter() < until):
        synchronize()
        taken.append(once(ask))
    return taken


def rest() -> None:
    """What the one before has drawn of the power is not taken from the next."""
    if torch.cuda.is_available():
        time.sleep(_REST_S)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_ms(session: FusedSession, batch: Batch, *, rests: bool = True) -> dict[str, float]:
    """Of its CUDA graph, with the copies from and to the host that it holds; after rests, or all in a row."""
    session.run(batch)
    replay = session.lane.replay
    taken = []
    for _ in range(ROUNDS):
        if rests:
            rest()
        taken += clocked(replay.last.replay, replay.stream)
    return spread(taken)


def clocked(ask: Callable[[], Any], on: Any, ahead: int = _AHEAD) -> list[float]:
    """What the device takes for what is queued on that stream, by its own clock, so many cycles after it is queued."""
    taken = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(on):
            # Meanwhile the host queues the rest.
            torch.cuda._sleep(ahead)
            begin.record()
            ask()
            end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return taken


def replaying(session: FusedSession, batch: Batch) -> Callable[[], Any]:
    session.run(batch)
    return session.lane.replay.last.replay


def kernels(ask: Callable[[], Any], runs: int = RUNS) -> list[dict[str, Any]]:
    """What runs on the device for one batch, each kernel's whole time first: where it goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            ask()
        synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        found.setdefault(event.name, []).append(event.device_time)
    rows = [
        {
            "kernel": name,
            "launches": round(len(taken) / runs),
            "us": float(np.mean(taken)),
            "ms": sum(taken) / runs / 1e3,
        }
        for name, taken in found.items()
        if len(taken) >= runs and sum(taken)
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def stream(lengths: Sequence[int], model: Any, sessions: Mapping[str, Session]) -> dict[str, Any]:
    """Texts of mixed lengths: sorted, and in batches of 32 for those who pad; beside it what pruning gains."""
    batch = random_batch(lengths)
    order = np.argsort(batch.lengths, kind="stable")
    parts = [batch.take(rows) for rows in np.array_split(order, max(1, len(order) // 32))]
    whole = batch.take(order)
    expected = np.concatenate([expected_of(model, part) for part in parts])
    own = {name: session for name, session in sessions.items() if isinstance(session, FusedSession)}

    def lane(session: Session) -> Callable[[], Any]:
        if isinstance(session, FusedSession):
            return lambda: session.run(whole)["logits"]
        return lambda: np.concatenate([session.run(part)["logits"] for part in parts])

    def alternating(lanes: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in lanes}
        for ask in lanes.values():
            ask()
        for _ in range(ROUNDS if torch.cuda.is_available() else 1):
            for name, ask in lanes.items():
                synchronize()
                rest()
                times[name].append(once(ask))
        return times

    set_pruning(sessions, prunes=False)
    lanes = {name: lane(session) for name, session in sessions.items()}
    errors = {name: error(ask(), expected) for name, ask in lanes.items()}
    lanes = {name: ask for name, ask in lanes.items() if errors[name] <= largest_error(name)}
    times = alternating(lanes)
    over_and_over = {name: sustained(ask) for name, ask in lanes.items() if torch.cuda.is_available()}
    found = {name: kernels(ask, 1) for name, ask in lanes.items() if name in own and torch.cuda.is_available()}
    set_pruning(sessions, prunes=True)
    pruned = alternating({name: ask for name, ask in lanes.items() if name in own})
    return {
        "model": STREAMED,
        "texts": len(lengths),
        "tokens": batch.tokens,
        "lengths": list(lengths),
        "errors": errors,
        "ms": {name: float(np.median(taken)) for name, taken in times.items()},
        "range_ms": {name: [min(taken), max(taken)] for name, taken in times.items()},
        "pruned_ms": {name: float(np.median(taken)) for name, taken in pruned.items()},
        "sustained": over_and_over,
        "kernels": found,
    }


def once(ask: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    ask()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def sustained(ask: Callable[[], Any]) -> dict[str, float | None]:
    """What it takes, and what the GPU runs at and draws, when the clock has settled: in the second half."""
    is_over = threading.Event()
    times: list[float] = []
    seen: dict[str, list[float]] = {"clock_hertz": [], "power_watts": []}

    def watch() -> None:
        # PyTorch asks NVIDIA's management library, of the GPU that it computes on.
        with suppress(ImportError, RuntimeError):
            while not is_over.wait(0.05):
                seen["clock_hertz"].append(torch.cuda.clock_rate() * 1e6)
                seen["power_watts"].append(torch.cuda.power_draw() / 1e3)

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < _SUSTAINED_S:
        times.append(once(ask))
    is_over.set()
    watching.join()
    settled = {gauge: values[len(values) // 2 :] for gauge, values in seen.items()}
    medians = {gauge: float(np.median(values)) if values else None for gauge, values in settled.items()}
    return {"ms": float(np.median(times[len(times) // 2 :])), **medians}


def random_batch(lengths: Sequence[int], seed: int = 0) -> Batch:
    ids = np.random.default_rng(seed).integers(5, 30000, sum(lengths)).astype(np.int32)
    return Batch({"input_ids": ids}, np.array(lengths, np.int32))


def error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def spread(taken: Sequence[float]) -> dict[str, float]:
    return {"p50": float(np.percentile(taken, 50)), "p99": float(np.percentile(taken, 99))}


def show(row: dict[str, Any]) -> str:
    asked = "" if row["asked_ms"] is None else f" (asked ≤ {row['asked_ms']})"
    asked += "" if row["asked_fp8_ms"] is None else f" (in fp8 ≤ {row['asked_fp8_ms']})"
    lines = [f"{row['model']} {row['shape']}{asked}"]
    for lane, wrong in row["errors"].items():
        times = {kind: row[f"{kind}_ms"].get(lane, {}).get("p50") for kind in ("device", "pruned_device")}
        kinds = [kind for kind in ("call", "alone") if lane in row[f"{kind}_ms"]]
        both = [f"{row[f'{kind}_ms'][lane]['p50']:.3f} {kind}" for kind in kinds]
        own = [f"{value:.4f} {kind}" for kind, value in times.items() if value is not None]
        lines.append(f"  {lane:24} error {wrong:.1e}, ms: {', '.join([*both, *own])}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
