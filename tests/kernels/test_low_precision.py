"""Models with 8-bit GEMMs are calibrated, stored and opened, and stay close to PyTorch in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hasten.backends import Artifact, RunOptions, Source
from hasten.backends.fused import BACKEND, FILE
from hasten.backends.fused.session import FusedSession
from hasten.backends.torch import ModuleSession
from hasten.builder.sources.export_wrapper import Exportable
from hasten.core.errors import StageError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Support, Variant
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.gemm.cublaslt import GemmShape
from hasten.kernels.ops.quantize import FP8, INT8, ActivationQuant
from hasten.kernels.ops.quantize import reference as quantize_reference
from hasten.kernels.quantize_weights import ActivationMaxima, observe_activations, quantize_weights
from hasten.kernels.weights import read
from support.models.fused_encoders import DEVICE, FEW_LAYERS, batch_of, model_of, open_session

INPUTS = ("input_ids", "attention_mask")
# Relative to the states of all tokens. Weights and activations each err by up to 1/16 in fp8, and by half of 1/127 of
# the maximum in int8; errors add up over layers, and norms keep them from growing.
MAX_ERROR = {"fp8": 0.08, "int8": 0.08}
precisions = pytest.mark.parametrize("precision", ["fp8", "int8"])
ROWS = batch_of(9, 12, 4)


def signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    return Signature(inputs, (TensorSpec("last_hidden_state", DType.FLOAT32, (BATCH, SEQUENCE, 64)),), max_length=140)


def module_of(family: str, layers: int = FEW_LAYERS) -> Exportable:
    return Exportable(model_of(family, "Model", layers=layers), INPUTS, ["last_hidden_state"])


def make_session(module: Exportable, name: str, folder: Path, **options: Any) -> FusedSession:
    source = Source(signature(), {}, module, calibration=ROWS, **options)
    return open_session(BACKEND.make(source, Variant.parse(name), folder))


def error(session: FusedSession, module: Exportable, batch: Batch) -> float:
    reference = ModuleSession(module, Artifact(Variant.parse("torch-fp32"), signature(), Path(), {}), RunOptions(1))
    expected, actual = (session.run(batch)["last_hidden_state"] for session in (reference, session))
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@precisions
@pytest.mark.parametrize(
    "family", ["Bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Roberta", "MPNet", "Electra"))]
)
def test_hidden_states_are_close(family: str, precision: str, tmp_path: Path) -> None:
    module = module_of(family)
    session = make_session(module, f"fused-{precision}@cuda", tmp_path)
    assert session.spec.precision == precision
    stored = load_file(tmp_path / FILE)
    assert {str(stored[f"0.{name}.weight"].dtype) for name in ("qkv", "out", "up", "down")} <= {str(FP8), str(INT8)}
    # By the small-batch kernels, where only the weights are quantized, and by the large-batch kernels.
    small, alone = error(session, module, batch_of(7)), session.run(batch_of(7))["last_hidden_state"]
    session.slot.encoder.small_batch_max_tokens = 0
    large = error(session, module, batch_of(7, 1, 17))
    assert 0 < small <= MAX_ERROR[precision]
    assert 0 < large <= MAX_ERROR[precision]
    # The outputs of a row do not depend on the batch.
    together = session.run(batch_of(7, 1, 17))["last_hidden_state"][:7]
    assert np.linalg.norm(alone - together) / np.linalg.norm(together) <= MAX_ERROR[precision]


@pytest.mark.parametrize("precision", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_shared_layers_with_projected_embeddings_are_close(precision: str, tmp_path: Path) -> None:
    """ALBERT: shared layers, and the tanh GELU that cuBLAS fuses."""
    module = module_of("Albert")
    assert (
        error(make_session(module, f"fused-{precision}@cuda", tmp_path), module, batch_of(5, 9)) <= MAX_ERROR[precision]
    )


def test_kept_gemms_stay_in_half_precision(tmp_path: Path) -> None:
    module = module_of("Bert")
    keep = ("0.qkv", "0.up")
    session = make_session(module, "fused-fp8+keep2@cuda", tmp_path, keep=keep)
    stored = load_file(tmp_path / FILE)
    quantized = {name for name, value in stored.items() if value.dtype == FP8}
    assert quantized == {
        f"{layer}.{name}.weight" for layer in range(FEW_LAYERS) for name in ("qkv", "out", "up", "down")
    } - {f"{name}.weight" for name in keep}
    assert session.spec.precision == "fp8"
    session.slot.encoder.small_batch_max_tokens = 0
    assert error(session, module, batch_of(5, 9)) <= MAX_ERROR["fp8"]


def test_most_sensitive_gemm_is_first() -> None:
    model = model_of("Bert", "Model", layers=1)
    # Attention contributes almost nothing, so its rounding has little effect.
    model.encoder.layer[0].attention.output.dense.weight.data *= 1e-3
    source = Source(signature(), {}, Exportable(model, INPUTS, ["last_hidden_state"]), calibration=batch_of(9))
    actual = BACKEND.most_sensitive(source, Variant.parse("fused-fp8@cuda"))
    assert sorted(actual[:2]) == ["0.down", "0.up"]
    assert sorted(actual[2:]) == ["0.out", "0.qkv"]


# No single share of the range stays below both errors.
@pytest.mark.parametrize(("is_rare", "max_error"), [(True, 0.016), (False, 0.0075)])
def test_int8_ranges_are_shared_per_gemm(is_rare: bool, max_error: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 64, generator=drawn), torch.randn(48, 64, generator=drawn)
    if is_rare:
        # One large activation meets one large weight: weights have scales per column, activations do not.
        x[0, 3] = weight[0, 3] = 10
    else:
        # An outlier channel for all tokens and weights.
        x[:, 3] *= 300
    actual = quantize_weights({"0.up.weight": weight}, {"0.up": ActivationMaxima(x.abs().amax(0), x)}, INT8, ())
    quantized = quantize_reference(x, ActivationQuant(actual["0.up.inverse_scales"], INT8))
    y = quantized.float() @ actual["0.up.weight"].float().T * actual["0.up.scale"]
    expected = x @ weight.T
    assert 0 < (y - expected).norm() / expected.norm() <= max_error


def test_calibration_samples_tokens_but_maxima_cover_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read(model_of("Bert", "Model", layers=1))
    weights = {name: value.to(DEVICE) for name, value in model.weights.items()}
    full = observe_activations(model.geometry, weights, ROWS)
    monkeypatch.setattr("hasten.kernels.quantize_weights._SAMPLE_TOKENS", 10)
    sampled = observe_activations(model.geometry, weights, ROWS)
    for name, maxima in full.items():
        assert torch.equal(maxima.sample.abs().amax(0), maxima.max_abs)
        torch.testing.assert_close(sampled[name].sample, maxima.sample[::3])
        torch.testing.assert_close(sampled[name].max_abs, maxima.max_abs)


def test_values_beyond_calibrated_range_stay_finite(tmp_path: Path) -> None:
    module = module_of("Bert")
    session = make_session(module, "fused-fp8@cuda", tmp_path)
    for name, quant in session.slot.encoder._quants.items():
        quant.inverse_scales.mul_(1e6)
        session._weights[f"{name}.scale"].div_(1e6)
    session.slot.encoder.small_batch_max_tokens = 0
    assert np.isfinite(session.run(batch_of(7, 3))["last_hidden_state"]).all()


def test_missing_calibration_rows_are_reported(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="fused-fp8@cuda needs calibration rows"):
        BACKEND.make(Source(signature(), {}, module_of("Bert", 1)), Variant.parse("fused-fp8@cuda"), tmp_path)


def test_gemm_shapes_match_large_batch() -> None:
    def shapes(activation: str, *quantized: str) -> set[GemmShape]:
        weights = {"word_embeddings": torch.zeros(1)}
        for name in quantized:
            weights |= {f"0.{name}.inverse_scales": torch.ones(1), f"0.{name}.weight": torch.zeros(1, dtype=FP8)}
        return set(Encoder(Geometry(1, 32, 2, 64, 1e-5, activation), weights).gemm_shapes(48))

    fp8 = "float8_e4m3fn"
    assert shapes("gelu", "qkv", "out", "up", "down") == {
        GemmShape(48, 96, 32, True, False, fp8),
        GemmShape(48, 32, 32, False, False, fp8),
        GemmShape(48, 64, 32, True, True, fp8, fp8),
        GemmShape(48, 32, 64, False, False, fp8),
    }
    # The output of GELU is quantized only if the next GEMM is, which cuBLAS cannot do in half precision.
    assert GemmShape(48, 64, 32, True, True, fp8) in shapes("gelu", "up")
    assert GemmShape(48, 64, 32, True, False) in shapes("gelu_new", "down")
    assert GemmShape(48, 64, 32, True, True) in shapes("gelu_new")


@pytest.mark.slow
def test_build_stores_fp8_variants(tiny_classifier: Any, quick_build: Any) -> None:
    """A build goes from calibration rows to the manifest, as on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(type(BACKEND), "probe", lambda *_: Support.yes())
            patch.setattr(type(BACKEND), "open", lambda _, artifact, __: open_session(artifact))
        names = ["fused-fp8@cuda", "fused-fp8+keep1@cuda"]
        bundle = quick_build(tiny_classifier("bert"), variants=names, min_agreement=0.0, keep="all")
    stored = {entry.name: entry for entry in bundle.manifest.variants}
    assert set(stored) == set(names)
    assert {entry.precision for entry in stored.values()} == {"fp8"}
    weights = {name: load_file(bundle.artifact(entry).path()) for name, entry in stored.items()}
    counts = {
        name: sum(value.dtype == FP8 for value in stored_weights.values()) for name, stored_weights in weights.items()
    }
    assert counts[names[0]] == counts[names[1]] + 1
