"""From a transformers module to an encoder's weights, by the names of its parameters alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hasten.core.errors import UnsupportedError
from hasten.kernels.activation import EXACT, TANH
from hasten.kernels.encoder import Geometry


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where a family keeps what all have. `layer` holds a layer, with a place for its number unless all share one."""

    layer: str = "encoder.layer.{}"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    middle: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    end: str = "output.LayerNorm"
    project: str = ""
    distances: str = ""
    # Names of layers and of activations that lead from the first token to the scores of labels, or to a choice's; and
    # from a mask to the scores of words.
    scores: tuple[str, ...] = ("classifier.dense", "tanh", "classifier.out_proj")
    choice: tuple[str, ...] = ("{base}.pooler.dense", "tanh", "classifier")
    words: tuple[str, ...] = ("lm_head.dense", "gelu", "lm_head.layer_norm", "lm_head.decoder")
    # RoBERTa and its kin count places from behind the padding token.
    counts_from_padding: bool = False
    names: Mapping[str, str] | None = None  # of the configuration's fields, where they are its own

    @property
    def products(self) -> dict[str, tuple[str, ...]]:
        """Of a layer, by our names: the linear layers that are one product here."""
        return {"qkv": self.qkv, "out": (self.out,), "up": (self.up,), "down": (self.down,)}


_BERT = Architecture(
    scores=("{base}.pooler.dense", "tanh", "classifier"),
    words=(
        "cls.predictions.transform.dense", "{activation}", "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
    ),
)  # fmt: skip
_ROBERTA = Architecture(counts_from_padding=True)
ARCHITECTURES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Architecture(
        project="embeddings_project",
        scores=("classifier.dense", "gelu", "classifier.out_proj"),
        choice=("sequence_summary.summary", "gelu", "classifier"),
        words=("generator_predictions.dense", "gelu", "generator_predictions.LayerNorm", "generator_lm_head"),
    ),
    "distilbert": Architecture(
        layer="transformer.layer.{}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        middle="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        end="output_layer_norm",
        scores=("pre_classifier", "relu", "classifier"),
        choice=("pre_classifier", "relu", "classifier"),
        words=("vocab_transform", "{activation}", "vocab_layer_norm", "vocab_projector"),
        names={
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
        middle="attention.LayerNorm",
        distances="encoder.relative_attention_bias",
        counts_from_padding=True,
    ),
    "albert": Architecture(
        layer="encoder.albert_layer_groups.0.albert_layers.0",
        qkv=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        middle="attention.LayerNorm",
        up="ffn",
        down="ffn_output",
        end="full_layer_layer_norm",
        project="encoder.embedding_hidden_mapping_in",
        scores=("{base}.pooler", "tanh", "classifier"),
        choice=("{base}.pooler", "tanh", "classifier"),
        words=("predictions.dense", "{activation}", "predictions.LayerNorm", "predictions.decoder"),
    ),
}
_ACTIVATIONS = {"gelu": EXACT, "gelu_new": TANH, "gelu_pytorch_tanh": TANH, "gelu_fast": TANH}
# How the classes of models that we know end.
_LABELS, _CHOICES, _MASKS = "ForSequenceClassification", "ForMultipleChoice", "ForMaskedLM"
_TOKENS = {"ForTokenClassification": ("classifier",), "ForQuestionAnswering": ("qa_outputs",)}
# PyTorch's names for what dense layers behind a pooling end in.
_MODULES = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class Reading:
    """An encoder, and the layers and activations behind it, by the names their weights have here."""

    geometry: Geometry
    weights: dict[str, Any]
    head: tuple[str, ...]


def read(model: Any) -> Reading:
    """Of a transformers model; refused with the reason where it is not one we know to the last layer."""
    config = model.config
    family = ARCHITECTURES.get(config.model_type)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"'{config.model_type}' is no architecture of the fused backend", hint=f"known: {known}")
    base = getattr(model, model.base_model_prefix, model)
    geometry = _geometry(config, family, base)
    head = _head(model, family, geometry) if base is not model else ()
    try:
        weights = _encoder(base.state_dict(), family, geometry) | _behind(model, head)
    except KeyError as error:
        raise UnsupportedError(
            f"{type(model).__name__} has no {error.args[0]!r}, which the fused backend reads",
            hint="an adapter must be merged into its model first",
        ) from error
    if not all(tensor.is_floating_point() for tensor in weights.values()):
        raise UnsupportedError("the fused backend is made from floating-point weights, and these are quantized")
    return Reading(geometry, {name: tensor.contiguous() for name, tensor in weights.items()}, head)


def ranges(model: Any) -> dict[str, float]:
    """Of a model with quantizers in it: how large what a product takes may be, where both of its sides are rounded."""
    family = ARCHITECTURES[model.config.model_type]
    base, found = getattr(model, model.base_model_prefix, model), {}
    geometry = _geometry(model.config, family, base)
    for place in range(1 if geometry.is_shared else geometry.layers):
        for name, parts in family.products.items():
            linears = [base.get_submodule(f"{family.layer.format(place)}.{part}") for part in parts]
            sides = [getattr(linear, f"{side}_quantizer", None) for linear in linears for side in ("input", "weight")]
            if all(side is not None and side.is_active for side in sides):
                found[f"{place}.{name}"] = max(float(linear.input_quantizer.amax) for linear in linears)
    return found


