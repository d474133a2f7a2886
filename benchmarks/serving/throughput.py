"""Measure throughput under mixed traffic: 32 clients, SST-2 sentences and long reviews, every server in turn.

    python benchmarks/serving/throughput.py --model DIR --data sst2_validation.jsonl [--bundle DIR] [--reviews FILE]
        [--peers ENV] [--triton ENV]

One server runs at a time; rounds alternate between them. The accuracy of each on the labelled sentences is measured
first. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from clients import closed_loop
from contenders import (
    Contender,
    RunningServer,
    ServedModel,
    all_peers,
    build_unless_given,
    export_stock_graph,
    hasten_server,
    peer_server,
    variant_names,
)
from environments import peers_python, provenance_with_versions, triton_python
from traffic import Traffic, read_traffic, traffic_parser

from hasten.metrics.statistics import median_ratio

TARGET_RATIO, TARGET_PADDING = 1.5, 0.05
CHOSEN, FP32 = "hasten", "hasten, fp32"
# In the name of peers that run hasten's graph.
HASTEN_GRAPH = "our graph"


def main() -> None:
    """Run the study, write its result file and print a summary."""
    args = traffic_parser(__doc__, "serving_throughput.json").parse_args()
    pythons = {"hasten": sys.executable, "peers": peers_python(args.peers), "triton": triton_python(args.triton)}
    traffic = read_traffic(args.data, args.reviews)
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = build_unless_given(args.model, args.bundle, Path(work))
        stock_graph = export_stock_graph(pythons["peers"], args.model, Path(work))
        model = ServedModel(args.model, stock_graph, bundle, pythons["peers"], pythons["triton"])
        contenders = [each for each in all_contenders(model) if args.only in each.name or "hasten" in each.name]
        rows: dict[str, dict[str, Any]] = {}
        for number in range(args.rounds):
            for contender in contenders:
                row = rows.setdefault(contender.name, {"rounds": []})
                with RunningServer(contender) as server:
                    if number == 0:
                        row["judged"] = measure_accuracy(server, traffic, args.rows)
                    row["rounds"].append(measure_round(server, traffic, args, seed=number))
                print(f"{contender.name:<32} {row['rounds'][-1]['per_second']:7.1f}/s", file=sys.stderr)
    results = provenance_with_versions(pythons) | {
        "bundle": variant_names(bundle),
        "clients": args.clients,
        "share_of_long_texts": args.share,
        "long_texts": traffic.source,
        "seconds": args.seconds,
        "contenders": rows,
        **ratios(rows),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def all_contenders(model: ServedModel) -> Iterator[Contender]:
    """Yield hasten with its chosen variant and in fp32, all peers, and FastAPI with hasten's graph."""
    graph, _ = model.best_graph()
    yield hasten_server(model.bundle, model.labels, name=CHOSEN)
    yield hasten_server(model.bundle, model.labels, "--variant", "onnxruntime-fp32", name=FP32)
    yield from all_peers(model, model.graph, "ONNX Runtime fp32")
    yield peer_server(model, "fastapi_onnxruntime.py", graph, f"FastAPI, {HASTEN_GRAPH}")


def measure_accuracy(server: RunningServer, traffic: Traffic, rows: int | None) -> dict[str, Any]:
    """Return the accuracy on the labelled sentences, asked by eight clients at once."""
    request_format, labels = server.contender.format, traffic.labels[:rows]
    predicted: dict[int, str] = {}
    requests = ((index, request_format.request(traffic.texts[index])) for index in range(len(labels)))

    def on_answer(index: int, head: bytes, body: bytes) -> None:
        predicted[index] = request_format.label(head, body)

    answers = closed_loop(server.port, requests, clients=8, on_answer=on_answer)
    if answers.errors:
        raise SystemExit(f"{server.contender.name} answers {answers.errors[0]}")
    correct = sum(predicted[index] == label for index, label in enumerate(labels))
    return {"accuracy": correct / len(labels), "rows": len(labels)}


def measure_round(server: RunningServer, traffic: Traffic, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Warm the server up, then return throughput, latency and hasten's batching metrics."""
    request = server.contender.format.request
    requests = ((index, request(traffic.texts[index])) for index in traffic.stream(args.share, seed))
    closed_loop(server.port, requests, clients=args.clients, seconds=min(2.0, args.seconds))
    before = server.counters()
    answers = closed_loop(server.port, requests, clients=args.clients, seconds=args.seconds)
    row: dict[str, Any] = {
        "per_second": answers.per_second,
        "p50_ms": answers.percentile_ms(50),
        "p99_ms": answers.percentile_ms(99),
        "answers": len(answers.indices),
        "errors": len(answers.errors),
        "client_share": answers.client_share,
    }
    if before:
        spent = {name: value - before[name] for name, value in server.counters().items()}
        padding, tokens = spent["hasten_padding_tokens_total"], spent["hasten_prompt_tokens_total"]
        row["padding"] = padding / (tokens + padding)
        row["rows_per_batch"] = spent["hasten_batch_rows_sum"] / spent["hasten_batch_rows_count"]
        row["queue_ms"] = spent["hasten_queue_seconds_sum"] / len(answers.indices) * 1e3
        row["compute_share"] = spent["hasten_compute_seconds_sum"] / answers.elapsed_s
    return row


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return hasten's throughput over the best peer with the stock graph and the best with hasten's graph."""
    rates = {name: np.array([each["per_second"] for each in row["rounds"]]) for name, row in rows.items()}
    peers = {name: float(np.median(rate)) for name, rate in rates.items() if not name.startswith("hasten")}
    with_stock_graph = {name: rate for name, rate in peers.items() if HASTEN_GRAPH not in name}
    with_hasten_graph = {name: rate for name, rate in peers.items() if HASTEN_GRAPH in name}
    groups = (with_stock_graph, with_hasten_graph)
    best = [max(group, key=lambda name: group[name]) for group in groups if group]
    # median_ratio compares times, so rates are inverted.
    return {
        "ratios": [
            {"ours": ours, "peer": name, "ratio": median_ratio(1 / rates[name], 1 / rates[ours])}
            for name in best
            for ours in (CHOSEN, FP32)
        ]
    }


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results beside the targets."""
    for row in results["ratios"]:
        ratio = row["ratio"]
        verdict = "met" if ratio["value"] >= TARGET_RATIO else "NOT met"
        interval = f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"
        print(f"{row['ours']}: {interval} of {row['peer']}; target ≥ {TARGET_RATIO}×: {verdict}")
    print(f"{'':<44}{'requests/s':>11}{'p50':>11}{'p99':>11}{'accuracy':>10}  errors")
    rows = results["contenders"].items()
    for name, row in sorted(rows, key=lambda pair: -_median(pair[1], "per_second")):
        errors = sum(each["errors"] for each in row["rounds"])
        rate, p50, p99 = (_median(row, key) for key in ("per_second", "p50_ms", "p99_ms"))
        print(f"{name:<44}{rate:11.1f}{p50:8.1f} ms{p99:8.1f} ms{row['judged']['accuracy']:10.4f}  {errors}")
        if "padding" in row["rounds"][0]:
            padding = _median(row, "padding")
            verdict = "met" if padding <= TARGET_PADDING else "NOT met"
            print(
                f"  padding {padding:.2%} (target ≤ {TARGET_PADDING:.0%}: {verdict}), "
                f"{_median(row, 'rows_per_batch'):.1f} rows/batch, sessions busy {_median(row, 'compute_share'):.2f}"
            )


def _median(row: dict[str, Any], name: str) -> float:
    return float(np.median([each[name] for each in row["rounds"]]))


if __name__ == "__main__":
    main()
