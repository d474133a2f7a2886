"""Read the layout of a sentence-transformers model: pooling, dense layers, normalization, prompts, maximum length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.tensors import FloatArray
from hasten.tasks import Pooling

# In the order in which sentence-transformers concatenates them.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
}
# The files in which versions of sentence-transformers store the maximum length.
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The feature that pooling and dense layers compute, and the one of a cross-encoder's last layer.
VECTOR, SCORES = "sentence_embedding", "scores"
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A dense layer after pooling, with its weights on disk."""

    file: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    # The name of the feature that it computes.
    output: str = VECTOR

    def module(self) -> Any:
        """Return the layer as a PyTorch module."""
        from safetensors.torch import load_file
        from torch import nn

        linear = nn.Linear(self.inputs, self.outputs, bias=self.has_bias)
        # The file may hold the weights of the transformer too.
        weights = {name: value for name, value in load_file(self.file).items() if name.startswith("linear.")}
        linear.load_state_dict({name.removeprefix("linear."): value.float() for name, value in weights.items()})
        return nn.Sequential(linear, getattr(nn, self.activation)())

    def arrays(self) -> dict[str, FloatArray]:
        """Return the weight and, if the layer has one, the bias as fp32 arrays, without PyTorch."""
        from safetensors.numpy import load_file

        return {name.removeprefix("linear."): value.astype("float32") for name, value in load_file(self.file).items()}


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A LayerNorm after pooling, with its weights on disk."""

    file: Path
    width: int

    def module(self) -> Any:
        """Return the layer as a PyTorch module, in the form of a dense layer: a linear layer and an activation."""
        from safetensors.torch import load_file
        from torch import nn

        norm = nn.LayerNorm(self.width)
        norm.load_state_dict(
            {name.removeprefix("norm."): value.float() for name, value in load_file(self.file).items()}
        )
        return nn.Sequential(nn.Identity(), norm)


@dataclass(frozen=True, slots=True)
class SparsePooling:
    """The pooling of logits over a vocabulary into one weight per term (SPLADE)."""

    # Whether the weights of a term at all tokens are added; otherwise the largest counts.
    is_sum: bool = False
    # How often log(1 + x) is applied to positive logits.
    logarithms: int = 1


@dataclass(frozen=True, slots=True)
class LateLayout:
    """The settings of a multi-vector encoder: lengths, query expansion, and the words that are not scored."""

    query_length: int | None = None
    document_length: int | None = None
    # Queries are filled up to this length, by default with the mask token; 0 if they are not.
    expansion_length: int = 0
    expansion_token: str | None = None
    # Whether longer queries are truncated to that length, and whether tokens attend to those that fill a query.
    is_expansion_fixed: bool = False
    is_expansion_attended: bool = False
    skipped_words: tuple[str, ...] = ()
    skipped_sides: tuple[str, ...] = ("document",)
    # Markers of queries and documents that were single tokens in training.
    prefixes: dict[str, str] = field(default_factory=dict)

    def limits(self, default: int) -> tuple[int, int]:
        """Return the maximum lengths of queries and of documents; `default` is that of any text."""
        if self.expansion_length and self.is_expansion_fixed:
            query_length = self.expansion_length
        else:
            query_length = max(self.query_length or default, self.expansion_length)
        return query_length, self.document_length or default


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    """The modules after the transformer, and the settings of the model."""

    pooling: tuple[Pooling, ...]
    normalize: bool
    dense: tuple[DenseLayer | NormLayer, ...] = ()
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    # Whether the pooling includes the tokens of a prompt.
    pools_prompt: bool = True
    # The folder of the module that scores with the logits of a language model ("" if no file names one); None if no
    # logits are used.
    logit_module: str | None = None
    # The pooling of a sparse encoder, which replaces `pooling` and `dense`.
    sparse: SparsePooling | None = None
    # The settings of a multi-vector encoder, which has no pooling.
    late: LateLayout | None = None
    similarity: str = ""
    max_active_dims: int | None = None


def read_layout(model: ModelDirectory, plan: Plan) -> SentenceLayout:
    """Read the layout from the model's files; the plan's pooling replaces missing files or overrides them."""
    plan_pooling = parse_pooling(plan.pooling) if plan.pooling else None
    modules = model.json("modules.json")
    if modules is None:
        if plan_pooling is None:
            raise PlanError(
                f"{model.id} has no sentence-transformers layout, so its pooling is unknown",
                hint="--pooling mean or cls",
            )
        return SentenceLayout(plan_pooling, normalize=False)
    layout = read_modules(model)
    if not layout.pooling and plan_pooling is None:
        raise PlanError(f"{model.id} has no pooling module", hint="--pooling mean or cls")
    return add_settings(replace(layout, pooling=plan_pooling or layout.pooling), model)


def add_settings(layout: SentenceLayout, model: ModelDirectory) -> SentenceLayout:
    """Return the layout with the settings that sentence-transformers stores beside the modules."""
    lengths: Any = next((content for name in _LENGTH_FILES if (content := model.json(name))), {})
    config = model.json("config_sentence_transformers.json") or {}
    return replace(
        layout,
        max_length=lengths.get("max_seq_length"),
        lowercase=bool(lengths.get("do_lower_case")),
        # Keep empty prompts: newer versions write them, and requests or the default may name them.
        prompts={name: text or "" for name, text in (config.get("prompts") or {}).items()},
        default_prompt=config.get("default_prompt_name"),
    )


def read_modules(model: ModelDirectory) -> SentenceLayout:
    """Read the modules after the transformer; reject those that the graph cannot reproduce."""
    pooling: tuple[Pooling, ...] = ()
    dense: list[DenseLayer | NormLayer] = []
    normalize, pools_prompt = False, True
    for kind, folder in module_kinds(model):
        if kind in ("Transformer", "Dropout"):
            continue
        if kind == "Pooling":
            config = model.json(f"{folder}/config.json") or {}
            pooling, pools_prompt = _read_pooling(config), bool(config.get("include_prompt", True))
        elif normalize and kind in _LAYER_READERS:
            raise UnsupportedError(f"{model.id} has a dense layer after its Normalize module, which is not supported")
        elif kind in _LAYER_READERS:
            dense.append(_LAYER_READERS[kind](model, folder))
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedError(f"{model.id} has a '{kind}' module, which is not supported")
    return SentenceLayout(pooling, normalize, tuple(dense), pools_prompt=pools_prompt)


def module_kinds(model: ModelDirectory) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module in modules.json."""
    return [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in model.json("modules.json")]


