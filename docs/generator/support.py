"""Generates the reference page of supported architectures from `support.json`."""

from __future__ import annotations

from typing import Any

from generator.results import GENERATED, load, machine_line, table

_NO_MODEL = "transformers has no"


def page() -> str:
    """Return the table of architectures by task; numbered notes below it say what does not work."""
    results = load("support")
    tasks = results["tasks"]
    notes: dict[str, int] = {}
    rows = []
    for architecture in next(iter(tasks.values())):
        entries = [by_architecture[architecture] for by_architecture in tasks.values()]
        cells = [_task_cell(entry["results"], notes) for entry in entries]
        rows.append([architecture, *cells, _attention_cell(entries, notes)])
    lines = [
        GENERATED,
        "# Supported architectures",
        "",
        f"✓ means that {', '.join(results['variants'])} all give PyTorch's answers. – means that transformers has no "
        "such model. A number refers to a note below the table.",
        "",
        *table(["architecture", *tasks, "attention fused by ONNX Runtime"], rows),
        "",
        *(f"{number}. {note}" for note, number in notes.items()),
        "",
        "## Method",
        "",
        "- Each cell is a tiny model with random weights and the tokenizer and options of a published one. It is built "
        "as `hasten build` builds it and compared with PyTorch on texts of mixed length.",
        "- int8 and bf16 only have to stay close here: whether they are accurate enough depends on trained weights, "
        "and the accuracy gate decides that in every build.",
        "- `inductor` was not tested: torch.compile takes about a minute per model.",
        "- An architecture that is not listed may still work. `hasten build` checks it and reports the reason if not. "
        'BigBird works if its config sets `"attention_type": "original_full"`.',
        "",
        f"Machine: {machine_line(results)}.",
        "",
        "Command: `python benchmarks/architecture_support.py`. "
        "Result file: [support.json](../../benchmarks/results/support.json).",
    ]
    return "\n".join(lines) + "\n"


def _task_cell(results: dict[str, str], notes: dict[str, int]) -> str:
    reasons = dict.fromkeys(reason for reason in results.values() if reason != "yes")
    if not reasons:
        return "✓"
    if any(reason.startswith(_NO_MODEL) for reason in reasons):
        return "–"
    numbers = []
    for reason in reasons:
        failed = [variant for variant, result in results.items() if result == reason]
        names_itself = len(failed) == len(results) or failed == [reason.split()[0]]
        note = reason if names_itself else f"{', '.join(failed)}: {reason}"
        numbers.append(str(notes.setdefault(note, len(notes) + 1)))
    return " ".join([*(["✓"] if "yes" in results.values() else []), *numbers])


def _attention_cell(entries: list[dict[str, Any]], notes: dict[str, int]) -> str:
    entry = next((entry for entry in entries if entry["layers"]), None)
    if entry is None:
        return ""
    fused, layers = entry["attention_fused"], entry["layers"]
    if fused >= layers:
        return "all layers"
    number = notes.setdefault(f"Attention is not fused: {entry['unfused']}", len(notes) + 1)
    return f"{f'{fused} of {layers}' if fused else 'none'} {number}"
