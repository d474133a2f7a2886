"""What was measured on a GPU is used there, and nowhere else. Measuring itself needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from encoders import DEVICE
from hasten.kernels import tuning
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.packing import MOST_TOKENS, round_up
from hasten.kernels.products import Product, Products
from hasten.kernels.tuning import FILE, Tuning, cached, find, sizes

SHAPE = Product(144, 96, 32, has_bias=True)
ALGORITHM = "0f" * 64
# Of the right kind, but for an algorithm that is cut off.
SHORT = msgspec.json.encode(Tuning("one GPU", 16, ((SHAPE, "0f"),)))


@pytest.fixture
def encoder() -> Encoder:
    return Encoder(Geometry(1, 32, 2, 64, 1e-5, "gelu"), {})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A GPU and versions by name; what is found by them needs no device."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    names = {"here": "one GPU"}
    monkeypatch.setattr(tuning, "circumstances", lambda _: names["here"])
    return names


def test_a_bundle_brings_it_and_the_cache_keeps_it(encoder: Encoder, here: Any, tmp_path: Path) -> None:
    products: Any = None
    assert find(encoder, products, tmp_path) is None
    Tuning("one GPU", 16, ((SHAPE, ALGORITHM),)).write(tmp_path / FILE)
    found = find(encoder, products, tmp_path)
    assert found == Tuning("one GPU", 16, ((SHAPE, ALGORITHM),))
    here["here"] = "another GPU"
    assert find(encoder, products, tmp_path) is None
    Tuning("another GPU", 32, ()).write(cached(encoder, products))
    assert find(encoder, products, tmp_path) == Tuning("another GPU", 32, ())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("content", [b"", b"[]", b"not JSON", b"\xff\xfe", SHORT])
def test_one_that_is_broken_is_none(encoder: Encoder, tmp_path: Path, content: bytes) -> None:
    products: Any = None
    (tmp_path / FILE).write_bytes(content)
    assert find(encoder, products, tmp_path) is None


def test_every_size_of_a_bucket_is_measured() -> None:
    assert set(map(round_up, range(16, MOST_TOKENS + 1))) == set(sizes(MOST_TOKENS))


@pytest.mark.skipif(DEVICE == "cpu", reason="products of cuBLASLt need a GPU")
@pytest.mark.parametrize("has_gelu", [True, False])
def test_every_proposal_multiplies_the_same(has_gelu: bool) -> None:
    products = Products(torch.float16)
    x, weight, bias = (torch.randn(*shape, device="cuda").half() for shape in ((144, 32), (96, 32), (96,)))
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    if has_gelu:
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    shape = Product(144, 96, 32, has_bias=True, has_gelu=has_gelu)
    first = products(x, weight, bias, has_gelu=has_gelu)
    products.choose({shape: products.fastest(shape, tuning.seconds)})
    for found in (first, products(x, weight, bias, has_gelu=has_gelu)):
        assert ((found.float() - expected).norm() / expected.norm()).item() <= 2e-3
