"""Measure the contenders of one encoder: each of its shapes, and a workload of mixed lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from contenders import is_static, max_error
from encoders import SIGNATURE, Encoder, batch_of, padded_feeds, random_batch
from timing import (
    Run,
    is_gpu,
    kernels,
    summary,
    time_alternating,
    time_on_device,
    time_once,
    time_sustained,
    used_bytes,
)

from hasten.backends import Session
from hasten.backends.fused.session import FusedSession
from hasten.backends.torch import ModuleSession
from hasten.core.tensors import Batch, Shape
from hasten.kernels.cuda.graph_exec import GraphExec, capture_graph

# Rounds of the times between device tensors, which repeat closely.
_DEVICE_ROUNDS = 3
_BATCH_ROWS = 32
Log = Callable[[str], None]


def measure_shape(
    encoder: Encoder, shape: Shape, sessions: Mapping[str, Session], memory: dict[str, int], log: Log
) -> dict[str, Any]:
    """Return a result row: errors, times, kernels and memory by variant."""
    batch, study = batch_of(shape), encoder.study
    errors = first_answers(encoder, shape, sessions, memory, log)
    accepted = {name: session for name, session in sessions.items() if errors[name] <= max_error(name)}
    fused = {name: session for name, session in accepted.items() if isinstance(session, FusedSession) and is_gpu()}
    calls = time_alternating({name: partial(session.run, batch) for name, session in accepted.items()})
    log(f"{shape}: timed end to end")
    device_runs = {name: _between_device_tensors(session, batch) for name, session in accepted.items() if is_gpu()}
    alone = time_alternating({name: run for name, run in device_runs.items() if run is not None}, _DEVICE_ROUNDS)
    log(f"{shape}: timed between device tensors")
    on_device = {name: _time_graph(session, batch) for name, session in fused.items()}
    by_kernel = {name: kernels(_graph_replay(session, batch)) for name, session in fused.items()}
    log(f"{shape}: timed graphs and kernels")
    return {
        "shape": str(shape),
        "target_ms": study.shapes[shape],
        "target_fp8_ms": study.fp8_targets_ms.get(shape),
        "errors": errors,
        "call_ms": {name: summary(rounds) for name, rounds in calls.items()},
        "alone_ms": {name: summary(rounds) for name, rounds in alone.items()},
        "device_ms": on_device,
        "kernels": by_kernel,
        "memory_bytes": dict(memory),
    }


def first_answers(
    encoder: Encoder, shape: Shape, sessions: Mapping[str, Session], memory: dict[str, int], log: Log
) -> dict[str, float]:
    """Return the error of each variant's first answer, which compiles and captures what the shape needs."""
    batch = batch_of(shape)
    expected = encoder.expected_logits(batch)
    errors: dict[str, float] = {}
    for name, session in sessions.items():
        before, begin = used_bytes(), time.perf_counter()
        errors[name] = relative_error(session.run(batch)["logits"], expected)
        log(f"{shape}: {name} answered for the first time in {time.perf_counter() - begin:.1f} s")
        memory[name] = memory.get(name, 0) + used_bytes() - before
    return errors


def measure_mixed_lengths(encoder: Encoder, sessions: Mapping[str, Session], log: Log) -> dict[str, Any]:
    """Time texts of mixed length, sorted by length and in batches of 32 for variants that pad."""
    batch = random_batch(encoder.study.mixed_lengths)
    runs = mixed_runs(batch, {name: session for name, session in sessions.items() if not is_static(name)})
    order = np.argsort(batch.lengths, kind="stable")
    expected = np.concatenate([encoder.expected_logits(part) for part in _padded_parts(batch)])
    errors = {name: relative_error(run(), expected) for name, run in runs.items()}
    log("mixed lengths: answered for the first time")
    runs = {name: run for name, run in runs.items() if errors[name] <= max_error(name)}
    for run in runs.values():
        run()
    rounds = time_alternating(runs, time_round=time_once)
    log("mixed lengths: timed at boost clocks")
    sustained = {name: time_sustained(run) for name, run in runs.items() if is_gpu()}
    log("mixed lengths: timed without pauses")
    fused = {name: run for name, run in runs.items() if isinstance(sessions[name], FusedSession) and is_gpu()}
    return {
        "texts": len(order),
        "tokens": batch.tokens,
        "errors": errors,
        "ms": {name: summary(times) for name, times in rounds.items()},
        "sustained": sustained,
        "kernels": {name: kernels(run, 1) for name, run in fused.items()},
    }


