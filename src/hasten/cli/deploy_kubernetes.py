"""hasten deploy kubernetes BUNDLE"""

from __future__ import annotations

import argparse

from hasten.cli.pod_options import add_pod_arguments, pod_options, print_deployment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pod_arguments(parser)
    parser.add_argument(
        "--volume-claim", metavar="NAME", help="holds the bundle, under its name (default: it is put into the image)"
    )


def main(args: argparse.Namespace) -> int:
    from hasten.bundle import open_bundle
    from hasten.deploy.kubernetes import Delivery, write

    bundle = open_bundle(args.bundle)
    made = write(bundle, args.output, pod_options(args, bundle), Delivery(args.volume_claim), force=args.force)
    print_deployment(made, args)
    return 0
