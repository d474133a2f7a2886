"""ONNX Runtime, OpenVINO and PyTorch's int8 as people use them by hand, as contenders of the same benchmark.

Run as a program it is a lane (hasten.measure.lane) that also knows these.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.backends import BACKENDS, MODEL, Artifact, PaddedSession, RunOptions
from hasten.core.tensors import Batch, DType, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import Precision, Variant
from hasten.measure import lane


def export_plainly(loaded: Any, folder: Path) -> Artifact:
    """`torch.onnx.export` as in every tutorial: the model as it is loaded, 64-bit ids, nothing done to the graph."""
    import torch

    from hasten.builder.head import example
    from hasten.builder.libraries import quiet_libraries

    folder.mkdir()
    signature = replace(
        loaded.signature, inputs=tuple(replace(spec, dtype=DType.INT64) for spec in loaded.signature.inputs)
    )
    names = [spec.name for spec in signature.inputs]
    feeds = example(names, loaded.tokenizer.pad_id, signature.mask_id)
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
                spec.name: {place: size for place, size in enumerate(spec.shape) if isinstance(size, str)}
                for spec in (*signature.inputs, *signature.outputs)
            },
        )
    loaded.module.eval()
    return Artifact(Variant("plain_onnxruntime", Precision.FP32), signature, folder, {MODEL: "model.onnx"})


class PlainOnnxRuntime:
    """`InferenceSession(path)` on the exported graph, every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(artifact.path()), providers=["CPUExecutionProvider"])
        known = {entry.name for entry in session.get_inputs()}
        names = [spec.name for spec in artifact.signature.outputs]
        return _Session(
            artifact, lambda feeds: session.run(names, {name: feeds[name] for name in feeds if name in known})
        )


class PlainOpenVino:
    """`compile_model(path, "CPU")` on the exported graph, every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        import openvino

        compiled = openvino.Core().compile_model(artifact.path(), "CPU")
        return _Session(artifact, lambda feeds: list(compiled(feeds).values()))


class PlainTorch:
    """`torch.ao.quantization.quantize_dynamic` on the model's linear layers, as PyTorch documents it."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        import warnings

        import torch

        from hasten.backends.torch import ModuleSession, load_module

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated: it is what people use
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
    BACKENDS.add("plain_onnxruntime", PlainOnnxRuntime())  # type: ignore[arg-type]
    BACKENDS.add("plain_openvino", PlainOpenVino())  # type: ignore[arg-type]
    BACKENDS.add("plain_torch", PlainTorch())  # type: ignore[arg-type]
    # Our own sessions under another name, for graphs that are not what a build would give them.
    for name in ("onnxruntime", "openvino"):
        BACKENDS.add(f"whole_{name}", BACKENDS.get(name))


if __name__ == "__main__":
    register()
    lane.main()
