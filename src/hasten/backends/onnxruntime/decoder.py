"""Run a decoder in ONNX Runtime; graphs read and update the KV cache of all sequences in place, through IO binding.

Running sequences occupy the first rows of each buffer, so that any consecutive rows can share a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime.kv_cache import CROSS, PAST, PRESENT, KVCache
from hasten.backends.onnxruntime.session import CPU_PROVIDER, session_options
from hasten.core.errors import StageError
from hasten.core.system.closing import Closing
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import CPU

# Metadata key of decoder graphs of encoder-decoder models: the token ids that decoding starts with.
DECODER_START_TOKEN_IDS = "hasten.start_ids"
# Decode steps whose bindings are cached: one per first row and number of rows.
_MAX_BINDINGS = 64


class DecoderSession(Closing):
    """A `Decoder` on the CPU. A slot identifies a sequence for the caller; its row may change between steps."""

    _device = CPU

    def __init__(self, artifact: Artifact, options: RunOptions, slots: int, profile_folder: str | None = None) -> None:
        self.slots = slots
        self._session = self._load(artifact, DECODER, options, profile_folder)
        self._encoder = self._load(artifact, ENCODER, options, profile_folder) if ENCODER in artifact.graphs else None
        self._context = artifact.signature.max_length
        inputs = self._session.get_inputs()
        self._past = self._new_cache(PAST, inputs, slots, self._context)
        self._cross = self._new_cache(CROSS, inputs, slots, None)
        start_ids = self._session.get_modelmeta().custom_metadata_map.get(DECODER_START_TOKEN_IDS, "")
        self._start_ids = np.array(start_ids.split(",") if start_ids else [], np.int32)
        self._vocab_size = next(entry.shape[1] for entry in self._session.get_outputs() if entry.name == "logits")
        self._row_of: dict[int, int] = {}
        self._steps: dict[tuple[int, int], Step] = {}

    @property
    def runtimes(self) -> list[Any]:
        """Return ONNX Runtime's session of each graph."""
        return [session for session in (self._encoder, self._session) if session is not None]

    @property
    def cache_bytes(self) -> int:
        return self._past.committed_bytes + self._cross.committed_bytes

    def max_cache_bytes(self, prompt_tokens: int) -> int:
        if self._session is None:
            return 0
        row_bytes = self._context * self._past.token_bytes + prompt_tokens * self._cross.token_bytes
        return (self.slots + 1) * row_bytes

    def close(self) -> None:
        self._steps.clear()
        self._past.release()
        self._cross.release()
        self._session = self._encoder = None

    def prefill(self, slot: int, ids: IntArray) -> FloatArray:
        self._check_empty(slot)
        row = len(self._row_of)
        if self._encoder is not None:
            self._encode(row, ids)
            ids = self._start_ids
        self._past.reset(row)
        logits = self._append(row, ids)
        self._row_of[slot] = row
        return logits

    def reserve(self, tokens: int) -> None:
        self._reserve(self._past, min(tokens, self._context))

    def extend(self, slot: int, ids: IntArray) -> FloatArray:
        return self._append(self._row(slot), ids)

    def decode(self, slots: Sequence[int], ids: IntArray) -> FloatArray:
        rows = self._make_adjacent([self._row(slot) for slot in slots])
        first, count = min(rows), len(rows)
        lengths = self._past.lengths[first : first + count]
        max_length = int(lengths.max()) + 1
        if max_length > self._context:
            raise StageError(f"a sequence has reached the end of the context of {self._context} tokens")
        self._reserve(self._past, max_length)
        order = np.asarray(rows) - first
        ordered_ids = np.empty((count, 1), np.int32)
        ordered_ids[order, 0] = ids
        lengths += 1
        try:
            logits: FloatArray = self._step(first, count)(ordered_ids)[order]
        except StageError:
            lengths -= 1
            raise
        return logits

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source_rows = {target: self._row(source) for source, target in zip(sources, targets, strict=True)}
        for target in source_rows:
            if target not in self._row_of:
                self._check_empty(target)
                self._row_of[target] = len(self._row_of)
        self._copy({self._row_of[target]: row for target, row in source_rows.items()})

    def free(self, slot: int) -> None:
        """Release a slot; the last row moves into the gap, so that used rows stay consecutive."""
        row = self._row(slot)
        del self._row_of[slot]
        last = len(self._row_of)
        if row != last:
            self._copy({row: last})
            moved = next(other for other, other_row in self._row_of.items() if other_row == last)
            self._row_of[moved] = row

    def _append(self, row: int, ids: IntArray) -> FloatArray:
        """Append tokens to a row and return the logits of the next token."""
        before = int(self._past.lengths[row])
        length = before + len(ids)
        if not before < length <= self._context:
            raise StageError(f"a prompt of {length} tokens does not fit into a context of {self._context}")
        self._reserve(self._past, length)
        self._past.lengths[row] = length
        try:
            logits: FloatArray = self._new_step(row, 1, len(ids))(np.asarray(ids)[None])[0]
        except StageError:
            self._past.lengths[row] = before
            raise
        return logits

    def _encode(self, row: int, ids: IntArray) -> None:
        """Run the encoder on a prompt and store its keys and values in the row."""
        assert self._encoder is not None
        names = [entry.name for entry in self._encoder.get_outputs()]
        try:
            outputs = self._encoder.run(names, {"input_ids": np.asarray(ids, np.int32)[None]})
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on a prompt of {len(ids)} tokens: {error}") from error
        self._reserve(self._cross, len(ids))
        self._cross.put(row, dict(zip(names, outputs, strict=True)), len(ids))

    def _row(self, slot: int) -> int:
        if self._session is None:
            raise StageError("the session is closed")
        if slot not in self._row_of:
            raise StageError(f"slot {slot} is empty")
        return self._row_of[slot]

    def _check_empty(self, slot: int) -> None:
        if self._session is None:
            raise StageError("the session is closed")
        if not 0 <= slot < self.slots:
            raise StageError(f"there is no slot {slot}: there are {self.slots}")
        if slot in self._row_of:
            raise StageError(f"slot {slot} is not empty")

    def _reserve(self, cache: KVCache, tokens: int) -> None:
        if tokens > cache.capacity:
            self._steps.clear()
            cache.grow(tokens, len(self._row_of))

    def _copy(self, rows: Mapping[int, int]) -> None:
        self._past.copy(rows)
        self._cross.copy(rows)

    def _make_adjacent(self, rows: list[int]) -> list[int]:
        """Move rows together if they are not consecutive, and return their new positions in the same order."""
        selected = set(rows)
        if max(selected) - min(selected) + 1 == len(selected):
            return rows
        # The selected rows become the first ones: other rows among those are exchanged with selected rows behind them.
        displaced = [row for row in range(len(selected)) if row not in selected]
        behind = sorted(row for row in selected if row >= len(selected))
        moves = dict(zip(displaced, behind, strict=True))
        moves |= {source: target for target, source in moves.items()}
        self._copy(moves)
        self._row_of = {slot: moves.get(row, row) for slot, row in self._row_of.items()}
        return [moves.get(row, row) for row in rows]

    def _step(self, first: int, count: int) -> Step:
        if (first, count) not in self._steps:
            if len(self._steps) == _MAX_BINDINGS:
                self._steps.clear()
            self._steps[first, count] = self._new_step(first, count, 1)
        return self._steps[first, count]

    def _new_step(self, first: int, count: int, tokens: int) -> Step:
        caches = (self._past, self._cross)
        try:
            return Step(self._session, caches, first, (count, tokens), self._vocab_size, self._device)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(
                f"ONNX Runtime cannot allocate buffers for {count} rows of {tokens} tokens: {error}"
            ) from error

    def _load(self, artifact: Artifact, graph: str, options: RunOptions, profile_folder: str | None) -> Any:
        try:
            if profile_folder is not None:
                # One folder per graph: ONNX Runtime names profiles by the second in which they start.
                profile_folder = f"{profile_folder}/{graph}"
                Path(profile_folder).mkdir()
            return self._open(artifact.path(graph), options, profile_folder)
        except StageError:
            raise
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error

    # The methods below depend on the device and are overridden by `CudaDecoder`.

    def _open(self, graph: Path, options: RunOptions, profile_folder: str | None) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(
            str(graph), session_options(options.thread_count, profile_folder), providers=[CPU_PROVIDER]
        )

    def _new_cache(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None) -> KVCache:
        return KVCache(prefix, inputs, rows, limit)


