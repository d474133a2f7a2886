"""Rewrite a module's source with quantizers and compile it beside the original, which does not change.

Each model class gets a subclass whose methods are recompiled in a namespace in which class names refer to the
subclasses. In a rewritten method `super()` still starts from the original class, so that inheritance stays as written,
and tracebacks point to the lines of the original file.
"""

from __future__ import annotations
import __future__

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
from hasten.quantize.qdq.constructs import (
    LINEAR,
    QUANTIZER,
    OperandKind,
    RewriteProblem,
    Rewriter,
    RewriteScope,
    find_sums,
    referenced,
)
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer
from hasten.quantize.qdq.replacements import REPLACEMENTS, name_of

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_ORIGINAL = "_hasten_original"
_CELL = "_hasten_cell"
# The attribute of rewritten classes that lists the quantizers each method calls.
_METHOD_QUANTIZERS = "_hasten_called"
# These decorators only write documentation, and take longer than everything else.
_DOCSTRING_DECORATORS = ("auto_docstring", "add_start_docstrings", "add_start_docstrings_to_model_forward")
_SCRIPTED = "jit.script"
# Classes that compute positions, not features: their matmuls need as many digits as there are positions.
_NOT_QUANTIZED = ("*RotaryEmbedding",)
# Classes whose forward adds to the residual stream without a norm right behind the addition, by the last part of their
# module's name: ModernBERT has the norm at the start of the next layer.
_RESIDUAL_SUMS = {"modeling_modernbert": ("ModernBertEncoderLayer",)}


@dataclass(frozen=True, slots=True)
class RewriteOptions:
    """The precision of the quantizers, and the kinds that are enabled from the start."""

    precision: Precision = Precision.INT8
    # Linear layers are always enabled; other operands have quantizers that may be enabled later.
    enabled: frozenset[OperandKind] = frozenset({OperandKind.MATMUL})

    def quantizer(self, kind: str) -> Quantizer:
        """Return a new quantizer for an operand of this kind."""
        quantizer = Quantizer(self.precision)
        quantizer.is_enabled = kind in self.enabled
        return quantizer


@dataclass
class Rewritten:
    """The rewritten classes of a module."""

    file: str
    classes: dict[type, type] = field(default_factory=dict)
    # The original classes with a rewritten method of their own.
    changed: set[type] = field(default_factory=set)
    # By the name of a class or function: the names it refers to, and what could not be rewritten.
    references: dict[str, set[str]] = field(default_factory=dict)
    problems: dict[str, list[RewriteProblem]] = field(default_factory=dict)

    def check(self, kind: type) -> None:
        """Raise if a class refers, directly or not, to a construct that could not be rewritten."""
        seen, pending = set(), [kind.__name__]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for problem in self.problems.get(name, ()):
                raise UnsupportedError(
                    f"{kind.__name__} cannot be quantized: {problem.construct} in '{name}': {problem.reason}"
                    f" ({self.file}:{problem.line})"
                )
            pending += self.references.get(name, ())


def is_rewritten(kind: type) -> bool:
    """Return whether a class is the rewritten form of another."""
    return _ORIGINAL in vars(kind)


def rewrite(
    module: ModuleType, options: RewriteOptions, inherited: Callable[[type], type | None] = lambda _: None
) -> Rewritten:
    """Recompile a module's model classes with quantizers; `inherited` returns rewritten bases from other modules."""
    tree, file = _parse(module)
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.name for node in _conditional_functions(tree.body)}
    return _Rewrite(module, tree, Rewritten(file), options, names, inherited).run()


