"""Finding a model: a local directory or a hub id becomes a directory with configuration, weights and tokenizer."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.bundle.manifest import is_bundle
from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_ABOUT = ("*.json", "*/config.json", "*.py")
_WEIGHTS = ("*.safetensors", "*/*.safetensors", "*.txt", "*.model", "tokenizer*", "*.jinja")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Other formats of the same weights that hub repositories hold beside them.
_UNWANTED = ("onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite", "coreml/*")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model on disk and what its configuration says."""

    path: Path
    id: str
    revision: str | None
    config: dict[str, Any]

    @property
    def architecture(self) -> str:
        listed = self.config.get("architectures") or [""]
        return str(listed[0])

    def json(self, relative: str) -> Any:
        """A JSON file of the model, or None where it has none."""
        file = self.path / relative
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{file} is not valid JSON: {error}") from error


def find_model(plan: Plan, *, with_weights: bool = True) -> ModelDirectory:
    """Without weights, only what says what the model is: enough to refuse it early."""
    local = Path(plan.model).expanduser()
    if local.is_dir():
        if plan.revision is not None:
            raise PlanError(f"--revision is for hub models, and {plan.model} is a local directory")
        path, revision = local, None
    elif local.exists():
        raise PlanError(f"{plan.model} is a file, not a model", hint="give the directory that holds config.json")
    elif plan.model.startswith((".", "/", "~")) or not _HUB_ID.match(plan.model):
        raise PlanError(f"no model at {plan.model}: no such directory")
    else:
        path, revision = _download(plan, with_weights)
    config = _checked_config(path, plan, with_weights or local.is_dir())
    # A local model is known by its full path, so that it is found again from anywhere.
    name = str(path.resolve()) if local.is_dir() else plan.model
    return ModelDirectory(path, name, revision, config)


def _checked_config(path: Path, plan: Plan, with_weights: bool) -> dict[str, Any]:
    """The configuration, if this is a model whose weights we may load."""
    if is_bundle(path):
        raise PlanError(f"{plan.model} is already a bundle", hint=f"hasten run {plan.model} TEXT")
    if not (path / "config.json").is_file():
        raise PlanError(f"{plan.model} is not a Hugging Face model: it has no config.json")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path / 'config.json'} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path / 'config.json'} is not a model's configuration: not a JSON object")
    if not with_weights or any(path.glob("*.safetensors")):
        return config
    pickled = [file for pattern in _PICKLED for file in path.glob(pattern)]
    if not pickled:
        raise PlanError(f"{plan.model} has no weights: no .safetensors file beside its config.json")
    if not plan.allow_pickle:
        raise UnsupportedError(
            f"{plan.model} has only pickled weights ({pickled[0].name}), and unpickling can run any code",
            hint="--allow-pickle if you trust its author",
        )
    return config


def _download(plan: Plan, with_weights: bool) -> tuple[Path, str]:
    try:
        from huggingface_hub import snapshot_download
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
    patterns = [
        *_ABOUT,
        *(_WEIGHTS if with_weights else ()),
        *(_PICKLED if with_weights and plan.allow_pickle else ()),
    ]
    what = f"'{plan.model}'" + (f" at revision '{plan.revision}'" if plan.revision else "")
    try:
        folder = snapshot_download(
            plan.model,
            revision=plan.revision,
            token=os.environ.get("HF_TOKEN"),
            allow_patterns=patterns,
            ignore_patterns=list(_UNWANTED),
        )
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
    return Path(folder), Path(folder).name
