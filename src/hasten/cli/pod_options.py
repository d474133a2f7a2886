"""What `deploy kubernetes` and `deploy kserve` ask alike, and how they tell what was written."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.deploy.manifests import Deployment
    from hasten.deploy.pods import PodOptions


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--output", "-o", type=Path, metavar="DIR", required=True, help="where to write")
    parser.add_argument("--force", action="store_true", help="replace an older deployment there")
    parser.add_argument("--name", help="of the deployment and of the model (default: the bundle's directory)")
    parser.add_argument("--namespace", metavar="NAME", help="(default: the one kubectl is set to)")
    parser.add_argument("--image", metavar="NAME", help="to run (default: as the Dockerfile or `make image` calls it)")
    parser.add_argument("--variant", metavar="NAME", help="which to run (default: the fastest)")
    parser.add_argument("--threads", type=int, metavar="N", help="of each session (default: the cores it was timed on)")
    parser.add_argument("--instances", type=int, metavar="N", help="sessions of a pod (default: measured at its start)")
    parser.add_argument("--gpu", type=int, metavar="N", help="GPUs of a pod (default: one where the variant needs it)")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="pods, at least (default: 2)")
    parser.add_argument("--max-replicas", type=int, metavar="N", help="pods, at most (default: five times as many)")
    parser.add_argument(
        "--target-wait", default="50ms", metavar="TIME", help="more pods where requests wait longer (default: 50ms)"
    )
    parser.add_argument("--drain", default="30s", metavar="TIME", help="to answer what was taken (default: 30s)")
    parser.add_argument("--keys-secret", metavar="NAME", help="a Secret with API keys, a key a line, as api-keys")


def pod_options(args: argparse.Namespace, bundle: Bundle) -> PodOptions:
    from hasten.core.plan import parse_duration
    from hasten.deploy.pods import PodOptions

    return PodOptions(
        name=args.name or bundle.path.resolve().name,
        namespace=args.namespace,
        image=args.image,
        variant=args.variant,
        threads=args.threads,
        instances=args.instances,
        gpus=args.gpu,
        replicas=args.replicas,
        max_replicas=args.max_replicas if args.max_replicas is not None else 5 * args.replicas,
        target_wait_s=parse_duration(args.target_wait),
        drain_s=parse_duration(args.drain),
        keys_secret=args.keys_secret,
    )


def print_deployment(made: Deployment, args: argparse.Namespace) -> None:
    """What there is, and what to do with it."""
    from hasten.cli import console
    from hasten.deploy.pods import counted

    if args.json:
        console.print_json(made)
        return
    gpus = f"{counted(made.gpus, 'GPU')}, " if made.gpus else ""
    size = f"{gpus}{counted(made.cores, 'core')} and {made.memory_bytes // 2**20} MiB"
    scaled = f"; more are started with {made.scales_by}" if made.scales_by else ""
    build = ["docker", "build", "--file", f"{made.path}/Dockerfile", "--tag", str(made.image), str(args.bundle)]
    lines = [
        f"{made.path}: {', '.join(made.files)}",
        f"each pod runs {made.variant} on {size}{scaled}",
        *([f"  {shlex.join(build)}"] if "Dockerfile" in made.files else []),
        f"  {shlex.join(['kubectl', 'apply', '-k', str(made.path)])}",
    ]
    for line in lines:
        console.out.print(line, highlight=False, markup=False, soft_wrap=True)
