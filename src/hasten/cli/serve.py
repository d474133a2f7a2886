"""hasten serve BUNDLE …"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, nargs="+", help="each is served by the name of its directory")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    parser.add_argument("--variant", metavar="NAME", help="default: the fastest that runs here")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="sessions of each model (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="of each session (default: the cores shared out)")
    parser.add_argument("--max-wait", type=float, default=0.0, metavar="US", help="wait so long for a fuller batch")
    parser.add_argument("--max-queue", type=int, default=2048, metavar="N", help="more requests than this get 429")
    parser.add_argument("--max-body", type=float, default=32.0, metavar="MB", help="larger bodies get 413")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="API keys, one a line (or HASTEN_API_KEYS)")
    parser.add_argument("--drain", default="30s", metavar="TIME", help="time to answer what was taken, when stopped")


def main(args: argparse.Namespace) -> int:
    from hasten.cli import console
    from hasten.core.plan import parse_duration
    from hasten.server.connection import HttpLimits
    from hasten.server.queue import Limits
    from hasten.server.run import Settings, run
    from hasten.server.served import ModelSettings

    console.display(args.quiet)
    settings = Settings(
        bundles=tuple(args.bundle),
        host=args.host,
        port=args.port,
        model=ModelSettings(
            variant=args.variant,
            instances=args.instances,
            threads=args.threads,
            max_wait_s=args.max_wait / 1e6,
            limits=Limits(requests=args.max_queue),
        ),
        http=HttpLimits(body_bytes=int(args.max_body * 2**20)),
        key_file=args.key_file,
        drain_s=parse_duration(args.drain),
    )
    run(settings, on_ready=lambda address: console.out.print(f"ready on {address}", highlight=False))
    return 0
