"""The benchmark studies of the latency of a server and of the pods for a given traffic."""

from __future__ import annotations

import math
from typing import Any

from generator.results import duration, interval, load, machine_line, table
from generator.serving_throughput import HASTEN, machine_and_day, over_rounds, without_tuning
from generator.studies import Study

_RAW_SOCKET = "a bare socket around it"
_LATENCY = ("serving_latency", "serving_latency_arm64")
# Assumptions of the worked example.
_REQUESTS_PER_MINUTE, _UTILISATION, _ZONES = 1_000_000, 0.6, 3


def latency() -> Study:
    """Return the study of the overhead that a server adds to one request."""
    runs = [load(file) for file in _LATENCY]
    answer: list[str] = []
    for results in runs:
        contenders = results["contenders"]
        servers = {name: row for name, row in contenders.items() if row["base"] != name}
        rows = [
            [
                "raw socket (lower bound)" if name == _RAW_SOCKET else name,
                interval(row["added_ms"], " ms"),
                duration(row["p50_ms"]),
                duration(contenders[row["base"]]["p50_ms"]),
            ]
            for name, row in sorted(servers.items(), key=lambda item: float(item[1]["added_ms"]["value"]))
        ]
        title = f"overhead per request ({results['tokens']} tokens), median (IQR)"
        header = ["server", title, "p50 of the whole request", "p50 of its work in process"]
        answer += [
            f"{machine_and_day(results)}, `{results['graph']}`{without_tuning(results, 'peer_options')}:",
            "",
            *table(header, rows),
            "",
            _faster_for_one_client(servers),
            "",
        ]
    return Study(
        title="Serving latency",
        question="What does the server add to one request?",
        answer=answer[:-1],
        method=(
            "One client, one request at a time, connection kept alive; an SST-2 classifier of MiniLM's size.",
            "Overhead is the median over turns of the time of a request minus that of the same work in process, in the "
            "server's own environment and in the same turn; it may differ from the difference of the two p50. *The "
            "same graph* means that the peer runs the ONNX graph that hasten serves.",
            "All servers run one instance with as many threads as cores. Unless its table says otherwise, a peer does "
            "not batch, which answers a lone request soonest. tritonserver runs the model in its Python backend.",
            "Servers that are not measured at the moment are stopped (SIGSTOP).",
            "The machines are virtual and shared; the quartiles over turns show the noise.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/latency.py --model DIR --peers ENV --triton ENV",
        files=_LATENCY,
    )


def _faster_for_one_client(servers: dict[str, Any]) -> str:
    """Return in words which peers answer a lone request sooner than hasten through the same kind of interface."""
    hasten = {name: row for name, row in servers.items() if name.startswith("hasten")}
    sooner = []
    for name, row in servers.items():
        if name in hasten or name == _RAW_SOCKET:
            continue
        is_grpc = name.endswith("gRPC")
        ours, best = min(
            ((our_name, our_row) for our_name, our_row in hasten.items() if our_name.endswith("gRPC") == is_grpc),
            key=lambda item: float(item[1]["p50_ms"]),
        )
        parts = []
        if row["p50_ms"] < best["p50_ms"]:
            parts.append(f"answers sooner ({duration(row['p50_ms'])} against {duration(best['p50_ms'])})")
        if row["added_ms"]["value"] < best["added_ms"]["value"]:
            parts.append(f"adds less ({row['added_ms']['value']:.2f} ms against {best['added_ms']['value']:.2f} ms)")
        if parts:
            sooner.append(f"*{name}* {' and '.join(parts)} than *{ours}*")
    return f"{'; '.join(sooner)}." if sooner else "No peer answers sooner or adds less than hasten."


def pods() -> Study:
    """Return the formula for the number of pods, with one worked example."""
    results, ready = load("serving_throughput"), load("serving_endurance")["ready"]["summary"]
    cores = results["machine"]["cores"]
    rate = over_rounds(results["contenders"][HASTEN], "per_second")
    per_second = _REQUESTS_PER_MINUTE / 60
    busy = math.ceil(per_second / (rate * _UTILISATION))
    total = _ZONES * math.ceil(busy / (_ZONES - 1))
    return Study(
        title="Pods for a given traffic",
        question="How many pods does a given peak traffic need?",
        answer=[
            "```",
            "busy = ⌈ peak / (rate × utilisation) ⌉       pods that the traffic keeps busy",
            "pods = zones × ⌈ busy / (zones − 1) ⌉        enough are left if one zone fails",
            "```",
            "",
            f"Example: {_REQUESTS_PER_MINUTE:,} requests per minute ({per_second:,.0f}/s) of the traffic measured "
            f"[above](#serving-throughput), {rate:.1f} requests/s per pod of {cores} cores, utilisation "
            f"{_UTILISATION}, {_ZONES} zones:",
            "",
            "```",
            f"busy = ⌈ {per_second:,.0f} / ({rate:.1f} × {_UTILISATION}) ⌉ = {busy}",
            f"pods = {_ZONES} × ⌈ {busy} / {_ZONES - 1} ⌉ = {total}        {total * cores:,} cores, "
            f"{total * ready['memory_bytes'] / 1e9:.0f} GB resident",
            "```",
            "",
            "Replace *rate × utilisation* by a measurement of your own traffic: the highest rate at which one pod "
            "keeps its p99 below the objective.",
            "",
            "```",
            "hasten stress http://POD:8000 --data your_texts.jsonl --sweep --slo-p99 50ms --duration 60s --json",
            f"hasten deploy kubernetes BUNDLE -o k8s --replicas {total}",
            "```",
        ],
        method=(
            "The rate is measured on one pod; the rest is arithmetic. No cluster of this size was run.",
            "*peak* is the highest second, not the mean of a minute. Cost grows with tokens: your mix of lengths "
            "matters more than anything else.",
            f"*utilisation* below 1 keeps queues short: with random arrivals and equal requests the mean wait is "
            f"ρ / 2(1 − ρ) service times (Pollaczek–Khinchine), {_UTILISATION / (2 * (1 - _UTILISATION)):.2f} at "
            f"{_UTILISATION}.",
            "A rolling update needs 25 % more pods while it lasts (`maxSurge`).",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/serving/throughput.py --model DIR --data FILE",
        files=("serving_throughput", "serving_endurance"),
    )
