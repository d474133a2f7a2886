"""Tuning of the peers: requests/s of every configuration under mixed traffic; the best one of each is published."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from clients import closed_loop
from contenders import Contender, RunningServer, ServedModel
from peer_servers import Peer
from peers.options import Options
from traffic import Traffic

from provenance import provenance

_WARM_UP_S = 1.0


def tune(
    model: ServedModel, peers: Sequence[Peer], graph_name: str, traffic: Traffic, args: argparse.Namespace
) -> dict[str, Any]:
    """Return what each configuration of each peer reaches with the stock graph, one server after another."""
    peer_rows: dict[str, list[dict[str, Any]]] = {}
    for peer in peers:
        for options in peer.configurations():
            server = peer.server(model, model.graph, graph_name, options)
            row = asdict(options) | _measure(server, traffic, args)
            peer_rows.setdefault(server.name, []).append(row)
            print(f"{server.name:<32} {row['per_second']:7.1f}/s  {options}", file=sys.stderr)
    return provenance() | {"seconds": args.tuning_seconds, "peers": peer_rows}


def best_options(tuning: dict[str, Any], name: str) -> tuple[Options, float]:
    """Return the configuration of a peer with the most requests/s among those without errors, and its requests/s."""
    rows = [row for row in tuning["peers"][name] if not row["errors"]]
    if not rows:
        raise SystemExit(f"error: no configuration of {name} works")
    best = max(rows, key=lambda row: float(row["per_second"]))
    options = Options(best["instances"], best["threads"], best["max_batch_size"], best["has_buckets"])
    return options, float(best["per_second"])


def _measure(contender: Contender, traffic: Traffic, args: argparse.Namespace) -> dict[str, Any]:
    """Return what one configuration reaches; one that does not start is recorded as an error."""
    try:
        with RunningServer(contender) as server:
            request = contender.format.request
            requests = ((index, request(traffic.texts[index])) for index in traffic.stream(args.share, seed=0))
            closed_loop(server.port, requests, clients=args.clients, seconds=min(_WARM_UP_S, args.tuning_seconds))
            answers = closed_loop(server.port, requests, clients=args.clients, seconds=args.tuning_seconds)
    except SystemExit as error:
        return {"per_second": 0.0, "errors": 1, "failure": str(error)}
    return {
        "per_second": answers.per_second,
        "p50_ms": answers.percentile_ms(50),
        "p99_ms": answers.percentile_ms(99),
        "errors": len(answers.errors),
    }
