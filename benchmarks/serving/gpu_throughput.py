"""Measure how many texts per second servers answer over HTTP on a GPU, with one, few and many texts a request.

    python benchmarks/serving/gpu_throughput.py [--geometry MiniLM-L6 BERT-base] [--tokenizer FILE] [--workers 1 8]
        [--peers] [--device cpu]

Text classifiers with random weights and the vocabulary of FILE (the `tokenizer.json` of a BERT model) or a generated
one; good for speed only. Texts are unseen words, 92 tokens on average. Clients are closed-loop, in processes of their
own. Each configuration of hasten and each peer is started in turn, and its answers to a few texts are compared with
PyTorch's before it is measured. `--peers` adds FastAPI with the same session and batching loop in several uvicorn
workers, and LitServe, from this interpreter's environment. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from contenders import Contender, RunningServer, hasten_server
from environments import PEERS, provenance
from http_requests import json_format
from load_processes import Load, LoadProcesses
from peers.options import Options
from vocabulary import UnseenTexts

from gpu import MINILM_CONFIG, build, make_model
from hasten.bundle import open_bundle

HERE = Path(__file__).parent
GEOMETRIES = {
    "MiniLM-L6": MINILM_CONFIG,
    "BERT-base": MINILM_CONFIG | {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "one layer": MINILM_CONFIG
    | {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128},
}
# Texts a request, and clients.
CASES = ((1, 1), (1, 32), (1, 128), (32, 8), (256, 16))
WARM_UP_S = 2.0
# Buckets of a GPU are prepared in the background for some seconds after the server is ready.
SETTLE_S = 6.0
CHECKED_TEXTS = 16
# fp16 against PyTorch in fp32, of scores between 0 and 1.
SCORE_TOLERANCE = 5e-3
PEER_BATCH = 64
GPU_INTERVAL_MS = 100


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", default=["MiniLM-L6", "BERT-base"], choices=list(GEOMETRIES))
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: a generated one)")
    parser.add_argument("--variant", default="fused-fp16@cuda")
    parser.add_argument("--workers", nargs="+", default=["1", "auto"], help="values of hasten serve --workers")
    parser.add_argument("--options", default="", help="further options of hasten serve")
    parser.add_argument("--peers", action="store_true", help="measure FastAPI and LitServe too")
    parser.add_argument("--peer-workers", type=int, default=8, help="processes of each peer")
    parser.add_argument("--processes", type=int, default=3, help="processes of clients")
    parser.add_argument("--texts", type=int, default=48_000, help="different texts")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each case")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_gpu_throughput.json")
    args = parser.parse_args()
    results: dict[str, Any] = provenance() | {
        "variant": args.variant, "seconds": args.seconds, "client_processes": args.processes, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        for name in args.geometry:
            for row in measure(name, Path(work, name.replace(" ", "-")), args):
                results["rows"].append(row)
                args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def measure(name: str, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Build a model, and yield a row per server and case."""
    folder.mkdir()
    model = make_model(folder / "model", args.tokenizer, GEOMETRIES[name])
    bundle = build(model, args.variant, folder / "bundle")
    texts = UnseenTexts(open_bundle(bundle), seed=99).take([16, 40, 90, 200] * (CHECKED_TEXTS // 4))
    expected = reference_scores(model, texts)
    loads = LoadProcesses(bundle, args.processes, args.texts)
    for contender in contenders(bundle, args):
        with RunningServer(contender) as server:
            time.sleep(SETTLE_S)
            error = largest_error(server.port, texts, expected)
            if error > SCORE_TOLERANCE:
                raise SystemExit(f"{contender.name} answers wrongly: a score differs by {error:.2g}")
            for per_request, clients in CASES:
                loads.run(server.port, Load(per_request, clients, WARM_UP_S))
                before = server.counters()
                with GpuUtilization() as utilization:
                    answers = loads.run(server.port, Load(per_request, clients, args.seconds))
                spent = {key: value - before.get(key, 0.0) for key, value in server.counters().items()}
                batches = spent.get("hasten_batch_rows_count")
                row = {
                    "model": name, "server": contender.name, "ready_s": server.ready_s, "largest_error": error,
                    "texts_per_request": per_request, "clients": clients, **msgspec.to_builtins(answers),
                    "gpu_utilization": utilization.mean,
                    "rows_per_batch": spent["hasten_batch_rows_sum"] / batches if batches else None,
                }  # fmt: skip
                print(describe(row), flush=True)
                yield row
            print(*[line for line in server.log().splitlines() if "ready" in line or "prepared" in line], sep="\n")


def contenders(bundle: Path, args: argparse.Namespace) -> Iterator[Contender]:
    """Yield hasten with each number of workers, then the peers."""
    labels = list(open_bundle(bundle).manifest.task.labels)
    for workers in args.workers:
        options = ("--variant", args.variant, "--workers", workers, "--no-grpc", *args.options.split())
        yield hasten_server(bundle, labels, *options, name=f"hasten --workers {workers}")
    if args.peers:
        peer_options = Options(args.peer_workers, 1, PEER_BATCH)
        for name, file in (("FastAPI", "fastapi_bundle.py"), ("LitServe", "litserve_bundle.py")):
            command = (
                sys.executable,
                str(PEERS / file),
                str(bundle),
                args.variant,
                "{port}",
                *peer_options.arguments(),
            )
            yield Contender(name, command, json_format(), options=peer_options)


def reference_scores(model: Path, texts: Sequence[str]) -> list[dict[str, float]]:
    """Return the scores by label of each text in PyTorch, in fp32."""
    import torch
    import transformers

    network = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    scores = []
    for text in texts:
        with torch.no_grad():
            logits = network(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
        scores.append(dict(zip(network.config.id2label.values(), logits.softmax(-1).tolist(), strict=True)))
    return scores


def largest_error(port: int, texts: Sequence[str], expected: Sequence[dict[str, float]]) -> float:
    """Return the largest difference of a score, over texts sent alone and all at once."""
    url, headers = f"http://127.0.0.1:{port}/predict", {"content-type": "application/json"}

    def ask(inputs: object) -> Any:
        body = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
            return json.loads(response.read())

    answers = [*(ask(text)[0] for text in texts), *ask(list(texts))]
    pairs = zip(answers, [*expected, *expected], strict=True)
    return max(abs(answer["score"] - scores[answer["label"]]) for answer, scores in pairs)


class GpuUtilization:
    """Samples the utilization of the first GPU with nvidia-smi; the mean is None without one."""

    mean: float | None = None

    def __enter__(self) -> GpuUtilization:
        self._process: subprocess.Popen[str] | None = None
        query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0", f"-lms={GPU_INTERVAL_MS}"]
        with suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        self._lines: list[str] = []
        if self._process is not None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        # The first samples are of the time before the load.
        samples = [float(line) for line in self._lines[3:] if line.strip().isdigit()]
        self.mean = float(np.mean(samples)) / 100 if samples else None


def describe(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    gpu = "" if row["gpu_utilization"] is None else f"  GPU {row['gpu_utilization']:.0%}"
    batch = "" if row["rows_per_batch"] is None else f"  {row['rows_per_batch']:.1f} rows a batch"
    return (
        f"{row['model']:<10} {row['server']:<22} {row['texts_per_request']:>3} texts × {row['clients']:>3} clients: "
        f"{row['per_second']:7.0f} requests/s {row['texts_per_second']:7.0f} texts/s  p50 {row['p50_ms']:.2f} "
        f"p99 {row['p99_ms']:.2f} max {row['max_ms']:.0f} ms  fairness {row['fairness']:.2f}  "
        f"clients {row['client_cores']:.1f} cores{gpu}{batch}  ready {row['ready_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
