"""hasten bench BUNDLE: benchmark the variants of a bundle on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument(
        "-b", "--batch-size", type=int, nargs="+", metavar="N", help="batch size: N, or MIN OPT MAX (default: as built)"
    )
    parser.add_argument(
        "-s",
        "--seq-len",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens per text or prompt: N, or MIN OPT MAX (default: as built)",
    )
    parser.add_argument("--bench-budget", default="60s", metavar="TIME", help="time for the benchmark (default: 60s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from rich.markup import escape

    from hasten.builder.bench_bundle import bench_bundle
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.core.plan import Range, Shapes, parse_duration

    bundle = open_bundle(args.bundle)
    built = bundle.report.plan.shapes
    shapes = Shapes(
        Range.of("--batch-size", tuple(args.batch_size)) if args.batch_size else built.batch,
        Range.of("--seq-len", tuple(args.seq_len)) if args.seq_len else built.sequence,
    )
    measured = bench_bundle(
        bundle, shapes, parse_duration(args.bench_budget), args.threads, console.display(args.quiet)
    )
    if args.json:
        console.print_json(measured)
    else:
        if measured.prefill is not None:
            console.print_generation_timings(measured.prefill, measured.bench)
        else:
            console.print_timings(measured.bench)
        console.print_footprints(measured.bench)
        for candidate in measured.rejected:
            console.out.print(f"[dim]not timed: {candidate.variant}: {escape(candidate.reason)}[/]")
        console.out.print(f"[dim]{measured.machine}[/]")
        console.print_busy(measured.bench)
    return 0
