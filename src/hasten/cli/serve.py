"""hasten serve BUNDLE …, or MODEL …"""

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
from hasten.server import logs
from hasten.server.settings import OPTIONS, Settings, bundles_in, flag
from hasten.server.supervise import supervise

logger = logging.getLogger("hasten")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles",
        nargs="*",
        metavar="bundle",
        help="each goes by the name of its directory; or a directory of bundles; or a model, to be built first",
    )
    what = "the same options from a file: max_queue = 100; each may also be HASTEN_… in the environment"
    parser.add_argument("--config", type=Path, metavar="TOML", help=what)
    groups: dict[str, argparse._ArgumentGroup] = {}
    defaults = Settings()
    for name, option in OPTIONS.items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        what = option.help(getattr(defaults, name))
        if option.is_flag:
            groups[option.group].add_argument(flag(name), action=argparse.BooleanOptionalAction, help=what)
        else:
            groups[option.group].add_argument(flag(name), metavar=option.metavar, help=what)


def main(args: argparse.Namespace) -> int:
    settings = Settings.read(vars(args), file=args.config)
    logs.set_up(settings.log)
    try:
        return _serve(settings, args)
    except HastenError as error:
        if settings.log != "json":
            raise
        # Whatever reads the log reads why it ended, too.
        logger.critical("%s", error)
        return error.exit_code


def _serve(settings: Settings, args: argparse.Namespace) -> int:
    is_on_ray = settings.on == "ray"
    for name in ("replicas", "gpus", "max_models", "address", "write"):
        if not is_on_ray and getattr(settings, name) is not None:
            raise PlanError(f"{flag(name)} is for a fleet", hint="add --on ray")
    if settings.supervise and not is_on_ray:
        return supervise([sys.executable, "-m", "hasten", "serve", *_words(args), "--no-supervise"], settings.hang)
    from hasten.cli import console
    from hasten.server.run import Addresses

    if is_on_ray:
        from hasten.deploy.ray.run import run
    else:
        from hasten.server.run import run

    def tell(addresses: Addresses) -> None:
        if args.json:
            console.print_json(addresses)
            sys.stdout.flush()
            return
        if addresses.grpc is not None:
            console.out.print(f"gRPC on {addresses.grpc}", highlight=False)
        console.out.print(f"ready on {addresses.http}", highlight=False)

    bundles = tuple(str(_bundle(name, args.quiet or settings.log == "json")) for name in settings.bundles)
    logs.set_up(settings.log)  # a build's display has its own
    run(replace(settings, bundles=bundles), tell)
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command line again, as it was given."""
    words = [*args.bundles, *(["--config", str(args.config)] if args.config else [])]
    for name, option in OPTIONS.items():
        if (value := getattr(args, name)) is None:
            continue
        if option.is_flag:
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), value]
    return [*words, *(["--json"] if args.json else []), *(["--quiet"] if args.quiet else [])]


def _bundle(name: str, is_quiet: bool) -> Path:
    """A bundle, or a directory of them, as it is; anything else is a model, built where that was not done before."""
    path = Path(name)
    is_damaged = (path / MANIFEST).is_file() and not (path / "config.json").is_file()
    if is_bundle(path) or is_damaged or bundles_in(path) != [path]:
        return path  # whoever opens it says what is wrong with it
    from hasten.builder.build import build
    from hasten.builder.outline import outline
    from hasten.cli import console
    from hasten.core.plan import Plan
    from hasten.core.progress import Silent

    plan = Plan(model=name)
    about = outline(plan)
    if is_bundle(about.target) and _is_of(open_bundle(about.target), about.model, path):
        return about.target
    logger.info("%s is built first, which takes minutes and is done once", name)
    return build(plan, progress=Silent() if is_quiet else console.display(quiet=False)).path


def _is_of(bundle: Bundle, model: str, path: Path) -> bool:
    """Whether it was made of this model, as it is now."""
    built = datetime.fromisoformat(bundle.manifest.created).timestamp()
    is_older = all(file.stat().st_mtime < built for file in path.rglob("*")) if path.is_dir() else True
    return bundle.manifest.model.id == model and is_older
