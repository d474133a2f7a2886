"""Measure the memory of a server on texts of all lengths, with a memory limit and without one.

    python benchmarks/serving/memory.py --bundle DIR [--limit 384MB] [--variants NAME …]

DIR holds a bundle of embeddings. Clients send batches of texts of every length from one token to the model's limit, in
random order; the resident memory of the server is sampled meanwhile, and its peak is read from the system. Servers
with and without the limit alternate, so that their throughput can be compared. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from clients import closed_loop
from contenders import Contender, RunningServer, hasten_server
from environments import provenance
from http_requests import json_format, post

from hasten.bundle import Bundle, open_bundle
from hasten.server.settings import OPTIONS

HERE = Path(__file__).parent
CLIENTS, TEXTS = 8, 16
VARIANTS = ("onnxruntime-fp32", "openvino-bf16")


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--limit", default="512MB", help="memory limit of the server, as 512MB")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=1, help="sessions of every server")
    parser.add_argument("--step", type=int, default=1, help="send every N-th length only")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_memory.json")
    args = parser.parse_args()
    bundle = open_bundle(args.bundle)
    longest = bundle.tokenizer().spec.max_length
    results: dict[str, Any] = {
        **provenance(),
        "limit_bytes": OPTIONS["max_memory"].read(args.limit),
        "clients": CLIENTS,
        "texts_per_request": TEXTS,
        "rounds": args.rounds,
        "step": args.step,
        "instances": args.instances,
        "longest": longest,
        "variants": {},
    }
    for variant in args.variants:
        rows: dict[str, list[dict[str, Any]]] = {"limited": [], "unlimited": []}
        for number in range(args.rounds):
            for name, options in (("limited", ("--max-memory", args.limit)), ("unlimited", ())):
                options = ("--instances", str(args.instances), *options)
                rows[name].append(measure(args.bundle, variant, options, longest, args.step, number))
                print(f"{variant} {name}: {rows[name][-1]}", flush=True)
        results["variants"][variant] = rows
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def measure(bundle: Path, variant: str, options: Sequence[str], longest: int, step: int, seed: int) -> dict[str, Any]:
    """Send all lengths to a new server and return its memory, its throughput and the failed requests."""
    with RunningServer(embedding_server(bundle, variant, options)) as server:
        start = server.memory_bytes()
        samples: list[int] = []
        answers = closed_loop(
            server.port,
            requests(open_bundle(bundle), longest, step, seed),
            clients=CLIENTS,
            on_answer=lambda *_: samples.append(server.memory_bytes()),
        )
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return {
            "ready_bytes": start,
            "peak_bytes": int(status.partition("VmHWM:")[2].split()[0]) * 1024,
            "end_bytes": samples[-1],
            "texts_per_second": answers.per_second * TEXTS,
            "p99_ms": answers.percentile_ms(99),
            "requests": len(answers.indices),
            "errors": [[code, body.decode(errors="replace")[:200]] for code, body in answers.errors],
        }


def embedding_server(bundle: Path, variant: str, options: Sequence[str]) -> Contender:
    """Return a server of the bundle; it is asked directly, so the labels of its format do not matter."""
    contender = hasten_server(bundle, [], "--variant", variant, "--no-grpc", *options)
    return Contender(contender.name, contender.command, json_format(), contender.ready_path)


def requests(bundle: Bundle, longest: int, step: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield one request per length: texts of that many tokens, the special tokens included."""
    special = len(bundle.tokenizer().encode([""]).batch.values["input_ids"])
    lengths = list(range(special + 1, longest + 1, step))
    random.Random(seed).shuffle(lengths)
    for length in lengths:
        body = json.dumps({"inputs": ["a " * (length - special)] * TEXTS}).encode()
        yield length, post("/predict", body, "content-type: application/json")


if __name__ == "__main__":
    main()
