"""PyTorch module to ONNX graph, batch and sequence dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.builder.libraries import quiet_libraries
from hasten.builder.load import LoadedModel
from hasten.core.errors import StageError, missing_package
from hasten.exporter import trace
from hasten.graph import EXTERNAL_DATA_BYTES

if TYPE_CHECKING:
    from hasten.builder.head import Exportable

# The oldest runtime we support (ONNX Runtime 1.14, in tritonserver of 2023) reads these; newer ones read them too.
OPSET = 17
IR_VERSION = 8


def export(
    loaded: LoadedModel,
    file: Path,
    *,
    external_data_bytes: int = EXTERNAL_DATA_BYTES,
    versions: tuple[int, int] = (OPSET, IR_VERSION),
) -> None:
    """Trace the module on a ragged example; what tracing could have frozen, `check_graph` finds."""
    try:
        import onnx
        import torch
    except ImportError as error:
        raise missing_package(error.name or "onnx", "exporting", "build") from error

    from hasten.builder.head import example

    module, signature = loaded.module, loaded.signature
    opset, ir_version = versions
    names = [spec.name for spec in signature.inputs]
    feeds = example(names, loaded.tokenizer.pad_id, signature.mask_id, pads_left=signature.pads_left)
    axes = {
        spec.name: {place: name for place, name in enumerate(spec.shape) if isinstance(name, str)}
        for spec in (*signature.inputs, *signature.outputs)
    }
    # Eager attention is the one form ONNX Runtime's fusion recognises: SDPA's export hides it behind IsNaN and Where.
    with quiet_libraries(), _attention(module.model, "eager"), torch.inference_mode():
        module.has_additive_mask = _takes_additive_mask(module, feeds)
        try:
            graph, size_bytes = trace(module, feeds, [spec.name for spec in signature.outputs], axes, opset=opset)
        except StageError as error:
            raise StageError(f"{loaded.config.model_type} does not export to ONNX: {error.message}") from error
        finally:
            module.has_additive_mask = False
    graph.ir_version = ir_version
    onnx.save_model(
        graph,
        file,
        save_as_external_data=size_bytes > external_data_bytes,
        location=f"{file.name}.data",
        all_tensors_to_one_file=True,
    )


def _takes_additive_mask(module: Exportable, feeds: Mapping[str, Any]) -> bool:
    """Whether the model passes on a mask of (rows, 1, 1, keys): from a plain one, transformers 5 makes one of
    (rows, 1, queries, keys), in sixty operators, and every layer of the graph then adds the larger one."""
    import torch

    config = module.model.config
    if getattr(config, "layer_types", None) or getattr(config, "sliding_window", None):
        return False  # some layers see a part of the text only: they need to make masks of their own
    plain = module(**feeds)
    module.has_additive_mask = True
    try:
        additive = module(**feeds)
        return all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(plain, additive, strict=True))
    except Exception:  # a model that takes no other mask raises whatever it comes to
        return False
    finally:
        module.has_additive_mask = False


@contextmanager
def _attention(model: Any, implementation: str) -> Iterator[None]:
    """Another attention implementation for a while, where the model has a choice."""
    before = getattr(model.config, "_attn_implementation", None)
    if before in (None, implementation) or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
