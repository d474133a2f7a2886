"""Measure texts/s of `hasten.load(bundle)(texts)` on a GPU, beside transformers, and the stages before readiness.

    python benchmarks/gpu_throughput.py --tokenizer FILE [--only MiniLM-L6 …] [--skip startup …]
    python benchmarks/gpu_throughput.py --tokenizer FILE --device cpu    # tests the script; times mean nothing

FILE is the `tokenizer.json` of a BERT model. Models are text classifiers of the named sizes with random weights, good
for speed only. Texts are new in every round: half of them sentences, half paragraphs, 92 tokens on average, a quarter
of their words ones that the tokenizer has to split.

- Logits are first compared with transformers in fp32: a relative error above 1e-2 ends the run.
- `hasten`: one call with all texts, after a warm-up call. `tokenizer`: the same texts without a model, in chunks on
  one to four threads. `session`: batches that are already tokenized. They bound what a call can reach.
- transformers runs fp16 (fp32 on the CPU) in batches of 64 texts sorted by length, with tokenization and without. All
  batches run once before they are timed: on a GPU, attention takes about 70 ms to plan for each new length.
- Utilization is the mean of NVIDIA's gauge, sampled during the longest call.
- `startup`: a new process, step by step (`startup_stages.py`). `serve`: seconds until `hasten serve` is ready, and its
  log, twice: the first start measures how many sessions to run.

Nothing else may run on the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parent / "serving"))

from contenders import RunningServer, hasten_server

import hasten
from hasten.backends import SupportsPipelining
from hasten.core.system.map_ahead import map_ahead
from hasten.predictor import Predictor
from hasten.server.telemetry.nvml import GpuReadings
from provenance import provenance, require_gpu, run_main

HERE = Path(__file__).parent
_SHARED = {"vocab_size": 30522, "max_position_embeddings": 512, "num_attention_heads": 12}
CONFIGS = {
    "MiniLM-L6": _SHARED | {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "BERT-base": _SHARED | {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
TINY = {"tiny": _SHARED | {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 96}}
# Texts/s with 8,192 texts in one call.
TARGETS = {"MiniLM-L6": 30_000, "BERT-base": 24_000}
PARTS = ("tokenizer", "session", "transformers", "startup", "serve")
# Tokens of sentences and of paragraphs, special tokens included: uniform, 92 on average.
SENTENCE_TOKENS, PARAGRAPH_TOKENS = (10, 46), (90, 222)
_POOL_WORDS, _SPLIT_SHARE = 40_000, 0.25
_MAX_ERROR = 1e-2
_CHECKED_TEXTS, _CHUNK_TEXTS, _PEER_BATCH = 2048, 1024, 64
_SAMPLE_S = 0.05
_BEGIN = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes of a run: on a GPU those of the study, on the CPU those of a test of this script."""

    device: str
    variant: str
    configs: dict[str, dict[str, int]]
    counts: tuple[int, ...]
    checked: int
    rounds: int


GPU = Setup("cuda", "fused-fp16@cuda", CONFIGS, (8192, 65_536), _CHECKED_TEXTS, 3)
CPU = Setup("cpu", "onnxruntime-fp32", TINY, (512, 5000), 256, 1)


def main() -> None:
    """Measure each model; write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of a BERT model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS), help="models (default: all)")
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--work", type=Path, help="directory that keeps the bundles (default: a temporary one)")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "gpu_throughput.json")
    args = parser.parse_args()
    setup = GPU if args.device == "cuda" else CPU
    if setup is GPU:
        require_gpu()
    results: dict[str, Any] = {**provenance(), "variant": setup.variant, "models": {}}
    texts = Texts(args.tokenizer)
    with tempfile.TemporaryDirectory(prefix="hasten-throughput-") as temporary:
        for name in args.only if setup is GPU and args.only else setup.configs:
            folder = (args.work or Path(temporary)) / name
            results["models"][name] = measure(name, setup, texts, folder, args)
            args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def log(message: str) -> None:
    """Print a message with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {message}", flush=True)


