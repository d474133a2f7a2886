"""Stock ONNX Runtime, OpenVINO and PyTorch int8 with their defaults, as contenders of a benchmark.

As a program, this is a bench worker (hasten.measure.bench_worker) with these backends registered.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.backends import BACKENDS, MODEL, Artifact, PaddedSession, RunOptions
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
    """`compile_model(path, "CPU")` on the exported graph, with every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        """Open the exported graph."""
        import openvino

        compiled = openvino.Core().compile_model(artifact.path(), "CPU")
        return _Session(artifact, lambda feeds: list(compiled(feeds).values()))


class StockTorchInt8:
    """`torch.ao.quantization.quantize_dynamic` on the linear layers, as PyTorch documents it."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        """Open the stored module, quantized."""
        import warnings

        import torch

        from hasten.backends.torch import ModuleSession, load_module

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but still what is used
            stored = load_module(replace(artifact, variant=Variant("torch", Precision.FP32)))
            module = torch.ao.quantization.quantize_dynamic(stored, {torch.nn.Linear}, dtype=torch.qint8)
        return ModuleSession(module, artifact, options)


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, call: Any) -> None:
        self._call = call
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, "cpu", "default")

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        results = self._call(pad(batch, signature))
        return unpad(dict(zip([spec.name for spec in signature.outputs], results, strict=True)), batch, signature)


def register() -> None:
    """Register the stock backends, and hasten's own under second names for graphs that a build would not give them."""
    BACKENDS.add("plain_onnxruntime", StockOnnxRuntime())  # type: ignore[arg-type]
    BACKENDS.add("plain_openvino", StockOpenVino())  # type: ignore[arg-type]
    BACKENDS.add("plain_torch", StockTorchInt8())  # type: ignore[arg-type]
    for name in ("onnxruntime", "openvino"):
        BACKENDS.add(f"whole_{name}", BACKENDS.get(name))


if __name__ == "__main__":
    register()
    bench_worker.main()
