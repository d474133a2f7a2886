"""Build the bundle of a model on first use and keep it in the cache.

model ──▶ is a bundle? ──▶ open it
      └─▶ in the cache, by a digest of its inputs? ──▶ open it
          └─▶ build it into the cache
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import msgspec

from hasten.builder.sources.detect import detect_task
from hasten.builder.sources.directory import ModelDirectory, list_files
from hasten.builder.sources.locate import PICKLED_ENDINGS, IsBundleError, find_model
from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import is_bundle, sha256
from hasten.core.errors import BundleError, PlanError, StageError, missing_package
from hasten.core.plan import Plan
from hasten.core.progress import Progress
from hasten.core.system.cache import cache_directory
from hasten.core.system.hardware import this_machine
from hasten.core.variant import ANY_VARIANT, BEST, VariantChoice
from hasten.families import family_of

# Files that a build reads; other formats of the same weights do not matter.
_READ_FILES = (".json", ".txt", ".model", ".spm", ".py", ".jinja", ".safetensors")
# Enough to rank two or three variants; `hasten build` measures all of them.
_BENCH_BUDGET_S = 10.0

logger = logging.getLogger("hasten")


def name_of_model(model: object) -> str:
    """Return the name of a model; reject an object in memory."""
    if isinstance(model, str | PathLike):
        return str(model)
    raise PlanError(
        f"a model is named by its hub id or its directory, and this is a {type(model).__name__}",
        hint="hasten.build(model, tokenizer=…) builds the bundle of a model in memory",
    )


def bundle_for(plan: Plan, choice: VariantChoice, progress: Progress | None = None) -> Bundle:
    """Return the bundle of a plan's model, built if there is none yet, which takes minutes and shows its progress.

    It is built in the model's own precision unless the choice names another; "best" searches.
    """
    path = Path(plan.model).expanduser()
    if is_bundle(path):
        if plan != Plan(plan.model, task=plan.task):
            raise PlanError(f"{plan.model} is a bundle, and options of its build cannot be changed any more")
        return open_bundle(path)
    plan = replace(plan, device=choice.device, bench_budget_s=_BENCH_BUDGET_S)
    try:
        model = find_model(plan, with_weights=False)
    except IsBundleError:
        return open_bundle(_download_bundle(plan.model, plan.revision))
    plan = replace(plan, variants=family_of(detect_task(model, plan)).pipeline.variants_for(choice, model, plan))
    # A readable name; the key makes it unique.
    name = _flat_name(model.id if model.revision is not None else Path(model.id).name).strip("-.") or "model"
    target = cache_directory() / "on-demand" / f"{name}-{_key(plan, model)}"
    return open_bundle(target) if is_bundle(target) else _build(plan, target, progress)


def variant_of(bundle: Bundle, choice: VariantChoice) -> str | None:
    """Return the fastest variant of the bundle that fits the choice; None if every variant does."""
    if choice.precision == BEST:
        choice = replace(choice, precision=None)
    if choice == ANY_VARIANT:
        return None
    names = [entry.name for entry in bundle.manifest.variants if choice.fits(entry.variant)]
    if not names:
        stored = ", ".join(entry.name for entry in bundle.manifest.variants)
        raise PlanError(f"{bundle.path} has no variant with {choice}", hint=f"it has: {stored}")
    return names[0]


def _build(plan: Plan, target: Path, progress: Progress | None) -> Bundle:
    from hasten.builder.build import build
    from hasten.core.system.display import Display

    with _locked(target):
        if is_bundle(target):
            return open_bundle(target)
        # A directory that is not a bundle was not written by hasten, and the build rejects it.
        return build(plan, target, force=True, progress=progress or Display(), is_brief=True)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process build a bundle at a time: a second build would replace the files that the first has opened."""
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise missing_package("filelock", "building", "build") from error

    file = cache_directory() / "locks" / target.name
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("Another process is building %s: waiting for it.", target.name)
            lock.acquire()
    except OSError as error:
        hint = "set HASTEN_CACHE to another directory"
        raise StageError(f"the cache {cache_directory()} cannot be written: {error.strerror}", hint=hint) from error
    # The operating system releases the lock of a process that dies.
    try:
        yield
    finally:
        lock.release()


def _key(plan: Plan, model: ModelDirectory) -> str:
    """Return a digest of everything a bundle depends on: the model, the plan, the libraries and the machine."""
    machine = this_machine()
    digest = hashlib.sha256(msgspec.json.encode(replace(plan, model=""), order="sorted"))
    if plan.data is not None and Path(plan.data).is_file():
        digest.update(sha256(Path(plan.data)).encode())
    digest.update(msgspec.json.encode([machine.libraries, machine.instructions, machine.gpus]))
    for part in (model, model.base):
        for line in _identity(part, plan) if part is not None else ():
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def _identity(model: ModelDirectory, plan: Plan) -> Iterator[str]:
    """Return the commit on the hub, or the digests of local files."""
    if model.revision is not None:
        yield f"{model.id}@{model.revision}"
        return
    endings = (*_READ_FILES, *(PICKLED_ENDINGS if plan.allow_pickle else ()))
    for name in list_files(model.path):
        is_graph = model.graph is not None and name.startswith(model.graph)
        if is_graph or name.endswith(endings):
            yield f"{name} {sha256(model.path / name)}"


def _flat_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "--", name)


def _download_bundle(model: str, revision: str | None) -> Path:
    """Download a bundle as files: the hub's cache has links, and links that leave a bundle are rejected."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_package("huggingface_hub", "loading a bundle from the hub", "build") from error
    path = cache_directory() / "hub" / _flat_name(f"{model}@{revision or 'main'}")
    try:
        snapshot_download(model, revision=revision, local_dir=path)
    except Exception as error:  # the classes depend on the library's version
        if not is_bundle(path):
            raise StageError(f"the bundle {model} cannot be downloaded from the hub: {error}") from error
    if not is_bundle(path):
        raise BundleError(f"{model} has no bundle at revision {revision or 'main'}")
    return path