@dataclass
class _Rewrite:
    module: ModuleType
    tree: ast.Module
    result: Rewritten
    options: RewriteOptions
    names: set[str]
    inherited: Callable[[type], type | None]

    def run(self) -> Rewritten:
        self.residual_sums = _RESIDUAL_SUMS.get(self.module.__name__.rpartition(".")[2], ())
        self.namespace = dict(vars(self.module))
        self.namespace[QUANTIZER] = self.options.quantizer
        self.namespace[LINEAR] = partial(QuantizedLinear, precision=self.options.precision)
        self.namespace |= {name_of(function): replacement for function, replacement in REPLACEMENTS.items()}
        self.quantizers: dict[str, dict[str, OperandKind]] = {}
        for function in _conditional_functions(self.tree.body):
            self._record_references(function)
            if problem := self._conditional_problem(function):
                self.result.problems[function.name] = [problem]
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self._function(node)
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
        return self.result

    def _function(self, node: ast.FunctionDef) -> None:
        """Recompile a function if something in it changes."""
        self._record_references(node)
        scope = RewriteScope(_module_argument(node))
        rewritten = Rewriter(scope, self._resolve, {}).visit(node)
        if any(_SCRIPTED in ast.unparse(decorator) for decorator in node.decorator_list) and scope.is_changed:
            scope.problems.append(
                RewriteProblem(f"@torch.{_SCRIPTED}", node.lineno, "TorchScript compiles it from its file")
            )
        self.result.problems.setdefault(node.name, []).extend(scope.problems)
        self.quantizers[node.name] = scope.quantizers
        if scope.is_changed and not scope.problems:
            self._execute(rewritten)

    def _class(self, node: ast.ClassDef) -> None:
        original = vars(self.module).get(node.name)
        if not isinstance(original, type) or not issubclass(original, nn.Module):
            return
        self._record_references(node)
        rewritten_bases = (self.result.classes.get(base) or self.inherited(base) for base in original.__bases__)
        bases = [base for base in rewritten_bases if base is not None]
        scope = RewriteScope("self", reserved=_inherited_quantizers(node, bases))
        method_quantizers: dict[str, set[str]] = {}
        # Quantizers of functions that take this module come first: their names are fixed.
        for name in self._reachable_functions(node):
            scope.quantizers |= self.quantizers[name]
        if not any(fnmatch(node.name, pattern) for pattern in _NOT_QUANTIZED):
            sums = find_sums(node, self._resolve, all_of_forward=node.name in self.residual_sums)
            for function in _functions(node):
                scope.holder, before = _self_argument(function), set(scope.quantizers)
                Rewriter(scope, self._resolve, sums).visit(function)
                method_quantizers[function.name] = scope.quantizers.keys() - before
            scope.problems += filter(None, map(self._conditional_problem, _conditional_functions(node.body)))
        self.result.problems.setdefault(node.name, []).extend(scope.problems)
        if scope.quantizers:
            _construct_quantizers(node, scope.quantizers)
        if scope.quantizers or scope.is_changed:
            self.result.changed.add(original)
        try:
            rewritten = self._subclass(node, original, bases)
        except NameError as error:  # a method refers to a name of the class body, which is not recompiled
            problem = RewriteProblem(
                f"class {node.name}", node.lineno, f"its methods cannot be compiled on their own: {error}"
            )
            self.result.problems.setdefault(node.name, []).append(problem)
            rewritten = original
        else:
            self.result.classes[original] = rewritten
            setattr(rewritten, _METHOD_QUANTIZERS, method_quantizers)
        self.namespace[node.name] = rewritten

    def _conditional_problem(self, function: _Function) -> RewriteProblem | None:
        """Return a problem if a function under a condition, which is not recompiled, would have to change."""
        scope = RewriteScope("self")
        Rewriter(scope, self._resolve, {}).visit(copy.deepcopy(function))
        if not scope.is_changed and not scope.problems:
            return None
        return RewriteProblem(f"def {function.name}", function.lineno, "it is defined under an 'if', 'try' or 'with'")

    def _subclass(self, node: ast.ClassDef, original: type, bases: list[type]) -> type:
        """Recompile the functions of a class; the rest of its body is inherited and refers to the original classes."""
        cell = ast.parse(f"def {_CELL}(self): return __class__").body[0]
        shell = ast.ClassDef(node.name, bases=[], keywords=[], body=[*_functions(node), cell], decorator_list=[])
        if sys.version_info >= (3, 12):
            shell.type_params = []
        self._execute(ast.copy_location(shell, node))
        body = dict(vars(self.namespace[node.name]))
        for name in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            body.pop(name, None)
        # All methods share this cell, from which `super()` takes the class to start at.
        body.pop(_CELL).__closure__[0].cell_contents = original
        body |= {"__doc__": original.__doc__, "__module__": original.__module__, _ORIGINAL: original}
        return type(original)(node.name, (original, *bases), body)

    def _execute(self, node: ast.stmt) -> None:
        module = ast.fix_missing_locations(ast.Module([node], type_ignores=[]))
        imports = [part for part in self.tree.body if isinstance(part, ast.ImportFrom) and part.module == "__future__"]
        flags = sum(getattr(__future__, alias.name).compiler_flag for part in imports for alias in part.names)
        exec(compile(module, self.result.file, "exec", flags=flags, dont_inherit=True), self.namespace)

    def _resolve(self, expression: ast.expr) -> Any:
        """Return the object that a dotted name refers to in the module, or None for other expressions."""
        if isinstance(expression, ast.Name):
            return vars(self.module).get(expression.id)
        if isinstance(expression, ast.Attribute):
            inner = self._resolve(expression.value)
            return getattr(inner, expression.attr, None) if isinstance(inner, ModuleType) else None
        return None

    def _reachable_functions(self, node: ast.ClassDef) -> Iterator[str]:
        seen: set[str] = set()
        pending = sorted(self.result.references[node.name] & self.quantizers.keys())
        while pending:
            name = pending.pop(0)
            if name not in seen:
                seen.add(name)
                pending += sorted(self.result.references[name] & self.quantizers.keys())
                yield name

    def _record_references(self, node: ast.ClassDef | _Function) -> None:
        self.result.references[node.name] = referenced(node) & self.names - {node.name}


