"""The real tritonserver for tests, as `hasten deploy tritonserver --check` runs it, and models for it.

It is installed once, in `$HASTEN_TRITON_ENV` or the user's cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hasten.core.errors import UnsupportedError
from hasten.deploy.tritonserver.server_binary import ServerBinary
from support import virtualenvs


def find_program(packages: Sequence[str] = ()) -> ServerBinary:
    """Return the installed server; skip the test if it cannot run here."""
    environment = virtualenvs.folder("triton")
    try:
        with virtualenvs.making(environment):
            return ServerBinary.installed(environment, packages)
    except UnsupportedError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Tensor:
    """An input or output in a model's configuration."""

    name: str
    kind: str
    dims: Sequence[int]

    def __str__(self) -> str:
        return f'{{ name: "{self.name}" data_type: TYPE_{self.kind} dims: {list(self.dims)} }}'


def add_model(
    repository: Path, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], parameters: Mapping[str, str]
) -> None:
    """Add a model that runs `model.py` to a repository."""
    (repository / name / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "model.py", repository / name / "1")
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 0"]
    lines += [
        f"{field}: [{', '.join(map(str, tensors))}]" for field, tensors in (("input", inputs), ("output", outputs))
    ]
    lines += [
        f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"
        for key, value in parameters.items()
    ]
    (repository / name / "config.pbtxt").write_text("\n".join(lines))
