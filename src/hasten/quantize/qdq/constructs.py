"""Which expressions of a model's source are quantized, and what their quantizers are called."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from hasten.quantize.qdq.replacements import REPLACEMENTS, name_of

# Injected into the namespace in which rewritten code runs.
QUANTIZER = "_hasten_quantizer"
LINEAR = "_hasten_linear"

# How many of the first arguments are operands.
_PRODUCTS = {
    torch.matmul: 2,
    torch.bmm: 2,
    torch.mm: 2,
    nn.functional.linear: 2,
    nn.functional.scaled_dot_product_attention: 3,
}
_METHODS = ("matmul", "bmm", "mm")
_UNKNOWN_METHODS = ("baddbmm", "addmm", "addbmm")
# Products that no runtime has an eight-bit kernel for, in the form in which they are written.
_UNKNOWN = (
    torch.einsum,
    torch.baddbmm,
    torch.addmm,
    torch.addbmm,
    torch.tensordot,
    nn.functional.bilinear,
    nn.functional.multi_head_attention_forward,
)
_NO_KERNEL, _ELSEWHERE = "no runtime multiplies it in eight bits", "its operands are not its first arguments"
# Modules whose products are in torch's own source.
_CLOSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer, nn.Bilinear)


class Kind(StrEnum):
    """What is quantized beside linear layers."""

    PRODUCT = "product"
    RESIDUAL = "residual"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Problem:
    """A construct that cannot be rewritten, and why."""

    construct: str
    line: int
    why: str


@dataclass
class Owner:
    """A class or function as it is rewritten: its quantizers, in the order of its source, and what stood in the way."""

    # Where its quantizers are found at run time: `self`, or the argument that is the module.
    home: str | None
    # Names that bases have given away.
    taken: set[str] = field(default_factory=set)
    quantizers: dict[str, Kind] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    is_changed: bool = False

    def name(self, operand: ast.expr, kind: Kind) -> str:
        """After what stands there; a second one of the same name gets a number."""
        base, count = _base(operand).strip("_"), 1
        name = f"{base}_quantizer"
        while name in self.quantizers or name in self.taken:
            count += 1
            name = f"{base}_{count}_quantizer"
        self.quantizers[name] = kind
        self.is_changed = True
        return name


class Rewriter(ast.NodeTransformer):
    """Puts quantizers around operands, in one class or function."""

    def __init__(self, owner: Owner, resolve: Callable[[ast.expr], Any], sums: Mapping[int, Kind]) -> None:
        self.owner = owner
        self.resolve = resolve
        # The additions to quantize, by identity: found before, because rewriting makes new nodes.
        self.sums = sums

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        kind = Kind.PRODUCT if isinstance(node.op, ast.MatMult) else self.sums.get(id(node))
        self.generic_visit(node)
        if kind is not None:
            node.left = self._quantized(node.left, node, kind)
            node.right = self._quantized(node.right, node, kind)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        kind = Kind.PRODUCT if isinstance(node.op, ast.MatMult) else self.sums.get(id(node))
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
            self._call(node, LINEAR)
        elif any(function is each for each in REPLACEMENTS):
            self._call(node, name_of(function))
        elif any(function is each for each in _UNKNOWN):
            self._refuse(node, _NO_KERNEL)
        elif any(function is each for each in _CLOSED):
            self._refuse(node, "its products are in torch's own source, which is not rewritten")
        elif function is not None:
            count = next((count for product, count in _PRODUCTS.items() if product is function), 0)
            if len(node.args) < count:
                self._refuse(node, _ELSEWHERE)
            else:
                node.args[:count] = [self._quantized(operand, node) for operand in node.args[:count]]
        elif isinstance(node.func, ast.Attribute) and node.func.attr.rstrip("_") in _UNKNOWN_METHODS:
            self._refuse(node, _NO_KERNEL)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            if len(node.args) != 1:
                self._refuse(node, _ELSEWHERE)
            else:
                node.func.value = self._quantized(node.func.value, node)
                node.args = [self._quantized(node.args[0], node)]
        return node

    def _call(self, node: ast.Call, name: str) -> None:
        """Another function, by a name that is ours."""
        node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        self.owner.is_changed = True

    def _quantized(self, operand: ast.expr, construct: ast.AST, kind: Kind = Kind.PRODUCT) -> ast.expr:
        if isinstance(operand, ast.Constant):
            return operand
        if self.owner.home is None:
            self._refuse(construct, "there is no module here that could hold its quantizers")
            return operand
        home = ast.Name(self.owner.home, ast.Load())
        call = ast.Call(ast.Attribute(home, self.owner.name(operand, kind), ast.Load()), [operand], [])
        for made in (call, call.func, home):
            ast.copy_location(made, operand)
        return call

    def _refuse(self, construct: Any, why: str) -> None:
        written = ast.unparse(construct.func if isinstance(construct, ast.Call) else construct)
        problem = Problem(written, construct.lineno, why)
        if problem not in self.owner.problems:
            self.owner.problems.append(problem)


def find_sums(node: ast.ClassDef, resolve: Callable[[ast.expr], Any], *, all_of_forward: bool) -> dict[int, Kind]:
    """Additions whose result a norm takes: of residuals or, in a class that has tables, of embeddings."""
    makers = dict(_attributes(node))
    norms = {name for name, maker in makers.items() if _is_norm(resolve(maker))}
    has_tables = any(resolve(maker) is nn.Embedding for maker in makers.values())
    kind = Kind.EMBEDDINGS if has_tables else Kind.RESIDUAL
    found: list[ast.AST] = []
    for function in (part for part in node.body if isinstance(part, ast.FunctionDef)):
        if all_of_forward and function.name == "forward":
            found += [part for part in ast.walk(function) if _is_addition(part)]
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _attribute_of_self(call.func) in norms and call.args:
                found += _sums_behind(call.args[0], function, call.lineno, whole=has_tables)
    return {id(part): kind for part in found}


def referenced(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _sums_behind(argument: ast.expr, function: ast.FunctionDef, line: int, *, whole: bool) -> Iterator[ast.AST]:
    """The addition that is a norm's argument, or that its argument was last assigned; of embeddings, all of them."""
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
    """What `self.x = Maker(...)` in its methods makes its attributes with."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            for target in part.targets:
                if (name := _attribute_of_self(target)) is not None:
                    yield name, part.value.func


def _attribute_of_self(node: ast.expr) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else None  # type: ignore[attr-defined]


def _is_norm(maker: Any) -> bool:
    return isinstance(maker, type) and issubclass(maker, nn.Module) and maker.__name__.endswith("Norm")


def _base(operand: ast.expr) -> str:
    match operand:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name.endswith("_quantizer"):
            return _base(first)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[first, *_]) if "drop" in name:
            return _base(first)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name
        case ast.Call(func=ast.Attribute(value=inner)) if not _is_space(inner):
            return _base(inner)
        case ast.Call(args=[first, *_]):
            return _base(first)
        case ast.Subscript(value=inner) | ast.BinOp(left=inner) | ast.UnaryOp(operand=inner):
            return _base(inner)
    return "operand"


def _is_space(node: ast.expr) -> bool:
    """Whether it reads like a module of torch."""
    return ast.unparse(node) in ("torch", "nn", "F", "nn.functional", "torch.nn.functional", "math")
