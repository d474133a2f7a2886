"""The report of a bundle as one HTML file that needs no network: report.html.

Python only embeds data; `assets/page.js` draws tables and charts in the browser, with Observable Plot.
"""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from hasten.bundle import Bundle, Manifest
from hasten.core.errors import translate_os_errors
from hasten.core.options import changed_options
from hasten.core.report import Report
from hasten.tasks import Row

# Enough of a row to recognize it. Smaller errors than this are not worth an example.
_MAX_ROW_CHARS, _SMALL = 400, 1e-3
# What would end the element that the data stands in.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_page(bundle: Bundle, file: Path) -> None:
    """Write the report of a bundle as a page; a link is replaced, not followed."""
    text = render_page(bundle.manifest, bundle.report, bundle.reference().rows)
    with translate_os_errors(f"writing {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)


def render_page(manifest: Manifest, report: Report, rows: Sequence[Row]) -> str:
    """Return the report of a build as HTML; `rows` are the reference rows."""
    parts = {
        "TITLE": html.escape(report.plan.model.rstrip("/").rsplit("/", 1)[-1]),
        "STYLE": _asset("page.css"),
        "DATA": _to_json(_page_data(manifest, report, rows)),
        "PLOT": _asset("plot.min.js"),
        "SCRIPT": _asset("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def _page_data(manifest: Manifest, report: Report, rows: Sequence[Row]) -> dict[str, Any]:
    verdicts = [candidate.verdict for candidate in report.candidates if candidate.verdict is not None]
    worst = [
        verdict.agreement.worst[:1]
        for verdict in verdicts
        if verdict.passed and not verdict.agreement.max_error <= _SMALL
    ]
    # A model that was built from a Python object has the name of its class.
    is_repeatable = "(" not in report.plan.model
    return {
        "model": msgspec.to_builtins(manifest.model),
        "task": manifest.task.name,
        "hasten": manifest.hasten,
        "command": _command(report) if is_repeatable else None,
        "isGenerative": manifest.generation is not None,
        # Errors that are not finite become null.
        "report": msgspec.json.decode(msgspec.json.encode(report)),
        # A page may be shared: it holds no row that it does not show.
        "rows": {str(index): _shorten(rows[index]) for indices in worst for index in indices if index < len(rows)},
    }


def _command(report: Report) -> str:
    return shlex.join(["hasten", "build", report.plan.model, *changed_options(report.plan), "-o", "bundle"])


def _shorten(row: Row) -> Mapping[str, str]:
    texts = {name: str(value) for name, value in row.items()}
    return {name: text if len(text) <= _MAX_ROW_CHARS else f"{text[:_MAX_ROW_CHARS]}…" for name, text in texts.items()}


def _to_json(value: object) -> str:
    """Return JSON that can stand in a script element, whatever texts it holds."""
    # Texts of data files may hold lone surrogates, which json escapes.
    return json.dumps(value).translate(_ESCAPES)


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
