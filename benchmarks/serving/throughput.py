"""Measure throughput under mixed traffic: 32 clients, SST-2 sentences and long reviews, every server in turn.

    python benchmarks/serving/throughput.py --model DIR --data sst2_validation.jsonl [--bundle DIR] [--reviews FILE]
        [--peers ENV] [--triton ENV] [--tune]

`--tune` measures every configuration of every peer first and records them; without it, the configurations in the output
file are used. Each peer then runs in its best one. One server runs at a time; rounds alternate between them. The
accuracy of each on the labelled sentences is measured first. A bundle that was built with `--keep all` is served with
its chosen variant as well, if that is not the ONNX Runtime variant whose graph the peers get. Nothing else may run on
the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from clients import closed_loop
from contenders import (
    Contender,
    RunningServer,
    ServedModel,
    build_unless_given,
    export_stock_graph,
    hasten_server,
    variant_names,
)
from environments import peers_python, provenance_with_versions, triton_python
from peer_servers import ALL_PEERS, FASTAPI, Peer
from traffic import Traffic, read_traffic, traffic_parser
from tuning import best_options, tune

from hasten.metrics.statistics import median_ratio

TARGET_RATIO, TARGET_PADDING = 1.5, 0.05
# hasten with the variant whose graph the peers get, in fp32, and with the variant that its build chose, if another.
SAME_GRAPH, FP32, CHOSEN = "hasten", "hasten, fp32", "hasten, chosen variant"
STOCK_GRAPH = "ONNX Runtime fp32"
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
        peers = [peer for peer in ALL_PEERS if args.only in peer.name]
        tuning = tune(model, peers, STOCK_GRAPH, traffic, args) if args.tune else recorded_tuning(args.output)
        rows = measure_rounds(list(all_contenders(model, peers, tuning)), traffic, args)
    results = provenance_with_versions(pythons) | {
        "bundle": variant_names(bundle),
        "graph": model.best_graph()[1],
        "clients": args.clients,
        "share_of_long_texts": args.share,
        "long_texts": traffic.source,
        "seconds": args.seconds,
        "tuning": tuning,
        "contenders": rows,
        **ratios(rows),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def recorded_tuning(output: Path) -> dict[str, Any]:
    """Return the tuning of the peers from the output file of an earlier run."""
    tuning = json.loads(output.read_text()).get("tuning") if output.exists() else None
    if tuning is None:
        raise SystemExit(f"error: {output} has no tuning of the peers. Hint: run with --tune")
    recorded: dict[str, Any] = tuning
    return recorded


def all_contenders(model: ServedModel, peers: list[Peer], tuning: dict[str, Any]) -> Iterator[Contender]:
    """Yield hasten, all peers in their best configurations, and the two best of them with hasten's graph.

    FastAPI is always one of the two, since it is what most people write.
    """
    graph, variant = model.best_graph()
    yield hasten_server(model.bundle, model.labels, "--variant", variant, name=SAME_GRAPH)
    yield hasten_server(model.bundle, model.labels, "--variant", "onnxruntime-fp32", name=FP32)
    if variant_names(model.bundle)["chosen"] != variant:
        yield hasten_server(model.bundle, model.labels, name=CHOSEN)
    tuned: dict[Peer, tuple[Contender, float]] = {}
    for peer in peers:
        name = peer.row_name(STOCK_GRAPH)
        options, per_second = best_options(tuning, name)
        contender = peer.server(model, model.graph, STOCK_GRAPH, options)
        tuned[peer] = contender, per_second
        yield contender
    with_graph = [peer for peer in tuned if peer.has_graph and peer != FASTAPI]
    best = sorted(with_graph, key=lambda peer: -tuned[peer][1])[:1]
    for peer in [*([FASTAPI] if FASTAPI in tuned else []), *best]:
        yield peer.server(model, graph, HASTEN_GRAPH, best_options(tuning, peer.row_name(STOCK_GRAPH))[0])


def measure_rounds(contenders: list[Contender], traffic: Traffic, args: argparse.Namespace) -> dict[str, Any]:
    """Return the accuracy, the configuration and the rounds of each contender by its name."""
    rows: dict[str, dict[str, Any]] = {}
    for number in range(args.rounds):
        for contender in contenders:
            options = asdict(contender.options) if contender.options else None
            row = rows.setdefault(contender.name, {"options": options, "rounds": []})
            with RunningServer(contender) as server:
                if number == 0:
                    row["judged"] = measure_accuracy(server, traffic, args.rows)
                row["rounds"].append(measure_round(server, traffic, args, seed=number))
            print(f"{contender.name:<32} {row['rounds'][-1]['per_second']:7.1f}/s", file=sys.stderr)
    return rows


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
    ours = {name: rate for name, rate in rates.items() if name.startswith("hasten")}
    peers = {name: float(np.median(rate)) for name, rate in rates.items() if name not in ours}
    with_stock_graph = {name: rate for name, rate in peers.items() if HASTEN_GRAPH not in name}
    with_hasten_graph = {name: rate for name, rate in peers.items() if HASTEN_GRAPH in name}
    groups = (with_stock_graph, with_hasten_graph)
    best = [max(group, key=lambda name: group[name]) for group in groups if group]
    # median_ratio compares times, so rates are inverted.
    return {
        "ratios": [
            {"ours": name, "peer": peer, "ratio": median_ratio(1 / rates[peer], 1 / rate)}
            for peer in best
            for name, rate in ours.items()
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
