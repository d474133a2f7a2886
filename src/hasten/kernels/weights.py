"""Read an encoder's weights from a transformers module, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hasten.core.errors import UnsupportedError
from hasten.kernels import modernbert
from hasten.kernels.encoder import Geometry
from hasten.kernels.ops.activation import EXACT, TANH
from hasten.kernels.pre_norm_encoder import PreNormGeometry

_TOKEN_HEADS = {"ForTokenClassification": ("classifier",), "ForQuestionAnswering": ("qa_outputs",)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The parameter names of a model family; `layer` has a placeholder for the index unless layers share weights."""

    layer: str = "encoder.layer.{}"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    embedding_projection: str = ""
    relative_position_bias: str = ""
    # The layers and activations of the heads: from the first token to labels or to a choice's score, and from a mask to
    # the vocabulary.
    classification_head: tuple[str, ...] = ("classifier.dense", "tanh", "classifier.out_proj")
    choice_head: tuple[str, ...] = ("{base}.pooler.dense", "tanh", "classifier")
    masked_lm_head: tuple[str, ...] = ("lm_head.dense", "gelu", "lm_head.layer_norm", "lm_head.decoder")
    # Whether positions are numbered from behind the padding token's id, as in RoBERTa.
    has_position_offset: bool = False
    token_heads: Mapping[str, tuple[str, ...]] = field(default_factory=_TOKEN_HEADS.copy)
    config_names: Mapping[str, str] | None = None  # of configuration fields, where they differ from BERT's

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """Map our module names to the model's; several linear layers are merged into one GEMM."""
        return {
            "qkv": self.qkv, "out": (self.out,), "attention_norm": (self.attention_norm,),
            "up": (self.up,), "down": (self.down,), "output_norm": (self.output_norm,),
        }  # fmt: skip


