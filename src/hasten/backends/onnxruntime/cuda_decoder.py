"""Run a decoder in ONNX Runtime on an NVIDIA GPU: the KV cache stays in device memory, ids go in, logits come out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import Artifact, RunOptions
from hasten.backends.onnxruntime.cuda import check_started, nodes_on_cpu, open_graph, reject_cpu_nodes
from hasten.backends.onnxruntime.cuda_kv_cache import CudaKVCache
from hasten.backends.onnxruntime.decoder import DecoderSession
from hasten.backends.onnxruntime.kv_cache import KVCache
from hasten.backends.onnxruntime.session import NodePlacement, node_placements
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.variant import CUDA

# Tokens of the prompt that is profiled. Copies of up to eight 64-bit numbers are shapes, not data.
_PROFILED_TOKENS, _MAX_SHAPE_BYTES = 16, 64
# The error of versions of ONNX Runtime whose operator does not take a bias on CUDA; that of 1.31.1 does.
_NO_BIAS = "attention_bias is not supported"


class CudaDecoder(DecoderSession):
    """A `Decoder` on a GPU. With another `device` it runs on the CPU with the same bindings, for tests."""

    def __init__(
        self, artifact: Artifact, options: RunOptions, slots: int, profile_folder: str | None = None, device: str = CUDA
    ) -> None:
        self._device = device
        with capture_lock.shared():
            super().__init__(artifact, options, slots, profile_folder)

    close = capture_lock.shared()(DecoderSession.close)
    prefill = capture_lock.shared()(DecoderSession.prefill)
    reserve = capture_lock.shared()(DecoderSession.reserve)
    extend = capture_lock.shared()(DecoderSession.extend)
    decode = capture_lock.shared()(DecoderSession.decode)
    fork = capture_lock.shared()(DecoderSession.fork)
    free = capture_lock.shared()(DecoderSession.free)

    def _open(self, graph: Path, options: RunOptions, profile_folder: str | None) -> Any:
        session = open_graph(str(graph), self._device, profile_folder)
        check_started(session, self._device)
        return session

    def _new_cache(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> KVCache:
        return CudaKVCache(prefix, inputs, rows, limit, self._device)


def check_decoder_placements(artifact: Artifact) -> None:
    """Reject graphs that ONNX Runtime runs partly on the CPU: every token would wait for it."""
    with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
        try:
            nodes = _profile_decoder(artifact, folder)
        except StageError as error:
            if _NO_BIAS not in error.message:
                raise
            raise UnsupportedError(
                "the GroupQueryAttention of this ONNX Runtime takes no bias on a GPU, and the model has one",
                hint="use a newer onnxruntime-gpu, or --device cpu",
            ) from error
    reject_cpu_nodes(nodes_on_cpu(nodes, _MAX_SHAPE_BYTES))


def _profile_decoder(artifact: Artifact, folder: str) -> list[NodePlacement]:
    with CudaDecoder(artifact, RunOptions(1), 1, folder) as decoder:
        decoder.prefill(0, np.zeros(min(_PROFILED_TOKENS, artifact.signature.max_length - 1), np.int32))
        decoder.decode([0], np.zeros(1, np.int32))
        return [node for runtime in decoder.runtimes for node in node_placements(runtime)]
