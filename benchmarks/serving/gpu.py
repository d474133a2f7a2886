"""Text in, answer out, over HTTP, on a GPU: a lone client at 16 and 128 tokens, then 32 clients with mixed texts.

    python benchmarks/serving/gpu.py [--model DIR] [--bundle DIR] [--variant fused-fp16@cuda]

DIR of a text classifier as Hugging Face saves it; without one, a model of MiniLM-L6's size with random weights and a
vocabulary of a few words is made here: what it answers means nothing, what it takes does. The same work in process
takes turns with the server, so that what is left between the two is the server. The lone client repeats one text, whose
words the server knows by then; once more with one word that is new each time. Where there is no GPU, --variant
onnxruntime-fp32 shows that it runs. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from clients import closed_loop
from contenders import Running, hasten
from environments import commit
from latency import UNTIMED, WORDS, Http, Lane, ask_each, text_of
from wire import by_json

import hasten as ours
from hasten.bundle import Bundle, open_bundle
from hasten.core.hardware import this_machine
from hasten.core.plan import Keep

HERE = Path(__file__).parent
# p50 in ms, by the tokens of the text.
ASKED = {16: 0.9, 128: 1.1}
MINI = {
    "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "max_position_embeddings": 512,
}  # fmt: skip
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BINARY, JSON, NEW, WITHOUT = "HTTP binary", "HTTP JSON", "HTTP JSON, a new word", "in process"
# Of the mixed texts: most as short as a sentence, some as long as a model takes.
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 30, 0.9, 500
WARM = 200
_TOLD = """
grpcio httptools msgspec numpy nvidia-ml-py onnxruntime tokenizers torch transformers triton uvloop
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a text classifier (default: random weights of MiniLM-L6's size)")
    parser.add_argument("--bundle", type=Path, help="of a text classifier, instead of building one")
    parser.add_argument("--variant", default="fused-fp16@cuda")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=300, help="a turn")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of mixed traffic")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_gpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = args.bundle or built(args.model or made(Path(work, "model")), args.variant, Path(work, "bundle"))
        results = measured(bundle, args)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def made(folder: Path) -> Path:
    """A classifier whose vocabulary has the words that it is asked about; all others are unknown."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**MINI, num_labels=2))
    model.save_pretrained(folder)
    pieces = dict.fromkeys([*SPECIAL, *WORDS.split()])
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **names)
    tokenizer.save_pretrained(folder)
    return folder


def built(model: Path, variant: str, folder: Path) -> Path:
    """Proven on a few rows: with random weights there is little to prove, and nothing to choose between."""
    rows = folder.with_suffix(".jsonl")
    words = WORDS.split()
    texts = [" ".join((words * 8)[place : place + 2 + 3 * place]) for place in range(32)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"batch_size": (1, 4, 8), "seq_len": (16, 64, 128)}
    ours.build(model, folder, variants=(variant,), data=rows, keep=Keep.ALL, bench_budget_s=1.0, **sizes)
    return folder


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    bundle = open_bundle(path)
    contender = hasten(path, list(bundle.manifest.task.labels), "--variant", args.variant, "--no-grpc")
    with Running(contender) as server:
        lanes = [row for tokens in ASKED for row in alone(server, bundle, tokens, args)]
        mixed = crowd(server, bundle, args.clients, args.seconds)
        log = [line for line in server.log().splitlines() if "ready" in line]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": this_machine(),
        "versions": dict(_versions()),
        "model": str(args.model or args.bundle or "random weights of MiniLM-L6's size"),
        "variant": args.variant,
        "ready_s": server.ready_s,
        "log": log,
        "turns": args.turns,
        "requests": args.requests,
        "alone": lanes,
        "mixed": mixed,
    }


def alone(server: Running, bundle: Bundle, tokens: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One client that waits for each answer, on a connection it keeps."""
    text = text_of(bundle.path, tokens)
    binary, plain = server.contender.question.request(text), by_json().request(text)
    lanes: list[Lane] = [
        Http(BINARY, WITHOUT, server.port, binary),
        Http(JSON, WITHOUT, server.port, plain),
        _NewWords(server.port, text),
    ]
    times: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        lanes.append(stack.enter_context(work_alone(bundle, args.variant, text)))
        for lane in lanes:
            lane.time(WARM)
        for turn in range(args.turns):
            for place in np.roll(np.arange(len(lanes)), turn):
                times.setdefault(lanes[place].name, []).append(lanes[place].time(args.requests))
    base = np.median(times[WITHOUT], axis=1)
    for name, turns in times.items():
        whole = np.concatenate(turns) * 1e3
        yield {
            "tokens": tokens,
            "lane": name,
            "p50_ms": float(np.median(whole)),
            "p99_ms": float(np.percentile(whole, 99)),
            "added_ms": float(np.median(np.median(turns, axis=1) - base)) * 1e3,
            "asked_ms": ASKED[tokens] if name in (BINARY, JSON) else None,
            "turn_medians_ms": (np.median(turns, axis=1) * 1e3).tolist(),
        }


