"""Options and output that the `deploy` commands share."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.core.options import add_options, read_options
from hasten.deploy.pod_options import PodOptions

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.deploy.manifests import Deployment


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bundle and the output directory of a deployment."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("--output", "-o", type=Path, metavar="DIR", required=True, help="directory to write to")
    parser.add_argument("--force", action="store_true", help="replace a deployment in the output directory")


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `deploy kubernetes` and `deploy kserve` share."""
    add_output_arguments(parser)
    add_options(parser, PodOptions)


def pod_options(args: argparse.Namespace, bundle: Bundle) -> PodOptions:
    """Return the options of the pods, by default named like the bundle's directory."""
    return read_options(PodOptions, vars(args) | {"name": args.name or bundle.path.resolve().name})


def print_deployment(deployment: Deployment, args: argparse.Namespace) -> None:
    """Print the files that were written and the commands that deploy them."""
    from hasten.cli import console
    from hasten.deploy.pods import pluralize

    if args.json:
        console.print_json(deployment)
        return
    gpus = f"{pluralize(deployment.gpus, 'GPU')}, " if deployment.gpus else ""
    size = f"{gpus}{pluralize(deployment.cores, 'core')} and {deployment.memory_bytes // 2**20} MiB"
    scaled = f"; more are started with {deployment.scales_by}" if deployment.scales_by else ""
    lines = [
        f"{deployment.path}: {', '.join(deployment.files)}",
        f"each pod runs {deployment.variant} on {size}{scaled}",
    ]
    if "Dockerfile" in deployment.files:
        dockerfile = f"{deployment.path}/Dockerfile"
        build = ["docker", "build", "--file", dockerfile, "--tag", str(deployment.image), str(args.bundle)]
        lines.append(f"  {shlex.join(build)}")
    lines.append(f"  {shlex.join(['kubectl', 'apply', '-k', str(deployment.path)])}")
    for line in lines:
        console.print_line(line)
