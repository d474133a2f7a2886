"""Wrap models in the modules that are exported: the model, and the head that computes the graph's outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from hasten.core.errors import UnsupportedError
from hasten.core.tensors import EXPANSION_MASK, PROMPT_MASK
from hasten.tasks import Pooling

if TYPE_CHECKING:
    from hasten.builder.sources.sentence_layout import SparsePooling

# Below any activation, above the smallest float: padding is never the maximum.
_MASKED_VALUE = -1e9
# Terms whose logits are computed and pooled at a time: for a batch of 8 × 512 tokens, a vocabulary of 30,000 takes
# 500 MB at once and 67 MB in such blocks, as much as the feed-forward layers.
_BLOCK_TERMS = 4096


class Exportable(nn.Module):
    """Takes tensors by name and returns a tuple of tensors, as exporters and sessions require."""

    # The reason why the fused backend, which reads the weights of the model, cannot compute these outputs.
    not_fused = ""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        # Whether the model gets an additive attention mask (see builder/export/encoder.py).
        self.has_additive_mask = False
        self.eval()

    def with_model(self, model: nn.Module) -> Self:
        """Return the same wrapper for another model of the same class."""
        return type(self)(model, self.inputs, self.outputs)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return self.compute(dict(zip(self.inputs, args, strict=False)) | kwargs)

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of the graph, in order."""
        outputs = self.run_model(feeds)
        return tuple(outputs[name] for name in self.outputs)

    def run_model(self, feeds: dict[str, Tensor]) -> Any:
        """Return the outputs of the wrapped model."""
        return self.model(**self.prepare_mask(feeds), return_dict=True)

    def prepare_mask(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the feeds with the mask in the form that the model gets."""
        return feeds | ({"attention_mask": _additive_mask(feeds["attention_mask"])} if self.has_additive_mask else {})


def _additive_mask(mask: Tensor) -> Tensor:
    """Return a mask with zero for tokens and the lowest number for padding: (rows, 1, 1, keys).

    The expansion does nothing, but ONNX Runtime's attention fusion recognizes a mask by exactly these operators.
    """
    hidden = 1.0 - mask[:, None, None, :].expand(-1, 1, 1, -1).float()
    return hidden.masked_fill(hidden.bool(), torch.finfo(torch.float32).min)


class Pooled(Exportable):
    """Returns one vector per text instead of one per token."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str], head: PoolingHead) -> None:
        super().__init__(model, inputs, outputs)
        self.head = head.eval()

    def with_model(self, model: nn.Module) -> Self:
        return type(self)(model, self.inputs, self.outputs, self.head)

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        prompt = feeds.get(PROMPT_MASK)
        outputs = self.run_model({name: value for name, value in feeds.items() if name != PROMPT_MASK})
        return (self.head(outputs["last_hidden_state"], feeds["attention_mask"], prompt),)


class LogOdds(nn.Module):
    """Returns the logit of one token, or the difference of the logits of two."""

    def __init__(self, softcap: float | None) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, logits: Tensor) -> Tensor:
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]


class SparsePooled(Exportable):
    """Returns one weight per term of the vocabulary for each text; the model's logits are never complete in memory."""

    not_fused = "does not compute sparse embeddings"

    def __init__(
        self, model: Any, inputs: Sequence[str], outputs: Sequence[str], pooling: SparsePooling, pad_id: int
    ) -> None:
        super().__init__(model, inputs, outputs)
        feeds = example_inputs(inputs, pad_id, None)
        decoder = model.get_output_embeddings()
        unsupported = UnsupportedError(f"the head of {type(model).__name__} does not end with a layer over its terms")
        if not isinstance(decoder, nn.Linear):
            raise unsupported
        with torch.inference_mode():
            logits = self.run_model(feeds)["logits"]
            weights = _activate(logits, pooling.logarithms) * feeds["attention_mask"].unsqueeze(-1)
            expected = weights.sum(dim=1) if pooling.is_sum else weights.amax(dim=1)
            _remove(model, decoder)
            self.head = SparseHead(decoder, pooling).eval()
            try:
                (actual,) = self.compute(feeds)
            except Exception as error:  # a model that uses its last layer otherwise may raise anything
                raise unsupported from error
        if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-3, atol=1e-4):
            raise unsupported

    def with_model(self, model: Any) -> Self:
        if isinstance(decoder := model.get_output_embeddings(), nn.Linear):
            _remove(model, decoder)
        copied = copy.copy(self)
        copied._modules = {**self._modules, "model": model}
        return copied

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (self.head(self.run_model(feeds)["logits"], feeds["attention_mask"]),)


