"""GPU benchmark: every available backend on the same random weights and batches.

    python benchmarks/gpu.py [--only MiniLM-L6 RoBERTa-base …] [--variants fused-fp16@cuda …] [--lengths FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run    # on the CPU: tests the script; times mean nothing

In the environment of `make .venv/.dev`, or with the extras `build` and `fused` and the runtimes to compare with: for
ONNX Runtime `pip uninstall --yes onnxruntime`, then `pip install 'onnxruntime-gpu[cuda,cudnn]'`. Unavailable variants
are reported and left out.

- Outputs are first compared with PyTorch fp32; a variant that differs by more than 1e-2 (bf16: 0.05, int8: 0.1, fp8:
  0.25) is not timed. Errors and GPU memory are recorded with the times.
- Times are medians over alternating rounds. `call`: from token ids in host memory to scores in host memory. `alone`:
  from device tensors to device tensors, synchronized.
- For the fused backend also: device time by CUDA events with the copies to and from the host, the same with the last
  layer pruned (pruning is off otherwise), and the time of each kernel.
- A GPU that draws its maximum power lowers its clocks after some tenths of a second. Every round starts after a pause,
  so that no variant inherits the clocks of the one before. Sustained times are of runs without pauses.
- FILE holds the lengths in tokens of mixed-length texts, one per line; the default is the result file's. They run at
  boost clocks, then sustained, with the clocks and the power that the GPU settles at.
- Results of other models, shapes and variants in the result file are kept with their dates.

Nothing else may run on the GPU meanwhile.
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
from hasten.backends.fused.session import FusedSession, read_metadata
from hasten.backends.torch import ModuleSession
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources.export_wrapper import Exportable
from hasten.core.errors import HastenError
from hasten.core.plan import Range, Shapes
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Shape, Signature, TensorSpec, pad
from hasten.core.variant import Precision, Variant
from hasten.kernels.cuda.graph_exec import GraphExec, capture_graph
from hasten.kernels.ops.pdl import IS_INTERPRETED
from hasten.quantize.methods.fp16 import convert_to_fp16
from provenance import provenance, require_gpu, run_main

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.json"
INPUTS = ("input_ids", "attention_mask")
VARIANTS = (
    "torch-fp32@cuda", "torch-fp16@cuda", "torch-bf16@cuda", "inductor-fp16@cuda",
    "onnxruntime-fp16@cuda", "tensorrt-fp16@cuda",
    "fused-fp16@cuda", "fused-fp16+tanhgelu@cuda",
    "fused-fp8@cuda", "fused-fp8+tanhgelu@cuda", "fused-fp8+tanhgelu+fastaccum@cuda", "fused-int8@cuda",
)  # fmt: skip
MAX_ERROR = 1e-2
# Random weights say nothing about accuracy: these limits detect a wrong function. Rounding the weights of RoBERTa-base
# to fp8 in PyTorch, and nothing else, moves these logits by 0.06 to 0.08.
MAX_ERRORS = {Precision.BF16: 5e-2, Precision.INT8: 1e-1, Precision.FP8: 0.25}
ROUNDS, RUNS = 7, 30
# A round of slow runs has as many as fit into half a second, but at least five.
_MAX_ROUND_S, _MIN_RUNS, _WARM_UP_RUNS = 0.5, 5, 2
# About 0.2 ms.
_SLEEP_CYCLES = 400_000
_PAUSE_S, _SUSTAINED_S = 0.3, 2.5
# After a pause the host and the GPU need a while to reach full speed.
_WARM_UP_S = 0.03
_BERT = {"vocab_size": 30522, "type_vocab_size": 2}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclass(frozen=True, slots=True)
class Study:
    """A model and its shapes with targets: device time of the fused backend in ms, in fp16 and in fp8."""

    family: str
    config: dict[str, int]
    shapes: dict[Shape, float | None]
    fp8_targets_ms: dict[Shape, float] = field(default_factory=dict)


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
DRY_RUN = Study("Bert", _BERT | _TINY, {Shape(1, 4): None, Shape(2, 12): None})
MIXED_LENGTHS_MODEL = "RoBERTa-base"


def main() -> None:
    """Run the studies; write the result file after each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument(
        "--lengths", type=Path, help="file with the lengths in tokens of mixed-length texts, one per line"
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="run the fused variants of a tiny model on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        if not IS_INTERPRETED:
            parser.error("--dry-run needs Triton's interpreter: TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run")
        dry_run([Variant.parse(name) for name in args.variants])
        return
    require_gpu()
    previous: dict[str, Any] = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    origin, results = provenance(), {"rows": [], "notes": [], **previous}
    results |= {**origin, "cuda": torch.version.cuda, "triton": __import__("triton").__version__}
    date = {name: origin.get(name) for name in ("created", "commit")}
    previous_stream = previous.get("stream") or msgspec.json.decode(RESULTS.read_bytes())["stream"]
    lengths = [int(line) for line in args.lengths.read_text().split()] if args.lengths else previous_stream["lengths"]
    requested = [Variant.parse(name) for name in args.variants]
    supports = {variant: BACKENDS.get(variant.backend).probe(this_machine(), variant) for variant in requested}
    results["missing"] = {variant.name: support.reason for variant, support in supports.items() if not support.ok}
    variants = [variant for variant in requested if supports[variant].ok]
    if not variants:
        raise SystemExit("\n".join(f"error: {name}: {reason}" for name, reason in results["missing"].items()))
    for variant_name, reason in results["missing"].items():
        print(f"{variant_name} is left out: {reason}", flush=True)
    for name in args.only:
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="hasten-") as work:
            model, sessions, memory = prepare(STUDIES[name], variants, Path(work), missing=results["missing"])
            for session in sessions.values():
                stack.enter_context(session)
            for row in study(name, STUDIES[name], model, sessions, memory):
                rows = {(old["model"], old["shape"]): old for old in results["rows"]}
                key = row["model"], row["shape"]
                results["rows"] = list((rows | {key: merge(date | row, rows.get(key, {}))}).values())
                print(show(row), flush=True)
                # Written after each shape, so that a failure does not lose the others.
                write(results, args.output)
            if name == MIXED_LENGTHS_MODEL:
                mixed = stream(lengths, model, sessions)
                print({name: value for name, value in mixed.items() if name not in ("kernels", "lengths")}, flush=True)
                results["stream"] = merge(date | mixed, results.get("stream", {}))
                write(results, args.output)
        torch.compiler.reset()


