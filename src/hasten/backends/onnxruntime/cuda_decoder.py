"""A model that writes, in ONNX Runtime on an NVIDIA GPU: caches stay there, ids go in, and logits come out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import Artifact, RunOptions
from hasten.backends.onnxruntime.caches import Caches
from hasten.backends.onnxruntime.cuda import check_started, left_to_cpu, open_graph, refuse_left
from hasten.backends.onnxruntime.decoder import DecoderSession, bind_place
from hasten.backends.onnxruntime.device_caches import DeviceCaches
from hasten.backends.onnxruntime.session import Placement, placements
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.recording import recording
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import CUDA

# Tokens of the prompt that shows what runs where, and the bytes of eight numbers: what is copied of no more is a size.
_SHOWN, _SIZE_BYTES = 16, 64
# Said by versions of ONNX Runtime whose operator takes none on CUDA; 1.31.1's does.
_NO_BIAS = "attention_bias is not supported"


class CudaDecoder(DecoderSession):
    """On the CPU, in the same memory that a GPU would be given, it is for tests."""

    def __init__(
        self,
        artifact: Artifact,
        options: RunOptions,
        slots: int,
        profile: str | None = None,
        *,
        device: str = CUDA,
    ) -> None:
        self._device = device
        with recording.beside_others():
            super().__init__(artifact, options, slots, profile)

    close = recording.beside_others()(DecoderSession.close)
    begin = recording.beside_others()(DecoderSession.begin)
    step = recording.beside_others()(DecoderSession.step)
    copy = recording.beside_others()(DecoderSession.copy)
    end = recording.beside_others()(DecoderSession.end)

    def _open(self, graph: Path, options: RunOptions, profile: str | None) -> Any:
        session = open_graph(str(graph), self._device, profile)
        check_started(session, self._device)
        return session

    def _new_caches(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> Caches:
        return DeviceCaches(prefix, inputs, rows, limit, self._device)

    def _new_step(self, first: int, count: int, tokens: int) -> _DeviceStep:
        caches = (self._past, self._cross)
        try:
            return _DeviceStep(self._session, caches, first, count, (tokens, self._vocabulary), self._device)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime has no place for {count} rows of {tokens} tokens: {error}") from error


class _DeviceStep:
    """Fulfils `Step`. What it is given is copied into buffers that stay where they are."""

    def __init__(
        self,
        session: Any,
        caches: tuple[Caches, Caches],
        first: int,
        count: int,
        sizes: tuple[int, int],
        device: str,
    ) -> None:
        import onnxruntime

        def allocate(shape: Sequence[int], kind: type[Any]) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind, device, 0)

        past, cross = caches
        tokens, vocabulary = sizes
        self._session, self._binding = session, session.io_binding()
        self._lengths = past.lengths[first : first + count]
        self._crossed = cross.lengths[first : first + count]
        # The operator that attends reads it on the CPU.
        self._longest = np.empty((), np.int32)
        self._inputs = {"input_ids": allocate((count, tokens), np.int32), "seqlens_k": allocate((count,), np.int32)}
        if cross.is_used:
            self._inputs["cross_lengths"] = allocate((count,), np.int32)
        self._logits = allocate((count, vocabulary), np.float32)
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for place in (*past.places(first, count), *cross.places(first, count)):
            bind_place(self._binding, place, device)
        self._binding.bind_ortvalue_output("logits", self._logits)

    def __call__(self, ids: IntArray) -> FloatArray:
        given = {"input_ids": ids, "seqlens_k": self._lengths - 1, "cross_lengths": self._crossed}
        self._longest[...] = self._lengths.max()
        try:
            for name, value in self._inputs.items():
                value.update_inplace(np.ascontiguousarray(given[name], np.int32))
            # Anew, since what is on the CPU may be read when it is bound.
            longest = self._longest
            self._binding.bind_input("total_sequence_length", "cpu", 0, np.int32, (), longest.ctypes.data)
            self._session.run_with_iobinding(self._binding)
            return np.array(self._logits.numpy())
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on {len(ids)} rows: {error}") from error


def check_decoder_placements(artifact: Artifact) -> None:
    """Refuse graphs of which ONNX Runtime leaves a part to the CPU: every token would wait for it."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        try:
            ran = _placed(artifact, work)
        except StageError as error:
            if _NO_BIAS not in error.message:
                raise
            raise UnsupportedError(
                "the GroupQueryAttention of this ONNX Runtime takes no bias on a GPU, and the model has one",
                hint="a newer onnxruntime-gpu, or --device cpu",
            ) from error
    refuse_left(left_to_cpu(ran, _SIZE_BYTES))


def _placed(artifact: Artifact, work: str) -> list[Placement]:
    with CudaDecoder(artifact, RunOptions(1), 1, work) as decoder:
        decoder.begin(0, np.zeros(min(_SHOWN, artifact.signature.max_length - 1), np.int32))
        decoder.step([0], np.zeros(1, np.int32))
        return [one for runtime in decoder.runtimes for one in placements(runtime)]
