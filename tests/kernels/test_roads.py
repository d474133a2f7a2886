"""The roads a product of eight bits may take: all give the same, and tuning names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from encoders import DEVICE
from hasten.core.errors import StageError
from hasten.kernels import tuning
from hasten.kernels.activation import EXACT, TANH
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.multiply import CUTS, Cut, reference
from hasten.kernels.products import Product, Products
from hasten.kernels.roads import LIBRARY, NAME, OWN, TORCH, Roads
from hasten.kernels.tuning import FILE, Tuning, find

FP8 = "float8_e4m3fn"
UP = Product(48, 64, 32, has_bias=True, has_gelu=True, takes=FP8, gives=FP8)
ODD = Product(48, 56, 40, has_bias=True, has_gelu=True, takes=FP8, gives=FP8)
PLAIN = Product(48, 64, 32, has_bias=True, takes=FP8)
HALF = torch.float32 if DEVICE == "cpu" else torch.float16


def difference(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("road", [OWN, TORCH, LIBRARY, f"{LIBRARY} {'0f' * 64}", *(f"{OWN} {cut}" for cut in CUTS)])
def test_names_are_known(road: str) -> None:
    assert NAME.fullmatch(road)


@pytest.mark.parametrize("road", ["", "own 1x2", "library 0f", "torch 3", "rm -rf", "own 1x2x3x4x5x6", f"{'0f' * 64}"])
def test_others_are_not(road: str) -> None:
    assert not NAME.fullmatch(road)
    assert Cut.parse(str(CUTS[0])) == CUTS[0]


@pytest.mark.parametrize("what", [UP, PLAIN], ids=["squeezed", "plain"])
def test_what_was_chosen_is_taken(what: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    roads = Roads(EXACT, HALF)
    cut, taken = Cut(32, 32, 32, 4, 2), []
    go = roads.go
    monkeypatch.setattr(roads, "go", lambda road, *given: taken.append(road) or go(road, *given))
    x, weight, step, bias, how = roads.drawn(what, DEVICE)
    roads.choose({what: f"{OWN} {cut}"})
    found = roads(x, weight, step, bias, has_gelu=what.has_gelu, squeeze=how)
    assert taken == [f"{OWN} {cut}"]
    expected = reference(x, weight, step, bias, EXACT if what.has_gelu else None, how)
    assert difference(found, expected) <= 2e-3


@pytest.mark.parametrize(("what", "road"), [(UP, TORCH), (ODD, OWN)], ids=["even", "odd"])
def test_a_shape_that_the_library_refuses_goes_another_way(
    what: Product, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's products in fp8 refuse sides that 16 does not divide, on a GPU; its CPU's do not."""

    class Refusing:
        sums_fast = False
        asked = 0

        def squeezed(self, *_: Any) -> Any:
            self.asked += 1
            raise StageError("cuBLASLt proposes no algorithm")

        def proposals(self, _: Product) -> Any:
            raise StageError("cuBLASLt proposes no algorithm")

    library: Any = Refusing()
    roads = Roads(EXACT, HALF, library)
    go, taken = roads.go, []
    monkeypatch.setattr(roads, "go", lambda road, *given: taken.append(road) or go(road, *given))
    given = roads.drawn(what, DEVICE)
    expected = reference(*given[:4], EXACT, given[4])
    for _ in range(2):
        assert difference(roads(*given[:4], has_gelu=True, squeeze=given[4]), expected) <= 5e-3
    assert library.asked == 1
    assert taken == [LIBRARY, road, road]
    assert (TORCH in roads.known(what)) is (road == TORCH)


def test_what_was_measured_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "circumstances", lambda _: "one GPU")
    encoder, products = Encoder(Geometry(1, 32, 2, 64, 1e-5, "gelu"), {}), None
    Tuning("one GPU", 0, ((UP, f"{OWN} {CUTS[0]}"), (PLAIN, f"{LIBRARY} {'0f' * 64}"))).write(tmp_path / FILE)
    found = find(encoder, products, tmp_path)  # type: ignore[arg-type]
    assert found is not None
    assert dict(found.products)[UP] == f"{OWN} {CUTS[0]}"
    # An algorithm without a road is for halves.
    (tmp_path / FILE).write_bytes(msgspec.json.encode(Tuning("one GPU", 0, ((UP, "0f" * 64),))))
    assert find(encoder, products, tmp_path) is None  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE == "cpu", reason="the libraries need a GPU")
@pytest.mark.parametrize("kind", [EXACT, TANH])
@pytest.mark.parametrize("rows", [1, 17, 144, 2048])
@pytest.mark.parametrize("has_gelu", [True, False])
def test_every_road_multiplies_the_same(has_gelu: bool, rows: int, kind: str) -> None:
    roads = Roads(kind, torch.float16, Products(torch.float16))
    what = Product(rows, 384, 256, has_bias=True, has_gelu=has_gelu, takes=FP8, gives=FP8 if has_gelu else "")
    given = roads.drawn(what, "cuda")
    expected = reference(*given[:4], kind if has_gelu else None, given[4])
    known = roads.known(what)
    assert {road.split()[0] for road in known} == {LIBRARY, OWN}
    wrong = {road: difference(roads.go(road, what, *given), expected) for road in (*known, TORCH)}
    # What is rounded to halves on the way lies, now and then, next to another number of eight bits.
    assert max(wrong.values()) <= (1e-2 if has_gelu else 5e-3), wrong
    assert roads.fastest(what, tuning.seconds) in known
