"""Import Python source as temporary modules, for the duration of a test."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def importing(folder: Path, head: str) -> Iterator[Callable[[str], ModuleType]]:
    """Yield a function that writes a source under `head` to a file and imports it as a module."""
    names: list[str] = []

    def load(source: str) -> ModuleType:
        name = f"user_module_{len(names)}"
        file = folder / f"{name}.py"
        file.write_text(head + textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module

    try:
        yield load
    finally:
        for name in names:
            del sys.modules[name]
