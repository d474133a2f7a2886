"""The module that is exported: the model, and what turns its output into the graph's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from hasten.core.errors import UnsupportedError
from hasten.tasks import Pooling

# Below any activation, above the smallest float: padding never wins a maximum.
_NEVER = -1e9


class Exportable(nn.Module):
    """Takes tensors by name, gives a tuple of tensors: what exporters and sessions want."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        # Whether the model gets its mask ready to be added to attention scores (see builder/export.py).
        self.has_additive_mask = False
        self.eval()

    def around(self, model: nn.Module) -> Self:
        """The same for another model of the same kind."""
        return type(self)(model, self.inputs, self.outputs)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        return self.answer(dict(zip(self.inputs, args, strict=False)) | kwargs)

    def answer(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = self.run(feeds)
        return tuple(outputs[name] for name in self.outputs)

    def run(self, feeds: dict[str, Tensor]) -> Any:
        return self.model(**self.masked(feeds), return_dict=True)

    def masked(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the mask in the form that the model gets."""
        return feeds | {"attention_mask": _additive(feeds["attention_mask"])} if self.has_additive_mask else feeds


def _additive(mask: Tensor) -> Tensor:
    """Zero for what is seen, the lowest number for padding: (rows, 1, 1, keys).

    The expansion does nothing, but ONNX Runtime's attention fusion knows a mask by these very operators.
    """
    hidden = 1.0 - mask[:, None, None, :].expand(-1, 1, 1, -1).float()
    return hidden.masked_fill(hidden.bool(), torch.finfo(torch.float32).min)


class Pooled(Exportable):
    """One vector a text instead of one a token."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str], head: PoolingHead) -> None:
        super().__init__(model, inputs, outputs)
        self.head = head.eval()

    def around(self, model: nn.Module) -> Self:
        return type(self)(model, self.inputs, self.outputs, self.head)

    def answer(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = self.run(feeds)
        return (self.head(outputs["last_hidden_state"], feeds["attention_mask"]),)


class AtLastEnd(Exportable):
    """An encoder-decoder that classifies by its last end-of-text token, which is looked for in each row by itself.

    Its own head refuses rows that have different numbers of them, as texts and pairs have.
    """

    def answer(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        tokens = self.model.base_model(**self.masked(feeds), use_cache=False, return_dict=True)["last_hidden_state"]
        ends = feeds["input_ids"] == self.model.config.eos_token_id
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last = (places * ends).amax(dim=1, keepdim=True)
        vectors = (tokens * (places == last).unsqueeze(-1).to(tokens.dtype)).sum(dim=1)
        return (self.model.classification_head(vectors),)


class OneChoice(Exportable):
    """A multiple-choice model asked one choice a row: how many belong together is for the task to know."""

    def answer(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return super().answer({name: value.unsqueeze(1) for name, value in feeds.items()})


class AtMasks(Exportable):
    """Logits of the mask tokens alone: over a whole vocabulary, those of all tokens cost more than the model."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str], mask_id: int) -> None:
        super().__init__(model, inputs, outputs)
        self.mask_id = mask_id
        feeds = example(inputs, 0, mask_id)
        with torch.inference_mode():
            expected = [output[feeds["input_ids"] == mask_id] for output in super().answer(feeds)]
            # A hook and no module around it: some heads reach into the bare model, for its embeddings.
            model.base_model.register_forward_hook(_MaskRows(mask_id), with_kwargs=True)
            found = self.answer(feeds)
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True)):
            raise UnsupportedError(f"the head of {type(model).__name__} does not take each token by itself")

    def around(self, model: nn.Module) -> Self:
        return type(self)(model, self.inputs, self.outputs, self.mask_id)

    def answer(self, feeds: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(output.squeeze(0) for output in super().answer(feeds))


class _MaskRows:
    """Leaves of the bare model's vectors those of mask tokens, end to end as if they were one text."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def __call__(self, base: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], outputs: Any) -> Any:
        input_ids = args[0] if args else kwargs["input_ids"]
        # Places instead of a boolean index, which exporters turn into more operators.
        places = (input_ids.flatten() == self.mask_id).nonzero().squeeze(1)
        outputs.last_hidden_state = outputs.last_hidden_state.flatten(0, 1).index_select(0, places).unsqueeze(0)
        return outputs


def example(inputs: Sequence[str], pad_id: int, mask_id: int | None, *, pads_left: bool = False) -> dict[str, Tensor]:
    """Two rows of different length, so that no size is traced as one and the mask matters."""
    lengths = torch.tensor([7, 5])
    mask = torch.arange(7) < lengths[:, None]
    mask = mask.flip(1) if pads_left else mask
    feeds = {name: torch.zeros((2, 7), dtype=torch.int32) for name in inputs}
    feeds["input_ids"] = torch.where(mask, 5, pad_id).int()
    if mask_id is not None:
        feeds["input_ids"][[0, 0, 1], [2, 4, 3]] = mask_id
    feeds["attention_mask"] = mask.int()
    return feeds


class PoolingHead(nn.Module):
    """Token vectors to one vector a text: pooling, then dense layers where the model has them, then length one."""

    def __init__(self, pooling: Sequence[Pooling], dense: Sequence[nn.Module], normalize: bool) -> None:
        super().__init__()
        self.pooling = tuple(pooling)
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        pooled = torch.cat([pool(kind, tokens, mask) for kind in self.pooling], dim=-1)
        for layer in self.dense:
            pooled = layer(pooled)
        return nn.functional.normalize(pooled, p=2.0, dim=-1) if self.normalize else pooled


def pool(kind: Pooling, tokens: Tensor, mask: Tensor) -> Tensor:
    """As sentence-transformers defines each, for rows that start at the first position."""
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    if kind is Pooling.CLS:
        return tokens[:, 0]
    if kind is Pooling.MAX:
        return (tokens + (1.0 - weights) * _NEVER).amax(dim=1)
    if kind is Pooling.LAST_TOKEN:
        last = weights.sum(dim=1, keepdim=True) - 1.0
        # A one-hot product instead of a gather: the same value, and every exporter and runtime takes it.
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=tokens.dtype).view(1, -1, 1)
        return (tokens * (places == last).to(tokens.dtype)).sum(dim=1)
    if kind is Pooling.WEIGHTED_MEAN:
        weights = weights * torch.cumsum(torch.ones_like(weights), dim=1)
    total = weights.sum(dim=1).clamp(min=1e-9)
    summed = (tokens * weights).sum(dim=1)
    return summed / (total.sqrt() if kind is Pooling.MEAN_SQRT_LEN else total)
