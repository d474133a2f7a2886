"""Export a PyTorch module to an ONNX graph with dynamic batch and sequence axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.builder.export.language_adapters import default_language_only
from hasten.builder.sources.pytorch_model import LoadedModel
from hasten.builder.sources.quiet import quiet_libraries
from hasten.core.errors import StageError, missing_package
from hasten.onnx_export import trace
from hasten.onnx_graph import EXTERNAL_DATA_BYTES, write_graph

if TYPE_CHECKING:
    from hasten.builder.sources.export_wrapper import Exportable

# The oldest supported runtime (ONNX Runtime 1.14, in tritonserver of 2023) reads these versions.
OPSET = 17
IR_VERSION = 8


def export(
    loaded: LoadedModel,
    file: Path,
    *,
    external_data_bytes: int = EXTERNAL_DATA_BYTES,
    versions: tuple[int, int] = (OPSET, IR_VERSION),
) -> None:
    """Trace the module on a ragged example. `check_graph` detects sizes that tracing has frozen."""
    try:
        import onnx  # noqa: F401
        import torch
    except ImportError as error:
        raise missing_package(error.name or "onnx", "exporting", "build") from error

    from hasten.builder.export.relative_bias import relative_bias_of_any_length
    from hasten.builder.sources.export_wrapper import example_inputs

    module, signature = loaded.module, loaded.signature
    opset, ir_version = versions
    names = [spec.name for spec in signature.inputs]
    feeds = example_inputs(names, loaded.tokenizer.pad_id, signature.mask_id, pads_left=signature.pads_left)
    axes = {
        spec.name: {axis: name for axis, name in enumerate(spec.shape) if isinstance(name, str)}
        for spec in (*signature.inputs, *signature.outputs)
    }
    # ONNX Runtime's fusion recognizes only eager attention: SDPA's export adds IsNaN and Where.
    with (
        quiet_libraries(),
        attention_implementation(module.model, "eager"),
        default_language_only(module.model),
        relative_bias_of_any_length(module.model),
        broadcast_masks(),
        torch.inference_mode(),
    ):
        module.has_additive_mask = _takes_additive_mask(module, feeds)
        try:
            graph, size_bytes = trace(module, feeds, [spec.name for spec in signature.outputs], axes, opset=opset)
        except StageError as error:
            raise StageError(f"{loaded.config.model_type} does not export to ONNX: {error.message}") from error
        finally:
            module.has_additive_mask = False
    graph.ir_version = ir_version
    write_graph(graph, file, external_data=size_bytes > external_data_bytes)


def _takes_additive_mask(module: Exportable, feeds: Mapping[str, Any]) -> bool:
    """Return whether the model accepts a mask of (rows, 1, 1, keys).

    From a plain mask transformers 5 makes one of (rows, 1, queries, keys), in sixty operators, and every layer of the
    graph adds the larger one.
    """
    import torch

    config = module.model.config
    if getattr(config, "layer_types", None) or getattr(config, "sliding_window", None):
        return False  # layers with local attention compute their own masks
    plain = module(**feeds)
    module.has_additive_mask = True
    try:
        additive = module(**feeds)
        return all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(plain, additive, strict=True))
    except Exception:  # a model that does not accept this mask may raise anything
        return False
    finally:
        module.has_additive_mask = False


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Use another attention implementation within the context, in every part of the model that has a choice."""
    # T5's encoder and decoder have separate configurations, which older transformers do not update.
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    defaults = [(part, getattr(part.config, "_attn_implementation", None)) for part in parts]
    changed = [(part, default) for part, default in defaults if default not in (None, name)]
    for part, _ in changed:
        part.set_attn_implementation(name)
    try:
        yield
    finally:
        for part, default in changed:
            part.set_attn_implementation(default)


@contextmanager
def broadcast_masks() -> Iterator[None]:
    """Let transformers compute eager attention masks by broadcasting, also those of custom functions.

    For the latter it uses torch.vmap, which cannot be traced. Broadcasting needs functions of indices, as all that
    transformers defines are; `check_graph` detects any other.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as FUNCTIONS

    eager = FUNCTIONS["eager"]

    def broadcast(*args: Any, **options: Any) -> Any:
        return eager(*args, **{name: value for name, value in options.items() if name != "use_vmap"})

    FUNCTIONS["eager"] = broadcast
    try:
        yield
    finally:
        del FUNCTIONS["eager"]
