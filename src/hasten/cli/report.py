"""hasten report BUNDLE: write the report of a bundle as a page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file of the page (default: report.html in the bundle)"
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    import webbrowser

    from hasten.bundle import open_bundle
    from hasten.bundle.read import PAGE
    from hasten.cli import console
    from hasten.core.errors import StageError
    from hasten.report_page import write_page

    bundle = open_bundle(args.bundle)
    file = (args.output or bundle.path / PAGE).absolute()
    write_page(bundle, file)
    if args.json:
        console.print_json({"file": file})
    else:
        console.print_line(str(file))
    if args.open and not webbrowser.open(file.as_uri()):
        raise StageError("there is no browser to show the page", hint=f"open {file}")
    return 0
