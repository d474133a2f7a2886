"""The benchmark studies of the server: latency, overload, long prompts, memory and the pods for a given traffic."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from generator.results import cpu_name, duration, interval, load, machine_line, table
from generator.serving_throughput import HASTEN, machine_and_day, over_rounds, without_tuning
from generator.studies import Study

_RAW_SOCKET = "a bare socket around it"
_LATENCY = ("serving_latency", "serving_latency_arm64")
_ENDURANCE = ("serving_endurance", "serving_endurance_arm64")
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


def long_prompts() -> Study:
    """Return the study of running streams beside the prefill of a long prompt."""
    results = load("serving_long_prompts")
    rows = [
        [
            row["variant"],
            f"{row['prompt_tokens']:,}",
            f"{row['longest_gap_alone_s'] * 1e3:.0f} ms",
            f"{row['longest_gap_s'] * 1e3:.0f} ms",
            f"{row['median_gap_alone_s'] * 1e3:.0f} ms",
            f"{row['median_gap_s'] * 1e3:.0f} ms",
            f"{row['time_to_first_token_s']:.1f} s",
        ]
        for row in results["rows"]
    ]
    header = ["variant", "long prompt", "longest gap without it", "longest gap beside it", "median gap without it"]
    return Study(
        title="Long prompts beside running streams",
        question="How long do running streams wait while a long prompt is prefilled?",
        answer=table([*header, "median gap beside it", "its time to first token"], rows),
        method=(
            f"SmolLM2-135M, `hasten serve` with its defaults; {results['streams']} clients stream completions. A gap "
            "is the time between two text deltas of one completion, the longest of all streams and arrivals.",
            "The server prefills long prompts in chunks between decode steps.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/serving/long_prompts.py --bundle DIR",
        files=("serving_long_prompts",),
    )


def memory() -> Study:
    """Return the study of the memory limit on texts of all lengths."""
    results = load("serving_memory")
    rows = []
    for variant, runs in results["variants"].items():
        for name in ("unlimited", "limited"):
            ready, peak, rate, p99 = (
                median(run[key] for run in runs[name])
                for key in ("ready_bytes", "peak_bytes", "texts_per_second", "p99_ms")
            )
            failed, requests = (sum(counts) for counts in zip(*map(_request_counts, runs[name]), strict=True))
            limit = f"{results['limit_bytes'] / 1e6:.0f} MB" if name == "limited" else "none"
            memory = [f"{size / 1e6:.0f} MB" for size in (ready, peak)]
            rows.append([f"`{variant}`", limit, *memory, f"{rate:.0f}", duration(p99), f"{failed} of {requests}"])
    header = ["variant", "limit", "ready", "peak", "texts/s", "p99", "rejected"]
    return Study(
        title="Memory limit",
        question="How much memory does the server use on texts of all lengths, with `--max-memory` and without?",
        answer=table(header, rows),
        method=(
            f"MiniLM embeddings; {results['clients']} clients send requests of {results['texts_per_request']} texts of "
            f"equal length, of every second length up to {results['longest']} tokens, in random order.",
            "Resident memory; the peak as the system records it. One run of each server.",
            "All sessions of a model may take a quarter of the limit with their weights: with it, ONNX Runtime has one "
            "session here, without it two.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/serving/memory.py --bundle DIR --limit SIZE",
        files=("serving_memory",),
    )


def _request_counts(run: dict[str, Any]) -> tuple[int, int]:
    return len(run["errors"]), len(run["errors"]) + run["requests"]


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
