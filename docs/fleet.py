"""Writes docs/fleet.md: what a fleet needs for a million sentences a minute, from the result files of serving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

# What is assumed rather than measured; the page says each.
PER_MINUTE = 1_000_000
UTILISATION = 0.6
ZONES = 3
SURGE = 0.25
OURS = "hasten"
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)


def busy_pods(per_second: float, utilisation: float = UTILISATION) -> int:
    """That the traffic keeps busy, each as much as is wanted."""
    return math.ceil(PER_MINUTE / 60 / (per_second * utilisation))


def fleet_pods(busy: int) -> int:
    """That are there, so that enough of them are left without one zone."""
    return ZONES * math.ceil(busy / (ZONES - 1))


def page(results: Path, note: str, machine: Callable[[dict[str, Any]], str]) -> str:
    throughput, endurance, engines = (
        json.loads((results / f"serving_{name}.json").read_text(encoding="utf-8"))
        for name in ("throughput", "endurance", "fleet")
    )
    contenders = throughput["contenders"]
    rates = {name: [one["per_second"] for one in row["rounds"]] for name, row in contenders.items()}
    ours, p99_ms = rates[OURS], median(one["p99_ms"] for one in contenders[OURS]["rounds"])
    cores, memory_mb = throughput["machine"]["cores"], endurance["ready"]["summary"]["memory_bytes"] / 1e6
    rate, need = median(ours), PER_MINUTE / 60
    busy = busy_pods(rate)
    fleet = fleet_pods(busy)
    surge = math.ceil(SURGE * fleet)
    long = throughput["share_of_long_texts"]
    lines = [
        note,
        "# A fleet for a million sentences a minute",
        "",
        f"**{fleet} pods of {cores} cores, {fleet * cores:,} cores in {ZONES} zones**, for the model and the texts "
        f"that were measured: a fine-tuned MiniLM classifier as `{throughput['bundle']['chosen']}`, "
        f"{1 - long:.0%} sentences and {long:.0%} long reviews, one text a request. Every number on this page is "
        "calculated from the result files named at its end; what was assumed is listed, so that you can put in what is "
        "true for you.",
        "",
        "## The calculation",
        "",
        "```",
        "busy  = ⌈ needed / (rate × utilisation) ⌉      pods that the traffic keeps busy",
        "fleet = zones × ⌈ busy / (zones − 1) ⌉         pods that are there: enough are left without one zone",
        "surge = ⌈ fleet / 4 ⌉                          pods more while a rolling update runs (maxSurge 25%)",
        "",
        f"busy  = ⌈ {need:,.0f} / ({rate:.1f} × {UTILISATION}) ⌉ = {busy}",
        f"fleet = {ZONES} × ⌈ {busy} / {ZONES - 1} ⌉ = {fleet}",
        f"surge = ⌈ {fleet} / 4 ⌉ = {surge}",
        "```",
        "",
        "| | pods | cores | memory |",
        "|---|---|---|---|",
        *(
            f"| {what} | {pods} | {pods * cores:,} | {pods * memory_mb / 1e3:.0f} GB |"
            for what, pods in (
                ("kept busy", busy),
                ("one zone may fail", fleet),
                ("while a rolling update runs", fleet + surge),
            )
        ),
        "",
        "## What was measured",
        "",
        f"- *rate*: {rate:.1f} answers a second of one server on {cores} cores, {throughput['clients']} clients at a "
        f"time, the median of {len(ours)} rounds ({min(ours):.0f} to {max(ours):.0f}: a shared machine). With the "
        f"slowest round the fleet is {fleet_pods(busy_pods(min(ours)))} pods, with the fastest "
        f"{fleet_pods(busy_pods(max(ours)))}.",
        f"- p99 at that rate, which leaves nothing idle, is {p99_ms:.0f} ms: most of it is waiting.",
        f"- *memory*: {memory_mb:.0f} MB held by a server of MiniLM embeddings, a model of the same size, after a "
        "hundred requests. Manifests ask for more, since sessions may be several and bodies of requests are held too.",
        "",
        "## What was assumed",
        "",
        f"- *needed*: {PER_MINUTE:,} a minute is the peak, {need:,.0f} a second, spread evenly over pods and over the "
        "minute but for chance. What comes in bursts needs its peak of a second here, not its mean of a minute.",
        f"- *utilisation* {UTILISATION}: a pod that is busy all the time has a queue without end. Where requests come "
        "at random and take alike, each waits on average ρ / 2(1 − ρ) times as long as it takes to serve it "
        "(Pollaczek–Khinchine), and longer where they differ, as these do; p99 grows with it. That formula is theory: "
        "the sweep below measures instead.",
        f"- *zones*: {ZONES}, one of which may fail at the peak without a word to clients. Pods are spread evenly "
        "(`topologySpreadConstraints` in what `hasten deploy kubernetes` writes).",
        f"- *rolling update*: new pods come before old ones go (`maxUnavailable: 0`), so it takes {SURGE:.0%} more for "
        "its time, and no capacity from anyone.",
        f"- *lengths*: {long:.0%} of the texts are film reviews of 600 characters and more, the others sentences of "
        "SST-2. Time goes with tokens: your mix decides more than anything else here.",
        "- *cores* like those that were measured. Two pods on one node are taken to be as fast as on two: cores are "
        "not shared (whole cores, limits that are the requests), memory bandwidth is.",
        "- The network, the balancer in front and what calls the fleet are not in it. GPUs are neither: "
        "[one that serves alone](../README.md#on-a-gpu) is all that was measured.",
        "",
        "| utilisation | waits, in times of service | pods kept busy | fleet | cores |",
        "|---|---|---|---|---|",
        *(_level(level, rate, cores) for level in LEVELS),
        "",
        "## The same traffic on other servers",
        "",
        "From the same run, on the same machine, by the same calculation; with the graph in fp32 where not said "
        "otherwise, as README's table has them. How each was set up stands in `benchmarks/serving/peers`.",
        "",
        f"| | answers/s on {cores} cores | fleet | cores |",
        "|---|---|---|---|",
        *(_contender(name, median(found), cores) for name, found in sorted(rates.items(), key=_slowest_last)),
        "",
        "## On the engines of fleets",
        "",
        "The same bundle behind what `hasten serve`, `hasten serve --on ray` and `hasten deploy tritonserver` make of "
        f"it, in a run of its own: one process, or so many replicas, on {engines['machine']['cores']} cores, "
        f"{engines['clients']} clients; the long texts are {engines['long_texts']}, so that rates differ from those "
        f"above. *Added* is what a lone request of {engines['tokens']} tokens takes longer than the same work in "
        "process.",
        "",
        "| | added | answers/s | memory | fleet |",
        "|---|---|---|---|---|",
        *(_engine(name, row["rounds"], engines["latency"][name]) for name, row in engines["load"].items()),
        "",
        "## With your own numbers",
        "",
        "Start one pod, or `hasten serve` on the cores a pod will have, and let `hasten stress` find out from another "
        "machine:",
        "",
        "```",
        "hasten stress http://POD:8000 --lengths your_texts.jsonl --sweep --objective 50ms --duration 60s --json",
        "```",
        "",
        "`best.rate` is the most requests a second that keep p99 within 50 ms, coming at random moments whether or not "
        "those before were answered. It takes the place of *rate × utilisation*, so that nothing is assumed about "
        "either: `busy = ⌈ needed / best.rate ⌉`, and the rest as above. Then",
        "",
        "```",
        f"hasten deploy kubernetes BUNDLE -o k8s --replicas {fleet} --max-replicas {fleet + surge}",
        "```",
        "",
        "where the peak lasts; where it does not, `--replicas` is what the quietest hour needs, and the autoscaler "
        "adds pods as queues grow. It takes as long as a scrape, a minute's mean and the start of a pod "
        f"({endurance['ready']['summary']['ready_s']:.1f} s here, once there is a node): what comes faster than that "
        "needs pods that are there already.",
        "",
        f"Machine: {machine(throughput)}. Result files: [throughput](../benchmarks/results/serving_throughput.json), "
        "[endurance](../benchmarks/results/serving_endurance.json), "
        "[engines](../benchmarks/results/serving_fleet.json), repeated by `benchmarks/serving`.",
    ]
    return "\n".join(lines) + "\n"


def _level(level: float, rate: float, cores: int) -> str:
    busy = busy_pods(rate, level)
    fleet = fleet_pods(busy)
    return f"| {level} | {level / (2 * (1 - level)):.2f} | {busy} | {fleet} | {fleet * cores:,} |"


def _contender(name: str, rate: float, cores: int) -> str:
    fleet = fleet_pods(busy_pods(rate))
    return f"| {name} | {rate:.0f} | {fleet:,} | {fleet * cores:,} |"


def _engine(name: str, rounds: list[dict[str, Any]], alone: dict[str, Any]) -> str:
    rate, memory = (median(one[key] for one in rounds) for key in ("per_second", "memory_bytes"))
    fleet = fleet_pods(busy_pods(rate))
    return f"| {name} | {alone['added_ms']['value']:.1f} ms | {rate:.0f} | {memory / 1e6:.0f} MB | {fleet:,} |"


def _slowest_last(contender: tuple[str, list[float]]) -> float:
    return -median(contender[1])