def parse_pooling(text: str) -> tuple[Pooling, ...]:
    """Parse pooling modes joined by `+`."""
    try:
        return tuple(Pooling(part) for part in text.split("+"))
    except ValueError as error:
        raise PlanError(f"unknown pooling '{text}'", hint=f"one of {', '.join(Pooling)}, or several with +") from error


def _read_pooling(config: dict[str, Any]) -> tuple[Pooling, ...]:
    mode = config.get("pooling_mode")
    if mode is not None:
        return parse_pooling("+".join([mode] if isinstance(mode, str) else mode))
    return tuple(kind for flag, kind in _POOLING_FLAGS.items() if config.get(flag)) or (Pooling.MEAN,)


def _read_dense(model: ModelDirectory, folder: str) -> DenseLayer:
    config = model.json(f"{folder}/config.json") or {}
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{model.id} has a dense layer with the unsupported activation '{activation}'")
    if config.get("use_residual"):
        raise UnsupportedError(f"{model.id} has a dense layer with a residual connection, which is not supported")
    return DenseLayer(
        _find_weights(model, folder),
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation,
        output=str(config.get("module_output_name") or config.get("module_input_name") or VECTOR),
    )


def _read_norm(model: ModelDirectory, folder: str) -> NormLayer:
    config = model.json(f"{folder}/config.json") or {}
    return NormLayer(_find_weights(model, folder), int(config["dimension"]))


def read_layer(model: ModelDirectory, kind: str, folder: str) -> DenseLayer | NormLayer:
    """Read a dense layer or a LayerNorm."""
    return _LAYER_READERS[kind](model, folder)


def _find_weights(model: ModelDirectory, folder: str) -> Path:
    weights = model.find(f"{folder}/model.safetensors")
    if weights is None:
        raise UnsupportedError(f"{model.id} has a dense layer without safetensors weights ({folder})")
    return weights


_LAYER_READERS: dict[str, Callable[[ModelDirectory, str], DenseLayer | NormLayer]] = {
    "Dense": _read_dense,
    "LayerNorm": _read_norm,
}
