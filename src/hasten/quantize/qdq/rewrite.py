"""A module's source, parsed, quantized and compiled again beside the original.

Nothing of the original changes. Each of its model classes gets a subclass in which all methods are compiled anew, in
a namespace of their own where the names of its classes mean the subclasses. A rewritten method still says `super()`
for the original class, so that inheritance goes on as it was written, and carries the lines of the original file.
"""

from __future__ import annotations

import ast
import copy
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch import nn

from hasten.core.errors import UnsupportedError
from hasten.core.variant import Precision
from hasten.quantize.qdq.architectures import LEFT_ALONE, NEEDS, Needs
from hasten.quantize.qdq.constructs import (
    LINEAR,
    QUANTIZER,
    Kind,
    Owner,
    Problem,
    Rewriter,
    find_sums,
    referenced,
)
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer
from hasten.quantize.qdq.replacements import REPLACEMENTS, name_of

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_ORIGINAL = "_hasten_original"
_CELL = "_hasten_cell"
# On rewritten classes: which quantizers each of their methods calls.
_CALLED = "_hasten_called"
# They write documentation, which is that of the original, and take longer than all the rest.
_DOCUMENTING = ("auto_docstring", "add_start_docstrings", "add_start_docstrings_to_model_forward")
_SCRIPTED = "jit.script"


@dataclass(frozen=True, slots=True)
class Options:
    precision: Precision = Precision.INT8
    # What is switched on from the start, beside linear layers: quantizers stand everywhere, on or off.
    on: frozenset[Kind] = frozenset({Kind.PRODUCT})

    def quantizer(self, kind: str) -> Quantizer:
        made = Quantizer(self.precision)
        made.is_enabled = kind in self.on
        return made


@dataclass
class Rewritten:
    """A module's classes and functions, quantized."""

    file: str
    classes: dict[type, type] = field(default_factory=dict)
    # Of the originals, those in whose own methods something was rewritten.
    changed: set[type] = field(default_factory=set)
    _mentions: dict[str, set[str]] = field(default_factory=dict)
    _problems: dict[str, list[Problem]] = field(default_factory=dict)

    def check(self, kind: type) -> None:
        """Refuse a class that leads to something that could not be rewritten."""
        seen, waiting = set(), [kind.__name__]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for problem in self._problems.get(name, ()):
                raise UnsupportedError(
                    f"{kind.__name__} cannot be quantized: {problem.construct} in '{name}', {problem.why}"
                    f" ({self.file}:{problem.line})"
                )
            waiting += self._mentions.get(name, ())


def is_rewritten(kind: type) -> bool:
    return _ORIGINAL in vars(kind)


def rewrite(
    module: ModuleType, options: Options, inherited: Callable[[type], type | None] = lambda _: None
) -> Rewritten:
    """Compile a module's model classes again, with quantizers in them; `inherited` gives rewritten bases of others."""
    tree, file = _parse(module)
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.name for node in _under_conditions(tree.body)}
    return _Rewrite(module, tree, Rewritten(file), options, names, inherited).run()


