"""hasten deploy kserve BUNDLE"""

from __future__ import annotations

import argparse

from hasten.cli.pod_options import add_pod_arguments, pod_options, print_deployment

# As deploy/kserve.py has them, which is imported when it is needed.
_RUNTIMES, _MODES, _PROTOCOLS = ("hasten", "tritonserver"), ("standard", "knative"), ("v2", "grpc-v2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pod_arguments(parser)
    parser.add_argument("--runtime", choices=_RUNTIMES, default="hasten", help="what serves it (default: hasten)")
    parser.add_argument(
        "--storage",
        metavar="ADDRESS",
        help="s3://…, gs://…, pvc://…: holds the bundle, under its name, or tritonserver's repository "
        "(default: the bundle is put into the image)",
    )
    parser.add_argument("--protocol", choices=_PROTOCOLS, default="v2", help="by HTTP or by gRPC (default: v2)")
    parser.add_argument("--mode", choices=_MODES, default="standard", help="of KServe (default: standard)")
    parser.add_argument("--prometheus", metavar="URL", help="scale by the queue that it scrapes, through KEDA")
    parser.add_argument("--cluster-wide", action="store_true", help="a runtime for every namespace")


def main(args: argparse.Namespace) -> int:
    from hasten.bundle import open_bundle
    from hasten.deploy.kserve import Mode, Protocol, Runtime, Service, write

    bundle = open_bundle(args.bundle)
    service = Service(
        runtime=Runtime(args.runtime),
        mode=Mode(args.mode),
        protocol=Protocol(args.protocol),
        storage=args.storage,
        prometheus=args.prometheus,
        is_for_cluster=args.cluster_wide,
    )
    made = write(bundle, args.output, pod_options(args, bundle), service, force=args.force)
    print_deployment(made, args)
    return 0
