"""A drop-in `encode()` of sentence-transformers that runs a bundle; only tensors as output need PyTorch."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hasten.auto_build import bundle_for, name_of_model, variant_of
from hasten.backends import RunOptions
from hasten.builder.sources.detect import EMBEDDING as TASK
from hasten.bundle import open_bundle
from hasten.core.errors import InputError, PlanError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.progress import Progress, SilentProgress, step
from hasten.core.system.closing import Closing
from hasten.core.system.display import Display
from hasten.core.system.hardware import usable_cores
from hasten.core.tensors import FloatArray
from hasten.core.text.input_checks import check_text
from hasten.core.variant import VariantChoice
from hasten.predictor import Predictor, open_predictor
from hasten.tasks import Encoded
from hasten.tasks.sentence_similarity import EMBEDDING, resolve_prompt

# Texts that a process of a pool encodes at a time.
_CHUNK_TEXTS = 4096
# Names of the prompts that models define for queries and for documents.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Pool:
    """Worker processes with one session each, which open the bundle when they receive the first texts."""

    executor: ProcessPoolExecutor
    processes: int


class SentenceEncoder(Closing):
    """Encodes texts as vectors, with the interface of sentence-transformers.

    The model is a bundle, a hub id, or a directory in the layout of sentence-transformers, which is built once.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | None = None,
        precision: str | None = None,
        device: Literal["cpu", "cuda"] | None = None,
        revision: str | None = None,
        file_name: str | None = None,
        pooling: str | None = None,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        data: str | Path | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
    ) -> None:
        choice = VariantChoice(backend, precision, device)
        plan = Plan(
            model=name_of_model(model),
            task=TASK,
            revision=revision,
            file_name=file_name,
            pooling=pooling,
            data=str(data) if data is not None else None,
            trust_remote_code=trust_remote_code,
        )
        self.bundle = bundle_for(plan, choice, progress)
        if (own := self.bundle.manifest.task.name) != TASK:
            raise PlanError(f"{model} is a bundle for {own}, not for sentence embeddings", hint="use hasten.load")
        spec = self.bundle.manifest.task
        self._spec = replace(
            spec,
            prompts=spec.prompts | (prompts or {}),
            default_prompt=default_prompt_name if default_prompt_name is not None else spec.default_prompt,
        )
        # Called here to report an unknown default prompt at once.
        resolve_prompt(self._spec, None, None)
        self._variant = variant_of(self.bundle, choice)
        self._predictor = open_predictor(self.bundle, self._variant, RunOptions(threads))
        self.truncate_dim = truncate_dim

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Pool | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode a text as a vector, or a list of texts as an array with one row per text, in their order.

        Return a tensor with `convert_to_tensor`, and a list of tensors without it and without `convert_to_numpy`.
        """
        if output_value != "sentence_embedding":
            raise UnsupportedError(
                f"output_value {output_value!r} is not supported: a bundle returns sentence embeddings only",
                hint="hasten.pipeline('feature-extraction', model) returns a vector per token",
            )
        if precision != "float32":
            hint = "convert the result with sentence_transformers.util.quantize_embeddings"
            raise UnsupportedError(f"precision {precision!r} is not supported: embeddings are float32", hint=hint)
        if device is not None and str(device).partition(":")[0] != self.device:
            raise UnsupportedError(
                f"the model runs on {self.device}, not on {device}", hint="use SentenceEncoder(…, device=…)"
            )
        for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise InputError(f"{name} is {size!r}; it must be a whole number, at least 1")
        is_single = isinstance(sentences, str)
        inputs = [sentences] if isinstance(sentences, str) else sentences
        if not isinstance(inputs, Iterable) or isinstance(inputs, Mapping | bytes):
            raise InputError(f"sentences is {type(sentences).__name__}; it must be a text or a list of texts")
        texts = [check_text(text, f"text {number}", may_be_empty=True) for number, text in enumerate(inputs, 1)]
        prefix = resolve_prompt(self._spec, prompt_name, prompt)
        is_shown = logger.getEffectiveLevel() <= logging.INFO if show_progress_bar is None else show_progress_bar
        progress = Display() if is_shown else SilentProgress()
        if pool is not None:
            vectors = self._encode_in_pool(texts, prefix, batch_size, pool, chunk_size, progress)
        else:
            vectors = _encode(self._predictor, texts, prefix, batch_size, progress)
        limit = truncate_dim if truncate_dim is not None else self.truncate_dim
        if limit is not None:
            vectors = vectors[:, :limit]
        if normalize_embeddings:
            vectors = _normalized(vectors)
        if convert_to_tensor or not convert_to_numpy:
            vectors = _to_torch(vectors, is_stacked=convert_to_tensor)
        return vectors[0] if is_single else vectors

    def encode_query(self, sentences: str | Sequence[str], prompt_name: str | None = None, **options: Any) -> Any:
        """Encode with the model's prompt for queries, if it has one."""
        return self.encode(sentences, prompt_name=prompt_name or self._first_prompt(_QUERY_PROMPTS), **options)

    def encode_document(self, sentences: str | Sequence[str], prompt_name: str | None = None, **options: Any) -> Any:
        """Encode with the model's prompt for documents, if it has one."""
        return self.encode(sentences, prompt_name=prompt_name or self._first_prompt(_DOCUMENT_PROMPTS), **options)

    def similarity(self, some: FloatArray, others: FloatArray) -> FloatArray:
        """Return the cosine of each vector with each of the others."""
        cosines: FloatArray = _normalized(np.atleast_2d(some)) @ _normalized(np.atleast_2d(others)).T
        return cosines

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> Pool:
        """Start one process per entry of `target_devices`, or one per core; they share the cores of the CPU.

        As with every process pool, a script must start it under `if __name__ == "__main__"`.
        """
        if self.device != "cpu" or any(device != "cpu" for device in target_devices or ()):
            raise UnsupportedError(
                "process pools are supported on the CPU only: one process saturates a GPU",
                hint="use encode() without a pool",
            )
        processes = len(target_devices) if target_devices else usable_cores()
        threads = max(1, usable_cores() // processes)
        executor = ProcessPoolExecutor(
            processes,
            multiprocessing.get_context("spawn"),
            initializer=_open_worker,
            initargs=(self.bundle.path, self._variant, threads),
        )
        return Pool(executor, processes)

    @staticmethod
    def stop_multi_process_pool(pool: Pool) -> None:
        """Stop the processes of a pool."""
        pool.executor.shutdown()

    @property
    def device(self) -> str:
        """Return the device that the model runs on."""
        return self._predictor.session.spec.device

    @property
    def max_seq_length(self) -> int:
        """Return the maximum number of tokens per text."""
        return self._predictor.tokenizer.spec.max_length

    @property
    def prompts(self) -> dict[str, str]:
        """Return the prompts by name."""
        return dict(self._spec.prompts)

    def get_sentence_embedding_dimension(self) -> int:
        """Return the number of dimensions of the vectors."""
        size = _vector_size(self._predictor)
        return min(size, self.truncate_dim or size)

    def close(self) -> None:
        """Free the session."""
        self._predictor.close()

    def _first_prompt(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._spec.prompts), None)

    def _encode_in_pool(
        self, texts: list[str], prompt: str, batch_size: int, pool: Pool, chunk_size: int | None, progress: Progress
    ) -> FloatArray:
        """Encode texts of similar length in the same process; several chunks per process balance the load."""
        order = np.argsort([-len(text) for text in texts], kind="stable")
        size = chunk_size or min(_CHUNK_TEXTS, max(1, -(-len(texts) // (4 * pool.processes))))
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        texts_of_chunks = ([texts[index] for index in chunk] for chunk in chunks)
        results = pool.executor.map(_encode_in_worker, texts_of_chunks, repeat(prompt), repeat(batch_size))
        vectors = np.empty((len(texts), _vector_size(self._predictor)), np.float32)
        with step(progress, "encode", total=len(texts)):
            for chunk, result in zip(chunks, results, strict=True):
                vectors[chunk] = result
                progress.advance(len(chunk))
        return vectors


def _normalized(vectors: FloatArray) -> FloatArray:
    units: FloatArray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return units


def _vector_size(predictor: Predictor) -> int:
    (output,) = predictor.session.spec.signature.outputs
    return int(output.shape[-1])


def _encode(predictor: Predictor, texts: Sequence[str], prompt: str, batch_size: int, progress: Progress) -> FloatArray:
    """Encode chunks of texts sorted by characters, in batches sorted by tokens, which minimizes padding."""
    vectors = np.empty((len(texts), _vector_size(predictor)), np.float32)
    order = np.argsort([-len(text) for text in texts], kind="stable")

    def encode(chunk: range) -> Encoded:
        return Encoded.of(
            predictor.tokenizer.encode([prompt + texts[index] for index in order[chunk.start : chunk.stop]])
        )

    chunks = predictor.chunks(len(texts))
    with step(progress, "encode", total=len(texts)):
        results = predictor.run_in_chunks(chunks, encode, max_rows=batch_size, on_batch=progress.advance)
        with closing(results):
            for chunk, (_, outputs) in zip(chunks, results, strict=True):
                vectors[order[chunk.start : chunk.stop]] = outputs[EMBEDDING]
    return vectors


def _to_torch(vectors: FloatArray, *, is_stacked: bool) -> Any:
    """Return one tensor, or a list of tensors, that shares the memory of the array."""
    try:
        import torch
    except ImportError as error:
        raise missing_package("torch", "convert_to_tensor", None) from error
    tensor = torch.from_numpy(vectors)
    return tensor if is_stacked else list(tensor)


_worker: Predictor


def _open_worker(path: Path, variant: str | None, threads: int) -> None:
    global _worker
    _worker = open_predictor(open_bundle(path), variant, RunOptions(threads))


def _encode_in_worker(texts: list[str], prompt: str, batch_size: int) -> FloatArray:
    return _encode(_worker, texts, prompt, batch_size, SilentProgress())
