"""Read rerankers that score with a language model: the logits of "yes" and "no", and the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.quiet import first_line, quiet_libraries
from hasten.core.errors import UnsupportedError, missing_package
from hasten.core.tensors import ATTENTION_MASK
from hasten.core.text.pair_template import DOCUMENT, INSTRUCTION, QUERY, PairTemplate
from hasten.measure.encoder_gate import FP32_TOLERANCE

MODULE = "LogitScore"
# The tokens of models whose files name none, as in sentence-transformers.
_TRUE_TOKEN, _FALSE_TOKEN = "yes", "no"
# Arguments of a tokenizer that may be among the variables of a template.
_SIZES = {"max_length", "padding", "return_tensors", "truncation"}
# Private characters, which no template has.
_MARK = re.compile("\ue000(.*?)\ue001")
# The roles of the messages that sentence-transformers makes from a pair.
_ROLES = {INSTRUCTION: "system", QUERY: "query", DOCUMENT: "document"}
# Pairs on which the reduced template must equal the real one: a template may strip, change or shorten texts.
_PROBES = (
    ("A Query?", "A Document, İ.", "An Instruction:"),
    (" \n a ", "\ttwo\n\nlines \n", " b \n"),
    ("<a>", "", "&"),
    ("query " * 1000, "document " * 1000, "instruction " * 1000),
)


@dataclass(frozen=True, slots=True)
class LogitRanker:
    """A language model, and the tokens whose logits are a score: that of one, or the difference of two."""

    model: Any
    ids: list[int]

    @classmethod
    def read(cls, files: ModelDirectory, folder: str, model: Any, tokenizer: Any) -> LogitRanker:
        """Read the tokens from the folder of a module; without one (""), they are "yes" and "no"."""
        if folder:
            config = files.json(f"{folder}/config.json") or {}
            ids: list[Any] = [config.get("true_token_id")]
            ids += [] if config.get("false_token_id") is None else [config["false_token_id"]]
        else:
            ids = tokenizer.convert_tokens_to_ids([_TRUE_TOKEN, _FALSE_TOKEN])
            if ids[0] == ids[1]:  # both unknown
                raise UnsupportedError(
                    f"the tokenizer of {files.id} does not have the tokens '{_TRUE_TOKEN}' and '{_FALSE_TOKEN}'",
                    hint="save the model with sentence-transformers' LogitScore, which names the tokens of its score",
                )
        size = model.get_output_embeddings().weight.shape[0]
        if not all(isinstance(token, int) and 0 <= token < size for token in ids):
            raise UnsupportedError(f"{files.id} scores with the tokens {ids}, which it has no logits of")
        return cls(model, ids)

    def layer(self) -> Any:
        """Return a layer that computes the score from the last vector of a text."""
        from torch import nn

        from hasten.builder.sources.export_wrapper import LogOdds

        output = self.model.get_output_embeddings()
        linear = nn.Linear(output.weight.shape[1], len(self.ids), bias=output.bias is not None)
        linear.load_state_dict({name: value[self.ids] for name, value in output.state_dict().items()})
        return nn.Sequential(linear, LogOdds(getattr(self.model.config, "final_logit_softcapping", None)))

    def check(self, ranker: Any, feeds: Mapping[str, Any]) -> None:
        """Raise if the scores differ from those of the language model's own logits: some models scale them."""
        import torch

        with quiet_libraries(), torch.inference_mode():
            (scores,) = ranker(**feeds)
            logits = self.model(**feeds, use_cache=False).logits
        last = feeds[ATTENTION_MASK].sum(dim=1).long() - 1
        expected = logits[torch.arange(len(last)), last][:, self.ids]
        expected = expected[:, :1] - expected[:, 1:] if len(self.ids) > 1 else expected
        if not torch.allclose(scores, expected, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE):
            raise UnsupportedError(f"{type(self.model).__name__} changes its logits in a way that is not supported")


def read_templates(
    model: ModelDirectory, tokenizer: Any, settings: Mapping[str, Any]
) -> tuple[PairTemplate, PairTemplate]:
    """Return the chat template of a pair, and of a pair with an instruction; `settings` are its variables."""
    if unsupported := _SIZES & settings.keys():
        raise UnsupportedError(f"{model.id} sets '{min(unsupported)}' for its chat template, which is not supported")
    reduce = partial(_reduce, model, tokenizer, settings)
    return reduce((QUERY, DOCUMENT)), reduce((INSTRUCTION, QUERY, DOCUMENT))


def _reduce(model: ModelDirectory, tokenizer: Any, settings: Mapping[str, Any], slots: Sequence[str]) -> PairTemplate:
    """Render marks in the place of texts, and return what the template writes between them."""
    marks = {slot: f"\ue000{slot}\ue001" for slot in slots}
    for is_structured in (False, True):
        render = partial(_render, model, tokenizer, settings, is_structured=is_structured)
        pieces = _MARK.split(render(marks))
        if {QUERY, DOCUMENT} <= set(pieces[1::2]):
            break
    else:
        raise UnsupportedError(
            f"the chat template of {model.id} leaves out the query or the document",
            hint='a template for pairs renders messages with the roles "query" and "document"',
        )
    for strips in (False, True):
        template = PairTemplate(tuple(pieces[::2]), tuple(pieces[1::2]), strips)
        special = " ".join(tokenizer.all_special_tokens)
        probes = [dict(zip((QUERY, DOCUMENT, INSTRUCTION), probe, strict=True)) for probe in (*_PROBES, [special] * 3)]
        if all(template.render(**probe) == render({slot: probe[slot] for slot in slots}) for probe in probes):
            return template
    raise UnsupportedError(f"the chat template of {model.id} changes the texts of a pair, which is not supported")


def _render(
    model: ModelDirectory, tokenizer: Any, settings: Mapping[str, Any], parts: Mapping[str, str], *, is_structured: bool
) -> str:
    messages = [
        {"role": _ROLES[slot], "content": [{"type": "text", "text": text}] if is_structured else text}
        for slot, text in parts.items()
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))
    except ImportError as error:
        raise missing_package("jinja2", "reading a chat template", "generation") from error
    except Exception as error:  # a template may raise anything, and some only render structured content
        if is_structured:
            raise UnsupportedError(f"the chat template of {model.id} fails on a pair: {first_line(error)}") from error
        return ""