class Step:
    """One run of the decoder over consecutive rows, with all inputs and outputs bound to buffers on the device."""

    def __init__(
        self,
        session: Any,
        caches: tuple[KVCache, KVCache],
        first: int,
        shape: tuple[int, int],
        vocab_size: int,
        device: str,
    ) -> None:
        """Bind a step over `shape[0]` rows from `first` on, of `shape[1]` new tokens each."""
        import onnxruntime

        def allocate(shape: Sequence[int], dtype: type[Any]) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, device, 0)

        past, cross = caches
        count = shape[0]
        self._session, self._binding = session, session.io_binding()
        self._lengths = past.lengths[first : first + count]
        self._cross_lengths = cross.lengths[first : first + count]
        # The attention operator reads it on the CPU.
        self._max_length = np.empty((), np.int32)
        self._inputs = {"input_ids": allocate(shape, np.int32), "seqlens_k": allocate((count,), np.int32)}
        if cross.is_used:
            self._inputs["cross_lengths"] = allocate((count,), np.int32)
        self._logits = allocate((count, vocab_size), np.float32)
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for location in (*past.locations(first, count), *cross.locations(first, count)):
            tensor = (device, 0, location.dtype, location.shape, location.address)
            self._binding.bind_input(location.name, *tensor)
            if location.name.startswith(PAST):
                # Bound to the same buffer, so that the graph updates the cache in place.
                self._binding.bind_output(location.name.replace(PAST, PRESENT), *tensor)
        self._binding.bind_ortvalue_output("logits", self._logits)

    def __call__(self, ids: IntArray) -> FloatArray:
        """Return the logits after the last of the new ids in each row; the rows' lengths already include these."""
        feeds = {"input_ids": ids, "seqlens_k": self._lengths - 1, "cross_lengths": self._cross_lengths}
        self._max_length[...] = self._lengths.max()
        try:
            for name, value in self._inputs.items():
                value.update_inplace(np.ascontiguousarray(feeds[name], np.int32))
            # Bound again for every step, because ONNX Runtime may read host memory at binding time.
            max_length = self._max_length
            self._binding.bind_input("total_sequence_length", "cpu", 0, np.int32, (), max_length.ctypes.data)
            self._session.run_with_iobinding(self._binding)
            # Copied: on the CPU this is a view of the buffer.
            return np.array(self._logits.numpy())
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed on {len(ids)} rows: {error}") from error
