"""A quantized module as an ONNX graph with QuantizeLinear and DequantizeLinear, weights in eight bits."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.variant import Precision
from hasten.exporter import trace
from hasten.graph import EXTERNAL_DATA_BYTES, write_graph
from hasten.quantize.qdq.fold import fold
from hasten.quantize.qdq.rules import misplaced
from hasten.quantize.qdq.switch import evaluating, quantizers

FILE = "model.onnx"
# Scales for channels need opset 13, float8 needs 19 and the IR that came with it; older runtimes read the older ones.
_VERSIONS = {Precision.INT8: (17, 8), Precision.FP8: (19, 9)}
# In which those opsets quantize nothing.
_HALVES = (torch.float16, torch.bfloat16)
_TEXTS = ["a text of several words, to be traced", "a shorter one"]
_ANSWERS = ("logits", "start_logits", "end_logits", "last_hidden_state", "prediction_logits")


def export(model: nn.Module, tokenizer: Any, folder: str | Path) -> Path:
    """Write graph, configuration and tokenizer to a folder; returns the graph.

    Quantizers that are off are not in it. A build from the folder takes the graph for the original; one from the
    module judges it by the model in float.
    """
    folder = Path(folder)
    graph = exported(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
    write_graph(graph, folder / FILE, external_data=size_bytes > EXTERNAL_DATA_BYTES)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder / FILE


def exported(model: nn.Module, tokenizer: Any) -> Any:
    """The graph in memory, its placement checked."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise missing_package("onnx", "exporting", "build") from error
    active = [part for part in quantizers(model).values() if part.is_active]
    if not active:
        raise PlanError(f"no quantizer of {type(model).__name__} is on and calibrated", hint="calibrate it first")
    opset, ir_version = _VERSIONS[active[0].precision]
    if any(parameter.dtype in _HALVES for parameter in model.parameters()):
        model = copy.deepcopy(model).float()  # the user's goes on being theirs
    try:
        with evaluating(model), torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's advice, about sizes that the example fixes on purpose
            module = _Answering(model, *_example(model, tokenizer))
            answers = dict(zip(module.outputs, module(*module.feeds.values()), strict=True))
            graph, _ = trace(module, module.feeds, module.outputs, _axes(module.feeds, answers), opset=opset)
    except StageError as error:
        raise StageError(f"{type(model).__name__} does not export to ONNX: {error.message}") from error
    graph.ir_version = ir_version
    finish(graph, type(model).__name__)
    return graph


def finish(graph: Any, name: str) -> None:
    """What a traced graph lacks: weights in eight bits, and the proof that its pairs stand where they should."""
    fold(graph)
    if found := misplaced(graph):
        raise StageError(
            f"{len(found)} of the pairs of {name} stand where no runtime takes them: {found[0]}",
            hint="switch on or off both inputs of an operator together",
        )


class _Answering(nn.Module):
    """Takes tensors in the order of their names, gives a tuple: what the exporter wants."""

    def __init__(self, model: nn.Module, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.feeds = dict(feeds)
        self.outputs = tuple(outputs)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        results = self.model(**dict(zip(self.feeds, args, strict=True)), return_dict=True)
        return tuple(results[name] for name in self.outputs)


def _example(model: nn.Module, tokenizer: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Two rows of different length, so that no size is traced as one and the mask matters; and what they give."""
    accepted = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    try:
        encoded = tokenizer(_TEXTS, padding=True, return_tensors="pt")
        feeds = {name: value.int().to(device) for name, value in encoded.items() if name in accepted}
        given = model(**feeds, return_dict=True)
    except Exception as error:  # a model's own class and its tokenizer may do anything
        raise UnsupportedError(
            f"{type(model).__name__} does not take texts as its tokenizer gives them: {type(error).__name__}: {error}",
            hint="hasten.build knows what more the inputs of a task need",
        ) from error
    outputs = [name for name in _ANSWERS if name in given]
    if not outputs:
        raise UnsupportedError(f"{type(model).__name__} gives none of {', '.join(_ANSWERS)}")
    return feeds, outputs


def _axes(feeds: Mapping[str, Tensor], answers: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    length = next(iter(feeds.values())).shape[1]
    return {
        name: {0: "batch"} | ({1: "sequence"} if value.dim() > 1 and value.shape[1] == length else {})
        for name, value in (*feeds.items(), *answers.items())
    }
