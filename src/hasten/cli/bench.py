"""hasten bench BUNDLE"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "-b",
        "--batch-size",
        type=int,
        nargs="+",
        metavar="N",
        help="texts, or prompts, together (default: as it was built)",
    )
    parser.add_argument(
        "-s", "--seq-len", type=int, nargs="+", metavar="N", help="tokens of each (default: as it was built)"
    )
    parser.add_argument("--budget", default="60s", metavar="TIME", help="time for the benchmark (default: 60s)")
    parser.add_argument("--threads", type=int, metavar="N")


def main(args: argparse.Namespace) -> int:
    from rich.markup import escape

    from hasten.builder.rebench import rebench
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.core.plan import Range, Shapes, parse_duration

    bundle = open_bundle(args.bundle)
    asked = bundle.report.plan.shapes
    shapes = Shapes(
        Range.of("--batch-size", tuple(args.batch_size)) if args.batch_size else asked.batch,
        Range.of("--seq-len", tuple(args.seq_len)) if args.seq_len else asked.sequence,
    )
    measured = rebench(bundle, shapes, parse_duration(args.budget), args.threads, console.display(args.quiet))
    if args.json:
        console.print_json(measured)
    else:
        if measured.reading is not None:
            console.print_paces(measured.reading, measured.bench)
        else:
            console.print_timings(measured.bench)
        console.print_footprints(measured.bench)
        for candidate in measured.refused:
            console.out.print(f"[dim]not timed: {candidate.variant}: {escape(candidate.reason)}[/]", highlight=False)
        console.out.print(f"[dim]{measured.machine}[/]", highlight=False)
        console.print_busy(measured.bench)
    return 0
