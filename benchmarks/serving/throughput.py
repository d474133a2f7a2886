"""Answers a second under mixed traffic: 32 clients, sentences of SST-2 among long reviews, each contender in turn.

    python benchmarks/serving/throughput.py --model DIR --data sst2_validation.jsonl [--bundle DIR] [--reviews FILE]
        [--peers ENV] [--triton ENV]

One server is alive at a time; rounds go round all of them. Each is first asked all labelled sentences: who answers
other than the rest is seen. Nothing else may run on the machine meanwhile.
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
from contenders import Contender, Running, Setting, all_peers, built, hasten, peer, plain_graph, variants
from environments import about, peers_python, triton_python
from traffic import Traffic, parser, read_traffic

from hasten.core.statistics import median_ratio

ASKED_RATIO, ASKED_PADDING = 1.5, 0.05
CHOSEN, SAME_NUMBERS = "hasten", "hasten, fp32"
LENT = "our graph"


def main() -> None:
    args = parser(__doc__, "serving_throughput.json").parse_args()
    pythons = {"hasten": sys.executable, "peers": peers_python(args.peers), "triton": triton_python(args.triton)}
    traffic = read_traffic(args.data, args.reviews)
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = built(args.model, args.bundle, Path(work))
        plain = plain_graph(pythons["peers"], args.model, Path(work))
        setting = Setting(args.model, plain, bundle, pythons["peers"], pythons["triton"])
        contenders = [one for one in line_up(setting) if args.only in one.name or one.name.startswith("hasten")]
        rows: dict[str, dict[str, Any]] = {}
        for number in range(args.rounds):
            for contender in contenders:
                row = rows.setdefault(contender.name, {"rounds": []})
                with Running(contender) as server:
                    if number == 0:
                        row["judged"] = judge(server, traffic, args.rows)
                    row["rounds"].append(one_round(server, traffic, args, seed=number))
                print(f"{contender.name:<32} {row['rounds'][-1]['per_second']:7.1f}/s", file=sys.stderr)
    results = about(pythons) | {
        "bundle": variants(bundle),
        "clients": args.clients,
        "share_of_long_texts": args.share,
        "long_texts": traffic.source,
        "seconds": args.seconds,
        "contenders": rows,
        **ratios(rows),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def line_up(setting: Setting) -> Iterator[Contender]:
    graph, _ = setting.best_graph()
    yield hasten(setting.bundle, setting.labels, name=CHOSEN)
    yield hasten(setting.bundle, setting.labels, "--variant", "onnxruntime-fp32", name=SAME_NUMBERS)
    yield from all_peers(setting, setting.graph, "ONNX Runtime fp32")
    yield peer(setting, "fastapi_onnxruntime.py", graph, f"FastAPI, {LENT}")


def judge(server: Running, traffic: Traffic, rows: int | None) -> dict[str, Any]:
    """Its labels of the sentences, one client at a time and then all at once: batches may not change them much."""
    question, labels = server.contender.question, traffic.labels[:rows]
    given: dict[int, str] = {}
    requests = ((place, question.request(traffic.texts[place])) for place in range(len(labels)))

    def take(place: int, head: bytes, body: bytes) -> None:
        given[place] = question.label(head, body)

    answers = closed_loop(server.port, requests, clients=8, on_answer=take)
    if answers.bad:
        raise SystemExit(f"{server.contender.name} answers {answers.bad[0]}")
    right = sum(given[place] == label for place, label in enumerate(labels))
    return {"accuracy": right / len(labels), "rows": len(labels)}


def one_round(server: Running, traffic: Traffic, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    request = server.contender.question.request
    places = traffic.stream(args.share, seed)
    requests = ((place, request(traffic.texts[place])) for place in places)
    closed_loop(server.port, requests, clients=args.clients, seconds=min(2.0, args.seconds))
    before = server.counters()
    answers = closed_loop(server.port, requests, clients=args.clients, seconds=args.seconds)
    row: dict[str, Any] = {
        "per_second": answers.per_second,
        "p50_ms": answers.percentile_ms(50),
        "p99_ms": answers.percentile_ms(99),
        "answers": len(answers.places),
        "errors": len(answers.bad),
        "client_share": answers.client_share,
    }
    if before:
        spent = {name: value - before[name] for name, value in server.counters().items()}
        padding, tokens = spent["hasten_padding_tokens_total"], spent["hasten_tokens_total"]
        row["padding"] = padding / (tokens + padding)
        row["rows_per_batch"] = spent["hasten_batch_rows_sum"] / spent["hasten_batch_rows_count"]
        row["queue_ms"] = spent["hasten_queue_seconds_sum"] / len(answers.places) * 1e3
        row["compute_share"] = spent["hasten_compute_seconds_sum"] / answers.elapsed_s
    return row


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours over the best of the others, which have the graph as it is exported; and over those to whom we lend ours."""
    rates = {name: np.array([each["per_second"] for each in row["rounds"]]) for name, row in rows.items()}
    peers = {name: float(np.median(rate)) for name, rate in rates.items() if not name.startswith("hasten")}
    own = {name: rate for name, rate in peers.items() if LENT not in name}
    lent = {name: rate for name, rate in peers.items() if LENT in name}
    best = [max(some, key=lambda name: some[name]) for some in (own, lent) if some]
    # Times are what ratios are taken of: less is better.
    return {
        "ratios": [
            {"ours": ours, "peer": name, "ratio": median_ratio(1 / rates[name], 1 / rates[ours])}
            for name in best
            for ours in (CHOSEN, SAME_NUMBERS)
        ]
    }


def report(results: dict[str, Any]) -> None:
    for row in results["ratios"]:
        ratio = row["ratio"]
        verdict = "met" if ratio["value"] >= ASKED_RATIO else "NOT met"
        interval = f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"
        print(f"{row['ours']}: {interval} of {row['peer']}; asked ≥ {ASKED_RATIO}×: {verdict}")
    print(f"{'':<44}{'answers/s':>10}{'p50':>11}{'p99':>11}{'accuracy':>10}  errors")
    rows = results["contenders"].items()
    for name, row in sorted(rows, key=lambda pair: -_median(pair[1], "per_second")):
        errors = sum(each["errors"] for each in row["rounds"])
        rate, p50, p99 = (_median(row, what) for what in ("per_second", "p50_ms", "p99_ms"))
        print(f"{name:<44}{rate:10.1f}{p50:8.1f} ms{p99:8.1f} ms{row['judged']['accuracy']:10.4f}  {errors}")
        if "padding" in row["rounds"][0]:
            padding = _median(row, "padding")
            verdict = "met" if padding <= ASKED_PADDING else "NOT met"
            print(
                f"  padding {padding:.2%} (asked ≤ {ASKED_PADDING:.0%}: {verdict}), "
                f"{_median(row, 'rows_per_batch'):.1f} rows a batch, sessions busy {_median(row, 'compute_share'):.2f}"
            )


def _median(row: dict[str, Any], name: str) -> float:
    return float(np.median([each[name] for each in row["rounds"]]))


if __name__ == "__main__":
    main()
