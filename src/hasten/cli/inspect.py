"""hasten inspect BUNDLE"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.builder.inspect import Cache, GraphView, Inspection
    from hasten.core.generation import GenerationSpec
    from hasten.core.report import Pass
    from hasten.core.tensors import TensorSpec

# Enough to recognise them by; --json has all.
_SHOWN_LABELS = 8
_SHOWN_OPERATORS = 10
_SHOWN_NODES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variant", metavar="NAME", help="this one only, loaded to see what its runtime executes")
    parser.add_argument("--netron", action="store_true", help="open the graph, or the variant's, in Netron's viewer")
    parser.add_argument("--port", type=int, metavar="N", help="of the viewer (default: 8080, or one that is free)")


def main(args: argparse.Namespace) -> int:
    from hasten.builder.inspect import inspect, show, wait_for_viewer
    from hasten.bundle import open_bundle
    from hasten.cli import console

    bundle = open_bundle(args.bundle)
    if args.netron:
        address = show(bundle, args.variant, args.port)
        # Ctrl-C is how this ends, wherever it arrives.
        with suppress(KeyboardInterrupt):
            if args.json:
                console.print_json({"address": address})
            else:
                console.out.print(f"the graph is at {address} until Ctrl-C", highlight=False)
            wait_for_viewer()
        return 0
    found = inspect(bundle, args.variant)
    if args.json:
        console.print_json(found)
    else:
        _print_inspection(found)
    return 0


def _print_inspection(found: Inspection) -> None:
    from hasten.cli import console
    from hasten.cli.tables import plain_table

    _print_model(found)
    console.out.print()
    files = plain_table("files")
    files.add_column("file")
    files.add_column("size", justify="right")
    for name, size in found.files.items():
        files.add_row(name, _size(size))
    console.out.print(files)
    console.out.print()
    _print_passes(found.passes)
    console.out.print()
    _print_graphs(found.graphs)


def _print_model(found: Inspection) -> None:
    from rich.markup import escape

    from hasten.cli import console

    revision = f" at {found.model.revision}" if found.model.revision else ""
    about = {
        "model": f"{found.model.id}{revision}, {found.model.architecture}",
        "task": f"{found.task.name}, up to {found.signature.max_length} tokens",
        "labels": _some(found.task.labels, _SHOWN_LABELS),
        "takes": ", ".join(map(_tensor, found.signature.inputs)),
        "gives": ", ".join(map(_tensor, found.signature.outputs)),
        "writes": _writing(found.generation),
        "cache": _cache(found.cache, found.signature.max_length),
        "built": f"{found.created} by hasten {found.hasten}",
    }
    for name, value in about.items():
        if value:
            console.out.print(f"[bold]{name:<8}[/]{escape(value)}", highlight=False)


def _print_passes(passes: Iterable[Pass]) -> None:
    from rich.markup import escape

    from hasten.cli import console
    from hasten.cli.tables import plain_table

    table = plain_table("passes")
    for name in ("pass", "operators", "what changed"):
        table.add_column(name)
    for step in passes:
        before, after = sum(step.operators_before.values()), sum(step.operators_after.values())
        # The graph that every bundle holds is made whether or not a variant comes from it.
        made = ", ".join(step.variants) or "the bundle's graph"
        lines = [_changes(step) if before else _counts(step.operators_after), f"[dim]for {made}[/]"]
        lines += [f"[dim]{escape(note)}[/]" for note in step.notes]
        for what, reason in dict.fromkeys((part.what, part.reason) for part in step.left):
            nodes = [part.node for part in step.left if (part.what, part.reason) == (what, reason)]
            lines.append(f"[yellow]{what} left as it was, reason: {reason}[/]: {escape(_some(nodes, _SHOWN_NODES))}")
        table.add_row(step.name, f"{before} → {after}", "\n".join(lines))
    if table.row_count:
        console.out.print(table)
    else:
        console.out.print("[dim]passes: this bundle was built by a hasten that did not record them[/]")


def _print_graphs(graphs: Iterable[GraphView]) -> None:
    from rich.markup import escape

    from hasten.cli import console
    from hasten.cli.tables import plain_table

    table = plain_table("graphs")
    for name in ("graph", "weights", "operators", "which"):
        table.add_column(name)
    for view in graphs:
        total = str(sum(view.operators.values())) if view.operators else ""
        lines = [_counts(view.operators)] if view.operators else []
        lines += [f"[yellow]{escape(note)}[/]" for note in view.notes]
        table.add_row(_graph(view), view.weights or "", total, "\n".join(lines))
    console.out.print(table)
    for view in graphs:
        if view.executed:
            console.out.print()
            executed = plain_table(f"{view.name}, as loaded here")
            for name in ("operator", "on", "count"):
                executed.add_column(name, justify="right" if name == "count" else "left")
            for execution in view.executed:
                executed.add_row(execution.operator, execution.on, str(execution.count))
            console.out.print(executed)


def _writing(spec: GenerationSpec | None) -> str:
    if spec is None:
        return ""
    chat = "with" if spec.chat_template else "without"
    return f"{spec.vocabulary} tokens in its vocabulary, {chat} a chat template"


def _cache(cache: Cache | None, context: int) -> str:
    if cache is None:
        return ""
    read = (
        f", {_size(cache.bytes_per_prompt_token)} a token that its encoder reads"
        if cache.bytes_per_prompt_token
        else ""
    )
    return f"{_size(cache.bytes_per_token)} a token, {_size(cache.full_bytes)} a text of {context}{read}"


def _graph(view: GraphView) -> str:
    return view.name if view.graph == "model" else f"{view.name} {view.graph}"


def _changes(step: Pass) -> str:
    """What appeared, then what went, each by how much."""
    names = dict.fromkeys((*step.operators_after, *step.operators_before))
    by = {name: step.operators_after.get(name, 0) - step.operators_before.get(name, 0) for name in names}
    changed = [f"{name} {count:+d}" for name, count in sorted(by.items(), key=lambda item: -item[1]) if count]
    return ", ".join(changed).replace("-", "−") or "nothing"


def _counts(operators: Mapping[str, int]) -> str:
    return _some([f"{count}× {name}" for name, count in operators.items()], _SHOWN_OPERATORS)


def _some(names: Iterable[str], limit: int) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} ({', '.join(map(str, spec.shape))})"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
