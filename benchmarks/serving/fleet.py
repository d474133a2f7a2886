"""One bundle on the engines that run it: the embedded server, Ray Serve, tritonserver, and FastAPI as the baseline.

    python benchmarks/serving/fleet.py --model DIR --data sst2_validation.jsonl [--bundle DIR] [--reviews FILE]
        [--peers ENV] [--ray ENV] [--triton ENV]

All over the same graph, the bundle's fastest that ONNX Runtime takes, on the same traffic. First what each adds to the
work in process, one client and one request of 16 tokens at a time; then answers a second under mixed traffic, and the
memory of all its processes meanwhile. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from contenders import (
    Contender,
    Running,
    Setting,
    built,
    deployed_triton,
    hasten,
    on_ray,
    peer,
    plain_graph,
    variants,
)
from environments import about, peers_python, ray_python, triton_python
from latency import OURS, PLAIN, TOKENS, Http, Lane, Turn, summary, take_turns, text_of
from throughput import judge, one_round
from traffic import Traffic, parser, read_traffic

from hasten.core.hardware import usable_cores


def main() -> None:
    told = parser(__doc__, "serving_fleet.json")
    told.add_argument("--ray", type=Path, default=Path("ray-env"), help="hasten's with Ray Serve")
    told.add_argument("--turns", type=int, default=10, help="of one client, of each contender")
    told.add_argument("--requests", type=int, default=150, help="a turn")
    args = told.parse_args()
    pythons = {
        "hasten": sys.executable,
        "peers": peers_python(args.peers),
        "ray": ray_python(args.ray),
        "triton": triton_python(args.triton),
    }
    traffic = read_traffic(args.data, args.reviews)
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = built(args.model, args.bundle, Path(work))
        plain = plain_graph(pythons["peers"], args.model, Path(work))
        setting = Setting(args.model, plain, bundle, pythons["peers"], pythons["triton"])
        contenders = list(line_up(setting, pythons["ray"], Path(work) / "repository", args.only))
        added = added_latency(setting, contenders, args.turns, args.requests)
        under_load = loaded(contenders, traffic, args)
        results = about(pythons) | {
            "bundle": variants(bundle),
            "variant": setting.best_graph()[1],
            "cores": usable_cores(),
            "tokens": TOKENS,
            "turns": args.turns,
            "requests": args.requests,
            "clients": args.clients,
            "share_of_long_texts": args.share,
            "long_texts": traffic.source,
            "seconds": args.seconds,
            "latency": added,
            "load": under_load,
        }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def line_up(setting: Setting, ray: str, repository: Path, only: str) -> Iterator[Contender]:
    graph, variant = setting.best_graph()
    given = ("--variant", variant)
    one = hasten(setting.bundle, setting.labels, *given, name="hasten")
    contenders = [
        one,
        on_ray(setting, ray, 1, *given),
        on_ray(setting, ray, 2, *given),
        peer(setting, "ray_onnxruntime.py", graph, "Ray Serve by hand, our graph", is_restless=True),
        peer(setting, "fastapi_onnxruntime.py", graph, "FastAPI, our graph"),
    ]
    yield from (contender for contender in contenders if only in contender.name)
    if only in "tritonserver, hasten deploy":
        yield deployed_triton(setting, repository, variant)


def added_latency(setting: Setting, contenders: Iterable[Contender], turns: int, requests: int) -> dict[str, Any]:
    """Each beside the work in process alone: Ray uses the processor also while nobody asks."""
    return {
        name: summary(name, taken)
        for contender in contenders
        for name, taken in _turns(setting, contender, turns, requests)
        if name == contender.name
    }


def _turns(setting: Setting, contender: Contender, turns: int, requests: int) -> Iterator[tuple[str, list[Turn]]]:
    def lanes(_: Setting, server: Running) -> list[Lane]:
        base = OURS if "hasten" in contender.name.removesuffix("hasten deploy") else PLAIN
        request = contender.question.request(text_of(setting.bundle, TOKENS))
        return [Http(contender.name, base, server.port, request)]

    yield from take_turns(setting, [contender], turns, requests, lanes)


def loaded(contenders: list[Contender], traffic: Traffic, args: argparse.Namespace) -> dict[str, Any]:
    """One server alive at a time; rounds go round all of them."""
    rows: dict[str, Any] = {}
    for number in range(args.rounds):
        for contender in contenders:
            row = rows.setdefault(contender.name, {"rounds": []})
            with Running(contender) as server:
                if number == 0:
                    row["judged"] = judge(server, traffic, args.rows)
                found = one_round(server, traffic, args, seed=number)
                row["rounds"].append(found | {"memory_bytes": server.tree_bytes(), "ready_s": server.ready_s})
            print(f"{contender.name:<36} {found['per_second']:7.1f}/s", file=sys.stderr)
    return rows


def report(results: dict[str, Any]) -> None:
    print(f"{'':<36}{'alone':>10}{'added':>10}{'answers/s':>11}{'p50':>11}{'p99':>11}{'memory':>10}{'accuracy':>10}")
    for name, row in results["load"].items():
        alone = results["latency"][name]
        rate, p50, p99, memory = (
            float(np.median([each[what] for each in row["rounds"]]))
            for what in ("per_second", "p50_ms", "p99_ms", "memory_bytes")
        )
        errors = sum(each["errors"] for each in row["rounds"])
        print(
            f"{name:<36}{alone['p50_ms']:7.2f} ms{alone['added_ms']['value']:7.2f} ms{rate:11.1f}"
            f"{p50:8.1f} ms{p99:8.1f} ms{memory / 2**20:7.0f} MB{row['judged']['accuracy']:10.4f}"
            + (f"  {errors} errors" if errors else "")
        )


if __name__ == "__main__":
    main()
