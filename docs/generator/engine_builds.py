"""The benchmark study of engines: which graphs the parser and builder of TensorRT for RTX take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from generator.results import load, machine_line, table
from generator.studies import Study

# The beginnings of hasten's messages, by the step that failed; all other steps are hasten's.
_STEPS = {
    "TensorRT for RTX cannot read typed.onnx: ": "parser",
    "TensorRT for RTX cannot build an engine from typed.onnx: ": "builder",
}
_SIZES = ("MiniLM-L6", "BERT-base")
_MIB = 2**20

Engines = dict[str, dict[str, dict[str, Any]]]


def tensorrt_rtx() -> Study:
    """Return the study of parsing and building engines of all architectures."""
    results = load("tensorrt_rtx")
    summary, entries = results["summary"], results["architectures"]
    engines: Engines = {name: entry["engines"] for name, entry in entries.items() if entry["engines"]}
    tiny = {name: tasks for name, tasks in engines.items() if name not in _SIZES}
    groups = {f"tiny models of {len(tiny)} architectures": tiny, **{name: {name: engines[name]} for name in _SIZES}}
    precisions = list(dict.fromkeys(precision for *_, precision, _ in _flatten(engines)))
    rows = [[label, *(_built(group, precision) for precision in precisions)] for label, group in groups.items()]
    return Study(
        title="Engines of TensorRT for RTX",
        question="Which graphs do NVIDIA's ONNX parser and builder take?",
        answer=[
            f"{summary['built']} of {summary['graphs']} engines were built, for {len(engines)} models with "
            f"{len(next(iter(engines.values())))} tasks each. **{_run_line(summary)}**",
            "",
            *table(["engines built, median build time, median size", *precisions], rows),
            "",
            *table(["failed step", "reason, in its own words", "models"], _outcomes(entries)),
        ],
        method=(
            f"Versions: {', '.join(f'{name} {version}' for name, version in results['versions'].items())}. "
            "Engines have two optimization profiles: for the requested shapes, and for all others.",
            "The models have random weights. Each is exported, typed and built as `hasten build` does it; int8 and fp8 "
            "come from the module with calibrated quantizers.",
            "The builder compiles for all GPUs that the runtime supports and times no kernels, so it needs none. Build "
            "times are those of processes that ran beside others.",
            "A process that ended early leaves no results of its model. DeBERTa-v2's crashed in the builder; BART's "
            "ended because transformers has no such head. Since this run the script continues after either.",
            "An architecture without a graph, or whose graph gives wrong answers, is "
            "[not supported](reference/support.md) by any backend; the latter are parsed and built here all the same.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/gpu/tensorrt_rtx.py",
        files=("tensorrt_rtx",),
    )


def _run_line(summary: dict[str, Any]) -> str:
    """Return whether engines also ran."""
    if summary["run"]:
        return f"{summary['run']} of them ran on {', '.join(summary['gpu'])}, and their outputs were compared."
    if summary["gpu"]:
        return f"None of them ran: the runtime rejected {', '.join(summary['gpu'])}."
    return "None of them ran: the machine has no GPU."


def _flatten(engines: Engines) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for name, tasks in engines.items():
        for task, by_precision in tasks.items():
            for precision, engine in by_precision.items():
                yield name, task, precision, engine


def _built(engines: Engines, precision: str) -> str:
    """Return a cell: the number of engines that were built, the time and the size."""
    tried = [engine for *_, other, engine in _flatten(engines) if other == precision]
    built = [engine for engine in tried if engine["seconds"]]
    if not built:
        return f"0 of {len(tried)}"
    seconds, size = median(engine["seconds"] for engine in built), median(engine["engine_bytes"] for engine in built)
    return f"{len(built)} of {len(tried)}, {seconds:.1f} s, {size / _MIB:.{0 if size > 20 * _MIB else 1}f} MiB"


def _outcomes(entries: dict[str, Any]) -> list[list[str]]:
    """Return a row per failed step and reason, with the models concerned; the first is of models without a failure."""
    failed: dict[tuple[str, str], dict[str, list[tuple[str, str]]]] = {}
    complete = []
    for name, entry in entries.items():
        failures = [((task, ""), *_step(reason, "graph")) for task, reason in entry["failures"].items()]
        for _, task, precision, engine in _flatten({name: entry["engines"]}):
            if engine["failure"]:
                failures.append(((task, precision), *_step(engine["failure"])))
        for place, step, reason in failures:
            failed.setdefault((step, _without_names(reason, name)), {}).setdefault(name, []).append(place)
        if not failures:
            complete.append(name)
    rows = [["none", "", f"{len(complete)}: {', '.join(complete)}"]]
    for (step, reason), models in failed.items():
        cells = [f"{name}{_restriction(places, entries[name])}" for name, places in models.items()]
        rows.append([step, reason.replace("|", "\\|"), ", ".join(cells)])
    return rows


def _step(failure: str, step_of_hasten: str = "typed graph") -> tuple[str, str]:
    """Return the failed step and the reason without hasten's words."""
    for beginning, step in _STEPS.items():
        if failure.startswith(beginning):
            return step, failure.removeprefix(beginning)
    if failure.startswith("the process "):
        return "process", failure
    return "quantizers" if "cannot be quantized" in failure else step_of_hasten, failure


def _without_names(reason: str, model: str) -> str:
    """Return a reason without the names of one model and its classes, so that equal ones are one row."""
    reason = re.sub(rf"^({re.escape(model)}|[A-Z]\w+(?= cannot be quantized)) ", "it ", reason)
    return re.sub(r" in '\w+'", "", reason)


def _restriction(places: list[tuple[str, str]], entry: dict[str, Any]) -> str:
    """Return the tasks and precisions that fail, where others of the model do not."""
    tasks, precisions = (list(dict.fromkeys(part)) for part in zip(*places, strict=True))
    parts = []
    if len(tasks) < len(entry["engines"]) + len(entry["failures"]):
        parts.append(", ".join(tasks))
    if precisions != [""] and len(precisions) < len(next(iter(entry["engines"].values()))):
        parts.append(", ".join(precisions))
    return f" ({'; '.join(parts)})" if parts else ""
