"""A quantized module as an ONNX graph with QuantizeLinear and DequantizeLinear, weights in eight bits."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.staging import Hints, check_target
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
# What is traced: two rows of different length, so that no size is one and the mask matters.
_TEXTS = ["a text of several words, to be traced", "a shorter one"]
# More rows of fewer tokens: sizes that stay the same with them are fixed.
_OTHERS = ["a shorter one"] * 3
# Who exports is a program.
_HINTS = Hints("choose another directory", "force=True replaces it")
_ANSWERS = ("logits", "start_logits", "end_logits", "last_hidden_state", "prediction_logits")


def export(model: nn.Module, tokenizer: Any, folder: str | Path, *, force: bool = False) -> Path:
    """Write graph, configuration and tokenizer to a folder; returns the graph.

    Quantizers that are off are not in it. A build from the folder takes the graph for the original; one from the
    module judges it by the model in float. The folder is new or empty; with `force` it may hold an earlier export.
    """
    folder = Path(folder)
    check_target(folder, force=force, what="graph", is_ours=lambda found: (found / FILE).is_file(), hints=_HINTS)
    graph = exported(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{FILE}.data").unlink(missing_ok=True)  # an earlier export's: onnx would add to it
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
            feeds, answers = _example(model, tokenizer, _TEXTS)
            others = _example(model, tokenizer, _OTHERS)
            axes = _axes(feeds | answers, others[0] | others[1])
            graph, _ = trace(_Answering(model, feeds, answers), feeds, list(answers), axes, opset=opset)
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

    def __init__(self, model: nn.Module, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        results = self.model(**dict(zip(self.inputs, args, strict=True)), return_dict=True)
        return tuple(results[name] for name in self.outputs)


def _example(model: nn.Module, tokenizer: Any, texts: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the model takes for the texts, and what it gives."""
    accepted = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    try:
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        feeds = {name: value.int().to(device) for name, value in encoded.items() if name in accepted}
        given = model(**feeds, return_dict=True)
    except Exception as error:  # a model's own class and its tokenizer may do anything
        raise UnsupportedError(
            f"{type(model).__name__} does not take texts as its tokenizer gives them: {type(error).__name__}: {error}",
            hint="hasten.build knows what more the inputs of a task need",
        ) from error
    answers = {name: given[name] for name in _ANSWERS if name in given}
    if not answers:
        raise UnsupportedError(f"{type(model).__name__} gives none of {', '.join(_ANSWERS)}")
    return feeds, answers


def _axes(example: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """What has the sizes of the inputs, which come first, in both: in one there may be as many labels as tokens."""
    sizes = {name: list(zip(value.shape, other[name].shape, strict=False)) for name, value in example.items()}
    axes = dict(zip(next(iter(sizes.values())), ("batch", "sequence"), strict=False))
    return {name: {place: axes[pair] for place, pair in enumerate(of) if pair in axes} for name, of in sizes.items()}
