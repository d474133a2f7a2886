"""hasten deploy kserve BUNDLE: write manifests for KServe."""

from __future__ import annotations

import argparse

from hasten.cli.deployment import add_pod_arguments, pod_options, print_deployment
from hasten.core.options import add_options, read_options
from hasten.deploy.pod_options import Service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_pod_arguments(parser)
    add_options(parser, Service)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.bundle import open_bundle
    from hasten.deploy.kserve import write

    bundle = open_bundle(args.bundle)
    service = read_options(Service, vars(args))
    deployment = write(bundle, args.output, pod_options(args, bundle), service, force=args.force)
    print_deployment(deployment, args)
    return 0
