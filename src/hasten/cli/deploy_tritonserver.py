"""hasten deploy tritonserver BUNDLE"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--output", "-o", type=Path, metavar="DIR", required=True, help="where to write")
    parser.add_argument("--force", action="store_true", help="replace an older deployment there")


def main(args: argparse.Namespace) -> int:
    raise NotImplementedError