def read_dense(layers: Iterable[Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The steps and weights of dense layers behind a pooling, each a product and its activation."""
    steps: list[str] = []
    weights: dict[str, Any] = {}
    for place, (linear, activation) in enumerate(layers):
        kind = type(activation).__name__
        if kind not in _MODULES or getattr(activation, "approximate", "none") != "none":
            raise UnsupportedError(f"a dense layer that ends in {activation} is not in the fused backend")
        steps += [f"dense.{place}", _MODULES[kind]]
        weights[f"head.dense.{place}.weight"] = linear.weight.detach()
        weights[f"head.dense.{place}.bias"] = _bias(linear.weight.detach(), linear.bias)
    return tuple(steps), weights


def _geometry(config: Any, family: Architecture, base: Any) -> Geometry:
    own = family.names or {}

    def of(name: str) -> Any:
        return getattr(config, own.get(name, name))

    activation = of("hidden_act")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"'{activation}' is no activation of the fused backend")
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind not in (None, "absolute"):
        raise UnsupportedError(f"position embeddings of the kind '{kind}' are not in the fused backend")
    if getattr(config, "is_decoder", False):
        raise UnsupportedError("tokens that see only those before them are not in the fused backend")
    if getattr(config, "num_hidden_groups", 1) != 1 or getattr(config, "inner_group_num", 1) != 1:
        raise UnsupportedError("groups of different layers are not in the fused backend")
    return Geometry(
        layers=of("num_hidden_layers"),
        width=of("hidden_size"),
        heads=of("num_attention_heads"),
        inner=of("intermediate_size"),
        eps=float(getattr(config, "layer_norm_eps", 1e-12)),
        activation=_ACTIVATIONS[activation],
        first_place=base.embeddings.padding_idx + 1 if family.counts_from_padding else 0,
        is_shared="{}" not in family.layer,
    )


def _encoder(state: Mapping[str, Any], family: Architecture, geometry: Geometry) -> dict[str, Any]:
    weights = _embeddings(state, family)
    for place in range(1 if geometry.is_shared else geometry.layers):
        weights |= _layer(state, family, place)
    if family.distances:
        weights["distances"] = _distances(state[f"{family.distances}.weight"], len(weights["places"]))
    return weights


def _embeddings(state: Mapping[str, Any], family: Architecture) -> dict[str, Any]:
    found = {
        "words": state["embeddings.word_embeddings.weight"],
        "places": state["embeddings.position_embeddings.weight"],
        "norm.scale": state["embeddings.LayerNorm.weight"],
        "norm.shift": state["embeddings.LayerNorm.bias"],
    }
    if "embeddings.token_type_embeddings.weight" in state:
        found["kinds"] = state["embeddings.token_type_embeddings.weight"]
    if family.project and f"{family.project}.weight" in state:
        found |= {f"project.{part}": state[f"{family.project}.{part}"] for part in ("weight", "bias")}
    return found


def _layer(state: Mapping[str, Any], family: Architecture, place: int) -> dict[str, Any]:
    import torch

    prefix = family.layer.format(place)
    found = {}
    for ours, names in family.products.items():
        for part in ("weight", "bias"):
            first, *others = (state[f"{prefix}.{name}.{part}"] for name in names)
            found[f"{place}.{ours}.{part}"] = torch.cat([first, *others]) if others else first
    for ours, theirs in (("middle", family.middle), ("end", family.end)):
        found[f"{place}.{ours}.scale"] = state[f"{prefix}.{theirs}.weight"]
        found[f"{place}.{ours}.shift"] = state[f"{prefix}.{theirs}.bias"]
    return found


def _distances(table: Any, farthest: int) -> Any:
    """MPNet's buckets (buckets, heads) spread out: (heads, distances), none in the middle."""
    import torch

    buckets = table.shape[0] // 2
    apart = -torch.arange(-farthest, farthest + 1, device=table.device)
    side = (apart < 0).long() * buckets
    near = apart.abs()
    exact = buckets // 2
    far = torch.log(near.float().clamp(min=1) / exact) / torch.log(torch.tensor(128 / exact)) * (buckets - exact)
    place = torch.where(near < exact, near, (exact + far.long()).clamp(max=buckets - 1))
    return table[side + place].T


def _head(model: Any, family: Architecture, geometry: Geometry) -> tuple[str, ...]:
    kind, config = type(model).__name__, model.config
    known = {_LABELS: family.scores, _CHOICES: family.choice, _MASKS: family.words, **_TOKENS}
    found = next((steps for ending, steps in known.items() if kind.endswith(ending)), None)
    if found is None:
        raise UnsupportedError(f"the head of {kind} is not in the fused backend", hint=f"known: {', '.join(known)}")
    if found[0].startswith("sequence_summary"):
        asked = (config.summary_type, config.summary_use_proj, config.summary_activation)
        if asked != ("first", True, "gelu"):
            raise UnsupportedError(f"a summary by {asked} is not in the fused backend")
    return tuple(step.format(base=model.base_model_prefix, activation=geometry.activation) for step in found)


def _behind(model: Any, head: Sequence[str]) -> dict[str, Any]:
    """The weights of its steps; of the way back to words none, if it goes by the very ones that words came in by."""
    state, weights = model.state_dict(), {}
    for name in head:
        if f"{name}.weight" in state:
            weight = state[f"{name}.weight"]
            weights[f"head.{name}.weight"] = weight
            weights[f"head.{name}.bias"] = _bias(weight, state.get(f"{name}.bias"))
    if type(model).__name__.endswith(_MASKS):
        vocabulary = weights.pop(f"head.{head[-1]}.weight")
        if vocabulary.data_ptr() != model.get_input_embeddings().weight.data_ptr():
            weights["vocabulary"] = vocabulary
    return weights


def _bias(weight: Any, bias: Any | None) -> Any:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()


def cast(reading: Reading, dtype: Any) -> Reading:
    """The encoder in another precision; its head, which is small and decides, stays as it is."""
    weights = {
        name: tensor if name.startswith("head.") else tensor.to(dtype) for name, tensor in reading.weights.items()
    }
    return replace(reading, weights=weights)