def merge(new: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the old values of variants that were not measured now, with the date of their run in `earlier`."""
    earlier = {variant: old.get("created") for variant in old.get("errors", {})} | old.get("earlier", {})
    earlier = {variant: created for variant, created in earlier.items() if variant not in new["errors"]}
    merged = dict(new)
    for name, values in new.items():
        if isinstance(values, dict):
            previous = old.get(name)
            retained = {key: previous[key] for key in earlier if key in previous} if isinstance(previous, dict) else {}
            merged[name] = retained | values
    return merged | {"earlier": earlier}


def write(results: Mapping[str, Any], file: Path) -> None:
    """Write the result file."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT32, (BATCH, SEQUENCE), int(name == "input_ids")) for name in INPUTS)
    return Signature(inputs, (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),), max_length=512)


SIGNATURE = _signature()


def open_session(artifact: Artifact) -> Session:
    """Open an artifact with its backend."""
    return BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions())


def prepare(
    model_study: Study,
    variants: Sequence[Variant],
    work: Path,
    open_artifact: Callable[[Artifact], Session] = open_session,
    missing: dict[str, str] | None = None,
) -> tuple[Any, dict[str, Session], dict[str, int]]:
    """Return the fp32 model, a session per variant, and the GPU memory that each session takes.

    Variants that cannot be made are added to `missing` with the reason; without it their error is raised.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{model_study.family}Config")(**model_study.config, num_labels=2)
    model = getattr(transformers, f"{model_study.family}ForSequenceClassification")(config).eval()
    module = Exportable(model, INPUTS, ["logits"])
    graphs: Mapping[Dialect, Path] = {}
    if any(BACKENDS.get(variant.backend).dialect is not Dialect.MODULE for variant in variants):
        loaded: Any = SimpleNamespace(
            module=module, signature=SIGNATURE, tokenizer=SimpleNamespace(pad_id=1), config=config
        )
        export(loaded, work / "model.onnx")
        apply_passes(work / "model.onnx", work, config)
        # The graphs before pruning.
        graphs = {Dialect.ONNX: work / "folded" / "model.onnx", Dialect.ORT_CUDA: work / "whole" / "model.onnx"}
    sessions: dict[str, Session] = {}
    memory: dict[str, int] = {}
    for variant in variants:
        backend, folder = BACKENDS.get(variant.backend), work / variant.name
        folder.mkdir()
        begin = time.perf_counter()
        try:
            artifact = backend.make(_source(variant, module, graphs, work, model_study), variant, folder)
            before = used_bytes()
            sessions[variant.name] = open_artifact(artifact)
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
    """Return the memory in use on the whole GPU, after PyTorch has released its cache."""
    if not torch.cuda.is_available():
        return 0
    synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _source(variant: Variant, module: Any, graphs: Mapping[Dialect, Path], work: Path, model_study: Study) -> Source:
    backend = BACKENDS.get(variant.backend)
    if backend.dialect is Dialect.MODULE:
        # Calibration rows differ from those that are timed.
        is_dry_run = module.model.config.hidden_size == _TINY["hidden_size"]
        lengths = [5, 9] if is_dry_run else np.random.default_rng(1).integers(4, 384, 32).tolist()
        return Source(SIGNATURE, {}, module, calibration=random_batch(lengths, seed=1))
    graph = graphs[dialect_of(variant)]
    if variant.precision is Precision.FP16 and variant.backend == "onnxruntime":
        folder = work / f"{variant.name}-graph"
        folder.mkdir(exist_ok=True)
        graph = convert_to_fp16({MODEL: graph}, folder, {})[MODEL]
    # Engines are tuned for the largest shape.
    rows, tokens = ([getattr(shape, size) for shape in model_study.shapes] for size in ("batch", "sequence"))
    ranges = (Range(min(sizes), max(sizes), max(sizes)) for sizes in (rows, tokens))
    return Source(SIGNATURE, {MODEL: graph}, shapes=Shapes(*ranges))


def dry_run(variants: Sequence[Variant]) -> None:
    """Make, open, compare and run the fused variants of a tiny model: everything that needs no GPU."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        fused = [variant for variant in variants if variant.backend == BACKEND.name]
        model, sessions, memory = prepare(DRY_RUN, fused, Path(work), open_artifact=open_on_cpu)
        for row in study("dry run", DRY_RUN, model, sessions, memory):
            print(show(row), flush=True)
        print(stream([3, 9, 1, 5], model, sessions), flush=True)