def measure(name: str, setup: Setup, texts: Texts, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build a model, check its logits, and measure all parts."""
    model, bundle = folder / "model", folder / "bundle"
    if not bundle.exists():
        make_model(setup.configs[name], args.tokenizer, model)
        build(model, bundle, setup.variant, texts)
    log(f"{name}: built")
    row: dict[str, Any] = {}
    with hasten.load(bundle, setup.variant) as predictor:
        assert isinstance(predictor, Predictor)
        peer = Peer(model, setup.device)
        row["error"] = check(predictor, peer, texts.take(setup.checked))
        log(f"{name}: relative error of the logits {row['error']:.1e}")
        row["hasten"] = list(time_calls(predictor, setup, texts, TARGETS.get(name)))
        if "tokenizer" not in args.skip:
            row["tokenizer"] = time_tokenizer(predictor, texts.take(setup.counts[0]))
        if "session" not in args.skip and isinstance(predictor.session, SupportsPipelining):
            row["session_per_second"] = time_session(predictor, predictor.session, texts.take(setup.counts[0]))
        if "transformers" not in args.skip:
            row["transformers"] = peer.time(texts.take(setup.counts[0]))
    if "startup" not in args.skip:
        row["startup"] = startup_stages(bundle, setup.variant, texts)
    if "serve" not in args.skip:
        row["serve"] = [serve(bundle, setup.variant) for _ in range(2)]
    return row


class Texts:
    """Texts of words from a vocabulary, and of such words with an ending, which the tokenizer splits."""

    def __init__(self, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        tokenizer.no_padding()
        # Sorted, since the order of the vocabulary differs between processes.
        pieces = sorted(piece for piece in tokenizer.get_vocab() if piece.removeprefix("##").isalpha())
        stems = [piece for piece in pieces if not piece.startswith("##") and piece.isascii() and len(piece) > 2]
        endings = [piece.removeprefix("##") for piece in pieces if piece.startswith("##") and piece.isascii()]
        self._random = np.random.default_rng(0)
        words = self._random.choice(stems, _POOL_WORDS).tolist()
        split = int(_SPLIT_SHARE * _POOL_WORDS)
        words[:split] = map("".join, zip(words[:split], self._random.choice(endings, split).tolist(), strict=True))
        encodings = tokenizer.encode_batch(words, add_special_tokens=False)
        self._words = np.array(words, dtype=object)
        self._tokens_per_word = sum(len(encoding.ids) for encoding in encodings) / len(words)

    def take(self, count: int) -> list[str]:
        """Return this many texts that were not returned before, sentences and paragraphs in turn."""
        bounds = np.array([SENTENCE_TOKENS, PARAGRAPH_TOKENS])[np.arange(count) % 2]
        tokens = self._random.integers(bounds[:, 0], bounds[:, 1]) - 2
        sizes = np.maximum(1, np.round(tokens / self._tokens_per_word)).astype(int)
        words = self._words[self._random.integers(0, len(self._words), int(sizes.sum()))].tolist()
        ends = np.cumsum(sizes).tolist()
        return [" ".join(words[end - size : end]) for size, end in zip(sizes.tolist(), ends, strict=True)]


def make_model(config: dict[str, int], tokenizer_file: Path, folder: Path) -> None:
    """Save a classifier with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertForSequenceClassification(transformers.BertConfig(**config, num_labels=2)).save_pretrained(folder)
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), model_max_length=512, **names)
    tokenizer.save_pretrained(folder)


def build(model: Path, folder: Path, variant: str, texts: Texts) -> None:
    """Build one variant, verified on a few rows: with random weights there is little to verify."""
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.take(32)))
    hasten.build(
        model, folder, variants=(variant,), data=rows, keep="all", bench_budget_s=1.0,
        batch_size=(1, 4, 8), seq_len=(16, 64, 128),
    )  # fmt: skip


def check(predictor: Predictor, peer: Peer, texts: Sequence[str]) -> float:
    """Return the relative error of the logits of one call; exit if it is too large."""
    answers = predictor(list(texts), top_k=None, function_to_apply="none")
    logits = np.array([[label["score"] for label in sorted(row, key=lambda label: label["label"])] for row in answers])
    expected = peer.logits(texts, "float32")
    error = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
    if not error < _MAX_ERROR:
        raise SystemExit(f"error: the logits differ from those of transformers by {error:.2e}")
    return error


def time_calls(predictor: Predictor, setup: Setup, texts: Texts, target: int | None) -> Iterator[dict[str, Any]]:
    """Yield texts/s and tokens/s of calls with all texts, after one that is not timed."""
    predictor(texts.take(setup.counts[0]))
    for count in setup.counts:
        seconds, gauges = [], []
        for _ in range(setup.rounds if count == setup.counts[0] else 1):
            batch = texts.take(count)
            with sampled("utilization_ratio") as samples:
                seconds.append(timed(partial(predictor, batch)))
            gauges += samples
        tokens = predictor.tokenizer.encode(batch).batch.tokens
        row = {
            "texts": count,
            "tokens_per_text": tokens / count,
            "seconds": seconds,
            "texts_per_second": count / float(np.median(seconds)),
            "utilization": float(np.mean(gauges)) if gauges else None,
        }
        goal = f", target {target}" if target and count == setup.counts[0] else ""
        utilization = f", GPU {row['utilization']:.0%} busy" if row["utilization"] is not None else ""
        rate = f"{row['texts_per_second']:.0f} texts/s{goal}{utilization}"
        log(f"hasten, {count} texts of {tokens / count:.0f} tokens: {rate}")
        yield row


