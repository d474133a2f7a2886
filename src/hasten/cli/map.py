"""hasten map BUNDLE INPUT -o OUTPUT: answer the rows of files, and continue after an interruption."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.core.options import add_options, read_options
from hasten.corpus.settings import AnswerSettings, JobSettings, parse_task_options

if TYPE_CHECKING:
    from hasten.corpus.report import MapReport

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument(
        "input",
        help="a file, a directory, a glob in quotes or datasets:NAME:SPLIT; parquet, arrow, feather, jsonl, ndjson,"
        " json, csv, tsv",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory of the output")
    parser.add_argument(
        "-O", "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the task: -O top_k=3"
    )
    add_options(parser, JobSettings)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.cli import console
    from hasten.corpus.job import run_job

    values = vars(args)
    options = parse_task_options(args.option)
    answers = read_options(AnswerSettings, values, "answers.", options=options)
    settings = read_options(JobSettings, values, answers=answers)
    progress = console.display(args.quiet)
    try:
        report = run_job(args.bundle, args.input, args.output, settings, progress)
    except KeyboardInterrupt:
        print("interrupted: complete files are kept, and the same command continues after them", file=sys.stderr)
        return _INTERRUPTED
    if args.json:
        console.print_json(report)
    else:
        for line in _lines(report):
            console.print_line(line)
    return 0


def _lines(report: MapReport) -> list[str]:
    stages = ", ".join(f"{stage} {share:.0%}" for stage, share in report.stages.items())
    placement = report.placement
    threads = f" × {placement.threads} threads" if placement.threads is not None else ""
    lines = [
        f"{report.rows:,} rows in {report.seconds:,.1f} s: {report.rows_per_s:,.0f} rows/s,"
        f" {report.tokens_per_s:,.0f} tokens/s",
        f"sessions: {placement.sessions}{threads}; time: {stages}",
        f"{report.proof['variant']}: {report.proof['agreement']['reason']}",
    ]
    if report.cost_per_million_rows is not None:
        lines.append(f"cost per million rows: {report.cost_per_million_rows:,.2f}")
    if report.total_truncated:
        lines.append(f"{report.total_truncated:,} rows were truncated to the model's limit")
    if report.total_rejected:
        lines.append(f"{report.total_rejected:,} rows were rejected: {report.output}/_rejected.parquet")
    state = "" if report.is_complete else "; other shares of the work are not complete yet"
    lines.append(f"{report.output}: {report.total_rows:,} rows in {report.files:,} files{state}")
    return lines