def open_on_cpu(artifact: Artifact) -> FusedSession:
    """Open a fused artifact for Triton's interpreter, in fp32 except for 8-bit weights."""
    dtypes_8bit = (torch.float8_e4m3fn, torch.int8)
    weights = {
        name: value if value.dtype in dtypes_8bit else value.float()
        for name, value in load_file(artifact.path()).items()
    }
    return FusedSession(read_metadata(artifact), weights, artifact, device="cpu", use_pdl=False)


def max_error(variant: str) -> float:
    """Return the largest accepted relative error of a variant."""
    return MAX_ERRORS.get(Variant.parse(variant).precision, MAX_ERROR)


def device() -> str:
    """Return the device of the reference model."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def padded_feeds(batch: Batch) -> dict[str, Any]:
    """Return the padded tensors of a batch on the device."""
    return {key: torch.from_numpy(value).to(device()) for key, value in pad(batch, SIGNATURE).items()}


def expected_logits(model: Any, batch: Batch) -> Any:
    """Return the logits of PyTorch in fp32."""
    with torch.inference_mode():
        return model.to(device())(**padded_feeds(batch)).logits.float().cpu().numpy()


def study(
    name: str, model_study: Study, model: Any, sessions: Mapping[str, Session], memory: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield a result row per shape: errors, times, kernels and memory by variant."""
    is_gpu = torch.cuda.is_available()
    rounds = ROUNDS if is_gpu else 1
    for shape, target_ms in model_study.shapes.items():
        batch = random_batch([shape.sequence] * shape.batch)
        feeds, expected = padded_feeds(batch), expected_logits(model, batch)
        set_pruning(sessions, prunes=False)
        errors: dict[str, float] = {}
        for variant, session in sessions.items():
            before, begin = used_bytes(), time.perf_counter()
            errors[variant] = relative_error(session.run(batch)["logits"], expected)
            # Includes compilation, tuning and graph capture, which may take longer than all timed runs.
            print(f"{variant} answered {shape} for the first time in {time.perf_counter() - begin:.1f} s", flush=True)
            memory[variant] += used_bytes() - before
        accepted = {variant: session for variant, session in sessions.items() if errors[variant] <= max_error(variant)}
        calls: dict[str, list[float]] = {variant: [] for variant in accepted}
        alone: dict[str, list[float]] = {variant: [] for variant in accepted}
        device_runs = {variant: on_device(session, batch, feeds) for variant, session in accepted.items() if is_gpu}
        for _ in range(rounds):
            for variant, session in accepted.items():
                if (device_run := device_runs.get(variant)) is not None:
                    pause()
                    alone[variant] += time_runs(device_run)
                pause()
                calls[variant] += time_runs(partial(session.run, batch))
        fused = {key: session for key, session in accepted.items() if isinstance(session, FusedSession) and is_gpu}
        at_boost_clocks = {variant: device_ms(session, batch) for variant, session in fused.items()}
        without_pauses = {variant: device_ms(session, batch, pauses=False) for variant, session in fused.items()}
        set_pruning(sessions, prunes=True)
        pruned = {variant: device_ms(session, batch) for variant, session in fused.items()}
        set_pruning(sessions, prunes=False)
        yield {
            "model": name,
            "shape": str(shape),
            "target_ms": target_ms,
            "target_fp8_ms": model_study.fp8_targets_ms.get(shape),
            "errors": errors,
            "call_ms": {variant: percentiles(times) for variant, times in calls.items()},
            "alone_ms": {variant: percentiles(times) for variant, times in alone.items() if times},
            "device_ms": at_boost_clocks,
            "sustained_device_ms": without_pauses,
            "pruned_device_ms": pruned,
            "kernels": {variant: kernels(graph_replay(session, batch)) for variant, session in fused.items()},
            "memory_bytes": dict(memory),
        }


