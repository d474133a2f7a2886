"""Find the expressions of a model's source to quantize, and insert named quantizers around their operands."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from hasten.quantize.qdq.replacements import REPLACEMENTS, name_of

# The names injected into the namespace in which rewritten code runs.
QUANTIZER = "_hasten_quantizer"
LINEAR = "_hasten_linear"

# How many of the first arguments are operands.
_MATMULS = {
    torch.matmul: 2,
    torch.bmm: 2,
    torch.mm: 2,
    nn.functional.linear: 2,
    nn.functional.scaled_dot_product_attention: 3,
}
_MATMUL_METHODS = ("matmul", "bmm", "mm")
_UNSUPPORTED_METHODS = ("baddbmm", "addmm", "addbmm")
# Matmuls in a form that no runtime has an 8-bit kernel for.
_UNSUPPORTED = (
    torch.einsum,
    torch.baddbmm,
    torch.addmm,
    torch.addbmm,
    torch.tensordot,
    nn.functional.bilinear,
    nn.functional.multi_head_attention_forward,
)
_NO_KERNEL, _NOT_POSITIONAL = "no runtime computes it in 8 bits", "its operands are not positional arguments"
# Modules whose matmuls are in torch's own source.
_TORCH_MODULES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.Transformer,
    nn.Bilinear,
)


class OperandKind(StrEnum):
    """The kinds of operands that are quantized besides those of linear layers."""

    MATMUL = "matmul"
    RESIDUAL = "residual"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class RewriteProblem:
    """A construct that cannot be rewritten, and the reason."""

    construct: str
    line: int
    reason: str


@dataclass
class RewriteScope:
    """A class or function that is being rewritten: its quantizers in source order, and the problems found."""

    # The variable that holds its quantizers at run time: `self`, or the argument that is the module.
    holder: str | None
    # Names that base classes use.
    reserved: set[str] = field(default_factory=set)
    quantizers: dict[str, OperandKind] = field(default_factory=dict)
    problems: list[RewriteProblem] = field(default_factory=list)
    is_changed: bool = False

    def add_quantizer(self, operand: ast.expr, kind: OperandKind) -> str:
        """Add a quantizer and return its name, after the operand, numbered if the name is taken."""
        base, count = _base_name(operand).strip("_"), 1
        name = f"{base}_quantizer"
        while name in self.quantizers or name in self.reserved:
            count += 1
            name = f"{base}_{count}_quantizer"
        self.quantizers[name] = kind
        self.is_changed = True
        return name


class Rewriter(ast.NodeTransformer):
    """Inserts quantizers around operands in one class or function."""

    def __init__(
        self, scope: RewriteScope, resolve: Callable[[ast.expr], Any], sums: Mapping[int, OperandKind]
    ) -> None:
        self.scope = scope
        self.resolve = resolve
        # The additions to quantize, by the identity of their original nodes: rewriting creates new ones.
        self.sums = sums

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        kind = OperandKind.MATMUL if isinstance(node.op, ast.MatMult) else self.sums.get(id(node))
        self.generic_visit(node)
        if kind is not None:
            node.left = self._quantized(node.left, node, kind)
            node.right = self._quantized(node.right, node, kind)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        kind = OperandKind.MATMUL if isinstance(node.op, ast.MatMult) else self.sums.get(id(node))
        self.generic_visit(node)
        if kind is None or not isinstance(node.target, ast.Name):
            return node
        before = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        value = ast.BinOp(self._quantized(before, node, kind), node.op, self._quantized(node.value, node, kind))
        return ast.copy_location(ast.Assign([node.target], ast.copy_location(value, node)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = self.resolve(node.func)
        self.generic_visit(node)
        if function is nn.Linear:
            self._replace_function(node, LINEAR)
        elif any(function is each for each in REPLACEMENTS):
            self._replace_function(node, name_of(function))
        elif any(function is each for each in _UNSUPPORTED):
            self._reject(node, _NO_KERNEL)
        elif any(function is each for each in _TORCH_MODULES):
            self._reject(node, "its matmuls are in torch's own source, which is not rewritten")
        elif function is not None:
            count = next((count for matmul, count in _MATMULS.items() if matmul is function), 0)
            if len(node.args) < count:
                self._reject(node, _NOT_POSITIONAL)
            else:
                node.args[:count] = [self._quantized(operand, node) for operand in node.args[:count]]
        elif isinstance(node.func, ast.Attribute) and node.func.attr.rstrip("_") in _UNSUPPORTED_METHODS:
            self._reject(node, _NO_KERNEL)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _MATMUL_METHODS:
            if len(node.args) != 1:
                self._reject(node, _NOT_POSITIONAL)
            else:
                node.func.value = self._quantized(node.func.value, node)
                node.args = [self._quantized(node.args[0], node)]
        return node

    def _replace_function(self, node: ast.Call, name: str) -> None:
        """Call an injected function instead."""
        node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        self.scope.is_changed = True

    def _quantized(self, operand: ast.expr, construct: ast.AST, kind: OperandKind = OperandKind.MATMUL) -> ast.expr:
        if isinstance(operand, ast.Constant):
            return operand
        if self.scope.holder is None:
            self._reject(construct, "there is no module in scope to hold its quantizers")
            return operand
        holder = ast.Name(self.scope.holder, ast.Load())
        call = ast.Call(ast.Attribute(holder, self.scope.add_quantizer(operand, kind), ast.Load()), [operand], [])
        for node in (call, call.func, holder):
            ast.copy_location(node, operand)
        return call

    def _reject(self, construct: Any, reason: str) -> None:
        source = ast.unparse(construct.func if isinstance(construct, ast.Call) else construct)
        problem = RewriteProblem(source, construct.lineno, reason)
        if problem not in self.scope.problems:
            self.scope.problems.append(problem)


def find_sums(
    node: ast.ClassDef, resolve: Callable[[ast.expr], Any], *, all_of_forward: bool
) -> dict[int, OperandKind]:
    """Return the additions whose result a norm reads: of residuals or, in a class with tables, of embeddings."""
    constructors = dict(_attributes(node))
    norms = {name for name, constructor in constructors.items() if _is_norm(resolve(constructor))}
    has_tables = any(resolve(constructor) is nn.Embedding for constructor in constructors.values())
    kind = OperandKind.EMBEDDINGS if has_tables else OperandKind.RESIDUAL
    sums: list[ast.AST] = []
    for function in (part for part in node.body if isinstance(part, ast.FunctionDef)):
        if all_of_forward and function.name == "forward":
            sums += [part for part in ast.walk(function) if _is_addition(part)]
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _attribute_of_self(call.func) in norms and call.args:
                sums += _sums_behind(call.args[0], function, call.lineno, whole=has_tables)
    return {id(part): kind for part in sums}


def referenced(node: ast.AST) -> set[str]:
    """Return the names that a node reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _sums_behind(argument: ast.expr, function: ast.FunctionDef, line: int, *, whole: bool) -> Iterator[ast.AST]:
    """Yield the addition that is a norm's argument or was last assigned to it; with `whole`, all that were assigned."""
    if _is_addition(argument):
        yield argument
    if not isinstance(argument, ast.Name):
        return
    before = [part for part in ast.walk(function) if _assigned(part) == argument.id and part.lineno < line]  # type: ignore[attr-defined]
    before.sort(key=lambda part: part.lineno)  # type: ignore[attr-defined]
    for part in before if whole else before[-1:]:
        if isinstance(part, ast.AugAssign):
            yield part
        elif isinstance(part, ast.Assign) and _is_addition(part.value):
            yield part.value


