"""Finding a model: a local directory or a hub id becomes a directory with configuration, weights and tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hasten.bundle.manifest import is_bundle
from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.registry import did_you_mean

ADAPTER = "adapter_config.json"

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_ABOUT = ("*.json", "*/config.json", "*.py")
# In folders: the dense layers of sentence-transformers, which a graph does not hold either.
_BESIDE = ("*.txt", "*.model", "tokenizer*", "*.jinja", "*/*.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Other formats of the same weights that hub repositories hold beside them.
_UNWANTED = ("openvino/*", "*.h5", "*.msgpack", "*.ot", "*.tflite", "coreml/*")
# Where Optimum, and where sentence-transformers and transformers.js put the fp32 graph.
_USUAL_GRAPHS = ("model.onnx", "onnx/model.onnx")


class IsBundleError(PlanError):
    """What was found is no model that can be built, but was built already."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model on disk and what its configuration says."""

    path: Path
    id: str
    revision: str | None
    config: dict[str, Any]
    # The ONNX file that is the model, where its weights are not; then those nobody asked for.
    graph: str | None = None
    unused_graphs: tuple[str, ...] = ()
    # What an adapter was trained on.
    base: ModelDirectory | None = None

    @property
    def architecture(self) -> str:
        listed = self.config.get("architectures") or [""]
        return str(listed[0])

    @property
    def tokenizer_path(self) -> Path:
        has_own = any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return self.path if self.base is None or has_own else self.base.path

    def find(self, relative: str) -> Path | None:
        """A file of the model or, where an adapter has none, of its base."""
        file = self.path / relative
        if file.is_file():
            return file
        return self.base.find(relative) if self.base is not None else None

    def json(self, relative: str) -> Any:
        """A JSON file of the model, or None where it has none."""
        file = self.find(relative)
        return read_json(file) if file is not None else None


def find_model(plan: Plan, *, with_weights: bool = True, directory: Path | None = None) -> ModelDirectory:
    """Without weights, only what says what the model is: enough to refuse it early.

    `directory` is where a model lies whose name in the plan is not an address.
    """
    local = directory or Path(plan.model).expanduser()
    if local.is_dir():
        if plan.revision is not None:
            raise PlanError(f"--revision is for hub models, and {plan.model} is a local directory")
        path, revision, files = local, None, list_files(local)
    elif local.exists():
        raise PlanError(f"{plan.model} is a file, not a model", hint="give the directory that holds config.json")
    elif plan.model.startswith((".", "/", "~")) or not _HUB_ID.match(plan.model):
        raise PlanError(f"no model at {plan.model}: no such directory")
    else:
        path, revision, files = _download(plan, with_weights)
    if is_bundle(path):
        raise IsBundleError(f"{plan.model} is already a bundle", hint=f"hasten run {plan.model} TEXT")
    # A local model is known by its full path, so that it is found again from anywhere.
    name = str(path.resolve()) if local.is_dir() and directory is None else plan.model
    graph = pick_graph(files, plan)
    if graph is None:
        _check_weights(files, plan)
    if ADAPTER in files:
        from hasten.builder.adapter import find_adapted

        return find_adapted(path, name, revision, plan, with_weights=with_weights)
    if "config.json" not in files:
        hint = "a graph needs the configuration of the model it came from beside it" if graph is not None else None
        raise PlanError(f"{plan.model} is not a Hugging Face model: it has no config.json", hint=hint)
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise PlanError(f"{path / 'config.json'} is not a model's configuration: not a JSON object")
    unused = tuple(file for file in files if file.endswith(".onnx") and file != graph)
    return ModelDirectory(path, name, revision, config, graph, unused)


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not valid JSON: {error}") from error


def list_files(folder: Path) -> list[str]:
    """A model's files as a hub lists them; no layout is deeper than one folder."""
    found = [file for pattern in ("*", "*/*") for file in folder.glob(pattern) if file.is_file()]
    return sorted(file.relative_to(folder).as_posix() for file in found)


