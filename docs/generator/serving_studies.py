"""The benchmark studies of the server: latency, throughput, overload and the number of pods for a given traffic."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from generator.results import cpu_name, day, duration, interval, load, machine_line, table
from generator.studies import Study

HASTEN, HASTEN_FP32 = "hasten", "hasten, fp32"
FASTAPI_SAME_GRAPH, FASTAPI_FP32 = "FastAPI, our graph", "FastAPI, ONNX Runtime fp32"
_LABELS = {
    "a bare socket around it": "raw socket (lower bound)",
    FASTAPI_SAME_GRAPH: "FastAPI, hasten's graph",
}
_LATENCY = ("serving_latency", "serving_latency_arm64", "serving_latency_server")
_THROUGHPUT = ("serving_throughput", "serving_throughput_arm64")
_ENDURANCE = ("serving_endurance", "serving_endurance_arm64")
# Assumptions of the worked example.
_REQUESTS_PER_MINUTE, _UTILISATION, _ZONES = 1_000_000, 0.6, 3


def latency() -> Study:
    """Return the study of the overhead that a server adds to one request."""
    runs = [load(file) for file in _LATENCY]
    answer: list[str] = []
    for results in runs:
        contenders = {name: row for name, row in results["contenders"].items() if row["base"] != name}
        rows = [
            [_LABELS.get(name, name), interval(row["added_ms"], " ms"), duration(row["p50_ms"])]
            for name, row in sorted(contenders.items(), key=lambda item: float(item[1]["added_ms"]["value"]))
        ]
        title = f"overhead per request ({results['tokens']} tokens), median (IQR)"
        answer += [
            f"{machine_and_day(results)}, `{results['graph']}`:",
            "",
            *table(["server", title, "p50 of the whole request"], rows),
            "",
        ]
    return Study(
        title="Serving latency",
        question="What does the server add to one request?",
        answer=answer[:-1],
        method=(
            "One client, one request at a time, connection kept alive; an SST-2 classifier of MiniLM's size.",
            "Overhead is the time of a request minus that of the same work in process, measured in alternating turns. "
            "*The same graph* means that the peer runs the ONNX graph that hasten serves.",
            "Servers that are not measured at the moment are stopped (SIGSTOP).",
            "The machines are virtual and shared; the quartiles over turns show the noise.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/latency.py --model DIR --peers ENV --triton ENV",
        files=_LATENCY,
    )


def throughput() -> Study:
    """Return the study of requests per second under mixed traffic, with the configuration of the peers."""
    runs = [load(file) for file in _THROUGHPUT]
    answer: list[str] = []
    for results in runs:
        contenders = results["contenders"]
        names = sorted(contenders, key=lambda name: -over_rounds(contenders[name], "per_second"))
        rows = [
            [
                _LABELS.get(name, name),
                f"{over_rounds(contenders[name], 'per_second'):.0f}",
                duration(over_rounds(contenders[name], "p50_ms")),
                duration(over_rounds(contenders[name], "p99_ms")),
                f"{contenders[name]['judged']['accuracy']:.3f}",
            ]
            for name in names
        ]
        answer += [
            f"{machine_and_day(results)}, hasten with `{results['bundle']['chosen']}`:",
            "",
            *table(["server", "requests/s", "p50", "p99", "accuracy"], rows),
            "",
        ]
    first = runs[0]
    versions = first["versions"]["peers"] | first["versions"].get("triton", {})
    return Study(
        title="Serving throughput",
        question="How many requests per second does a server answer under mixed traffic?",
        answer=answer[:-1],
        method=(
            f"{first['clients']} clients, each waiting for its answer; {first['share_of_long_texts']:.0%} of the texts "
            "are long film reviews, the others SST-2 sentences. Medians over rounds that go through all servers; one "
            "server is alive at a time.",
            "Accuracy is that of the answers to labelled SST-2 sentences before timing.",
            "*hasten's graph* is the int8 graph that hasten serves; compare it with *hasten*. Compare fp32 rows with "
            "*hasten, fp32*.",
            f"FastAPI {versions['fastapi']}: a plain function in the thread pool, one ONNX Runtime session, no "
            "batching. *FastAPI, transformers* queues requests for one pipeline, as in transformers' documentation.",
            f"LitServe {versions['litserve']} and Ray Serve {versions['ray']}: `max_batch_size` 16 with a wait of 1 "
            "ms, one worker. LitServe's default wait of 0 never batches.",
            f"tritonserver (nvidia-pytriton {versions['nvidia-pytriton']}): Python backend with ONNX Runtime, "
            "`dynamic_batching {}`, `max_batch_size` 16, one instance.",
            "The three batching peers pad a batch to its longest text, so that one review slows down the sentences "
            "batched with it. hasten batches texts of similar length. Peers were not tuned further.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/throughput.py --model DIR --data FILE --peers ENV --triton ENV",
        files=_THROUGHPUT,
    )


def endurance() -> Study:
    """Return the study of start-up, overload and a million requests."""
    runs = [load(file) for file in _ENDURANCE]
    rows = []
    for results in runs:
        ready, overload, million = (results[name]["summary"] for name in ("ready", "overload", "million"))
        rows.append(
            [
                cpu_name(results),
                f"{ready['ready_s']:.1f} s",
                f"{ready['memory_bytes'] / 1e6:.0f} MB",
                f"{overload['slowdown']:.1f}×",
                f"{overload['failed_p99_ms']:.0f} ms",
                f"{million['errors']} of {million['requests']:,}",
                f"{million['growth']:.1%}",
            ]
        )
    header = [
        *("machine", "ready after", "memory", "p99 of accepted requests at 10× capacity", "429 within (p99)"),
        *("errors", "memory growth"),
    ]
    return Study(
        title="Overload and endurance",
        question="What happens at ten times the capacity, and after a million requests?",
        answer=table(header, rows),
        method=(
            "*Ready* and *memory*: MiniLM embeddings, from process start to readiness, resident memory after a hundred "
            "requests; medians over restarts.",
            f"Overload: `{runs[0]['overload']['options']}`; requests arrive at random times at 10× the measured "
            "capacity. The p99 of accepted requests is relative to the p99 at a tenth of the capacity; all others get "
            "a 429 within the time of the next column.",
            "Endurance: a one-layer model, one process; memory growth from when it has settled to the last request.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/endurance.py",
        files=_ENDURANCE,
    )


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


def over_rounds(contender: dict[str, Any], key: str) -> float:
    """Return the median of a figure over the rounds of a contender."""
    return median(float(each[key]) for each in contender["rounds"])


def machine_and_day(results: dict[str, Any]) -> str:
    """Return the machine and the date of a run, in a few words."""
    return f"{cpu_name(results)}, {day(results)}"
