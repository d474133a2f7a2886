"""Rewriting of module sources: which operands are quantized, their names, and what is rejected, with its line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.temp_modules import importing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hasten.core.errors import UnsupportedError  # noqa: E402
from hasten.core.variant import Precision  # noqa: E402
from hasten.quantize.qdq.constructs import OperandKind  # noqa: E402
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer  # noqa: E402
from hasten.quantize.qdq.rewrite import RewriteOptions, is_rewritten, rewrite  # noqa: E402

EVERYTHING = RewriteOptions(Precision.INT8, frozenset(OperandKind))
HEAD = "import torch\nfrom torch import nn\n"


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    with importing(tmp_path, HEAD) as load:
        yield load


def rewritten_instance(module: ModuleType, name: str, *args: Any, options: RewriteOptions = EVERYTHING) -> Any:
    result = rewrite(module, options)
    original = getattr(module, name)
    result.check(original)
    return result.classes[original](*args)


def quantizer_names(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, Quantizer)]


MATMULS = """
    class MatMuls(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b):
            first = {}
            return self.linear(first)
"""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a @ b", ["a_quantizer", "b_quantizer"]),
        ("torch.matmul(a, b.transpose(0, 1))", ["a_quantizer", "b_quantizer"]),
        ("torch.bmm(a[None], b[None])[0]", ["a_quantizer", "b_quantizer"]),
        ("a.matmul(b)", ["a_quantizer", "b_quantizer"]),
        ("nn.functional.linear(a, b)", ["a_quantizer", "b_quantizer"]),
        ("a.clone(); first @= b", ["first_quantizer", "b_quantizer"]),
        ("(a @ b) @ b", ["a_quantizer", "b_quantizer", "a_2_quantizer", "b_2_quantizer"]),
        (
            "nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])[0]",
            ["a_quantizer", "b_quantizer", "a_2_quantizer"],
        ),
        ("a * b", []),
    ],
)
def test_matmul_operands_are_quantized_and_named_after_themselves(
    module_of: Callable[[str], ModuleType], expression: str, expected: list[str]
) -> None:
    module = module_of(MATMULS.format(expression))
    model = rewritten_instance(module, "MatMuls")
    assert sorted(quantizer_names(model)) == sorted([*expected, "linear.input_quantizer", "linear.weight_quantizer"])
    assert isinstance(model.linear, QuantizedLinear)
    assert isinstance(model, module.MatMuls)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    plain = module.MatMuls()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(a, b), plain(a, b))


RESIDUALS = """
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.dropout = nn.Dropout(0.0)

        def forward(self, hidden, before):
            total = hidden + before
            other = hidden + 1.0
            return self.norm(total) + self.norm(self.dropout(other) + before)


    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(8, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, ids, positions):
            embeddings = self.words(ids) + positions
            embeddings += positions
            return self.norm(embeddings)
