"""Find a model by local directory or hub id, and download its configuration, weights and tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from hasten.builder.sources.directory import ADAPTER, ModelDirectory, list_files, read_json
from hasten.builder.sources.peft import resolve_adapter
from hasten.bundle.manifest import is_bundle
from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.registry import did_you_mean

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_CONFIG_FILES = ("*.json", "*/config.json", "*.py")
# Folders hold the dense layers of sentence-transformers, which are not part of a graph.
_TOKENIZER_FILES = ("*.txt", "*.model", "tokenizer*", "*.jinja", "*/*.safetensors")
# Weights that are unpickled, which can run arbitrary code.
PICKLED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# Other formats of the same weights in hub repositories.
_OTHER_FORMATS = ("openvino/*", "*.h5", "*.msgpack", "*.ot", "*.tflite", "coreml/*")
# The paths of the fp32 graph: by Optimum, and by sentence-transformers and transformers.js.
_DEFAULT_GRAPHS = ("model.onnx", "onnx/model.onnx")


class IsBundleError(PlanError):
    """The path holds a bundle, which is already built."""


def find_model(plan: Plan, *, with_weights: bool = True, directory: Path | None = None) -> ModelDirectory:
    """Find the model of a plan, and download it if it is on the hub.

    Without weights, only the configuration is downloaded: enough to reject an unsupported model early. `directory`
    holds the files of a model whose name in the plan is neither a path nor a hub id.
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
    # A local model is identified by its absolute path, so that it is found from any working directory.
    name = str(path.resolve()) if local.is_dir() and directory is None else plan.model
    graph = pick_graph(files, plan)
    if graph is None:
        _check_weights(files, plan)
    if ADAPTER in files:
        return resolve_adapter(path, name, revision, plan, find=partial(find_model, with_weights=with_weights))
    if "config.json" not in files and "router_config.json" in files:
        raise UnsupportedError(
            f"{plan.model} routes queries and documents to different modules, which is not supported"
        )
    if "config.json" not in files:
        hint = "a graph needs the configuration of its model in the same directory" if graph is not None else None
        raise PlanError(f"{plan.model} is not a Hugging Face model: it has no config.json", hint=hint)
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise PlanError(f"{path / 'config.json'} is not a model configuration: not a JSON object")
    unused = tuple(file for file in files if file.endswith(".onnx") and file != graph)
    return ModelDirectory(path, name, revision, config, graph, unused)


def fetch_weights(model: ModelDirectory, plan: Plan) -> ModelDirectory:
    """Return a model that was found without weights with its weights on disk: those of the same commit of the hub."""
    if model.base is not None:
        model = replace(model, base=fetch_weights(model.base, plan))
    if model.revision is None:
        return model
    path, _, _ = _download(replace(plan, model=model.id, revision=model.revision), with_weights=True)
    return replace(model, path=path)


def pick_graph(files: Sequence[str], plan: Plan) -> str | None:
    """Return the ONNX file to build from: the plan's `file_name`, else the default graph of a model without weights."""
    graphs = [file for file in files if file.endswith(".onnx")]
    if plan.file_name is not None:
        file_name = PurePosixPath(plan.file_name).as_posix()
        if file_name not in graphs:
            raise PlanError(
                f"{plan.model} has no graph '{plan.file_name}'{did_you_mean(file_name, graphs)}",
                hint=f"--file-name with one of: {', '.join(graphs)}" if graphs else "it holds no .onnx file",
            )
        return file_name
    if _weight_files(files, ".safetensors", *PICKLED_ENDINGS) or not graphs:
        return None
    if len(graphs) == 1:
        return graphs[0]
    for default in _DEFAULT_GRAPHS:
        if default in graphs:
            return default
    raise PlanError(
        f"{plan.model} holds {len(graphs)} ONNX graphs, and none is called model.onnx",
        hint=f"--file-name with one of: {', '.join(graphs)}",
    )


def _weight_files(files: Sequence[str], *endings: str) -> list[str]:
    return [file for file in files if "/" not in file and file.endswith(endings)]


def _check_weights(files: Sequence[str], plan: Plan) -> None:
    """Raise if the model has no weights, or only pickled ones that the plan does not allow."""
    is_model = "config.json" in files or ADAPTER in files
    if _weight_files(files, ".safetensors") or not is_model:
        return
    pickled = _weight_files(files, *PICKLED_ENDINGS)
    if not pickled:
        raise PlanError(f"{plan.model} has no weights: no .safetensors file beside its config.json, and no .onnx")
    if not plan.allow_pickle:
        graphs = [file for file in files if file.endswith(".onnx")]
        raise UnsupportedError(
            f"{plan.model} has only pickled weights ({pickled[0]}), and unpickling can run arbitrary code",
            hint="--allow-pickle if you trust its author" + (f", or --file-name {graphs[0]}" if graphs else ""),
        )


def _download(plan: Plan, with_weights: bool) -> tuple[Path, str, list[str]]:
    """Return the local folder, its commit, and the files that the hub lists."""
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

    options = {"revision": plan.revision, "token": token, "ignore_patterns": list(_OTHER_FORMATS)}
    fetch = partial(snapshot_download, plan.model, **options)
    name = f"'{plan.model}'" + (f" at revision '{plan.revision}'" if plan.revision else "")
    try:
        folder = Path(fetch(allow_patterns=list(_CONFIG_FILES)))
        try:
            files = sorted(HfApi(token=token).list_repo_files(plan.model, revision=folder.name))
        except Exception:  # offline; the class depends on the HTTP client of the installed library
            files = list_files(folder)
        if with_weights:
            graph = pick_graph(files, plan)
            weights = ["*.safetensors", *(f"*{suffix}" for suffix in PICKLED_ENDINGS if plan.allow_pickle)]
            weights = weights if graph is None else [f"{graph}*"]  # model.onnx_data and model.onnx.data too
            folder = Path(fetch(allow_patterns=[*_CONFIG_FILES, *_TOKENIZER_FILES, *weights]))
    except GatedRepoError as error:
        raise PlanError(f"{name} is gated", hint="accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise PlanError(
            f"no model {name}: neither a local directory nor a model on the hub",
            hint="check the spelling; private models need HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise PlanError(f"the hub has no {name}", hint="--revision takes a branch, a tag or a commit") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise StageError(
            f"no model {name} on this machine, and the hub cannot be reached",
            hint="check the network, or give a local directory",
        ) from error
    except HfHubHTTPError as error:
        raise StageError(f"the hub rejected {name}: {error}") from error
    # The cache's path ends in snapshots/<commit>: the revision that was downloaded.
    return folder, folder.name, files
