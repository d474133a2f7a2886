"""The command `hasten serve BUNDLE …` or `hasten serve MODEL …`."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import FILE as MANIFEST
from hasten.bundle.manifest import is_bundle
from hasten.core.errors import HastenError, PlanError
from hasten.core.options import flag
from hasten.server.settings import OPTIONS, Settings, find_bundles
from hasten.server.telemetry import logs

logger = logging.getLogger("hasten")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting."""
    parser.add_argument(
        "bundles",
        nargs="*",
        metavar="bundle",
        help="a bundle, served under its directory's name; a directory of bundles; or a model, which is built first",
    )
    text = "read options from a file (max_queue = 100); each may also be set in the environment (HASTEN_MAX_QUEUE=100)"
    parser.add_argument("--config", type=Path, metavar="TOML", help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    defaults = Settings()
    for name, option in OPTIONS.items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        text = option.help(getattr(defaults, name))
        if option.is_flag:
            groups[option.group].add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            groups[option.group].add_argument(flag(name), metavar=option.metavar, help=text)


def main(args: argparse.Namespace) -> int:
    """Run `hasten serve`."""
    settings = Settings.read(vars(args), file=args.config)
    logs.set_up(settings.log_format)
    try:
        return _serve(settings, args)
    except HastenError as error:
        if settings.log_format != "json":
            raise
        # Readers of the JSON log need the reason there, too.
        logger.critical("%s", error)
        return error.exit_code


def _serve(settings: Settings, args: argparse.Namespace) -> int:
    uses_ray = settings.runner == "ray"
    for name in ("replicas", "gpus", "max_models", "address", "write_config"):
        if not uses_ray and getattr(settings, name) is not None:
            raise PlanError(f"{flag(name)} needs Ray Serve", hint="add --runner ray")
    if uses_ray and settings.workers is not None:
        raise PlanError("--workers has no effect with Ray Serve", hint="use --replicas")
    from hasten.cli import console
    from hasten.server.frontend import Addresses

    if uses_ray:
        from hasten.deploy.ray.run import run
    else:
        from hasten.server.run import run

    def print_addresses(addresses: Addresses) -> None:
        if args.json:
            console.print_json(addresses)
            sys.stdout.flush()
            return
        if addresses.grpc is not None:
            console.out.print(f"gRPC on {addresses.grpc}")
        console.out.print(f"ready on {addresses.http}")

    bundles = tuple(str(_find_or_build(name, args.quiet or settings.log_format == "json")) for name in settings.bundles)
    logs.set_up(settings.log_format)  # a build replaces the log handler
    run(replace(settings, bundles=bundles), print_addresses)
    return 0


def _find_or_build(name: str, is_quiet: bool) -> Path:
    """Return a bundle or a directory of bundles as it is; build any other model unless that was done before."""
    path = Path(name)
    is_damaged = (path / MANIFEST).is_file() and not (path / "config.json").is_file()
    if is_bundle(path) or is_damaged or find_bundles(path) != [path]:
        return path  # opening it reports what is wrong with it
    from hasten.builder.build import build
    from hasten.builder.preflight import preview
    from hasten.cli import console
    from hasten.core.plan import Plan
    from hasten.core.progress import SilentProgress

    plan = Plan(model=name)
    planned = preview(plan)
    if is_bundle(planned.target) and _is_current(open_bundle(planned.target), planned.model, path):
        return planned.target
    logger.info("building %s first, which takes minutes and is done once", name)
    return build(plan, progress=SilentProgress() if is_quiet else console.display(quiet=False)).path


def _is_current(bundle: Bundle, model: str, path: Path) -> bool:
    """Return whether a bundle was built from this model in its present state."""
    built = datetime.fromisoformat(bundle.manifest.created).timestamp()
    is_older = all(file.stat().st_mtime < built for file in path.rglob("*")) if path.is_dir() else True
    return bundle.manifest.model.id == model and is_older