def _assigned(node: ast.AST) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    is_plain = isinstance(node, ast.Assign) or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add))
    return target.id if is_plain and isinstance(target, ast.Name) else None


def _is_addition(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes that methods assign as `self.x = Constructor(...)`, with their constructors."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            for target in part.targets:
                if (name := _attribute_of_self(target)) is not None:
                    yield name, part.value.func


def _attribute_of_self(node: ast.expr) -> str | None:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_attribute else None  # type: ignore[attr-defined]


def _is_norm(constructor: Any) -> bool:
    return (
        isinstance(constructor, type) and issubclass(constructor, nn.Module) and constructor.__name__.endswith("Norm")
    )


def _base_name(operand: ast.expr) -> str:
    match operand:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name.endswith("_quantizer"):
            return _base_name(first)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[first, *_]) if "drop" in name:
            return _base_name(first)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name
        case ast.Call(func=ast.Attribute(value=inner)) if not _is_torch_namespace(inner):
            return _base_name(inner)
        case ast.Call(args=[first, *_]):
            return _base_name(first)
        case ast.Subscript(value=inner) | ast.BinOp(left=inner) | ast.UnaryOp(operand=inner):
            return _base_name(inner)
    return "operand"


def _is_torch_namespace(node: ast.expr) -> bool:
    """Return whether an expression names a module of functions."""
    return ast.unparse(node) in ("torch", "nn", "F", "nn.functional", "torch.nn.functional", "math")
