"""Copy modules of hasten, with all modules of hasten that they import, into a model repository."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# Imported before any of its modules; it disables ONNX Runtime's telemetry.
_ALWAYS = "hasten"


def vendor(modules: Sequence[str], target: Path) -> None:
    """Copy the modules to `target`/hasten, so that they can be imported with `target` on the path.

    The `__init__.py` of a package is left empty unless it is imported itself: it may import modules that are not
    needed there.
    """
    for module in _closure(modules):
        source = find_source(module)
        assert source is not None
        copy = target / "hasten" / source.relative_to(_ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    for folder in [target / "hasten", *(target / "hasten").rglob("*/")]:
        (folder / "__init__.py").touch()


def _closure(modules: Sequence[str]) -> set[str]:
    closure: set[str] = set()
    pending = [_ALWAYS, *modules]
    while pending:
        module = pending.pop()
        file = find_source(module)
        if module in closure or file is None:
            continue
        closure.add(module)
        pending += _imported(ast.parse(file.read_text(encoding="utf-8")))
    return closure


def find_source(module: str) -> Path | None:
    """Return the file of a module of hasten; None for a name that a module defines."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hasten":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hasten")
        else:
            yield from _imported(node)