class TokenVectors(Exportable):
    """Returns a vector per token: the model's, through dense layers and, if the model does so, normalized."""

    not_fused = "does not compute token vectors of multi-vector encoders"

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[str],
        outputs: Sequence[str],
        dense: Sequence[nn.Module],
        normalize: bool,
    ) -> None:
        super().__init__(model, inputs, outputs)
        self.dense = nn.ModuleList(dense).eval()
        self.normalize = normalize

    def with_model(self, model: nn.Module) -> Self:
        return type(self)(model, self.inputs, self.outputs, list(self.dense), self.normalize)

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        feeds = dict(feeds)
        if (expansion := feeds.pop(EXPANSION_MASK, None)) is not None:
            feeds["attention_mask"] = feeds["attention_mask"] * (1 - expansion)
        vectors = self.run_model(feeds)["last_hidden_state"]
        for layer in self.dense:
            vectors = layer(vectors)
        return (nn.functional.normalize(vectors, p=2.0, dim=-1) if self.normalize else vectors,)


class SparseHead(nn.Module):
    """Turns vectors of tokens into one weight per term, a block of terms at a time."""

    def __init__(self, decoder: nn.Linear, pooling: SparsePooling) -> None:
        super().__init__()
        self.is_sum, self.logarithms = pooling.is_sum, pooling.logarithms
        self.blocks = nn.ModuleList()
        for start in range(0, decoder.out_features, _BLOCK_TERMS):
            terms = slice(start, start + _BLOCK_TERMS)
            block = nn.Linear(1, 1, bias=decoder.bias is not None)
            block.weight = nn.Parameter(decoder.weight[terms].detach())
            block.out_features, block.in_features = block.weight.shape
            if decoder.bias is not None:
                block.bias = nn.Parameter(decoder.bias[terms].detach())
            self.blocks.append(block)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        real = mask.unsqueeze(-1)
        if self.is_sum:
            weights = real.to(tokens.dtype)
            pooled = [(_activate(block(tokens), self.logarithms) * weights).sum(dim=1) for block in self.blocks]
            return torch.cat(pooled, dim=-1)
        # Padding gets the vector of the first token, which changes no maximum and is cheaper than masking logits.
        tokens = torch.where(real.bool(), tokens, tokens[:, :1])
        # The activation is monotone: it may follow the maximum.
        return _activate(torch.cat([block(tokens).amax(dim=1) for block in self.blocks], dim=-1), self.logarithms)


def _activate(logits: Tensor, logarithms: int) -> Tensor:
    weights = logits.relu()
    for _ in range(logarithms):
        weights = weights.log1p()
    return weights


def _remove(model: nn.Module, layer: nn.Module) -> None:
    """Replace a layer of a model by the identity."""
    name = next(name for name, module in model.named_modules() if module is layer)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())


class LastTokenHead(Exportable):
    """An encoder-decoder that classifies by its last end-of-text token, searched in each row separately.

    The model's own head rejects rows with different numbers of these tokens, such as texts and pairs.
    """

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        prepared = self.prepare_mask(feeds)
        if hasattr(self.model, "_shift_right"):  # T5's base model does not derive them from the text
            prepared["decoder_input_ids"] = self.model._shift_right(feeds["input_ids"])
        outputs = self.model.base_model(**prepared, use_cache=False, return_dict=True)
        tokens = outputs["last_hidden_state"]
        ends = feeds["input_ids"] == self.model.config.eos_token_id
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        last = (positions * ends).amax(dim=1, keepdim=True)
        vectors = (tokens * (positions == last).unsqueeze(-1).to(tokens.dtype)).sum(dim=1)
        return (self.model.classification_head(vectors),)


class SingleChoice(Exportable):
    """A multiple-choice model that gets one choice per row; the task groups the choices."""

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return super().compute({name: value.unsqueeze(1) for name, value in feeds.items()})