@dataclass
class _Rewrite:
    module: ModuleType
    tree: ast.Module
    result: Rewritten
    options: Options
    names: set[str]
    inherited: Callable[[type], type | None]

    def run(self) -> Rewritten:
        self.needs = NEEDS.get(self.module.__name__.rpartition(".")[2], Needs())
        self.namespace = dict(vars(self.module))
        self.namespace[QUANTIZER] = self.options.quantizer
        self.namespace[LINEAR] = partial(QuantizedLinear, precision=self.options.precision)
        self.namespace |= {name_of(function): replacement for function, replacement in REPLACEMENTS.items()}
        self.quantizers: dict[str, dict[str, Kind]] = {}
        for function in _under_conditions(self.tree.body):
            self._note(function)
            if problem := self._unseen(function):
                self.result._problems[function.name] = [problem]
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self._function(node)
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
        return self.result

    def _function(self, node: ast.FunctionDef) -> None:
        """Only one in which something changes: any other is the original's own."""
        self._note(node)
        owner = Owner(_module_argument(node))
        rewritten = self._rewriter(owner, {}).visit(node)
        if any(_SCRIPTED in ast.unparse(decorator) for decorator in node.decorator_list) and owner.is_changed:
            owner.problems.append(Problem(f"@torch.{_SCRIPTED}", node.lineno, "it is compiled from its file"))
        self._keep_problems(node.name, owner)
        self.quantizers[node.name] = owner.quantizers
        if owner.is_changed and not owner.problems:
            self._execute(rewritten)

    def _class(self, node: ast.ClassDef) -> None:
        original = vars(self.module).get(node.name)
        if not isinstance(original, type) or not issubclass(original, nn.Module):
            return
        self._note(node)
        found = (self.result.classes.get(base) or self.inherited(base) for base in original.__bases__)
        bases = [base for base in found if base is not None]
        owner = Owner("self", taken=_still_called(node, bases))
        called: dict[str, set[str]] = {}
        # Those of functions that find them on this module come first, so that its own do not take their names.
        for name in self._reached_functions(node):
            owner.quantizers |= self.quantizers[name]
        if not any(fnmatch(node.name, pattern) for pattern in LEFT_ALONE):
            is_summing = node.name in self.needs.sums
            sums = find_sums(node, self._resolve, all_of_forward=is_summing)
            for function in _functions(node):
                owner.home, before = _own_argument(function), set(owner.quantizers)
                self._rewriter(owner, sums).visit(function)
                called[function.name] = owner.quantizers.keys() - before
            owner.problems += filter(None, map(self._unseen, _under_conditions(node.body)))
        self._keep_problems(node.name, owner)
        if owner.quantizers:
            _create(node, owner.quantizers)
        if owner.quantizers or owner.is_changed:
            self.result.changed.add(original)
        try:
            made = self._subclass(node, original, bases)
        except NameError as error:  # of something beside its methods, which is not compiled with them
            problem = Problem(f"class {node.name}", node.lineno, f"its methods do not compile by themselves: {error}")
            self.result._problems.setdefault(node.name, []).append(problem)
            made = original
        else:
            self.result.classes[original] = made
            setattr(made, _CALLED, called)
        self.namespace[node.name] = made

    def _unseen(self, function: _Function) -> Problem | None:
        """One that is not compiled anew, where it would come out changed."""
        owner = Owner("self")
        self._rewriter(owner, {}).visit(copy.deepcopy(function))
        if not owner.is_changed and not owner.problems:
            return None
        return Problem(f"def {function.name}", function.lineno, "it stands under an 'if', 'try' or 'with'")

    def _subclass(self, node: ast.ClassDef, original: type, bases: list[type]) -> type:
        """Its functions alone: what else a class body has is inherited, and means the original classes."""
        shell = ast.ClassDef(node.name, bases=[], keywords=[], body=[*_functions(node), _cell()], decorator_list=[])
        if sys.version_info >= (3, 12):
            shell.type_params = []
        self._execute(ast.copy_location(shell, node))
        body = dict(vars(self.namespace[node.name]))
        for name in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            body.pop(name, None)
        # All of them share it; `super()` looks up in it where to begin.
        body.pop(_CELL).__closure__[0].cell_contents = original
        body |= {"__doc__": original.__doc__, "__module__": original.__module__, _ORIGINAL: original}
        return type(original)(node.name, (original, *bases), body)

    def _execute(self, node: ast.stmt) -> None:
        whole = ast.fix_missing_locations(ast.Module([node], type_ignores=[]))
        flags = sum(
            getattr(_future(alias.name), "compiler_flag", 0)
            for part in self.tree.body
            if isinstance(part, ast.ImportFrom) and part.module == "__future__"
            for alias in part.names
        )
        exec(compile(whole, self.result.file, "exec", flags=flags, dont_inherit=True), self.namespace)

    def _rewriter(self, owner: Owner, sums: Mapping[int, Kind]) -> Rewriter:
        return Rewriter(owner, self._resolve, sums)

    def _resolve(self, expression: ast.expr) -> Any:
        """What a dotted name means in the module, and None for anything else."""
        if isinstance(expression, ast.Name):
            return vars(self.module).get(expression.id)
        if isinstance(expression, ast.Attribute):
            inner = self._resolve(expression.value)
            return getattr(inner, expression.attr, None) if isinstance(inner, ModuleType) else None
        return None

    def _reached_functions(self, node: ast.ClassDef) -> Iterator[str]:
        seen: set[str] = set()
        waiting = sorted(self.result._mentions[node.name] & self.quantizers.keys())
        while waiting:
            name = waiting.pop(0)
            if name not in seen:
                seen.add(name)
                waiting += sorted(self.result._mentions[name] & self.quantizers.keys())
                yield name

    def _note(self, node: ast.ClassDef | _Function) -> None:
        self.result._mentions[node.name] = referenced(node) & self.names - {node.name}

    def _keep_problems(self, name: str, owner: Owner) -> None:
        if owner.problems:
            self.result._problems[name] = owner.problems


