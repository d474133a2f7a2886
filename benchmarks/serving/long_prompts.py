"""Measure how long running streams wait while `hasten serve` prefills a long prompt.

    python benchmarks/serving/long_prompts.py --bundle DIR [--variants VARIANT …] [-o FILE]

DIR of a generative bundle. Three clients stream completions without a pause (server-sent events). After a while without
other requests, a prompt of 1,031 tokens arrives, later one of 4,031. Reported are the longest time between two text
deltas of any of the three streams, without the long prompt and from its arrival to its last token, and the time to the
first token of the long prompt. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from contenders import Contender, RunningServer
from environments import provenance_with_versions
from http_requests import json_format

from hasten.bundle import open_bundle

RESULTS = Path(__file__).parents[1] / "results"
STREAMS, PROMPT_TOKENS, LONG_TOKENS = 3, (1031, 4031), 8
STREAM_TOKENS, ALONE_S = 400, 3.0
# The longest gap that is asked for, in seconds.
TARGET_S = 0.3
TEXT = "The lighthouse keeper walked along the beach every morning and wrote down what the sea had brought. "


class Stream:
    """A client that streams one completion after another and records when each text delta arrives."""

    def __init__(self, port: int, model: str, prompt: list[int]) -> None:
        self._port, self._model, self._prompt = port, model, prompt
        # The begin and the end of every wait between two deltas of one completion.
        self.gaps: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_over = False
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether its thread is alive."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the current delta."""
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            previous: float | None = None
            for now in deltas(self._port, self._model, self._prompt, STREAM_TOKENS):
                if previous is not None:
                    self.gaps.append((previous, now))
                previous = now
                if self._is_over:
                    return


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle of a generative model")
    parser.add_argument("--variants", nargs="+", default=["onnxruntime-fp32", "onnxruntime-int8"])
    parser.add_argument("--repeats", type=int, default=2, help="arrivals of each long prompt")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "serving_long_prompts.json")
    args = parser.parse_args()
    rows = [row for variant in args.variants for row in measure(args.bundle, variant, args.repeats)]
    results = provenance_with_versions({"hasten": sys.executable}) | {
        "model": "SmolLM2-135M-Instruct",
        "streams": STREAMS,
        "target_s": TARGET_S,
        "rows": rows,
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    for row in rows:
        is_met = row["longest_gap_s"] <= TARGET_S
        print(f"{row}; target ≤ {TARGET_S} s: {'met' if is_met else 'NOT met'}")


def measure(folder: Path, variant: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per length of the long prompt."""
    bundle = open_bundle(folder)
    ids = bundle.tokenizer().encode([TEXT * 300]).batch.values["input_ids"].tolist()
    name = folder.resolve().name
    arguments = ("serve", str(folder), "--variant", variant, "--port", "{port}", "--grpc-port", "{grpc}")
    server = Contender("hasten", (sys.executable, "-m", "hasten", *arguments), json_format(), "/v2/health/ready")
    with RunningServer(server) as running:
        rows = [measure_length(running.port, name, ids, length, repeats) for length in PROMPT_TOKENS]
    return [{"variant": variant, **row} for row in rows]


def measure_length(port: int, model: str, ids: list[int], length: int, repeats: int) -> dict[str, Any]:
    """Let a prompt of this length arrive several times beside running streams; return the waits."""
    runs = []
    for _ in range(repeats):
        streams = [Stream(port, model, ids[index : index + 20]) for index in range(STREAMS)]
        while not all(stream.gaps for stream in streams):
            if not all(stream.is_running for stream in streams):
                raise SystemExit("error: a stream has failed")
            time.sleep(0.01)
        begin = time.perf_counter()
        time.sleep(ALONE_S)
        sent = time.perf_counter()
        arrivals = list(deltas(port, model, ids[:length], LONG_TOKENS))
        end = time.perf_counter()
        time.sleep(0.5)  # until the waits that the long prompt has caused are over
        for stream in streams:
            stream.stop()
        gaps = [gap for stream in streams for gap in stream.gaps]
        alone = [until - since for since, until in gaps if since >= begin and until <= sent]
        beside = [until - since for since, until in gaps if until > sent and since < end]
        runs.append(
            {
                "time_to_first_token_s": round(arrivals[0] - sent, 3),
                "longest_gap_s": round(max(beside), 3),
                "median_gap_s": round(median(beside), 4),
                "longest_gap_alone_s": round(max(alone), 3),
                "median_gap_alone_s": round(median(alone), 4),
            }
        )
    return {
        "prompt_tokens": length,
        "longest_gap_s": max(run["longest_gap_s"] for run in runs),
        "longest_gap_alone_s": max(run["longest_gap_alone_s"] for run in runs),
        "median_gap_s": median(run["median_gap_s"] for run in runs),
        "median_gap_alone_s": median(run["median_gap_alone_s"] for run in runs),
        "time_to_first_token_s": median(run["time_to_first_token_s"] for run in runs),
        "runs": runs,
    }


def deltas(port: int, model: str, prompt: list[int], tokens: int) -> Iterator[float]:
    """Stream a greedy completion of up to this many tokens; yield the time of every text delta."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"error: {response.read()!r}")
    try:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                yield time.perf_counter()
    finally:
        connection.close()


if __name__ == "__main__":
    main()
