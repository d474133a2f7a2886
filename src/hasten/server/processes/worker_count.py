"""Number of processes that answer clients."""

from __future__ import annotations

from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import PlanError
from hasten.core.system.hardware import this_machine, usable_cores
from hasten.core.variant import CPU
from hasten.server.settings import Settings
from hasten.server.startup import bundle_paths

_MAX_WORKERS = 8


def count_workers(settings: Settings) -> int:
    """Return the number of API workers; 1 means a single process without engine processes.

    By default there are several if a model runs on a GPU: then Python, not the model, limits the throughput
    (docs/decisions/processes.md).
    """
    workers = _count(settings)
    if workers == 1 and settings.engines > 1:
        raise PlanError(f"--engines {settings.engines} needs several API workers", hint="add --workers 2 or more")
    return workers


def _count(settings: Settings) -> int:
    if settings.workers == 1:
        return 1
    bundles = [open_bundle(path) for path in bundle_paths(settings).values()]
    if settings.workers is not None:
        for bundle in bundles:
            require_encoder(bundle)
        return settings.workers
    if any(bundle.manifest.generation is not None for bundle in bundles):
        return 1
    if not any(_runs_on_gpu(bundle, settings) for bundle in bundles):
        return 1
    return max(1, min(_MAX_WORKERS, usable_cores() // 2))


def require_encoder(bundle: Bundle) -> None:
    """Raise if a bundle holds a generative model, which only a server of one process serves."""
    if bundle.manifest.generation is not None:
        raise PlanError(
            f"{bundle.path.name} generates text, and several processes serve only encoder models",
            hint="use --workers 1",
        )


def _runs_on_gpu(bundle: Bundle, settings: Settings) -> bool:
    """Return whether the variant that will be served needs a GPU that is here.

    Whether it runs is left to the engine process: probing would import its runtime here.
    """
    if settings.variant is not None:
        return bundle.entry(settings.variant).variant.device != CPU
    fastest = next(iter(bundle.manifest.variants), None)
    return fastest is not None and fastest.variant.device != CPU and bool(this_machine().gpus)
