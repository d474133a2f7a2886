"""Generates reference pages, benchmark pages and the README's figures from the code and the result files."""

import sys
from pathlib import Path

# The benchmarks name the sources that their results depend on.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
