"""Compare a call of `hasten.load(bundle)` with thirty lines of tokenizers and ONNX Runtime around the same graph.

    python benchmarks/cpu/in_process.py MODEL [--work DIR]

MODEL is the directory of a BERT text classifier. It is built in fp32, and so is a classifier of one small layer
with the same tokenizer, in which Python's share of the time is visible; `--work` keeps both bundles for the next time.
The thirty lines are `serving/peers/classifier.py`. Both contenders run in one process and call the same ONNX Runtime
session, in turns, so that they differ in nothing but their Python code. Answers are compared first. Nothing else may
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import msgspec
import numpy as np
import tokenizers

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "serving" / "peers"))

from classifier import Classifier
from options import Options

import hasten
from hasten.core.system.hardware import usable_cores
from hasten.measure.data import sample_texts
from hasten.predictor import Predictor
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "in_process.json"
VARIANT = "onnxruntime-fp32"
LENGTHS = (16, 128)
# The size of the classifier of one layer.
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
KINDS = (REPEATED := "repeated", "new", NEW_WORDS := "all words new")
# Untimed calls before each round, and texts that are compared before the first.
UNTIMED, WARM_UP_TEXTS = 5, 50
TOLERANCE, RESAMPLES = 1e-5, 2000


def main() -> None:
    """Run the study, write its result file and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, help="directory that keeps the bundles (default: a temporary one)")
    parser.add_argument("--runs", type=int, default=3, help="runs with fresh processes")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per run")
    parser.add_argument("--calls", type=int, default=20, help="calls of each contender per round")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-in-process-") as folder:
        bundles = build_bundles(args.model, args.work or Path(folder))
        medians: dict[tuple[str, int, str], list[dict[str, float]]] = {}
        for _ in range(args.runs):
            for name, bundle in bundles.items():
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    rounds = process.submit(time_rounds, args.model, bundle, args.rounds, args.calls).result()
                for tokens, kind, of_round in rounds:
                    medians.setdefault((name, tokens, kind), []).append(of_round)
    rows = [summary(*case, of_rounds) for case, of_rounds in medians.items()]
    budget = {"runs": args.runs, "rounds": args.rounds, "calls": args.calls}
    results = {**provenance(), "variant": VARIANT, **budget, "rows": rows}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    for row in rows:
        difference = "{value:+.1f} us ({low:+.1f} to {high:+.1f})".format_map(row["difference_us"])
        print(
            f"{row['model']:<10}{row['tokens']:>4} tokens {row['texts']:<14}"
            f"{row['hasten_us']:9.1f} us, thirty lines {row['thirty_lines_us']:9.1f} us: {difference}"
        )


def build_bundles(model: Path, work: Path) -> dict[str, Path]:
    """Build the bundles that do not exist yet and return all by the name of their model."""
    bundles = {model.name: work / f"{model.name}.hasten", "one layer": work / "one_layer.hasten"}
    if not bundles[model.name].exists():
        hasten.build(model, bundles[model.name], variants=VARIANT, bench_budget_s=1)
    if not bundles["one layer"].exists():
        import transformers

        config = transformers.AutoConfig.from_pretrained(model, **SMALL)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        small_model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
        hasten.build(small_model, bundles["one layer"], tokenizer=tokenizer, variants=VARIANT, bench_budget_s=1)
    return bundles


def time_rounds(model: Path, bundle: Path, rounds: int, calls: int) -> list[tuple[int, str, dict[str, float]]]:
    """Return the median microseconds of both contenders in every round of every case."""
    predictor = hasten.load(bundle, VARIANT)
    assert isinstance(predictor, Predictor)
    options = Options(instances=1, threads=usable_cores())
    thirty_lines = Classifier(str(model), str(bundle / "variants" / VARIANT / "model.onnx"), options)
    # The same session, because two would compete: the threads of a session spin for a while after each run.
    thirty_lines.session = predictor.session.runtime
    contenders: dict[str, Callable[[str], Any]] = {
        "hasten": predictor,
        "thirty_lines": lambda text: thirty_lines([text]),
    }
    sources = TextSource(thirty_lines.tokenizer)
    for word in sources.words:
        predictor.tokenizer.encode([word])
    for text in sources.texts("new", 128, WARM_UP_TEXTS):
        (ours,), (theirs,) = (predict(text) for predict in contenders.values())
        assert ours["label"] == theirs["label"], text
        assert abs(ours["score"] - theirs["score"]) < TOLERANCE, text
    timed = []
    for _ in range(rounds):
        for tokens, kind in product(LENGTHS, KINDS):
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for call, text in enumerate(sources.texts(kind, tokens, UNTIMED + calls)):
                # Each contender goes first in every other call.
                for name, predict in list(contenders.items())[:: 1 if call % 2 else -1]:
                    begin = time.perf_counter()
                    predict(text)
                    times[name].append(time.perf_counter() - begin)
            medians = {name: float(np.median(seconds[UNTIMED:])) * 1e6 for name, seconds in times.items()}
            timed.append((tokens, kind, medians))
    return timed


class TextSource:
    """Makes texts of an exact number of tokens from the words of hasten's sample."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        words = dict.fromkeys(" ".join(sample_texts()).split())
        self.words = [word for word in words if word.isascii() and word.isalpha()]
        self._tokenizer, self._random, self._number = tokenizer, random.Random(0), count()

    def texts(self, kind: str, tokens: int, n: int) -> list[str]:
        """Return `n` times a text, new texts, or texts whose words are all new."""
        if kind == REPEATED:
            return [self._text(random.Random(tokens), tokens, "")] * n
        return [
            self._text(self._random, tokens, str(next(self._number)) if kind == NEW_WORDS else "") for _ in range(n)
        ]

    def _text(self, source: random.Random, tokens: int, suffix: str) -> str:
        words, left = [], tokens - self._tokenizer.num_special_tokens_to_add(False)
        while left > 0:
            word = source.choice(self.words) + suffix
            size = len(self._tokenizer.encode(word, add_special_tokens=False))
            if size > left:
                word, size = source.choice(ascii_lowercase), 1
            words.append(word)
            left -= size
        return " ".join(words)


def summary(model: str, tokens: int, kind: str, medians: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the medians over rounds, and the difference with its bootstrap interval of 95 %."""
    differences = np.array([each["hasten"] - each["thirty_lines"] for each in medians])
    picks = np.random.default_rng(0).integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.percentile(np.median(differences[picks], axis=1), (2.5, 97.5))
    return {
        "model": model,
        "tokens": tokens,
        "texts": kind,
        "hasten_us": float(np.median([each["hasten"] for each in medians])),
        "thirty_lines_us": float(np.median([each["thirty_lines"] for each in medians])),
        "difference_us": {"value": float(np.median(differences)), "low": float(low), "high": float(high)},
    }


if __name__ == "__main__":
    main()