def on_device(session: Any, batch: Batch, feeds: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return a function that runs a session on device tensors; None for TensorRT, whose copies are part of its run."""
    if isinstance(session, FusedSession):
        return launch_without_copies(session, batch)
    if isinstance(session, ModuleSession):

        def run_module() -> None:
            with torch.inference_mode():
                session._module(**feeds)

        return run_module
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.core.gpu.padded_buckets import bucket_of

    if isinstance(session, CudaSession):
        bucket = session._bucket(bucket_of(batch, SIGNATURE))
        return lambda: bucket._session.run_with_iobinding(bucket._binding, bucket._options)
    return None


def launch_without_copies(session: FusedSession, batch: Batch) -> Callable[[], Any]:
    """Return the launch of its CUDA graph without the copies from and to the host."""
    stream = session.slot.replay.stream
    graph_exec = GraphExec(capture_without_copies(session, batch))
    return lambda: graph_exec.launch(stream)


def capture_without_copies(session: FusedSession, batch: Batch) -> Any:
    """Capture the graph of a batch whose input is on the device."""
    session.run(batch)
    slot = session.slot
    bucket, recorded = next(reversed(slot.replay._graphs.items()))
    with torch.inference_mode(), capture_graph(slot.replay.stream) as graph:
        session._compute(slot.encoder, recorded.device_input, bucket)
    return graph


def set_pruning(sessions: Mapping[str, Session], *, prunes: bool) -> None:
    """Turn last-layer pruning of fused sessions on or off and discard their CUDA graphs."""
    for session in sessions.values():
        if isinstance(session, FusedSession):
            session.prunes = prunes
            for slot in session._slots:
                slot.replay.clear()


def time_runs(run: Callable[[], Any]) -> list[float]:
    """Warm up, then return the milliseconds of each run of a round."""
    is_gpu = torch.cuda.is_available()
    warm_up_runs, max_runs = (_WARM_UP_RUNS, RUNS) if is_gpu else (0, 1)
    deadline = time.perf_counter() + (_WARM_UP_S if is_gpu else 0.0)
    while warm_up_runs > 0 or time.perf_counter() < deadline:
        run()
        synchronize()
        warm_up_runs -= 1
    times: list[float] = []
    deadline = time.perf_counter() + _MAX_ROUND_S
    while len(times) < max_runs and (len(times) < _MIN_RUNS or time.perf_counter() < deadline):
        synchronize()
        times.append(time_once(run))
    return times


def pause() -> None:
    """Let the clocks recover from the power that the previous variant has drawn."""
    if torch.cuda.is_available():
        time.sleep(_PAUSE_S)


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_ms(session: FusedSession, batch: Batch, *, pauses: bool = True) -> dict[str, float]:
    """Return the device time of its CUDA graph, host copies included, at boost clocks or without pauses."""
    session.run(batch)
    replay = session.slot.replay
    times = []
    for _ in range(ROUNDS):
        if pauses:
            pause()
        times += time_on_device(replay.last.replay, replay.stream)
    return percentiles(times)


def time_on_device(run: Callable[[], Any], stream: Any, cycles: int = _SLEEP_CYCLES) -> list[float]:
    """Return the milliseconds between CUDA events around the work that `run` queues on a stream.

    The device sleeps for some cycles first, so that the host has queued everything before the work starts.
    """
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            begin.record()
            run()
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def graph_replay(session: FusedSession, batch: Batch) -> Callable[[], Any]:
    """Return the replay of the CUDA graph of a batch."""
    session.run(batch)
    return session.slot.replay.last.replay


def kernels(run: Callable[[], Any], runs: int = RUNS) -> list[dict[str, Any]]:
    """Return launches and times per kernel of one run, the largest total first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            run()
        synchronize()
    times_us: dict[str, list[float]] = {}
    for event in profile.events():
        times_us.setdefault(event.name, []).append(event.device_time)
    rows = [
        {
            "kernel": name,
            "launches": round(len(times) / runs),
            "us": float(np.mean(times)),
            "ms": sum(times) / runs / 1e3,
        }
        for name, times in times_us.items()
        if len(times) >= runs and sum(times)
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def stream(lengths: Sequence[int], model: Any, sessions: Mapping[str, Session]) -> dict[str, Any]:
    """Time mixed-length texts, sorted by length and in batches of 32 for variants that pad; also with pruning."""
    batch = random_batch(lengths)
    order = np.argsort(batch.lengths, kind="stable")
    parts = [batch.take(rows) for rows in np.array_split(order, max(1, len(order) // 32))]
    whole = batch.take(order)
    expected = np.concatenate([expected_logits(model, part) for part in parts])
    fused = {name: session for name, session in sessions.items() if isinstance(session, FusedSession)}

    def runner(session: Session) -> Callable[[], Any]:
        if isinstance(session, FusedSession):
            return lambda: session.run(whole)["logits"]
        return lambda: np.concatenate([session.run(part)["logits"] for part in parts])

    def time_alternating(runners: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for run in runners.values():
            run()
        for _ in range(ROUNDS if torch.cuda.is_available() else 1):
            for name, run in runners.items():
                synchronize()
                pause()
                times[name].append(time_once(run))
        return times

    set_pruning(sessions, prunes=False)
    runners = {name: runner(session) for name, session in sessions.items()}
    errors = {name: relative_error(run(), expected) for name, run in runners.items()}
    runners = {name: run for name, run in runners.items() if errors[name] <= max_error(name)}
    times = time_alternating(runners)
    sustained = {name: time_sustained(run) for name, run in runners.items() if torch.cuda.is_available()}
    by_kernel = {name: kernels(run, 1) for name, run in runners.items() if name in fused and torch.cuda.is_available()}
    set_pruning(sessions, prunes=True)
    pruned = time_alternating({name: run for name, run in runners.items() if name in fused})
    return {
        "model": MIXED_LENGTHS_MODEL,
        "texts": len(lengths),
        "tokens": batch.tokens,
        "lengths": list(lengths),
        "errors": errors,
        "ms": {name: float(np.median(values)) for name, values in times.items()},
        "range_ms": {name: [min(values), max(values)] for name, values in times.items()},
        "pruned_ms": {name: float(np.median(values)) for name, values in pruned.items()},
        "sustained": sustained,
        "kernels": by_kernel,
    }


def time_once(run: Callable[[], Any]) -> float:
    """Return the milliseconds of one run."""
    begin = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def time_sustained(run: Callable[[], Any]) -> dict[str, float | None]:
    """Run without pauses; return time, clock and power of the second half, when the clock has settled."""
    is_over = threading.Event()
    times: list[float] = []
    samples: dict[str, list[float]] = {"clock_hertz": [], "power_watts": []}

    def sample() -> None:
        # PyTorch reads both from NVML, for the GPU that it computes on.
        with suppress(ImportError, RuntimeError):
            while not is_over.wait(0.05):
                samples["clock_hertz"].append(torch.cuda.clock_rate() * 1e6)
                samples["power_watts"].append(torch.cuda.power_draw() / 1e3)

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < _SUSTAINED_S:
        times.append(time_once(run))
    is_over.set()
    sampler.join()
    settled = {gauge: values[len(values) // 2 :] for gauge, values in samples.items()}
    medians = {gauge: float(np.median(values)) if values else None for gauge, values in settled.items()}
    return {"ms": float(np.median(times[len(times) // 2 :])), **medians}


def random_batch(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Return random token ids of these lengths."""
    ids = np.random.default_rng(seed).integers(5, 30000, sum(lengths)).astype(np.int32)
    return Batch({"input_ids": ids}, np.array(lengths, np.int32))


def relative_error(logits: Any, expected: Any) -> float:
    """Return the norm of the error over the norm of the expected logits."""
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))}


def show(row: dict[str, Any]) -> str:
    """Return a result row as text."""
    targets = "" if row["target_ms"] is None else f" (asked ≤ {row['target_ms']})"
    targets += "" if row["target_fp8_ms"] is None else f" (in fp8 ≤ {row['target_fp8_ms']})"
    lines = [f"{row['model']} {row['shape']}{targets}"]
    for variant, error in row["errors"].items():
        by_kind = {kind: row[f"{kind}_ms"].get(variant, {}).get("p50") for kind in ("device", "pruned_device")}
        kinds = [kind for kind in ("call", "alone") if variant in row[f"{kind}_ms"]]
        host_times = [f"{row[f'{kind}_ms'][variant]['p50']:.3f} {kind}" for kind in kinds]
        device_times = [f"{value:.4f} {kind}" for kind, value in by_kind.items() if value is not None]
        lines.append(f"  {variant:24} error {error:.1e}, ms: {', '.join([*host_times, *device_times])}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
