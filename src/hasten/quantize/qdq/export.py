"""Export a quantized module to an ONNX graph with QDQ pairs and 8-bit weights."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.errors import StageError, UnsupportedError, missing_package
from hasten.core.system.atomic_directory import TargetHints, check_target
from hasten.core.variant import Precision
from hasten.onnx_export import trace
from hasten.onnx_graph import EXTERNAL_DATA_BYTES, write_graph
from hasten.quantize.qdq.fold import fold
from hasten.quantize.qdq.rules import find_violations
from hasten.quantize.qdq.toggle import active_quantizers, evaluating

FILE = "model.onnx"
# The opset and IR version. float8 needs opset 19 and its IR; older runtimes read only older ones.
_VERSIONS = {Precision.INT8: (17, 8), Precision.FP8: (19, 9)}
# Those opsets do not quantize these types.
_HALF_TYPES = (torch.float16, torch.bfloat16)
# Two rows of different lengths are traced, so that no size is one and the mask matters.
_TRACED_TEXTS = ["a text of several words, to be traced", "a shorter one"]
# More rows of fewer tokens: axes whose size stays the same with them are fixed.
_OTHER_TEXTS = ["a shorter one"] * 3
# The caller is a program, not the command line.
_HINTS = TargetHints("choose another directory", "force=True replaces it")
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "prediction_logits")


def export(model: nn.Module, tokenizer: Any, folder: str | Path, *, force: bool = False) -> Path:
    """Write the graph, configuration and tokenizer to a folder; return the path of the graph.

    Disabled quantizers are left out. A build from the folder compares with this graph; a build from the module compares
    with the float model. The folder must be new or empty; with `force` it may hold an earlier export.
    """
    folder = Path(folder)
    check_target(folder, force=force, kind="graph", is_ours=lambda path: (path / FILE).is_file(), hints=_HINTS)
    graph = export_graph(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{FILE}.data").unlink(missing_ok=True)  # from an earlier export: onnx would append to it
    size_bytes = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
    write_graph(graph, folder / FILE, external_data=size_bytes > EXTERNAL_DATA_BYTES)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder / FILE


def export_graph(model: nn.Module, tokenizer: Any) -> Any:
    """Return the graph in memory, after checking the placement of its QDQ pairs."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise missing_package("onnx", "exporting", "build") from error
    opset, ir_version = _VERSIONS[next(iter(active_quantizers(model).values())).precision]
    if any(parameter.dtype in _HALF_TYPES for parameter in model.parameters()):
        model = copy.deepcopy(model).float()  # the caller's model stays as it is
    try:
        with evaluating(model), torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns about sizes that the example fixes on purpose
            feeds, outputs = _example(model, tokenizer, _TRACED_TEXTS)
            others = _example(model, tokenizer, _OTHER_TEXTS)
            axes = _axes(feeds | outputs, others[0] | others[1])
            graph, _ = trace(_PositionalModule(model, feeds, outputs), feeds, list(outputs), axes, opset=opset)
    except StageError as error:
        raise StageError(f"{type(model).__name__} cannot be exported to ONNX: {error.message}") from error
    graph.ir_version = ir_version
    finalize_graph(graph, type(model).__name__)
    return graph


def finalize_graph(graph: Any, name: str) -> None:
    """Store the weights of a traced graph in 8 bits, and raise if its QDQ pairs are misplaced."""
    fold(graph)
    if violations := find_violations(graph):
        raise StageError(
            f"{len(violations)} QDQ pairs of {name} are misplaced: {violations[0]}",
            hint="enable or disable the quantizers of both inputs of an operator together",
        )


class _PositionalModule(nn.Module):
    """A model that takes positional tensors and returns a tuple, as the exporter needs it."""

    def __init__(self, model: nn.Module, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        results = self.model(**dict(zip(self.inputs, args, strict=True)), return_dict=True)
        return tuple(results[name] for name in self.outputs)


def _example(model: nn.Module, tokenizer: Any, texts: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's inputs and outputs for the texts."""
    accepted = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    try:
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        feeds = {name: value.int().to(device) for name, value in encoded.items() if name in accepted}
        results = model(**feeds, return_dict=True)
    except Exception as error:  # custom models and tokenizers raise anything
        raise UnsupportedError(
            f"{type(model).__name__} fails on its tokenizer's output: {type(error).__name__}: {error}",
            hint="use hasten.build, which adds the other inputs that a task needs",
        ) from error
    outputs = {name: results[name] for name in _OUTPUTS if name in results}
    if not outputs:
        raise UnsupportedError(f"{type(model).__name__} returns none of {', '.join(_OUTPUTS)}")
    return feeds, outputs


def _axes(example: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Return the axes that have the inputs' sizes in both examples: in one, labels may be as many as tokens."""
    sizes = {name: list(zip(value.shape, other[name].shape, strict=False)) for name, value in example.items()}
    axes = dict(zip(next(iter(sizes.values())), ("batch", "sequence"), strict=False))
    return {name: {axis: axes[size] for axis, size in enumerate(of) if size in axes} for name, of in sizes.items()}