"""


def test_sums_before_norms_are_quantized_and_enabled_by_option(
    module_of: Callable[[str], ModuleType],
) -> None:
    module = module_of(RESIDUALS)
    model = rewritten_instance(module, "Residual")
    assert quantizer_names(model) == ["hidden_quantizer", "before_quantizer", "other_quantizer", "before_2_quantizer"]
    assert all(part.is_enabled for part in model.modules() if isinstance(part, Quantizer))
    default = rewritten_instance(module, "Residual", options=RewriteOptions())
    assert quantizer_names(default) == quantizer_names(model)
    assert not any(part.is_enabled for part in default.modules() if isinstance(part, Quantizer))

    embedded = rewritten_instance(module, "Embedded")
    assert quantizer_names(embedded) == [
        "words_quantizer",
        "positions_quantizer",
        "embeddings_quantizer",
        "positions_2_quantizer",
    ]
    plain = module.Embedded()
    plain.load_state_dict(embedded.state_dict(), strict=False)
    ids, positions = torch.tensor([1, 2]), torch.randn(2, 4)
    assert torch.equal(embedded(ids, positions), plain(ids, positions))


INHERITED = """
    def score(module: nn.Module, query, key):
        return query @ key


    class Base(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.width = width

        def forward(self, a):
            return torch.matmul(a, a)


    class Derived(Base):
        def forward(self, a):
            return super().forward(a) + score(self, a, a)


    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Derived(4)

        def forward(self, a):
            return self.inner(a)
"""


def test_inheritance_and_function_calls_are_preserved(module_of: Callable[[str], ModuleType]) -> None:
    module = module_of(INHERITED)
    before = dict(vars(module))
    model = rewritten_instance(module, "Outer")
    assert quantizer_names(model) == [
        *(f"inner.{name}_quantizer" for name in ("a", "a_2")),
        *(f"inner.{name}_quantizer" for name in ("query", "key")),
    ]
    assert is_rewritten(type(model.inner))
    assert isinstance(model.inner, module.Derived)
    assert isinstance(model.inner, module.Base)
    a = torch.randn(3, 3)
    assert torch.equal(model(a), 2 * (a @ a))
    assert dict(vars(module)) == before


SHARED = """
    class Base(nn.Module):
        def forward(self, a):
            return a @ a

        def other(self, a):
            return a @ a


    class Extended(Base):
        def forward(self, a):
            return super().forward(a) + (2 * a) @ a


    class Instead(Base):
        def forward(self, a):
            return (2 * a) @ a + self.other(a)
"""


def test_class_and_its_base_do_not_share_quantizers(module_of: Callable[[str], ModuleType]) -> None:
    """A shared quantizer would use the larger of the two scales."""
    module = module_of(SHARED)
    assert len(quantizer_names(rewritten_instance(module, "Base"))) == 4
    extended, instead = rewritten_instance(module, "Extended"), rewritten_instance(module, "Instead")
    for model in (extended, instead):
        called: list[Any] = []
        for part in model.modules():
            if isinstance(part, Quantizer):
                part.register_forward_hook(lambda part, *_, called=called: called.append(part))
        a = torch.randn(3, 3)
        torch.testing.assert_close(model(a), 3 * a @ a)
        assert len(called) == len(set(called)) == 4


def test_methods_that_need_their_class_body_are_rejected(module_of: Callable[[str], ModuleType]) -> None:
    source = """
        class Layer(nn.Module):
            SIZE = 3

            def forward(self, a, size=SIZE):
                return a @ a


        class User(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = Layer()


        class Innocent(nn.Module):
            def forward(self, a):
                return a @ a
    """
    module = module_of(source)
    with pytest.raises(UnsupportedError, match=r"class Layer in 'Layer': .* name 'SIZE' is not defined \(.*\.py:4\)"):
        rewritten_instance(module, "User")
    assert quantizer_names(rewritten_instance(module, "Innocent"))


def test_tracebacks_show_the_original_file_and_line(module_of: Callable[[str], ModuleType]) -> None:
    module = module_of(MATMULS.format("torch.matmul(a, b)"))
    model = rewritten_instance(module, "MatMuls")
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(4, 4), torch.randn(3, 3))
    frame = next(
        frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename == module.__file__
    )
    lines = Path(str(module.__file__)).read_text().splitlines()
    assert frame.line == "first = torch.matmul(a, b)"
    assert lines[(frame.lineno or 0) - 1].strip() == frame.line
    assert frame.name == "forward"


@pytest.mark.parametrize(
    ("source", "construct", "line"),
    [
        ("def f(a):\n    return a @ a\n", "a @ a", 4),
        ("def f(a):\n    return torch.einsum('ij,jk', a, a)\n", "torch.einsum", 4),
        ("def f(module, a):\n    return torch.baddbmm(a, a, a)\n", "torch.baddbmm", 4),
        ("def f(module, a):\n    return a.baddbmm(a, a)\n", "a.baddbmm", 4),
        ("def f(module, a):\n    return a.addmm_(a, a)\n", "a.addmm_", 4),
        ("def f(module, a):\n    return a.matmul(other=a)\n", "a.matmul", 4),
        ("def f(a):\n    return nn.MultiheadAttention(4, 2)(a, a, a)\n", "nn.MultiheadAttention", 4),
        ("if True:\n    def f(module, a):\n        return a @ a\n", "def f", 4),
        ("try:\n    pass\nexcept ImportError:\n    def f(module, a):\n        return a @ a\n", "def f", 6),
    ],
)
def test_unsupported_construct_is_rejected_with_file_and_line(
    module_of: Callable[[str], ModuleType], source: str, construct: str, line: int
) -> None:
    user = """
class User(nn.Module):
    def forward(self, a):
        return f(a)


class Innocent(nn.Module):
    def forward(self, a):
        return a
"""
    module = module_of(source + user)
    with pytest.raises(UnsupportedError) as raised:
        rewritten_instance(module, "User")
    assert f"{construct} in 'f'" in str(raised.value)
    assert f"{module.__file__}:{line}" in str(raised.value)
    rewritten_instance(module, "Innocent")


def test_module_without_source_is_rejected() -> None:
    module = ModuleType("sourceless")
    with pytest.raises(UnsupportedError, match="sourceless has no source"):
        rewrite(module, RewriteOptions())
