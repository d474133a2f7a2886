"""Save a bundle as a directory that transformers can read, and push it to the hub."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hasten.bundle import Bundle
from hasten.bundle.manifest import FILE
from hasten.bundle.read import TOKENIZER
from hasten.bundle.write import check_target
from hasten.core.errors import StageError, missing_package
from hasten.core.system.atomic_directory import AtomicDirectory

_CONFIGURATIONS = ("config.json", "generation_config.json", "tokenizer_config.json")


def save(bundle: Bundle, target: Path) -> None:
    """Copy the bundle, and add the configuration files of transformers, which readers of bundles ignore."""
    bundle.check()
    with AtomicDirectory(target.expanduser(), lambda path: check_target(path, force=True)) as staging:
        for name in (FILE, *bundle.manifest.files):
            file = staging.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, file)
        for name in _CONFIGURATIONS:
            if (source := bundle.configuration(name)) is not None:
                shutil.copyfile(source, staging.path / name)
        shutil.copyfile(bundle.path / TOKENIZER, staging.path / Path(TOKENIZER).name)
        staging.put_in_place()


def push(bundle: Bundle, repo_id: str, *, private: bool | None, token: str | None, **options: Any) -> str:
    """Push the bundle to a repository on the hub and return its address."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise missing_package("huggingface_hub", "pushing to the hub", "build") from error
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        folder = Path(work) / "bundle"
        save(bundle, folder)
        api = HfApi(token=token)
        try:
            name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            address = api.upload_folder(folder_path=folder, repo_id=name, **options)
        except Exception as error:  # the class depends on the library's version
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StageError(
                f"{repo_id} could not be pushed to the hub: {reason}", hint="check the network and HF_TOKEN"
            ) from error
    return str(address)