_BERT = Architecture(
    classification_head=("{base}.pooler.dense", "tanh", "classifier"),
    masked_lm_head=(
        "cls.predictions.transform.dense", "{activation}", "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    ),
)  # fmt: skip
_ROBERTA = Architecture(has_position_offset=True)
_MODERNBERT_HEAD = ("head.dense", "{head_activation}", "head.norm")
ARCHITECTURES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Architecture(
        embedding_projection="embeddings_project",
        classification_head=("classifier.dense", "gelu", "classifier.out_proj"),
        choice_head=("sequence_summary.summary", "gelu", "classifier"),
        masked_lm_head=("generator_predictions.dense", "gelu", "generator_predictions.LayerNorm", "generator_lm_head"),
    ),
    "distilbert": Architecture(
        layer="transformer.layer.{}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        output_norm="output_layer_norm",
        classification_head=("pre_classifier", "relu", "classifier"),
        choice_head=("pre_classifier", "relu", "classifier"),
        masked_lm_head=("vocab_transform", "{activation}", "vocab_layer_norm", "vocab_projector"),
        config_names={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "mpnet": Architecture(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
        relative_position_bias="encoder.relative_attention_bias",
        has_position_offset=True,
    ),
    "albert": Architecture(
        layer="encoder.albert_layer_groups.0.albert_layers.0",
        qkv=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        attention_norm="attention.LayerNorm",
        up="ffn",
        down="ffn_output",
        output_norm="full_layer_layer_norm",
        embedding_projection="encoder.embedding_hidden_mapping_in",
        classification_head=("{base}.pooler", "tanh", "classifier"),
        choice_head=("{base}.pooler", "tanh", "classifier"),
        masked_lm_head=("predictions.dense", "{activation}", "predictions.LayerNorm", "predictions.decoder"),
    ),
    # Its encoder is another one, which `modernbert.py` reads.
    modernbert.MODEL_TYPE: Architecture(
        classification_head=(*_MODERNBERT_HEAD, "classifier"),
        choice_head=(*_MODERNBERT_HEAD, "classifier"),
        masked_lm_head=(*_MODERNBERT_HEAD, "decoder"),
        token_heads=dict.fromkeys(_TOKEN_HEADS, (*_MODERNBERT_HEAD, "classifier")),
    ),
}
_ACTIVATIONS = {"gelu": EXACT, "gelu_new": TANH, "gelu_pytorch_tanh": TANH, "gelu_fast": TANH}
# Suffixes of the supported model classes.
_CLASSIFICATION, _CHOICE, _MASKED_LM = "ForSequenceClassification", "ForMultipleChoice", "ForMaskedLM"
# By PyTorch's class names.
_DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The geometry and weights of a model, and the pooling, layers and activations of its head."""

    geometry: Geometry | PreNormGeometry
    weights: dict[str, Any]
    head: tuple[str, ...]
    # Empty for the first token of each sequence, and for heads per token.
    pooling: tuple[str, ...] = ()


def read(model: Any) -> ModelWeights:
    """Read a transformers model, or raise UnsupportedError unless every layer of it is known."""
    config = model.config
    family = ARCHITECTURES.get(config.model_type)
    if family is None:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"the fused backend does not support '{config.model_type}'", hint=f"supported: {supported}"
        )
    base = getattr(model, model.base_model_prefix, model)
    has_head = base is not model
    try:
        if config.model_type == modernbert.MODEL_TYPE:
            geometry: Any = modernbert.read_geometry(config, _activation(config.hidden_activation))
            weights = modernbert.read_encoder(base.state_dict(), geometry)
        else:
            geometry = _geometry(config, family, base)
            weights = _encoder(base.state_dict(), family, geometry)
        head = _head(model, family, geometry) if has_head else ()
        weights |= _head_weights(model, head)
    except KeyError as error:
        raise UnsupportedError(
            f"{type(model).__name__} has no parameter {error.args[0]!r}, which the fused backend needs",
            hint="merge adapters into their model first",
        ) from error
    if not all(tensor.is_floating_point() for tensor in weights.values()):
        raise UnsupportedError("the fused backend needs floating-point weights, but these are quantized")
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    return ModelWeights(geometry, contiguous, head, _pooling(model) if has_head else ())


def ranges(model: Any) -> dict[str, float]:
    """Return the input range of each GEMM of a model with quantizers, where input and weight are both quantized."""
    if model.config.model_type == modernbert.MODEL_TYPE:
        raise UnsupportedError("the fused backend does not support the quantizers of ModernBERT, whose norms it moves")
    family = ARCHITECTURES[model.config.model_type]
    base, amax = getattr(model, model.base_model_prefix, model), {}
    geometry = _geometry(model.config, family, base)
    for layer in range(1 if geometry.is_shared else geometry.layers):
        for gemm, parts in family.modules.items():
            linears = [base.get_submodule(f"{family.layer.format(layer)}.{part}") for part in parts]
            quantizers = [
                getattr(linear, f"{side}_quantizer", None) for linear in linears for side in ("input", "weight")
            ]
            if all(quantizer is not None and quantizer.is_active for quantizer in quantizers):
                amax[f"{layer}.{gemm}"] = max(float(linear.input_quantizer.amax) for linear in linears)
    return amax


def read_dense(layers: Iterable[Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the layers and weights of dense layers after the pooling, each a linear layer and its activation."""
    names: list[str] = []
    weights: dict[str, Any] = {}
    for index, (linear, activation) in enumerate(layers):
        kind = type(activation).__name__
        if kind not in _DENSE_ACTIVATIONS or getattr(activation, "approximate", "none") != "none":
            raise UnsupportedError(f"the fused backend does not support a dense layer with {activation}")
        names += [f"dense.{index}", _DENSE_ACTIVATIONS[kind]]
        weights[f"head.dense.{index}.weight"] = linear.weight.detach()
        weights[f"head.dense.{index}.bias"] = _bias(linear.weight.detach(), linear.bias)
    return tuple(names), weights


def _geometry(config: Any, family: Architecture, base: Any) -> Geometry:
    config_names = family.config_names or {}

    def option(name: str) -> Any:
        return getattr(config, config_names.get(name, name))

    activation = _activation(option("hidden_act"))
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind not in (None, "absolute"):
        raise UnsupportedError(f"the fused backend does not support position embeddings of type '{kind}'")
    if getattr(config, "is_decoder", False):
        raise UnsupportedError("the fused backend does not support decoders (causal attention)")
    if getattr(config, "num_hidden_groups", 1) != 1 or getattr(config, "inner_group_num", 1) != 1:
        raise UnsupportedError("the fused backend does not support several groups of layers")
    return Geometry(
        layers=option("num_hidden_layers"),
        width=option("hidden_size"),
        heads=option("num_attention_heads"),
        inner=option("intermediate_size"),
        eps=float(getattr(config, "layer_norm_eps", 1e-12)),
        activation=activation,
        position_offset=base.embeddings.padding_idx + 1 if family.has_position_offset else 0,
        is_shared="{}" not in family.layer,
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"the fused backend does not support the activation '{name}'")
    return _ACTIVATIONS[name]


def _encoder(state: Mapping[str, Any], family: Architecture, geometry: Geometry) -> dict[str, Any]:
    embeddings = {
        "word_embeddings": "embeddings.word_embeddings.weight",
        "position_embeddings": "embeddings.position_embeddings.weight",
        "embedding_norm.weight": "embeddings.LayerNorm.weight",
        "embedding_norm.bias": "embeddings.LayerNorm.bias",
    }
    if "embeddings.token_type_embeddings.weight" in state:
        embeddings["token_type_embeddings"] = "embeddings.token_type_embeddings.weight"
    projection = family.embedding_projection
    if f"{projection}.weight" in state:
        embeddings |= {f"embedding_projection.{part}": f"{projection}.{part}" for part in ("weight", "bias")}
    weights = {ours: state[theirs] for ours, theirs in embeddings.items()}
    for index in range(1 if geometry.is_shared else geometry.layers):
        weights |= _layer(state, family, index)
    if name := family.relative_position_bias:
        max_distance = len(weights["position_embeddings"])
        weights["relative_position_bias"] = _relative_position_bias(state[f"{name}.weight"], max_distance)
    return weights


def _layer(state: Mapping[str, Any], family: Architecture, index: int) -> dict[str, Any]:
    import torch

    prefix = family.layer.format(index)
    weights = {}
    for ours, names in family.modules.items():
        for part in ("weight", "bias"):
            first, *others = (state[f"{prefix}.{name}.{part}"] for name in names)
            weights[f"{index}.{ours}.{part}"] = torch.cat([first, *others]) if others else first
    return weights


def _relative_position_bias(table: Any, max_distance: int) -> Any:
    """Expand MPNet's logarithmic buckets (buckets, heads) to (heads, distances), with distance 0 in the middle."""
    import torch

    buckets = table.shape[0] // 2
    distance = -torch.arange(-max_distance, max_distance + 1, device=table.device)
    side = (distance < 0).long() * buckets
    near = distance.abs()
    exact = buckets // 2
    far = torch.log(near.float().clamp(min=1) / exact) / torch.log(torch.tensor(128 / exact)) * (buckets - exact)
    bucket = torch.where(near < exact, near, (exact + far.long()).clamp(max=buckets - 1))
    return table[side + bucket].T


def _head(model: Any, family: Architecture, geometry: Geometry | PreNormGeometry) -> tuple[str, ...]:
    kind, config = type(model).__name__, model.config
    heads = {
        _CLASSIFICATION: family.classification_head,
        _CHOICE: family.choice_head,
        _MASKED_LM: family.masked_lm_head,
        **family.token_heads,
    }
    layers = next((layers for suffix, layers in heads.items() if kind.endswith(suffix)), None)
    if layers is None:
        supported = ", ".join(heads)
        raise UnsupportedError(f"the fused backend does not support the head of {kind}", hint=f"supported: {supported}")
    if layers[0].startswith("sequence_summary"):
        summary = (config.summary_type, config.summary_use_proj, config.summary_activation)
        if summary != ("first", True, "gelu"):
            raise UnsupportedError(f"the fused backend does not support the sequence summary {summary}")
    head_activation = _activation(getattr(config, "classifier_activation", "gelu"))
    names = {"base": model.base_model_prefix, "activation": geometry.activation, "head_activation": head_activation}
    return tuple(layer.format(**names) for layer in layers)


def _pooling(model: Any) -> tuple[str, ...]:
    """Return the pooling before the head of a model with a choice; others read the first token, or all."""
    is_pooled = type(model).__name__.endswith((_CLASSIFICATION, _CHOICE))
    pooling = getattr(model.config, "classifier_pooling", "cls")
    return (pooling,) if is_pooled and pooling != "cls" else ()


def _head_weights(model: Any, head: Sequence[str]) -> dict[str, Any]:
    """Return the weights of the head's layers; tied output embeddings are left out."""
    state, weights = model.state_dict(), {}
    for name in head:
        if f"{name}.weight" in state:
            weight = state[f"{name}.weight"]
            weights[f"head.{name}.weight"] = weight
            weights[f"head.{name}.bias"] = _bias(weight, state.get(f"{name}.bias"))
    if type(model).__name__.endswith(_MASKED_LM):
        output_embeddings = weights.pop(f"head.{head[-1]}.weight")
        if output_embeddings.data_ptr() != model.get_input_embeddings().weight.data_ptr():
            weights["output_embeddings"] = output_embeddings
    return weights


def _bias(weight: Any, bias: Any | None) -> Any:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()


def cast(model: ModelWeights, dtype: Any) -> ModelWeights:
    """Convert the encoder's weights to another precision; the head is small and sensitive, so it stays as it is."""
    weights = {name: tensor if name.startswith("head.") else tensor.to(dtype) for name, tensor in model.weights.items()}
    return replace(model, weights=weights)
