"""Read ModernBERT's weights, transformed so that its norms need no weight and no mean.

Only norms read the residual, and they subtract its mean. So everything that is added to it can have mean zero: the
output columns of linear layers are centered here, the embeddings when they are computed. A LayerNorm is then a division
by the root mean square, and its weight is multiplied into the next linear layer. Channels that are rotated together,
and columns of the gated activation that are multiplied, become neighbors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.core.errors import UnsupportedError
from hasten.kernels.pre_norm_encoder import PreNormGeometry

MODEL_TYPE = "modernbert"


def read_geometry(config: Any, activation: str) -> PreNormGeometry:
    """Return the hyperparameters, or raise UnsupportedError for options that the kernels lack."""
    if config.attention_bias or config.mlp_bias or config.norm_bias:
        raise UnsupportedError("the fused backend does not support biases in ModernBERT's layers")
    thetas = {}
    for kind in ("full_attention", "sliding_attention"):
        parameters = config.rope_parameters[kind]
        if parameters.get("rope_type", "default") != "default":
            raise UnsupportedError(f"the fused backend does not support rotary scaling '{parameters['rope_type']}'")
        thetas[kind] = float(parameters["rope_theta"])
    if config.hidden_size // config.num_attention_heads % 2:
        raise UnsupportedError("the fused backend does not support heads of odd size with rotary embeddings")
    return PreNormGeometry(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        inner=config.intermediate_size,
        eps=float(config.norm_eps),
        activation=activation,
        window=config.local_attention // 2,
        global_layers=tuple(index for index, kind in enumerate(config.layer_types) if kind == "full_attention"),
        global_theta=thetas["full_attention"],
        local_theta=thetas["sliding_attention"],
        positions=config.max_position_embeddings,
    )


def read_encoder(state: Mapping[str, Any], geometry: PreNormGeometry) -> dict[str, Any]:
    """Return the transformed weights, in fp32."""
    if not all(tensor.is_floating_point() for tensor in state.values()):
        raise UnsupportedError("the fused backend needs floating-point weights, but these are quantized")
    final_norm = state["final_norm.weight"].float()
    weights = {
        "word_embeddings": state["embeddings.tok_embeddings.weight"],
        "embedding_norm.weight": state["embeddings.norm.weight"],
        "final_norm.weight": final_norm,
        "final_norm.bias": final_norm.new_zeros(final_norm.shape),
    }
    for layer in range(geometry.layers):
        prefix = f"layers.{layer}."
        # The first layer has the norm of the embeddings only.
        attention_norm = state[f"{prefix}attn_norm.weight"].float() if layer else 1.0
        qkv, up = state[f"{prefix}attn.Wqkv.weight"].float(), state[f"{prefix}mlp.Wi.weight"].float()
        weights |= {
            f"{layer}.qkv.weight": _pair_channels(qkv * attention_norm, geometry),
            f"{layer}.out.weight": _centered(state[f"{prefix}attn.Wo.weight"].float()),
            f"{layer}.up.weight": _interleaved(up * state[f"{prefix}mlp_norm.weight"].float()),
            f"{layer}.down.weight": _centered(state[f"{prefix}mlp.Wo.weight"].float()),
        }
    return weights


def _pair_channels(qkv: Any, geometry: PreNormGeometry) -> Any:
    """Move the channels i and i + half of each head of queries and keys side by side."""
    import torch

    width = geometry.width
    head_size = width // geometry.heads
    rotated = qkv[: 2 * width].view(-1, 2, head_size // 2, width).transpose(1, 2).reshape(2 * width, width)
    return torch.cat([rotated, qkv[2 * width :]])


def _interleaved(up: Any) -> Any:
    """Move the columns that are multiplied with each other side by side: activated, then factor."""
    return up.view(2, -1, up.shape[1]).transpose(0, 1).reshape(up.shape)


def _centered(weight: Any) -> Any:
    """Subtract the mean over the outputs."""
    return weight - weight.mean(0, keepdim=True)
