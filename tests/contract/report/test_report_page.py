"""The page that shows the report of a bundle: complete, small, safe with any text, without network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Candidate
from hasten.report_page import render_page

HOSTILE = '</script><script>alert("\u2028")//<!-- {{PLOT}} {{DATA}} &amp;'
MAX_BYTES = 500_000


class Elements(HTMLParser):
    """The elements of a page and the texts of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str | None] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def page_of(bundle: Bundle) -> str:
    return (bundle.path / "report.html").read_text("utf-8")


def test_build_writes_page_that_is_not_sealed(classifier_bundle: Bundle) -> None:
    page = page_of(classifier_bundle)
    assert Elements(page).data["report"] == json.loads((classifier_bundle.path / "report.json").read_text())
    assert "report.html" not in classifier_bundle.manifest.files
    assert len(page.encode()) < MAX_BYTES


def test_page_needs_no_network(classifier_bundle: Bundle) -> None:
    page = page_of(classifier_bundle)
    elements = Elements(page)
    assert elements.attributes == []
    assert "default-src 'none'" in page
    # Names of XML namespaces and licences, which nothing loads.
    assert set(re.findall(r"https?://([\w.-]+)", page)) <= {"www.w3.org", "github.com"}


def test_page_names_command_that_repeats_the_build(classifier_bundle: Bundle) -> None:
    words = Elements(page_of(classifier_bundle)).data["command"].split()
    plan = classifier_bundle.report.plan
    assert words[:3] == ["hasten", "build", plan.model]
    assert words[words.index("--variants") + 1 :][: len(plan.variants)] == list(plan.variants)


def test_hostile_texts_stay_data(classifier_bundle: Bundle) -> None:
    report, manifest = classifier_bundle.report, classifier_bundle.manifest
    verdict = next(candidate.verdict for candidate in report.candidates if candidate.verdict is not None)
    worst = replace(verdict.agreement, worst=(0,), max_error=float("nan"))
    candidates = (
        *report.candidates,
        Candidate(HOSTILE, report.candidates[0].status, HOSTILE, replace(verdict, agreement=worst)),
    )
    manifest = replace(manifest, model=replace(manifest.model, id=HOSTILE))
    report = replace(report, candidates=candidates, plan=replace(report.plan, model=HOSTILE))
    page = render_page(manifest, report, [{"text": f"{HOSTILE}\ud800", "label": 3}])
    elements = Elements(page)
    assert elements.tags.count("script") == 3
    assert elements.data["rows"] == {"0": {"text": f"{HOSTILE}\ud800", "label": "3"}}
    assert elements.data["model"]["id"] == elements.data["report"]["candidates"][-1]["reason"] == HOSTILE
    assert elements.data["report"]["candidates"][-1]["verdict"]["agreement"]["max_error"] is None
    page.encode()  # no lone surrogate is left


def test_command_writes_page_anew(
    classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page_of(classifier_bundle)
    (classifier_bundle.path / "report.html").unlink()
    assert main(["report", str(classifier_bundle.path)]) == 0
    assert capsys.readouterr().out == f"{classifier_bundle.path.resolve() / 'report.html'}\n"
    assert page_of(classifier_bundle) == before
    file = tmp_path / "new" / "page.html"
    assert main(["report", str(classifier_bundle.path), "-o", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    assert file.read_text("utf-8") == before
    hasten.load(classifier_bundle.path).close()


def test_page_that_cannot_be_written_is_one_line(
    classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["report", str(classifier_bundle.path), "-o", str(tmp_path / "file" / "page.html")]) != 0
    assert "a file is in the way: writing" in capsys.readouterr().err