def _parse(module: ModuleType) -> tuple[ast.Module, str]:
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).suffix == ".py" or not Path(file).exists():
        raise UnsupportedError(
            f"{module.__name__} has no source, which quantization rewrites", hint="it must be a .py file"
        )
    with tokenize.open(file) as source:
        return ast.parse(source.read(), file), file


def _inherited_quantizers(node: ast.ClassDef, bases: list[type]) -> set[str]:
    """Return the quantizers of inherited methods that a class still uses: their names are reserved."""
    source, defined = ast.unparse(node), {function.name for function in _functions(node)}
    return {
        name
        for base in bases
        for kind in base.__mro__
        for method, names in vars(kind).get(_METHOD_QUANTIZERS, {}).items()
        for name in names
        if method not in defined or f"super().{method}(" in source
    }


def _construct_quantizers(node: ast.ClassDef, names: Mapping[str, OperandKind]) -> None:
    """Construct the quantizers right after `super().__init__()`, which initialises the module."""
    init = next((part for part in _functions(node) if part.name == "__init__"), None)
    if init is None:
        source = "def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)"
        init = _at(ast.parse(source).body[0], node)
        node.body.append(init)
    self_name = init.args.args[0].arg
    statements = [ast.parse(f"{self_name}.{name} = {QUANTIZER}('{kind}')").body[0] for name, kind in names.items()]
    is_super_init = [isinstance(part, ast.Expr) and ".__init__(" in ast.unparse(part) for part in init.body]
    index = is_super_init.index(True) if any(is_super_init) else len(init.body) - 1
    init.body[index + 1 : index + 1] = [_at(each, init.body[index]) for each in statements]


def _at(node: Any, location: ast.AST) -> Any:
    """Give a whole tree the source location of one node."""
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt | ast.arg | ast.keyword):
            ast.copy_location(part, location)
    return node


def _functions(node: ast.ClassDef) -> list[_Function]:
    functions = [part for part in node.body if isinstance(part, _Function)]
    for function in functions:
        function.decorator_list = [
            decorator
            for decorator in function.decorator_list
            if ast.unparse(decorator).partition("(")[0] not in _DOCSTRING_DECORATORS
        ]
    return functions


def _conditional_functions(body: Iterable[ast.AST]) -> Iterator[_Function]:
    """Yield the functions of a module or class that are defined under a condition, a try or a with."""
    for part in body:
        if isinstance(part, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for inner in ast.iter_child_nodes(part):
                if isinstance(inner, _Function):
                    yield inner
                else:
                    yield from _conditional_functions([inner])


def _self_argument(function: _Function) -> str | None:
    kinds = {ast.unparse(decorator) for decorator in function.decorator_list}
    first = [*function.args.posonlyargs, *function.args.args][:1]
    return first[0].arg if first and not kinds & {"staticmethod", "classmethod"} else None


def _module_argument(function: ast.FunctionDef) -> str | None:
    """Return the argument of a function that is the module it computes for, as in attention functions."""
    for argument in (*function.args.posonlyargs, *function.args.args):
        annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        if argument.arg in ("module", "self") or annotation.endswith("nn.Module"):
            return argument.arg
    return None