def mixed_runs(batch: Batch, sessions: Mapping[str, Session]) -> dict[str, Run]:
    """Return the run of a mixed-length batch by variant: whole for the fused backend, otherwise in padded batches."""
    parts = _padded_parts(batch)
    whole = batch.take(np.argsort(batch.lengths, kind="stable"))

    def runner(session: Session) -> Run:
        if isinstance(session, FusedSession):
            return lambda: session.run(whole)["logits"]
        return lambda: np.concatenate([session.run(part)["logits"] for part in parts])

    return {name: runner(session) for name, session in sessions.items()}


def relative_error(logits: Any, expected: Any) -> float:
    """Return the norm of the error over the norm of the expected logits."""
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def show(row: Mapping[str, Any]) -> str:
    """Return a result row as text."""
    targets = "" if row["target_ms"] is None else f" (target ≤ {row['target_ms']})"
    targets += "" if row["target_fp8_ms"] is None else f" (fp8 ≤ {row['target_fp8_ms']})"
    lines = [f"{row['model']} {row['shape']}{targets}"]
    for name, error in row["errors"].items():
        times = [
            f"{kind} {value['p50']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
            for kind in ("call", "alone", "device")
            if (value := row[f"{kind}_ms"].get(name)) is not None
        ]
        lines.append(f"  {name:36} error {error:.1e}, ms: {', '.join(times)}")
    return "\n".join(lines)


def _padded_parts(batch: Batch) -> list[Batch]:
    order = np.argsort(batch.lengths, kind="stable")
    return [batch.take(rows) for rows in np.array_split(order, max(1, len(order) // _BATCH_ROWS))]


def _time_graph(session: FusedSession, batch: Batch) -> dict[str, float]:
    """Return the device time of the CUDA graph of a batch, copies from and to the host included."""
    session.run(batch)
    replay = session.slot.replay
    times = partial(time_on_device, stream=replay.stream)
    return summary(time_alternating({"": replay.last.replay}, time_round=times)[""])


def _graph_replay(session: FusedSession, batch: Batch) -> Run:
    session.run(batch)
    run: Run = session.slot.replay.last.replay
    return run


def _between_device_tensors(session: Any, batch: Batch) -> Run | None:
    """Return a function that runs a session on device tensors; None for TensorRT, whose copies are part of its run."""
    if isinstance(session, FusedSession):
        stream = session.slot.replay.stream
        graph_exec = GraphExec(_capture_without_copies(session, batch))
        return lambda: graph_exec.launch(stream)
    if isinstance(session, ModuleSession):
        feeds = padded_feeds(batch)

        def run_module() -> None:
            with torch.inference_mode():
                torch.compiler.cudagraph_mark_step_begin()
                session._module(**feeds)

        return run_module
    from hasten.backends.onnxruntime.cuda import CudaSession
    from hasten.core.gpu.padded_buckets import bucket_of

    if isinstance(session, CudaSession):
        bucket = session._bucket(bucket_of(batch, SIGNATURE))
        return lambda: bucket._session.run_with_iobinding(bucket._binding, bucket._options)
    return None


def _capture_without_copies(session: FusedSession, batch: Batch) -> Any:
    """Capture the graph of a batch whose input is on the device."""
    session.run(batch)
    slot = session.slot
    bucket, recorded = next(reversed(slot.replay._graphs.items()))
    with torch.inference_mode(), capture_graph(slot.replay.stream) as graph:
        session._compute(slot.encoder, recorded.device_input, bucket)
    return graph
