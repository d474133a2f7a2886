"""The benchmark studies of what a server withstands: overload, attacks, long prompts and a memory limit."""

from __future__ import annotations

from statistics import median
from typing import Any

from generator.results import cpu_name, duration, interval, load, machine_line, table
from generator.studies import Study

_ENDURANCE = ("serving_endurance", "serving_endurance_arm64")
_ATTACK = ("serving_attack", "serving_attack_heavy")
_CORES = {
    "split": "The server has one core; clients and attackers share the other.",
    "shared": "Server, clients and attackers share all cores.",
}


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


def attack() -> Study:
    """Return the study of what good clients notice while others attack the server."""
    runs = [load(file) for file in _ATTACK]
    results = runs[0]
    summary, phases = results["summary"], results["summary"]["phases"]
    rows = [
        [
            title.format(_per_second(run)),
            *(duration(run["summary"]["phases"][phase][key]) for key in ("p50_ms", "p99_ms", "p999_ms", "max_ms")),
            *(duration(run["summary"]["phases"][phase][probe]["max_ms"]) for probe in ("health", "grpc")),
            f"{interval(run['summary']['ratios']['p99_ms'])}×" if phase == "attacked" else "",
        ]
        for run in runs
        for phase, title in (("alone", "without attackers"), ("attacked", "with {:.0f} attacks/s"))
    ]
    outcomes = [
        [
            name.replace("_", " "),
            f"{results['rates'][name][0]} at once, {results['rates'][name][1]:g}/s",
            ", ".join(f"{outcome} ({count:,})" for outcome, count in counts.items()),
        ]
        for name, counts in summary["attackers"].items()
    ]
    header = ["windows", "p50", "p99", "p99.9", "slowest", "slowest health check", "slowest gRPC call", "p99, ratio"]
    return Study(
        title="Clients beside attackers",
        question="What do good clients notice while others attack the server?",
        answer=[
            *table(header, rows),
            "",
            *map(_attack_outcome, runs),
            "",
            *table(
                ["attack", "rate", f"what attackers got (times), at {_per_second(results):.0f} attacks/s"], outcomes
            ),
        ],
        method=(
            f"{summary['rate']:,.0f} requests/s of texts of 1 to 30 words arrive at random times, in "
            f"{len(results['windows'])} windows; the attackers run in every second one. Each answer is compared with "
            "that of the model in process. The model has one small layer, so that the server's own work is what is "
            f"measured: it keeps {phases['alone']['server_cores']:.2f} of a core busy without attackers and "
            f"{' and '.join(_server_cores(run) for run in runs)} with them. What is left waits in a queue, so that a "
            "delay of one request delays those behind it.",
            "The ratio is the median over pairs of windows with the same arrivals, with its 95 % interval; "
            "percentiles are medians over windows, the slowest is of all windows.",
            "Health checks and gRPC calls: up to ten a second each from another process.",
            f"`hasten serve` with `{results['options']}`, lower than the defaults so that they are reached. "
            f"{_CORES[results['cores']]} Attackers run only while nothing else does.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/attack.py",
        files=_ATTACK,
    )


def _per_second(results: dict[str, Any]) -> float:
    """Return how many attacks begin each second, over all kinds."""
    return sum(per_second for _, per_second in results["rates"].values())


def _server_cores(results: dict[str, Any]) -> str:
    return f"{results['summary']['phases']['attacked']['server_cores']:.2f}"


def _attack_outcome(results: dict[str, Any]) -> str:
    """Return a list item: how good clients were answered in a run, and what the server held before and after it."""
    summary, settled, ended = (results["summary"], *(results["summary"][name] for name in ("settled", "ended")))
    failed, probes = (
        sum(summary["phases"][phase][probe][key] for phase in summary["phases"] for probe in ("health", "grpc"))
        for key in ("failed", "probes")
    )
    return (
        f"- {_per_second(results):.0f} attacks/s: of {summary['requests']:,} requests "
        f"{summary['statuses'].get('200', 0):,} got 200, with {summary['wrong_answers']} wrong answers; {failed} of "
        f"{probes:,} health checks and gRPC calls failed. Resident memory {settled['memory_bytes'] / 1e6:.0f} MB "
        f"before, {ended['memory_bytes'] / 1e6:.0f} MB after, {ended['peak_memory_bytes'] / 1e6:.0f} MB at its peak; "
        f"open files {settled['files']:.0f} and {ended['files']:.0f}, threads {settled['threads']:.0f} and "
        f"{ended['threads']:.0f}. The log has {summary['tracebacks']} tracebacks."
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
            f"equal length, of {_every(results['step'])} length up to {results['longest']} tokens, in random order.",
            "Resident memory; the peak as the system records it. Medians of "
            f"{results['rounds']} runs with fresh servers, each with `--instances {results['instances']}`; servers "
            "with the limit and without alternate.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/serving/memory.py --bundle DIR --limit SIZE",
        files=("serving_memory",),
    )


def _every(step: int) -> str:
    return "every" if step == 1 else f"every {step}th"


def _request_counts(run: dict[str, Any]) -> tuple[int, int]:
    return len(run["errors"]), len(run["errors"]) + run["requests"]
