"""hasten verify BUNDLE"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines (default: the bundle's own reference)")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help="default: all it holds")
    parser.add_argument("--min-agreement", type=float, metavar="SHARE")
    parser.add_argument("--max-drop", type=float, metavar="POINTS")
    parser.add_argument("--threads", type=int, metavar="N")


def main(args: argparse.Namespace) -> int:
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.core.errors import AccuracyError, UnsupportedError
    from hasten.core.plan import Gate
    from hasten.measure.data import read_rows
    from hasten.measure.verify import GRAPH, reverify

    bundle = open_bundle(args.bundle)
    rows = read_rows(args.data) if args.data else None
    gate = Gate(args.min_agreement, args.max_drop)
    candidates = reverify(bundle, rows, gate, args.variant, args.threads, console.display(args.quiet))
    if args.json:
        console.print_json(candidates)
    else:
        console.print_verdicts(candidates, rows or bundle.reference().rows)
    if not all(candidate.verdict.passed for candidate in candidates if candidate.verdict):
        raise AccuracyError(f"{args.bundle} does not answer like the original here")
    if not any(candidate.verdict for candidate in candidates if candidate.variant != GRAPH):
        raise UnsupportedError(f"none of the variants in {args.bundle} runs here, so only its graph was verified")
    return 0
