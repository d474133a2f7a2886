"""The command `hasten build MODEL -o DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hasten.core.options import add_options, read_options
from hasten.core.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan and those of the command."""
    parser.add_argument("model", help="hub id or local directory")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="directory of the bundle (default: the cache)")
    add_options(parser, Plan)
    parser.add_argument("--force", action="store_true", help="replace the bundle at the output")
    parser.add_argument("--dry-run", action="store_true", help="print what a build would do, and do nothing")


def main(args: argparse.Namespace) -> int:
    """Build the bundle and print its report."""
    plan = read_options(Plan, vars(args), model=args.model)
    from rich.markup import escape

    from hasten.builder.build import build
    from hasten.builder.preflight import preview
    from hasten.cli import console
    from hasten.families import family_of_bundle

    if args.dry_run:
        dry_run = preview(plan, args.output, force=args.force)
        if args.json:
            console.print_json({"plan": plan, "outline": dry_run})
        else:
            console.out.print(f"model    {escape(dry_run.model)} ({dry_run.task})")
            console.out.print(f"try      {', '.join(dry_run.contenders)}")
            if dry_run.further:
                console.out.print(f"then     {', '.join(dry_run.further)}, within {plan.search_budget_s:g} s")
            console.out.print(f"baseline {dry_run.baseline} on the {'CPU' if dry_run.device == 'cpu' else 'GPU'}")
            for candidate in dry_run.unavailable:
                console.out.print(f"         [dim]not {candidate.variant}: {escape(candidate.reason)}[/]")
            console.out.print(f"write    {escape(str(dry_run.target))}")
            for note in dry_run.notes:
                console.out.print(f"[yellow]{escape(note)}[/]")
        return 0
    bundle = build(plan, args.output, force=args.force, progress=console.display(args.quiet))
    if args.json:
        console.print_json({"path": bundle.path, "report": bundle.report})
        return 0
    where = args.output or bundle.path
    console.print_summary(bundle.report, where)
    console.out.print(f"\n[bold]{bundle.chosen.name}[/] is in [bold]{escape(str(where))}[/]")
    console.out.print(f"  hasten run {where} {family_of_bundle(bundle).example(bundle)}", markup=False)
    return 0
