"""hasten verify BUNDLE: verify the files and variants of a bundle on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="rows to verify on: jsonl, json, csv, tsv, parquet, a folder, datasets:NAME:SPLIT (default: the bundle's"
        " reference)",
    )
    parser.add_argument(
        "--columns", metavar="NAME=COLUMN,…", help="column names of the data: text=sentence,label=stars"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME",
        help="variant to verify; may be repeated (default: all in the bundle)",
    )
    parser.add_argument(
        "--min-agreement", type=float, metavar="SHARE", help="minimum agreement with the reference (default: as built)"
    )
    parser.add_argument(
        "--max-drop", type=float, metavar="POINTS", help="maximum drop of the metric, in points (default: as built)"
    )
    parser.add_argument("--metric", metavar="NAME", help="metric that --max-drop bounds (default: as built)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
    from hasten.core.plan import Gate, parse_columns
    from hasten.families import family_of_bundle
    from hasten.measure.data import check_columns, read_rows
    from hasten.measure.encoder_gate import GRAPH
    from hasten.measure.evaluation_rows import naming_source
    from hasten.measure.verify_bundle import verify_bundle

    if args.columns is not None and args.data is None:
        raise PlanError("--columns needs a data file", hint="pass --data FILE")
    columns = parse_columns(args.columns) if args.columns is not None else {}
    gate = Gate(args.min_agreement, args.max_drop, args.metric)
    progress = console.display(args.quiet)
    bundle = open_bundle(args.bundle)
    family = family_of_bundle(bundle)
    task = family.columns(bundle.manifest.task.name)
    check_columns(columns, task)
    rows = read_rows(args.data, columns, bundle.manifest.task) if args.data is not None else None
    with naming_source(str(args.data or args.bundle), task, rows or ()):
        candidates = verify_bundle(bundle, rows, gate, args.variant, args.threads, progress)
    if args.json:
        console.print_json(candidates)
    else:
        console.print_verdicts(candidates, family.judge.judged_rows(bundle, rows))
    failed = [candidate.variant for candidate in candidates if candidate.verdict and not candidate.verdict.passed]
    if failed:
        raise AccuracyError(f"{args.bundle}: {', '.join(failed)} failed the accuracy gate here")
    if not any(candidate.verdict for candidate in candidates if candidate.variant != GRAPH):
        detail = ", so only its graph was verified" if bundle.manifest.graphs else ""
        raise UnsupportedError(f"none of the variants in {args.bundle} runs here{detail}")
    return 0