def pick_graph(files: Sequence[str], plan: Plan) -> str | None:
    """The ONNX file to build from: the one asked for or, where there are no weights, the one that is the model."""
    graphs = [file for file in files if file.endswith(".onnx")]
    if plan.file_name is not None:
        wanted = PurePosixPath(plan.file_name).as_posix()
        if wanted not in graphs:
            raise PlanError(
                f"{plan.model} has no graph '{plan.file_name}'{did_you_mean(wanted, graphs)}",
                hint=f"--file-name with one of: {', '.join(graphs)}" if graphs else "it holds no .onnx file",
            )
        return wanted
    if any(map(_is_safe, files)) or any(map(_is_pickled, files)) or not graphs:
        return None
    if len(graphs) == 1:
        return graphs[0]
    usual = next((name for name in _USUAL_GRAPHS if name in graphs), None)
    if usual is None:
        raise PlanError(
            f"{plan.model} holds {len(graphs)} ONNX graphs, and none is called model.onnx",
            hint=f"--file-name with one of: {', '.join(graphs)}",
        )
    return usual


def _is_safe(file: str) -> bool:
    return "/" not in file and file.endswith(".safetensors")


def _is_pickled(file: str) -> bool:
    return "/" not in file and file.endswith(_PICKLED)


def _check_weights(files: Sequence[str], plan: Plan) -> None:
    """That there are weights, and that we may load them."""
    is_model = "config.json" in files or ADAPTER in files
    if any(map(_is_safe, files)) or not is_model:
        return
    pickled = [file for file in files if _is_pickled(file)]
    if not pickled:
        raise PlanError(f"{plan.model} has no weights: no .safetensors file beside its config.json, and no .onnx")
    if not plan.allow_pickle:
        graphs = [file for file in files if file.endswith(".onnx")]
        raise UnsupportedError(
            f"{plan.model} has only pickled weights ({pickled[0]}), and unpickling can run any code",
            hint="--allow-pickle if you trust its author" + (f", or --file-name {graphs[0]}" if graphs else ""),
        )


def _weights(graph: str | None, plan: Plan) -> list[str]:
    if graph is not None:
        return [f"{graph}*"]  # model.onnx_data and model.onnx.data too
    return ["*.safetensors", *(f"*{ending}" for ending in _PICKLED if plan.allow_pickle)]


def _download(plan: Plan, with_weights: bool) -> tuple[Path, str, list[str]]:
    """The folder, the commit it holds, and what else the hub has there."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise missing_package("huggingface_hub", "loading a model from the hub", "build") from error
    token = os.environ.get("HF_TOKEN")

    def fetch(*patterns: str) -> Path:
        folder = snapshot_download(
            plan.model,
            revision=plan.revision,
            token=token,
            allow_patterns=list(patterns),
            ignore_patterns=list(_UNWANTED),
        )
        return Path(folder)

    what = f"'{plan.model}'" + (f" at revision '{plan.revision}'" if plan.revision else "")
    try:
        folder = fetch(*_ABOUT)
        try:
            files = sorted(HfApi(token=token).list_repo_files(plan.model, revision=folder.name))
        except Exception:  # offline, in whatever class the library's HTTP client of the year says so
            files = list_files(folder)
        if with_weights:
            folder = fetch(*_ABOUT, *_BESIDE, *_weights(pick_graph(files, plan), plan))
    except GatedRepoError as error:
        raise PlanError(f"{what} is gated", hint="accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise PlanError(
            f"no model {what}: neither a local directory nor a model on the hub",
            hint="check the spelling; private models need HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise PlanError(f"the hub has no {what}", hint="--revision takes a branch, a tag or a commit") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise StageError(
            f"no model {what} here, and the hub cannot be reached",
            hint="check the network, or give a local directory",
        ) from error
    except HfHubHTTPError as error:
        raise StageError(f"the hub refused {what}: {error}") from error
    # The cache's layout ends in snapshots/<commit>: the revision that was really taken.
    return folder, folder.name, files
