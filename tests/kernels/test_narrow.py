"""Whole models whose products are of eight bits, against PyTorch in fp32: calibrated, written, opened and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from encoders import DEVICE, FEW_LAYERS, batch_of, model_of, opened
from hasten.backends import Artifact, RunOptions, Source
from hasten.backends.fused import BACKEND, FILE
from hasten.backends.fused.session import FusedSession
from hasten.backends.torch import ModuleSession
from hasten.builder.head import Exportable
from hasten.core.errors import StageError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Support, Variant
from hasten.kernels import calibrate
from hasten.kernels.calibrate import Taken, narrowed, watched
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.products import Product
from hasten.kernels.squeeze import FP8, INT8, Squeeze
from hasten.kernels.squeeze import reference as squeezed
from hasten.kernels.weights import read

INPUTS = ("input_ids", "attention_mask")
# Relative to the states of all tokens. Weights and values are each off by up to a sixteenth in fp8, by half of a 127th
# of the largest in int8; layers add up what they are off by, and norms keep it from growing.
LARGEST_ERROR = {"fp8": 0.08, "int8": 0.08}
precisions = pytest.mark.parametrize("precision", ["fp8", "int8"])
ROWS = batch_of(9, 12, 4)


def signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    return Signature(inputs, (TensorSpec("last_hidden_state", DType.FLOAT32, (BATCH, SEQUENCE, 64)),), max_length=140)


def module_of(family: str, layers: int = FEW_LAYERS) -> Exportable:
    return Exportable(model_of(family, "Model", layers=layers), INPUTS, ["last_hidden_state"])


def made(module: Exportable, name: str, folder: Path, **about: Any) -> FusedSession:
    source = Source(signature(), {}, module, calibration=ROWS, **about)
    return opened(BACKEND.make(source, Variant.parse(name), folder))


def error(session: FusedSession, module: Exportable, batch: Batch) -> float:
    theirs = ModuleSession(module, Artifact(Variant.parse("torch-fp32"), signature(), Path(), {}), RunOptions(1))
    expected, found = (one.run(batch)["last_hidden_state"] for one in (theirs, session))
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@precisions
@pytest.mark.parametrize(
    "family", ["Bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Roberta", "MPNet", "Electra"))]
)
def test_states_are_near(family: str, precision: str, tmp_path: Path) -> None:
    module = module_of(family)
    session = made(module, f"fused-{precision}@cuda", tmp_path)
    assert session.spec.precision == precision
    stored = load_file(tmp_path / FILE)
    assert {str(stored[f"0.{name}.weight"].dtype) for name in ("qkv", "out", "up", "down")} <= {str(FP8), str(INT8)}
    # By the kernels for few tokens, where only the weights are narrow, and by the others.
    few, alone = error(session, module, batch_of(7)), session.run(batch_of(7))["last_hidden_state"]
    session.lane.encoder.few_tokens = 0
    many = error(session, module, batch_of(7, 1, 17))
    assert 0 < few <= LARGEST_ERROR[precision]
    assert 0 < many <= LARGEST_ERROR[precision]
    # A row is answered alike in any company.
    together = session.run(batch_of(7, 1, 17))["last_hidden_state"][:7]
    assert np.linalg.norm(alone - together) / np.linalg.norm(together) <= LARGEST_ERROR[precision]


@pytest.mark.parametrize("precision", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_shared_layers_and_projected_embeddings(precision: str, tmp_path: Path) -> None:
    """ALBERT: the same products in all layers, and the GELU that cuBLAS takes along."""
    module = module_of("Albert")
    assert error(made(module, f"fused-{precision}@cuda", tmp_path), module, batch_of(5, 9)) <= LARGEST_ERROR[precision]


def test_products_that_are_kept_are_halves(tmp_path: Path) -> None:
    module = module_of("Bert")
    keep = ("0.qkv", "0.up")
    session = made(module, "fused-fp8+keep2@cuda", tmp_path, keep=keep)
    stored = load_file(tmp_path / FILE)
    narrow = {name for name, value in stored.items() if value.dtype == FP8}
    assert narrow == {
        f"{layer}.{name}.weight" for layer in range(FEW_LAYERS) for name in ("qkv", "out", "up", "down")
    } - {f"{name}.weight" for name in keep}
    assert session.spec.precision == "fp8"
    session.lane.encoder.few_tokens = 0
    assert error(session, module, batch_of(5, 9)) <= LARGEST_ERROR["fp8"]


def test_the_product_that_costs_most_is_named_first() -> None:
    model = model_of("Bert", "Model", layers=1)
    # Attention adds next to nothing, so that what is rounded for it matters little.
    model.encoder.layer[0].attention.output.dense.weight.data *= 1e-3
    source = Source(signature(), {}, Exportable(model, INPUTS, ["last_hidden_state"]), calibration=batch_of(9))
    found = BACKEND.most_sensitive(source, Variant.parse("fused-fp8@cuda"))
    assert sorted(found[:2]) == ["0.down", "0.up"]
    assert sorted(found[2:]) == ["0.out", "0.qkv"]


# No share of the range that is the same for both stays below both errors.
@pytest.mark.parametrize(("is_rare", "largest_error"), [(True, 0.016), (False, 0.0075)])
def test_int8_divides_ranges_as_each_product_needs_it(is_rare: bool, largest_error: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 64, generator=drawn), torch.randn(48, 64, generator=drawn)
    if is_rare:
        # One large value that one large weight meets: other weights have steps of their own, other values have none.
        x[0, 3] = weight[0, 3] = 10
    else:
        # A channel far above the others, for all tokens and all weights.
        x[:, 3] *= 300
    found = narrowed({"0.up.weight": weight}, {"0.up": Taken(x.abs().amax(0), x)}, INT8, ())
    narrow = squeezed(x, Squeeze(found["0.up.factors"], INT8))
    y = narrow.float() @ found["0.up.weight"].float().T * found["0.up.step"]
    expected = x @ weight.T
    assert 0 < (y - expected).norm() / expected.norm() <= largest_error


def test_of_many_tokens_some_are_kept_and_none_is_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = read(model_of("Bert", "Model", layers=1))
    weights = {name: value.to(DEVICE) for name, value in reading.weights.items()}
    whole = watched(reading.geometry, weights, ROWS)
    monkeypatch.setattr(calibrate, "_SAMPLE_TOKENS", 10)
    some = watched(reading.geometry, weights, ROWS)
    for name, what in whole.items():
        assert torch.equal(what.sample.abs().amax(0), what.most)
        torch.testing.assert_close(some[name].sample, what.sample[::3])
        torch.testing.assert_close(some[name].most, what.most)


def test_values_beyond_what_was_seen_are_cut_off_and_stay_numbers(tmp_path: Path) -> None:
    module = module_of("Bert")
    session = made(module, "fused-fp8@cuda", tmp_path)
    for name, how in session.lane.encoder._squeezes.items():
        how.factors.mul_(1e6)
        session._weights[f"{name}.step"].div_(1e6)
    session.lane.encoder.few_tokens = 0
    assert np.isfinite(session.run(batch_of(7, 3))["last_hidden_state"]).all()


def test_without_rows_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="fused-fp8@cuda is calibrated, and there are no rows"):
        BACKEND.make(Source(signature(), {}, module_of("Bert", 1)), Variant.parse("fused-fp8@cuda"), tmp_path)


def test_what_is_tuned_are_the_products_that_are_asked_for() -> None:
    def shapes(activation: str, *narrow: str) -> set[Product]:
        weights = {"words": torch.zeros(1)}
        for name in narrow:
            weights |= {f"0.{name}.factors": torch.ones(1), f"0.{name}.weight": torch.zeros(1, dtype=FP8)}
        return set(Encoder(Geometry(1, 32, 2, 64, 1e-5, activation), weights).shapes(48))

    fp8 = "float8_e4m3fn"
    assert shapes("gelu", "qkv", "out", "up", "down") == {
        Product(48, 96, 32, True, False, fp8),
        Product(48, 32, 32, False, False, fp8),
        Product(48, 64, 32, True, True, fp8, fp8),
        Product(48, 32, 64, False, False, fp8),
    }
    # What comes of GELU stays as it is where the next product is kept, and has to be squeezed where only that is not.
    assert Product(48, 64, 32, True, True, fp8) in shapes("gelu", "up")
    assert Product(48, 64, 32, True, False) in shapes("gelu_new", "down")
    assert Product(48, 64, 32, True, True) in shapes("gelu_new")


@pytest.mark.slow
def test_a_build_makes_verifies_and_stores_it(tiny_classifier: Any, quick_build: Any) -> None:
    """From calibration rows to the manifest, as on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(type(BACKEND), "probe", lambda *_: Support.yes())
            patch.setattr(type(BACKEND), "open", lambda _, artifact, __: opened(artifact))
        names = ["fused-fp8@cuda", "fused-fp8+keep1@cuda"]
        bundle = quick_build(tiny_classifier("bert"), variants=names, min_agreement=0.0, keep="all")
    stored = {entry.name: entry for entry in bundle.manifest.variants}
    assert set(stored) == set(names)
    assert {entry.precision for entry in stored.values()} == {"fp8"}
    weights = {name: load_file(bundle.artifact(entry).path()) for name, entry in stored.items()}
    counts = {name: sum(value.dtype == FP8 for value in found.values()) for name, found in weights.items()}
    assert counts[names[0]] == counts[names[1]] + 1