def time_tokenizer(predictor: Predictor, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return texts/s of the tokenizer alone by the number of threads that call it."""
    chunks = [texts[start : start + _CHUNK_TEXTS] for start in range(0, len(texts), _CHUNK_TEXTS)]
    encode = predictor.tokenizer.encode
    rows = [{"threads": 0, "chunk": len(texts), "texts_per_second": len(texts) / timed(lambda: encode(texts))}]
    for threads in range(5):
        run = partial(_encode_ahead, predictor, chunks, threads)
        seconds = min(timed(run) for _ in range(2))
        rows.append({"threads": threads, "chunk": _CHUNK_TEXTS, "texts_per_second": len(texts) / seconds})
    for row in rows:
        log(f"tokenizer, chunks of {row['chunk']}, {row['threads']} threads: {row['texts_per_second']:.0f} texts/s")
    return rows


def _encode_ahead(predictor: Predictor, chunks: Sequence[Sequence[str]], threads: int) -> None:
    for _ in map_ahead(predictor.tokenizer.encode, chunks, threads):
        pass


def time_session(predictor: Predictor, session: SupportsPipelining, texts: Sequence[str]) -> float:
    """Return texts/s of the session alone, on tokenized chunks."""
    chunks = [texts[start : start + _CHUNK_TEXTS] for start in range(0, len(texts), _CHUNK_TEXTS)]
    batches = [predictor.tokenizer.encode(chunk).batch for chunk in chunks]

    def run() -> None:
        with closing(session.run_many(batches)) as results:
            for _ in results:
                pass

    run()
    rate = len(texts) / min(timed(run) for _ in range(3))
    log(f"session alone: {rate:.0f} texts/s, {rate * sum(batch.tokens for batch in batches) / len(texts):.0f} tokens/s")
    return rate


class Peer:
    """transformers on the same weights."""

    def __init__(self, model: Path, device: str) -> None:
        import transformers

        self._device = device
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval().to(device)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def logits(self, texts: Sequence[str], dtype: str) -> Any:
        """Return the logits in the order of the texts."""
        import torch

        self._model.to(getattr(torch, dtype))
        return self._run(self._tokenize(texts))

    def time(self, texts: Sequence[str]) -> dict[str, float]:
        """Return texts/s with tokenization and without, after a pass over the same batches that is not timed."""
        self.logits(texts, "float16" if self._device == "cuda" else "float32")
        begin = time.perf_counter()
        rows = self._tokenize(texts)
        tokenized = time.perf_counter()
        self._run(rows)
        end = time.perf_counter()
        rates = {"texts_per_second": len(texts) / (end - begin), "from_ids": len(texts) / (end - tokenized)}
        log(f"transformers: {rates['texts_per_second']:.0f} texts/s, from token ids {rates['from_ids']:.0f}")
        return rates

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._tokenizer(list(texts), truncation=True)["input_ids"])

    def _run(self, rows: Sequence[Sequence[int]]) -> Any:
        import torch

        order = np.argsort([-len(row) for row in rows], kind="stable")
        parts = []
        with torch.inference_mode():
            for start in range(0, len(rows), _PEER_BATCH):
                batch = {"input_ids": [rows[index] for index in order[start : start + _PEER_BATCH]]}
                feeds = self._tokenizer.pad(batch, return_tensors="pt").to(self._device)
                parts.append(self._model(**feeds).logits)
            logits = torch.cat(parts).float().cpu().numpy()
        unsorted = np.empty_like(logits)
        unsorted[order] = logits
        return unsorted


def startup_stages(bundle: Path, variant: str, texts: Texts) -> dict[str, float]:
    """Return the seconds of each stage of a new process up to its first answers."""
    sentence, paragraph = texts.take(2)
    command = [sys.executable, str(HERE / "startup_stages.py"), str(bundle), variant, sentence, paragraph]
    begin = time.time()
    output = subprocess.run([*command, str(begin)], stdout=subprocess.PIPE, text=True, check=True).stdout
    stages = json.loads(output.splitlines()[-1])
    log("startup: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()))
    return dict(stages)


def serve(bundle: Path, variant: str) -> dict[str, Any]:
    """Return the seconds until `hasten serve` is ready, and its log."""
    with RunningServer(hasten_server(bundle, [], "--variant", variant, "--no-grpc")) as server:
        lines = server.log().splitlines()
        log(f"hasten serve: ready after {server.ready_s:.1f} s")
        print(*(f"    {line}" for line in lines), sep="\n", flush=True)
        return {"ready_s": server.ready_s, "log": lines}


@contextmanager
def sampled(gauge: str) -> Iterator[list[float]]:
    """Sample a gauge of the first GPU while the body runs; the list is complete at its end."""
    samples: list[float] = []
    readings, is_over = GpuReadings(), threading.Event()

    def sample() -> None:
        while len(readings) and not is_over.wait(_SAMPLE_S):
            samples.extend(value for index, value in readings.read(gauge) if index == 0)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    run_main(main)
