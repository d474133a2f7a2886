"""A browser draws the page of a report: no error, every section, and texts from anywhere stay texts."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.report_page import render_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
SECTIONS = ("Speed and agreement", "Latency", "Accuracy", "Memory and size", "Build")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


def run_browser(page: Path, *options: str) -> str:
    """Open a page and return the document after its scripts, with their errors."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", *options]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, "--enable-logging=stderr", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, errors
    return done.stdout


@pytest.fixture
def page(tiny_classifier: Any, quick_build: Any, tmp_path: Path) -> Path:
    variants = ["onnxruntime-fp32", "onnxruntime-int8"]
    bundle = quick_build(tiny_classifier(), tmp_path / "bundle", variants=variants)
    report, file = bundle.report, tmp_path / "report.html"
    candidates = [replace(each, reason=HOSTILE) for each in report.candidates]
    for index, each in enumerate(candidates):
        if each.verdict is not None:
            agreement = replace(each.verdict.agreement, max_error=0.1, worst=(0,))
            candidates[index] = replace(each, verdict=replace(each.verdict, agreement=agreement))
    report = replace(report, candidates=tuple(candidates))
    file.write_text(render_page(bundle.manifest, report, bundle.reference().rows), "utf-8")
    return file


def test_error_of_a_script_is_noticed(page: Path) -> None:
    page.write_text(page.read_text("utf-8").replace('"use strict";', '"use strict"; null.x;'), "utf-8")
    with pytest.raises(AssertionError, match="Uncaught TypeError"):
        run_browser(page, "--dump-dom")


def test_browser_draws_all_sections(page: Path) -> None:
    document = run_browser(page, "--dump-dom")
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in document, title
    assert document.count("<svg") >= 2
    assert "&lt;img src=x" in document
    assert "differs most on row 0" in document
    assert "[object " not in document
    assert "<title>hacked" not in document


@pytest.mark.parametrize("size", ["1100,1600", "390,1600"])
def test_browser_takes_pictures(page: Path, size: str) -> None:
    picture = page.with_name("page.png")
    run_browser(page, f"--window-size={size}", f"--screenshot={picture}")
    # A blank page is a picture of a few kilobytes.
    assert picture.stat().st_size > 30_000
