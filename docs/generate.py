"""Writes the generated documentation: reference pages, benchmarks page, chart and the README's figures.

`--check` writes nothing and fails if a file is out of date, so that the README cannot show a number that is not in a
result file.
"""

from __future__ import annotations

import argparse
import sys

from generator import benchmarks, chart, precision, readme, reference, support
from generator.results import ROOT

DOCS = ROOT / "docs"


def main() -> int:
    """Write or check all generated files and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a generated file is out of date")
    is_check = parser.parse_args().check
    panels = readme.panels()
    pages = {
        DOCS / "reference" / "cli.md": reference.command_line_page(),
        DOCS / "reference" / "settings.md": reference.settings_page(),
        DOCS / "reference" / "api.md": reference.api_page(),
        DOCS / "reference" / "extensions.md": reference.extensions_page(),
        DOCS / "reference" / "support.md": support.page(),
        DOCS / "reference" / "precision.md": precision.page(),
        DOCS / "benchmarks.md": benchmarks.page(),
        DOCS / "assets" / "speed.svg": chart.draw(panels, chart.LIGHT),
        DOCS / "assets" / "speed-dark.svg": chart.draw(panels, chart.DARK),
        readme.README: readme.page(),
    }
    stale = []
    for file, text in pages.items():
        if not is_check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(str(file.relative_to(ROOT)))
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
