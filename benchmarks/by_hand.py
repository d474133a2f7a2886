"""ONNX Runtime and OpenVINO as people use them by hand, as contenders of the same benchmark.

Run as a program it is a lane (hasten.measure.lane) that also knows these two.
"""

from __future__ import annotations

from typing import Any

from hasten.backends import BACKENDS, Artifact, PaddedSession, RunOptions
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, pad
from hasten.measure import lane


class PlainOnnxRuntime:
    """`InferenceSession(path)` on the exported graph, every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(artifact.path()), providers=["CPUExecutionProvider"])
        return _Session(artifact, lambda feeds: session.run(None, feeds)[0])


class PlainOpenVino:
    """`compile_model(path, "CPU")` on the exported graph, every option at its default."""

    def open(self, artifact: Artifact, options: RunOptions) -> PaddedSession:
        import openvino

        compiled = openvino.Core().compile_model(artifact.path(), "CPU")
        return _Session(artifact, lambda feeds: compiled(feeds)[0])


class _Session(PaddedSession):
    def __init__(self, artifact: Artifact, call: Any) -> None:
        self._call = call
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, "cpu", "default")

    def run(self, batch: Batch) -> Outputs:
        return {self.spec.signature.outputs[0].name: self._call(pad(batch, self.spec.signature))}


if __name__ == "__main__":
    BACKENDS.add("plain_onnxruntime", PlainOnnxRuntime())  # type: ignore[arg-type]
    BACKENDS.add("plain_openvino", PlainOpenVino())  # type: ignore[arg-type]
    lane.main()
