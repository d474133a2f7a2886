"""hasten verify BUNDLE"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="jsonl, json, csv, tsv, parquet, a folder, datasets:NAME:SPLIT (default: the bundle's own reference)",
    )
    parser.add_argument(
        "--columns", metavar="NAME=COLUMN,…", help="what the data calls them: text=sentence,label=stars"
    )
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help="default: all it holds")
    parser.add_argument("--min-agreement", type=float, metavar="SHARE")
    parser.add_argument("--max-drop", type=float, metavar="POINTS")
    parser.add_argument("--metric", metavar="NAME", help="the one --max-drop goes by (default: as it was built)")
    parser.add_argument("--threads", type=int, metavar="N")


def main(args: argparse.Namespace) -> int:
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
    from hasten.core.plan import Gate, parse_columns
    from hasten.measure.data import check_columns, read_rows
    from hasten.measure.reverify import judged_rows, reverify
    from hasten.measure.rows import naming
    from hasten.measure.verify import GRAPH
    from hasten.measure.writing_reference import TextColumn
    from hasten.tasks import TASKS

    if args.columns is not None and args.data is None:
        raise PlanError("--columns is about a data file, and there is none", hint="--data file.csv")
    columns = parse_columns(args.columns) if args.columns is not None else {}
    gate = Gate(args.min_agreement, args.max_drop, args.metric)
    progress = console.display(args.quiet)
    bundle = open_bundle(args.bundle)
    name, writes = bundle.manifest.task.name, bundle.manifest.generation is not None
    task = TextColumn(name) if writes else TASKS.get(name)
    check_columns(columns, task)
    rows = read_rows(args.data, columns, bundle.manifest.task) if args.data is not None else None
    with naming(str(args.data or args.bundle), task, rows or ()):
        candidates = reverify(bundle, rows, gate, args.variant, args.threads, progress)
    if args.json:
        console.print_json(candidates)
    else:
        console.print_verdicts(candidates, judged_rows(bundle, rows))
    if not all(candidate.verdict.passed for candidate in candidates if candidate.verdict):
        raise AccuracyError(f"{args.bundle} does not answer like the original here")
    if not any(candidate.verdict for candidate in candidates if candidate.variant != GRAPH):
        only = "" if writes else ", so only its graph was verified"
        raise UnsupportedError(f"none of the variants in {args.bundle} runs here{only}")
    return 0