class MaskPositionHead(Exportable):
    """Returns the logits of mask tokens only: over a whole vocabulary, those of all tokens cost more than the model."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str], mask_id: int) -> None:
        super().__init__(model, inputs, outputs)
        self.mask_id = mask_id
        feeds = example_inputs(inputs, 0, mask_id)
        with torch.inference_mode():
            expected = [output[feeds["input_ids"] == mask_id] for output in super().compute(feeds)]
            # A hook instead of a wrapper module: some heads use the embeddings of the base model.
            model.base_model.register_forward_hook(_KeepMaskTokens(mask_id), with_kwargs=True)
            actual = self.compute(feeds)
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(actual, expected, strict=True)):
            raise UnsupportedError(f"the head of {type(model).__name__} does not take each token by itself")

    def with_model(self, model: nn.Module) -> Self:
        return type(self)(model, self.inputs, self.outputs, self.mask_id)

    def compute(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(output.squeeze(0) for output in super().compute(feeds))


class _KeepMaskTokens:
    """Keeps the base model's vectors of mask tokens, concatenated as one text."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def __call__(self, base: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], outputs: Any) -> Any:
        input_ids = args[0] if args else kwargs["input_ids"]
        # Indices instead of a boolean mask, which exporters turn into more operators.
        indices = (input_ids.flatten() == self.mask_id).nonzero().squeeze(1)
        outputs.last_hidden_state = outputs.last_hidden_state.flatten(0, 1).index_select(0, indices).unsqueeze(0)
        return outputs


def example_inputs(
    inputs: Sequence[str], pad_id: int, mask_id: int | None, *, pads_left: bool = False
) -> dict[str, Tensor]:
    """Return a batch of two rows of different length, so that no size is traced as one and the mask matters.

    No row repeats a token: attention over equal values gives the same result with any mask, even without causality.
    """
    lengths = torch.tensor([7, 5])
    mask = torch.arange(7) < lengths[:, None]
    mask = mask.flip(1) if pads_left else mask
    feeds = {name: torch.zeros((2, 7), dtype=torch.int32) for name in inputs}
    tokens = torch.tensor([token for token in range(5, 14) if token not in (pad_id, mask_id)][:7])
    feeds["input_ids"] = torch.where(mask, torch.stack([tokens, tokens.roll(3)]), pad_id).int()
    if mask_id is not None:
        feeds["input_ids"][[0, 0, 1], [2, 4, 3]] = mask_id
    feeds["attention_mask"] = mask.int()
    if PROMPT_MASK in feeds:
        feeds[PROMPT_MASK][:, :2] = 1
    if EXPANSION_MASK in feeds:
        feeds[EXPANSION_MASK][:, 3:] = mask[:, 3:].int()
    return feeds


class PoolingHead(nn.Module):
    """Turns token vectors into one vector per text: pooling, then the model's dense layers and normalization."""

    def __init__(self, pooling: Sequence[Pooling], dense: Sequence[nn.Module], normalize: bool) -> None:
        super().__init__()
        self.pooling = tuple(pooling)
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize

    def forward(self, tokens: Tensor, mask: Tensor, prompt: Tensor | None = None) -> Tensor:
        pooled = torch.cat([pool(kind, tokens, mask, prompt) for kind in self.pooling], dim=-1)
        for layer in self.dense:
            pooled = layer(pooled)
        return nn.functional.normalize(pooled, p=2.0, dim=-1) if self.normalize else pooled


def pool(kind: Pooling, tokens: Tensor, mask: Tensor, prompt: Tensor | None = None) -> Tensor:
    """Pool token vectors as sentence-transformers does, for rows that start at the first position.

    `prompt` marks tokens at the start of a row that are left out.
    """
    real = mask.unsqueeze(-1).to(tokens.dtype)
    weights = real if prompt is None else real * (prompt == 0).unsqueeze(-1).to(tokens.dtype)
    if kind is Pooling.CLS and prompt is None:
        return tokens[:, 0]
    if kind is Pooling.MAX:
        return (tokens + (1.0 - weights) * _MASKED_VALUE).amax(dim=1)
    if kind in (Pooling.CLS, Pooling.LAST_TOKEN):
        length, count = real.sum(dim=1, keepdim=True), weights.sum(dim=1, keepdim=True)
        # The first token again if none is left, but no last token.
        index = (length - count) * (count > 0).to(tokens.dtype) if kind is Pooling.CLS else length - 1.0
        # A one-hot product instead of a gather: the same value, and every exporter and runtime supports it.
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=tokens.dtype).view(1, -1, 1)
        chosen = (positions == index).to(tokens.dtype)
        is_masked = kind is Pooling.LAST_TOKEN and prompt is not None
        return (tokens * (chosen * weights if is_masked else chosen)).sum(dim=1)
    if kind is Pooling.WEIGHTED_MEAN:
        weights = weights * torch.cumsum(torch.ones_like(weights), dim=1)
    total = weights.sum(dim=1).clamp(min=1e-9)
    summed = (tokens * weights).sum(dim=1)
    return summed / (total.sqrt() if kind is Pooling.MEAN_SQRT_LEN else total)
