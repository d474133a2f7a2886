"""Our own code, copied into a model repository: the files of a module and of all of ours that it imports."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# Imported before any module of it, and it keeps ONNX Runtime from reporting to its maker.
_ALWAYS = "hasten"


def ship(modules: Sequence[str], target: Path) -> None:
    """Put them under `target`/hasten, where `target` on the path finds them.

    Of a package that is only on the way to a module the file is left empty: it may import what nobody there needs.
    """
    for module in _closure(modules):
        source = _file(module)
        assert source is not None
        copy = target / "hasten" / source.relative_to(_ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    for folder in [target / "hasten", *(target / "hasten").rglob("*/")]:
        (folder / "__init__.py").touch()


def is_ours(module: str) -> bool:
    return _file(module) is not None


def _closure(modules: Sequence[str]) -> set[str]:
    found: set[str] = set()
    waiting = [_ALWAYS, *modules]
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if module in found or file is None:
            continue
        found.add(module)
        waiting += _imported(ast.parse(file.read_text(encoding="utf-8")))
    return found


def _file(module: str) -> Path | None:
    """Of a module of ours; nothing for a name that a module defines."""
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
