"""Describe a model's directory (its path, its configuration and its files) and make temporary directories."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.errors import PlanError, translate_os_errors

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model on disk, with its configuration."""

    path: Path
    id: str
    revision: str | None
    config: dict[str, Any]
    # The ONNX file to build from instead of weights, and the ONNX files that are not used.
    graph: str | None = None
    unused_graphs: tuple[str, ...] = ()
    # The base model of a PEFT adapter.
    base: ModelDirectory | None = None

    @property
    def architecture(self) -> str:
        """Return the class name that the configuration lists first, or an empty string."""
        listed = self.config.get("architectures") or [""]
        return str(listed[0])

    @property
    def tokenizer_path(self) -> Path:
        """Return the folder of the tokenizer: an adapter without a tokenizer uses that of its base."""
        has_tokenizer = any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return self.path if self.base is None or has_tokenizer else self.base.path

    def find(self, relative: str) -> Path | None:
        """Return a file of the model; an adapter falls back to its base."""
        file = self.path / relative
        if file.is_file():
            return file
        return self.base.find(relative) if self.base is not None else None

    def json(self, relative: str) -> Any:
        """Return the content of a JSON file of the model, or None if the file does not exist."""
        file = self.find(relative)
        return read_json(file) if file is not None else None


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Make a directory for the context; a full disk or missing permissions become a one-line error."""
    action = f"working in {tempfile.gettempdir()}"
    with (
        translate_os_errors(action),
        tempfile.TemporaryDirectory(prefix="hasten-") as work,
        translate_os_errors(action, Path(work).parent),
    ):
        yield Path(work)


def read_json(file: Path) -> Any:
    """Read a JSON file of a model."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not valid JSON: {error}") from error


def list_files(folder: Path) -> list[str]:
    """List a model's files as a hub lists them; no layout is deeper than one folder."""
    files = [file for pattern in ("*", "*/*") for file in folder.glob(pattern) if file.is_file()]
    return sorted(file.relative_to(folder).as_posix() for file in files)