class _NewWords:
    """The last word of the text is another one each time, and of about as many tokens."""

    name, base = NEW, WITHOUT

    def __init__(self, port: int, text: str) -> None:
        self._port, self._numbers = port, count(10_000)
        self._rest = text.split()[:-1]

    def time(self, requests: int) -> list[float]:
        texts = [" ".join([*self._rest, f"{next(self._numbers)}"]) for _ in range(UNTIMED + requests)]
        return ask_each(self._port, [by_json().request(text) for text in texts])[UNTIMED:]


class _Work:
    """The same without a server, in a process of its own."""

    name = base = WITHOUT

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def time(self, requests: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))


@contextmanager
def work_alone(bundle: Bundle, variant: str, text: str) -> Iterator[_Work]:
    words = [sys.executable, str(HERE / "in_process.py"), str(bundle.path), variant, "1", text]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().split()[:1] != ["ready"]:
            raise SystemExit("the work in process did not start")
        yield _Work(process)
        process.communicate()


def crowd(server: Running, bundle: Bundle, clients: int, seconds: float) -> dict[str, Any]:
    """Texts of all lengths, from clients that each wait for their answers."""
    random = np.random.default_rng(0)
    longest = min(MOST_TOKENS, bundle.manifest.tokenizer.max_length)
    counts = np.clip(random.lognormal(np.log(MEDIAN_TOKENS), SPREAD, 4096), 3, longest).astype(int)
    words = WORDS.split()
    texts = [" ".join(random.choice(words, count - 2)) for count in counts]
    request = server.contender.question.request

    def requests() -> Iterator[tuple[int, bytes]]:
        while True:
            yield from ((place, request(text)) for place, text in enumerate(texts))

    stream = requests()
    # What is new to the server the first time is not what it is about.
    closed_loop(server.port, stream, clients=clients, seconds=min(3.0, seconds))
    before, begin = server.counters(), time.perf_counter()
    answers = closed_loop(server.port, stream, clients=clients, seconds=seconds)
    elapsed = time.perf_counter() - begin
    spent = {name: value - before.get(name, 0.0) for name, value in server.counters().items()}
    if answers.bad:
        raise SystemExit(f"the server answers {answers.bad[0]}")
    tokens, padding = spent["hasten_tokens_total"], spent["hasten_padding_tokens_total"]
    return {
        "clients": clients,
        "per_second": answers.per_second,
        "tokens_per_second": tokens / elapsed,
        "p50_ms": answers.percentile_ms(50),
        "p99_ms": answers.percentile_ms(99),
        "client_share": answers.client_share,
        "rows_per_batch": spent["hasten_batch_rows_sum"] / spent["hasten_batch_rows_count"],
        "padding": padding / (tokens + padding),
        "compute_share": spent["hasten_compute_seconds_sum"] / elapsed,
        "gpu": {name: value for name, value in server.counters().items() if name.startswith("hasten_gpu")},
    }


def report(results: dict[str, Any]) -> None:
    print(f"{results['variant']}, ready after {results['ready_s']:.1f} s")
    print(*results["log"], sep="\n")
    for row in results["alone"]:
        asked = row["asked_ms"]
        verdict = "" if asked is None else f"  asked ≤ {asked} ms: {'met' if row['p50_ms'] <= asked else 'NOT met'}"
        shown = f"p50 {row['p50_ms']:.3f} ms  p99 {row['p99_ms']:.3f} ms  added {row['added_ms']:.3f} ms"
        print(f"{row['tokens']:>4} tokens, {row['lane']:<21} {shown}{verdict}")
    mixed = results["mixed"]
    print(
        f"{mixed['clients']} clients, all lengths: {mixed['per_second']:.0f} answers and"
        f" {mixed['tokens_per_second']:.0f} tokens a second, p50 {mixed['p50_ms']:.2f} ms,"
        f" p99 {mixed['p99_ms']:.2f} ms, {mixed['rows_per_batch']:.1f} rows a batch, padding {mixed['padding']:.1%},"
        f" sessions busy {mixed['compute_share']:.2f}, the clients themselves {mixed['client_share']:.2f}"
    )


def _versions() -> Iterator[tuple[str, str]]:
    for name in _TOLD.split():
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    main()