def _parse(module: ModuleType) -> tuple[ast.Module, str]:
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).suffix == ".py" or not Path(file).exists():
        raise UnsupportedError(
            f"{module.__name__} comes without its source, and quantizing rewrites it", hint="it must be a .py file"
        )
    with tokenize.open(file) as source:
        return ast.parse(source.read(), file), file


def _still_called(node: ast.ClassDef, bases: list[type]) -> set[str]:
    """Names of quantizers in methods that a class inherits and goes on using: no other place of it may have them."""
    written, own = ast.unparse(node), {function.name for function in _functions(node)}
    return {
        name
        for base in bases
        for kind in base.__mro__
        for method, names in vars(kind).get(_CALLED, {}).items()
        for name in names
        if method not in own or f"super().{method}(" in written
    }


def _create(node: ast.ClassDef, names: Mapping[str, Kind]) -> None:
    """Put quantizers where `super().__init__()` has just made a module of it."""
    maker = next((part for part in _functions(node) if part.name == "__init__"), None)
    if maker is None:
        written = "def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)"
        maker = _at(ast.parse(written).body[0], node)
        node.body.append(maker)
    own = maker.args.args[0].arg
    made = [ast.parse(f"{own}.{name} = {QUANTIZER}('{kind}')").body[0] for name, kind in names.items()]
    place = next((place for place, part in enumerate(maker.body) if _is_super_init(part)), len(maker.body) - 1)
    maker.body[place + 1 : place + 1] = [_at(each, maker.body[place]) for each in made]


def _is_super_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ".__init__(" in ast.unparse(node.value)


def _at(node: Any, place: ast.AST) -> Any:
    """The whole of it at one place of the file."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt | ast.arg | ast.keyword):
            ast.copy_location(part, place)
    return node


def _cell() -> ast.stmt:
    return ast.parse(f"def {_CELL}(self): return __class__").body[0]


def _functions(node: ast.ClassDef) -> list[_Function]:
    functions = [part for part in node.body if isinstance(part, _Function)]
    for function in functions:
        function.decorator_list = [
            decorator
            for decorator in function.decorator_list
            if ast.unparse(decorator).partition("(")[0] not in _DOCUMENTING
        ]
    return functions


def _under_conditions(body: Iterable[ast.AST]) -> Iterator[_Function]:
    """Functions of a module or class that stand neither at its top nor inside of others."""
    for part in body:
        if isinstance(part, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for inner in ast.iter_child_nodes(part):
                if isinstance(inner, _Function):
                    yield inner
                else:
                    yield from _under_conditions([inner])


def _own_argument(function: _Function) -> str | None:
    kinds = {ast.unparse(decorator) for decorator in function.decorator_list}
    first = [*function.args.posonlyargs, *function.args.args][:1]
    return first[0].arg if first and not kinds & {"staticmethod", "classmethod"} else None


def _module_argument(function: ast.FunctionDef) -> str | None:
    """The argument of a function that is the module it computes for, as attention functions have it."""
    for argument in (*function.args.posonlyargs, *function.args.args):
        annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        if argument.arg in ("module", "self") or annotation.endswith("nn.Module"):
            return argument.arg
    return None


def _future(name: str) -> Any:
    import __future__

    return getattr(__future__, name, None)


def mapping(done: Mapping[str, Rewritten]) -> dict[type, type]:
    """Originals to what they were rewritten to, over all modules."""
    return {original: kind for each in done.values() for original, kind in each.classes.items()}
