"""What a sentence-transformers model says about pooling, dense layers, normalisation, prompts and its limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.builder.source import ModelDirectory
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.tensors import FloatArray
from hasten.tasks import Pooling

# In the order in which sentence-transformers concatenates them.
_FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
}
# The names under which sentence-transformers has stored the limit over the years.
_SIZE_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")


@dataclass(frozen=True, slots=True)
class DenseLayer:
    file: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str

    def module(self) -> Any:
        from safetensors.torch import load_file
        from torch import nn

        linear = nn.Linear(self.inputs, self.outputs, bias=self.has_bias)
        weights = load_file(self.file)
        linear.load_state_dict({name.removeprefix("linear."): value.float() for name, value in weights.items()})
        return nn.Sequential(linear, getattr(nn, self.activation)())

    def arrays(self) -> dict[str, FloatArray]:
        """ "weight" and, where it has one, "bias", without PyTorch."""
        from safetensors.numpy import load_file

        return {name.removeprefix("linear."): value.astype("float32") for name, value in load_file(self.file).items()}


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    pooling: tuple[Pooling, ...]
    normalize: bool
    dense: tuple[DenseLayer, ...] = ()
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_layout(model: ModelDirectory, plan: Plan) -> SentenceLayout:
    """From the model's own files; `--pooling` stands in for them, or overrides what they say."""
    asked = parse_pooling(plan.pooling) if plan.pooling else None
    modules = model.json("modules.json")
    if modules is None:
        if asked is None:
            raise PlanError(
                f"{model.id} has no sentence-transformers layout, so its pooling is unknown",
                hint="--pooling mean or cls",
            )
        return SentenceLayout(asked, normalize=False)
    pooling: tuple[Pooling, ...] = ()
    dense: list[DenseLayer] = []
    normalize = False
    for entry in modules:
        kind, folder = str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])
        if kind == "Transformer":
            continue
        if kind == "Pooling":
            pooling = _read_pooling(model, folder)
        elif normalize and kind == "Dense":
            raise UnsupportedError(f"{model.id} has a dense layer after its Normalize, which hasten does not know")
        elif kind == "Dense":
            dense.append(_read_dense(model, folder))
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedError(f"{model.id} ends in a '{kind}' module, which hasten does not know")
    if not pooling and asked is None:
        raise PlanError(f"{model.id} has no pooling module", hint="--pooling mean or cls")
    sizes: Any = next((found for name in _SIZE_FILES if (found := model.json(name))), {})
    about = model.json("config_sentence_transformers.json") or {}
    return SentenceLayout(
        pooling=asked or pooling,
        normalize=normalize,
        dense=tuple(dense),
        max_length=sizes.get("max_seq_length"),
        lowercase=bool(sizes.get("do_lower_case")),
        # Empty ones too: newer versions write them, and they may be asked for by name or be the default.
        prompts={name: text or "" for name, text in (about.get("prompts") or {}).items()},
        default_prompt=about.get("default_prompt_name"),
    )


def parse_pooling(text: str) -> tuple[Pooling, ...]:
    try:
        return tuple(Pooling(part) for part in text.split("+"))
    except ValueError as error:
        raise PlanError(f"unknown pooling '{text}'", hint=f"one of {', '.join(Pooling)}, or several with +") from error


def _read_pooling(model: ModelDirectory, folder: str) -> tuple[Pooling, ...]:
    config = model.json(f"{folder}/config.json") or {}
    if not config.get("include_prompt", True):
        raise UnsupportedError(f"{model.id} leaves its prompt out of the pooling, which a graph cannot do")
    mode = config.get("pooling_mode")
    if mode is not None:
        return parse_pooling("+".join([mode] if isinstance(mode, str) else mode))
    return tuple(kind for flag, kind in _FLAGS.items() if config.get(flag)) or (Pooling.MEAN,)


def _read_dense(model: ModelDirectory, folder: str) -> DenseLayer:
    config = model.json(f"{folder}/config.json") or {}
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{model.id} has a dense layer with the activation '{activation}'")
    if config.get("use_residual"):
        raise UnsupportedError(f"{model.id} has a dense layer with a residual connection")
    weights = model.find(f"{folder}/model.safetensors")
    if weights is None:
        raise UnsupportedError(f"{model.id} has a dense layer without safetensors weights ({folder})")
    return DenseLayer(
        weights,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation,
    )
