"""Stock ONNX Runtime, OpenVINO and PyTorch as their documentation configures them, as contenders of a benchmark.

As a program, this is a bench worker (hasten.measure.bench_worker) with these backends registered.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.backends import BACKENDS, MODEL, Artifact, PaddedSession, RunOptions, Session
from hasten.core.tensors import Batch, DType, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import Precision, Variant
from hasten.measure import bench_worker


def export_stock(loaded: Any, folder: Path) -> Artifact:
    """Export the model as tutorials do: as it is loaded, with 64-bit ids and no passes over the graph."""
    import torch

    from hasten.builder.sources.export_wrapper import example_inputs
    from hasten.builder.sources.quiet import quiet_libraries

    folder.mkdir()
    signature = replace(
        loaded.signature, inputs=tuple(replace(spec, dtype=DType.INT64) for spec in loaded.signature.inputs)
    )
    names = [spec.name for spec in signature.inputs]
    feeds = example_inputs(names, loaded.tokenizer.pad_id, signature.mask_id)
    with quiet_libraries(), torch.inference_mode():
        torch.onnx.export(
            loaded.module,
            tuple(feeds[name].long() for name in names),
            str(folder / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=[spec.name for spec in signature.outputs],
            dynamic_axes={
                spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
                for spec in (*signature.inputs, *signature.outputs)
            },
        )
    loaded.module.eval()
    return Artifact(Variant("plain_onnxruntime", Precision.FP32), signature, folder, {MODEL: "model.onnx"})


def optimize_with_onnxruntime(loaded: Any, folder: Path) -> Artifact:
    """Export with eager attention and run `onnxruntime.transformers.optimizer`, as ONNX Runtime documents it.

    The optimizer fuses no attention of SDPA exports; a run without fused attention is an error.
    """
    from onnxruntime.transformers import optimizer

    from hasten.builder.export.encoder import attention_implementation

    with attention_implementation(loaded.module.model, "eager"):
        exported = export_stock(loaded, folder)
    config = loaded.module.model.config
    optimized = optimizer.optimize_model(
        str(exported.path()), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    fused = optimized.get_fused_operator_statistics()
    if fused["Attention"] != config.num_hidden_layers:
        raise SystemExit(f"ONNX Runtime's optimizer fused {fused['Attention']} of {config.num_hidden_layers} layers")
    optimized.save_model_to_file(str(folder / "optimized.onnx"))
    variant = Variant("optimized_onnxruntime", Precision.FP32)
    return replace(exported, variant=variant, graphs={MODEL: "optimized.onnx"})


def quantize_with_onnxruntime(stock: Artifact, folder: Path) -> Artifact:
    """Quantize with `quantize_dynamic` and its defaults, as ONNX Runtime documents it."""
    from onnxruntime.quantization import quantize_dynamic

    folder.mkdir()
    quantize_dynamic(stock.path(), folder / "model.onnx")
    variant = Variant("plain_onnxruntime", Precision.INT8, modifiers=("documented",))
    return replace(stock, variant=variant, directory=folder)


class StockOnnxRuntime:
    """`InferenceSession(path)` on the exported graph, with every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        """Open the exported graph."""
        import onnxruntime

        session = onnxruntime.InferenceSession(str(artifact.path()), providers=["CPUExecutionProvider"])
        input_names = {entry.name for entry in session.get_inputs()}
        outputs = [spec.name for spec in artifact.signature.outputs]
        return _Session(
            artifact, lambda feeds: session.run(outputs, {name: feeds[name] for name in feeds if name in input_names})
        )


class StockOpenVino:
    """`compile_model(path, "CPU")` on the exported graph, with the precision as a hint and other options at default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        """Open the exported graph. Without the hint OpenVINO computes fp32 graphs in bf16 on CPUs that support it."""
        import openvino

        hints = {Precision.FP32: "f32", Precision.BF16: "bf16", Precision.FP16: "f16"}
        hint = hints.get(artifact.variant.precision)
        config = {} if hint is None else {"INFERENCE_PRECISION_HINT": hint}
        compiled = openvino.Core().compile_model(artifact.path(), "CPU", config)
        return _Session(artifact, lambda feeds: list(compiled(feeds).values()))


class StockTorch:
    """The stored module, transformed in a way that PyTorch documents."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        """Open the stored module, transformed."""
        from hasten.backends.torch import ModuleSession, load_module

        stored = load_module(replace(artifact, variant=Variant("torch", Precision.FP32)))
        return ModuleSession(self._transform(stored), artifact, options)


def quantize_linear(module: Any) -> Any:
    """Quantize linear layers dynamically to int8, by `torch.ao.quantization.quantize_dynamic`."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but still what is used
        return torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear}, dtype=torch.qint8)


def autocast(module: Any) -> Any:
    """Run the module under `torch.autocast` in bf16."""
    import torch

    module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)
    return module


def cast(module: Any) -> Any:
    """Cast the module's weights to bf16."""
    import torch

    return module.to(torch.bfloat16)


def compile_module(module: Any, *, is_dynamic: bool) -> Any:
    """Compile with `torch.compile`, for each shape by itself or once for all."""
    import torch

    return torch.compile(module, dynamic=is_dynamic)


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, call: Any) -> None:
        self._call = call
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, "cpu", "default")

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        results = self._call(pad(batch, signature))
        return unpad(dict(zip([spec.name for spec in signature.outputs], results, strict=True)), batch, signature)


def register(*, is_dynamic: bool = False) -> None:
    """Register the stock backends, and hasten's own under second names for graphs that a build would not give them.

    torch.compile compiles for each shape by itself, which is faster, or with dynamic shapes, for rows of many lengths.
    """
    compiled = functools.partial(compile_module, is_dynamic=is_dynamic)
    stock = {
        "plain_onnxruntime": StockOnnxRuntime(),
        "optimized_onnxruntime": StockOnnxRuntime(),
        "plain_openvino": StockOpenVino(),
        "plain_torch": StockTorch(quantize_linear),
        "autocast_torch": StockTorch(autocast),
        "cast_torch": StockTorch(cast),
        "compiled_torch": StockTorch(compiled),
        "compiled_autocast_torch": StockTorch(lambda module: compiled(autocast(module))),
        "compiled_cast_torch": StockTorch(lambda module: compiled(cast(module))),
    }
    for name, backend in stock.items():
        BACKENDS.add(name, backend)  # type: ignore[arg-type]
    for name in ("onnxruntime", "openvino"):
        BACKENDS.add(f"whole_{name}", BACKENDS.get(name))


if __name__ == "__main__":
    register()
    bench_worker.main()
