"""Rewriting on sources written for it: what is quantized, what it is called, and what is refused, with its line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sources import importing

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hasten.core.errors import UnsupportedError  # noqa: E402
from hasten.core.variant import Precision  # noqa: E402
from hasten.quantize.qdq.constructs import Kind  # noqa: E402
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer  # noqa: E402
from hasten.quantize.qdq.rewrite import Options, is_rewritten, rewrite  # noqa: E402

EVERYTHING = Options(Precision.INT8, frozenset(Kind))
HEAD = "import torch\nfrom torch import nn\n"


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    with importing(tmp_path, HEAD) as load:
        yield load


def made(module: ModuleType, name: str, *args: Any, options: Options = EVERYTHING) -> Any:
    result = rewrite(module, options)
    original = getattr(module, name)
    result.check(original)
    return result.classes[original](*args)


def names(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, Quantizer)]


PRODUCTS = """
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b):
            first = {}
            return self.linear(first)
"""


@pytest.mark.parametrize(
    ("written", "expected"),
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
def test_operands_of_products_are_quantized_and_named_after_what_stands_there(
    module_of: Callable[[str], ModuleType], written: str, expected: list[str]
) -> None:
    module = module_of(PRODUCTS.format(written))
    model = made(module, "Products")
    assert sorted(names(model)) == sorted([*expected, "linear.input_quantizer", "linear.weight_quantizer"])
    assert isinstance(model.linear, QuantizedLinear)
    assert isinstance(model, module.Products)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    plain = module.Products()
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

        def forward(self, ids, places):
            embeddings = self.words(ids) + places
            embeddings += places
            return self.norm(embeddings)
"""


def test_sums_in_front_of_norms_are_quantized_and_switched_on_where_asked(
    module_of: Callable[[str], ModuleType],
) -> None:
    module = module_of(RESIDUALS)
    model = made(module, "Residual")
    assert names(model) == ["hidden_quantizer", "before_quantizer", "other_quantizer", "before_2_quantizer"]
    assert all(part.is_enabled for part in model.modules() if isinstance(part, Quantizer))
    quiet = made(module, "Residual", options=Options())
    assert names(quiet) == names(model)
    assert not any(part.is_enabled for part in quiet.modules() if isinstance(part, Quantizer))

    embedded = made(module, "Embedded")
    assert names(embedded) == ["words_quantizer", "places_quantizer", "embeddings_quantizer", "places_2_quantizer"]
    plain = module.Embedded()
    plain.load_state_dict(embedded.state_dict(), strict=False)
    ids, places = torch.tensor([1, 2]), torch.randn(2, 4)
    assert torch.equal(embedded(ids, places), plain(ids, places))


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


def test_inheritance_and_functions_go_on_as_written(module_of: Callable[[str], ModuleType]) -> None:
    module = module_of(INHERITED)
    before = dict(vars(module))
    model = made(module, "Outer")
    assert names(model) == [
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


def test_a_class_and_its_base_do_not_share_quantizers(module_of: Callable[[str], ModuleType]) -> None:
    """One scale for two places would be that of the larger one."""
    module = module_of(SHARED)
    assert len(names(made(module, "Base"))) == 4
    extended, instead = made(module, "Extended"), made(module, "Instead")
    for model in (extended, instead):
        called: list[Any] = []
        for part in model.modules():
            if isinstance(part, Quantizer):
                part.register_forward_hook(lambda part, *_, called=called: called.append(part))
        a = torch.randn(3, 3)
        torch.testing.assert_close(model(a), 3 * a @ a)
        assert len(called) == len(set(called)) == 4


def test_methods_that_need_their_class_body_are_refused(module_of: Callable[[str], ModuleType]) -> None:
    source = """
        class Own(nn.Module):
            SIZE = 3

            def forward(self, a, size=SIZE):
                return a @ a


        class User(nn.Module):
            def __init__(self):
                super().__init__()
                self.own = Own()


        class Innocent(nn.Module):
            def forward(self, a):
                return a @ a
    """
    module = module_of(source)
    with pytest.raises(UnsupportedError, match=r"class Own in 'Own', .* name 'SIZE' is not defined \(.*\.py:4\)"):
        made(module, "User")
    assert names(made(module, "Innocent"))


def test_tracebacks_show_the_original_file_and_line(module_of: Callable[[str], ModuleType]) -> None:
    module = module_of(PRODUCTS.format("torch.matmul(a, b)"))
    model = made(module, "Products")
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
def test_what_cannot_be_rewritten_is_refused_with_construct_file_and_line(
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
        made(module, "User")
    assert f"{construct} in 'f'" in str(raised.value)
    assert f"{module.__file__}:{line}" in str(raised.value)
    made(module, "Innocent")


def test_a_module_without_source_is_refused() -> None:
    module = ModuleType("sourceless")
    with pytest.raises(UnsupportedError, match="sourceless comes without its source"):
        rewrite(module, Options())
