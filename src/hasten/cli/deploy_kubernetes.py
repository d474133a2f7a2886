"""hasten deploy kubernetes BUNDLE: write manifests for Kubernetes."""

from __future__ import annotations

import argparse

from hasten.cli.deployment import add_pod_arguments, pod_options, print_deployment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_pod_arguments(parser)
    text = "volume claim with the bundle under its name (default: the bundle is copied into the image)"
    parser.add_argument("--volume-claim", metavar="NAME", help=text)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.bundle import open_bundle
    from hasten.deploy.kubernetes import write

    bundle = open_bundle(args.bundle)
    deployment = write(bundle, args.output, pod_options(args, bundle), args.volume_claim, force=args.force)
    print_deployment(deployment, args)
    return 0
