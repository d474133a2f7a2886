"""ModernBERT on the fused backend gives the outputs of transformers, whichever kernels run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import RunOptions, Source
from hasten.backends.fused import BACKEND
from hasten.backends.torch import ModuleSession
from hasten.builder.sources.export_wrapper import Exportable, MaskPositionHead, Pooled, PoolingHead
from hasten.core.errors import UnsupportedError
from hasten.core.tensors import BATCH, MASKS, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Variant
from hasten.kernels.gemm.cublaslt import GemmShape
from hasten.kernels.ops import attention
from hasten.kernels.pre_norm_encoder import PreNormEncoder
from hasten.kernels.weights import ranges
from hasten.tasks import Pooling
from support.models.fused_encoders import TOLERANCE, batch_of, model_of, open_session

INPUTS = ("input_ids", "attention_mask")
MASK_ID = 4
# Small enough that short texts have one to three windows: local layers see 4 tokens to each side.
WINDOW = {"local_attention": 8}
# Texts of one token, at the window's edges, and of up to three windows.
LENGTHS = (1, 4, 5, 6, 8, 9, 10, 12, 13)
pytestmark = pytest.mark.usefixtures("exact_transformed_weights")


def signature_of(output: str, axes: tuple[Any, ...], mask_id: int | None = None) -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    return Signature(inputs, (TensorSpec(output, DType.FLOAT32, (*axes, 2)),), max_length=140, mask_id=mask_id)


def check(module: Any, signature: Signature, folder: Path, batch: Batch) -> Any:
    """Compare a module's fused session with PyTorch, and return its encoder."""
    artifact = BACKEND.make(Source(signature, {}, module), Variant.parse("fused-fp16@cuda"), folder)
    session, name = open_session(artifact), signature.outputs[0].name
    expected, actual = (each.run(batch)[name] for each in (ModuleSession(module, artifact, RunOptions(1)), session))
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) <= TOLERANCE
    return session.slot.encoder


@pytest.mark.parametrize(
    "layer_types", [("full", "sliding", "sliding"), ("sliding", "full"), ("full",), ("sliding", "sliding")], ids=str
)
def test_states_match_at_window_edges(layer_types: tuple[str, ...], tmp_path: Path) -> None:
    options = WINDOW | {"layer_types": [f"{kind}_attention" for kind in layer_types]}
    module = Exportable(
        model_of("ModernBert", "Model", layers=len(layer_types), **options), INPUTS, ["last_hidden_state"]
    )
    encoder = check(module, signature_of("last_hidden_state", (BATCH, SEQUENCE)), tmp_path, batch_of(*LENGTHS))
    # The small-batch kernels have no window.
    assert encoder.small_batch_limit == 0


@pytest.mark.parametrize("length", [1, 17, 32])
def test_small_batch_matches(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, small_batch = [], PreNormEncoder.small_batch
    monkeypatch.setattr(
        PreNormEncoder, "small_batch", lambda *args: sizes.append(args[1].ids.shape[0]) or small_batch(*args)
    )
    module = Exportable(model_of("ModernBert", "Model"), INPUTS, ["last_hidden_state"])
    check(module, signature_of("last_hidden_state", (BATCH, SEQUENCE)), tmp_path, batch_of(length))
    assert sizes


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("lengths", [(7,), (20, 1, 13)], ids=["small", "large"])
def test_classification_head_matches_for_every_pooling(lengths: tuple[int, ...], pooling: str, tmp_path: Path) -> None:
    model = model_of("ModernBert", "ForSequenceClassification", classifier_pooling=pooling)
    check(Exportable(model, INPUTS, ["logits"]), signature_of("logits", (BATCH,)), tmp_path, batch_of(*lengths))


def test_token_classification_head_matches(tmp_path: Path) -> None:
    module = Exportable(model_of("ModernBert", "ForTokenClassification", classifier_pooling="mean"), INPUTS, ["logits"])
    check(module, signature_of("logits", (BATCH, SEQUENCE)), tmp_path, batch_of(5, 17, 1))


def test_masked_lm_head_matches(tmp_path: Path) -> None:
    module = MaskPositionHead(model_of("ModernBert", "ForMaskedLM"), INPUTS, ["logits"], MASK_ID)
    batch = batch_of(5, 3, 1, mask_id=MASK_ID)
    check(module, signature_of("logits", (MASKS,), MASK_ID), tmp_path, batch)


@pytest.mark.parametrize("pooling", [Pooling.CLS, Pooling.MEAN])
@pytest.mark.parametrize("layers", [2, 3], ids=["last layer is local", "last layer is global"])
def test_embeddings_match(layers: int, pooling: Pooling, tmp_path: Path) -> None:
    head = PoolingHead([pooling], [], normalize=True)
    model = model_of("ModernBert", "Model", layers=layers, **WINDOW)
    module = Pooled(model, INPUTS, ["embedding"], head)
    check(module, signature_of("embedding", (BATCH,)), tmp_path, batch_of(17, 1, 6))


def test_gemm_shapes_are_distinct(tmp_path: Path) -> None:
    module = Exportable(model_of("ModernBert", "Model", layers=2), INPUTS, ["last_hidden_state"])
    encoder = check(module, signature_of("last_hidden_state", (BATCH, SEQUENCE)), tmp_path, batch_of(3))
    # The linear layers qkv and up have the same shape.
    assert encoder.gemm_shapes(48) == [GemmShape(48, *size) for size in ((192, 64), (64, 64), (64, 96))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_bias": True}, "does not support biases"),
        ({"attention_bias": True}, "does not support biases"),
        ({"mlp_bias": True}, "does not support biases"),
        ({"hidden_activation": "silu"}, "does not support the activation 'silu'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rotary scaling 'linear'"),
    ],
    ids=str,
)
def test_unsupported_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        BACKEND.check_module(Exportable(model_of("ModernBert", "Model", layers=1, **options), INPUTS, ["logits"]))


def test_quantizers_of_a_module_are_rejected() -> None:
    with pytest.raises(UnsupportedError, match="does not support the quantizers of ModernBERT"):
        ranges(model_of("ModernBert", "Model", layers=1))


def test_very_long_text_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Global layers use larger tiles than the layers with a window, which split them."""
    monkeypatch.setattr(attention, "VERY_LONG_TOKENS", 100)
    module = Exportable(model_of("ModernBert", "Model", **WINDOW), INPUTS, ["last_hidden_state"])
    check(module, signature_of("last_hidden_state", (BATCH, SEQUENCE)), tmp_path, batch_of(130))


def test_centered_residual_survives_large_means(tmp_path: Path) -> None:
    """Weights that move all channels alike change no norm, however far they move them."""
    model = model_of("ModernBert", "Model", layers=2)
    for layer in model.layers:
        layer.attn.Wo.weight.data += 2.0
        layer.mlp.Wo.weight.data += 2.0
    module = Exportable(model, INPUTS, ["last_hidden_state"])
    encoder = check(module, signature_of("last_hidden_state", (BATCH, SEQUENCE)), tmp_path, batch_of(40))
    weights = encoder._weights
    assert weights["1.down.weight"].float().mean(0).abs().max() <= 1e-3
