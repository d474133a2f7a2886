"""Bundles made when they are first asked for, and kept: for people who name a model and want it to answer.

model ──▶ a bundle? ──▶ open it
      └─▶ in the cache, by what it is made of? ──▶ open it
          └─▶ build it into the cache
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import msgspec

from hasten.backends.onnxruntime import stored_precision
from hasten.builder.detect import find_writing
from hasten.builder.levels import of_precision
from hasten.builder.source import IsBundleError, ModelDirectory, find_model, list_files
from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import is_bundle, sha256
from hasten.core.cache import cache_directory
from hasten.core.errors import BundleError, PlanError, StageError, missing_package
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan
from hasten.core.progress import Progress
from hasten.core.variant import ANYTHING, CUDA, Precision, VariantChoice

# Of what a build reads: other formats of the same weights do not matter.
_READ = (".json", ".txt", ".model", ".spm", ".py", ".jinja", ".safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Enough to rank two or three variants; whoever wants the table of all builds with `hasten build`.
_BENCH_S = 10.0
BEST = "best"
# What runs models that write.
_WRITER = "onnxruntime"

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for beside the model. The precision is the model's own, unless one is named; "best" searches."""

    task: str | None = None
    choice: VariantChoice = ANYTHING
    revision: str | None = None
    file_name: str | None = None
    pooling: str | None = None
    # Rows to judge on, instead of the built-in sample.
    data: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def is_about_building(self) -> bool:
        asked = (self.revision, self.file_name, self.pooling, self.data, self.allow_pickle, self.trust_remote_code)
        return any(asked)


def bundle_of(model: str | Path, wish: Wish, progress: Progress | None = None) -> Bundle:
    """The model's bundle, made if there is none yet, which takes a minute or two and shows its progress."""
    if not isinstance(model, str | PathLike):
        raise PlanError(
            f"a model is named by its hub id or its directory, and not given as a {type(model).__name__}",
            hint="hasten.build(model, tokenizer=…) makes a bundle of one in memory",
        )
    path = Path(model).expanduser()
    if is_bundle(path):
        if wish.is_about_building:
            raise PlanError(f"{model} is a bundle: it was built, and nothing about that can be asked for any more")
        return open_bundle(path)
    plan = Plan(
        model=str(model),
        revision=wish.revision,
        task=wish.task,
        pooling=wish.pooling,
        file_name=wish.file_name,
        device=wish.choice.device,
        data=wish.data,
        bench_budget_s=_BENCH_S,
        allow_pickle=wish.allow_pickle,
        trust_remote_code=wish.trust_remote_code,
    )
    try:
        found = find_model(plan, with_weights=False)
    except IsBundleError:
        return open_bundle(_download_bundle(str(model), wish.revision))
    plan = replace(plan, variants=_variants(plan, found, wish.choice))
    place = cache_directory() / "on-demand" / f"{_name(found)}-{_key(plan, found)}"
    return open_bundle(place) if is_bundle(place) else _build(plan, place, progress)


def variant_of(bundle: Bundle, choice: VariantChoice) -> str | None:
    """The fastest in the bundle that is what was asked for; None where any will do, whichever runs here."""
    if choice.precision == BEST:
        choice = replace(choice, precision=None)
    if choice == ANYTHING:
        return None
    known = bundle.manifest.variants
    found = next((entry.name for entry in known if choice.fits(entry.variant)), None)
    if found is None:
        raise PlanError(
            f"{bundle.path} holds nothing with {choice}", hint=f"it holds: {', '.join(entry.name for entry in known)}"
        )
    return found


def _build(plan: Plan, place: Path, progress: Progress | None) -> Bundle:
    from hasten.builder.build import build
    from hasten.core.display import Display

    with _alone(place):
        if is_bundle(place):
            return open_bundle(place)
        # A directory that holds no bundle is left from nothing of ours, and refused.
        return build(plan, place, force=True, progress=progress or Display(), is_brief=True)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One build of it at a time: another would take as long, and replace what the first has open by then."""
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise missing_package("filelock", "building", "build") from error

    file = cache_directory() / "locks" / place.name
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("%s is being built by somebody else: waiting for it", place.name)
            lock.acquire()
    except OSError as error:
        hint = "HASTEN_CACHE names another directory"
        raise StageError(f"the cache {cache_directory()} cannot be written: {error.strerror}", hint=hint) from error
    # Whoever dies lets go of it.
    try:
        yield
    finally:
        lock.release()


def _variants(plan: Plan, model: ModelDirectory, choice: VariantChoice) -> tuple[str, ...]:
    """None stands for all that a build tries by itself."""
    if find_writing(model, plan) is not None:
        if choice.precision == BEST:
            return ()
        on_gpu = choice.device == CUDA
        # A GPU attends in halves alone.
        precision = choice.precision or (Precision.FP16 if on_gpu else Precision.FP32)
        return (f"{choice.backend or _WRITER}-{precision}{f'@{CUDA}' if on_gpu else ''}",)
    if choice.precision == BEST:
        if choice.backend is not None:
            raise PlanError("the best is looked for among all backends", hint="leave out backend, or name a precision")
        return ()
    came_in = Precision.FP32
    if model.graph is not None:
        model = find_model(plan)  # what is on the hub has to be here to be looked at
        came_in = stored_precision(model.path / str(model.graph))
    if came_in in (Precision.INT8, Precision.INT4):
        if choice.precision not in (None, came_in):
            raise PlanError(f"{model.graph} is in {came_in} already, and cannot be made {choice.precision}")
        return (f"graph-{came_in}",)
    return of_precision(choice.precision or Precision.FP32, choice.backend, choice.device, this_machine())


def _key(plan: Plan, model: ModelDirectory) -> str:
    """Of all that decides what a bundle is: the model itself, what was asked for, who makes it, and where."""
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
    """The commit on the hub, or what the files hold."""
    if model.revision is not None:
        yield f"{model.id}@{model.revision}"
        return
    endings = (*_READ, *(_PICKLED if plan.allow_pickle else ()))
    for name in list_files(model.path):
        is_graph = model.graph is not None and name.startswith(model.graph)
        if is_graph or name.endswith(endings):
            yield f"{name} {sha256(model.path / name)}"


def _name(model: ModelDirectory) -> str:
    """To be recognized by people; the key tells it apart."""
    name = model.id if model.revision is not None else Path(model.id).name
    return re.sub(r"[^\w.-]+", "--", name).strip("-.") or "model"


def _download_bundle(model: str, revision: str | None) -> Path:
    """Files and not links, as the hub's own cache has them: links that leave a bundle are refused."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_package("huggingface_hub", "loading a bundle from the hub", "build") from error
    place = cache_directory() / "hub" / re.sub(r"[^\w.-]+", "--", f"{model}@{revision or 'main'}")
    try:
        snapshot_download(model, revision=revision, local_dir=place)
    except Exception as error:  # a dozen classes, by the library's version
        if not is_bundle(place):
            raise StageError(f"the bundle {model} cannot be loaded from the hub: {error}") from error
    if not is_bundle(place):
        raise BundleError(f"{model} has no bundle at revision {revision or 'main'}")
    return place
