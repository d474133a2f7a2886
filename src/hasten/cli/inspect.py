"""hasten inspect BUNDLE: show the contents of a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.builder.inspect import GraphView, Inspection
    from hasten.core.report import Pass
    from hasten.core.tensors import TensorSpec

# The first few are shown; --json prints all.
_MAX_LABELS = 8
_MAX_OPERATORS = 10
_MAX_NODES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--variant", metavar="NAME", help="show this variant, loaded to see what its runtime executes")
    parser.add_argument(
        "--netron", action="store_true", help="open the graph, or that of --variant, in the Netron viewer"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port of the viewer (default: 8080, or a free one)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.builder.inspect import inspect, open_viewer, wait_for_viewer
    from hasten.bundle import open_bundle
    from hasten.cli import console

    bundle = open_bundle(args.bundle)
    if args.netron:
        address = open_viewer(bundle, args.variant, args.port)
        # Ctrl-C ends the command, whichever call it interrupts.
        with suppress(KeyboardInterrupt):
            if args.json:
                console.print_json({"address": address})
            else:
                console.out.print(f"the graph is at {address} until Ctrl-C")
            wait_for_viewer()
        return 0
    inspection = inspect(bundle, args.variant)
    if args.json:
        console.print_json(inspection)
        return 0
    _print_inspection(inspection)
    if args.variant is None:
        console.out.print()
        console.print_report(bundle.report)
    return 0


def _print_inspection(inspection: Inspection) -> None:
    from hasten.cli import console
    from hasten.cli.tables import plain_table

    _print_model(inspection)
    console.out.print()
    files = plain_table("files", ["file"], ["size"])
    for name, size in inspection.files.items():
        files.add_row(name, _size(size))
    console.out.print(files)
    console.out.print()
    _print_passes(inspection.passes)
    console.out.print()
    _print_graphs(inspection.graphs)


def _print_model(inspection: Inspection) -> None:
    from rich.markup import escape

    from hasten.cli import console

    model, signature = inspection.model, inspection.signature
    revision = f" at {model.revision}" if model.revision else ""
    properties = {
        "model": f"{model.id}{revision}, {model.architecture}",
        "task": f"{inspection.task.name}, up to {signature.max_length} tokens",
        "labels": _first(inspection.task.labels, _MAX_LABELS),
        "inputs": ", ".join(map(_tensor, signature.inputs)),
        "outputs": ", ".join(map(_tensor, signature.outputs)),
    }
    if (spec := inspection.generation) is not None:
        template = "with a chat template" if spec.chat_template else "without a chat template"
        properties["vocabulary"] = f"{spec.vocab_size} tokens, {template}"
    if (cache := inspection.cache) is not None:
        encoder = f", {_size(cache.bytes_per_prompt_token)} per encoder token" if cache.bytes_per_prompt_token else ""
        sequence = f"{_size(cache.full_bytes)} per sequence of {signature.max_length}"
        properties["KV cache"] = f"{_size(cache.bytes_per_token)} per token, {sequence}{encoder}"
    properties["built"] = f"{inspection.created} by hasten {inspection.hasten}"
    for name, value in properties.items():
        if value:
            console.out.print(f"[bold]{name:<11}[/]{escape(value)}")


def _print_passes(passes: Iterable[Pass]) -> None:
    from rich.markup import escape

    from hasten.cli import console
    from hasten.cli.tables import plain_table

    table = plain_table("passes", ["pass", "operators", "changes"])
    for step in passes:
        before, after = sum(step.operators_before.values()), sum(step.operators_after.values())
        # Every bundle has a graph, whether or not a variant is made from it.
        results = ", ".join(step.variants) or "the bundle's graph"
        lines = [_changes(step) if before else _counts(step.operators_after), f"[dim]for {results}[/]"]
        lines += [f"[dim]{escape(note)}[/]" for note in step.notes]
        for pattern, reason in dict.fromkeys((part.pattern, part.reason) for part in step.unfused):
            nodes = [part.node for part in step.unfused if (part.pattern, part.reason) == (pattern, reason)]
            lines.append(f"[yellow]{pattern} not fused, reason: {reason}[/]: {escape(_first(nodes, _MAX_NODES))}")
        table.add_row(step.name, f"{before} → {after}", "\n".join(lines))
    if table.row_count:
        console.out.print(table)
    else:
        console.out.print("[dim]passes: not recorded by the version of hasten that built this bundle[/]")


def _print_graphs(graphs: Iterable[GraphView]) -> None:
    from rich.markup import escape

    from hasten.cli import console
    from hasten.cli.tables import plain_table

    table = plain_table("graphs", ["graph", "weights", "operators", "counts"])
    for view in graphs:
        total = str(sum(view.operators.values())) if view.operators else ""
        lines = [_counts(view.operators)] if view.operators else []
        lines += [f"[yellow]{escape(note)}[/]" for note in view.notes]
        name = view.name if view.graph == "model" else f"{view.name} {view.graph}"
        table.add_row(name, view.weights or "", total, "\n".join(lines))
    console.out.print(table)
    for view in graphs:
        if view.executed:
            console.out.print()
            executed = plain_table(f"{view.name}, as loaded here", ["operator", "on"], ["count"])
            for execution in view.executed:
                executed.add_row(execution.operator, execution.on, str(execution.count))
            console.out.print(executed)


def _changes(step: Pass) -> str:
    """Return the change in the count of each operator, additions first."""
    names = dict.fromkeys((*step.operators_after, *step.operators_before))
    changes = {name: step.operators_after.get(name, 0) - step.operators_before.get(name, 0) for name in names}
    shown = [f"{name} {count:+d}" for name, count in sorted(changes.items(), key=lambda item: -item[1]) if count]
    return ", ".join(shown).replace("-", "−") or "nothing"


def _counts(operators: Mapping[str, int]) -> str:
    return _first([f"{count}× {name}" for name, count in operators.items()], _MAX_OPERATORS)


def _first(names: Iterable[str], limit: int) -> str:
    all_names = list(names)
    more = f" and {len(all_names) - limit} more" if len(all_names) > limit else ""
    return ", ".join(all_names[:limit]) + more


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} ({', '.join(map(str, spec.shape))})"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
