"""`encode()` as sentence-transformers has it, from a bundle: without PyTorch, unless tensors are asked for."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hasten.backends import RunOptions
from hasten.builder.detect import EMBEDDING as TASK
from hasten.bundle import open_bundle
from hasten.core.batching import by_length
from hasten.core.closing import Closing
from hasten.core.display import Display
from hasten.core.errors import InputError, PlanError, UnsupportedError, missing_package
from hasten.core.hardware import usable_cores
from hasten.core.progress import Progress, Silent, step
from hasten.core.tensors import FloatArray
from hasten.core.variant import VariantChoice
from hasten.on_demand import Wish, bundle_of, variant_of
from hasten.predictor import Predictor, open_predictor
from hasten.tasks import Encoded, checked_text
from hasten.tasks.sentence_similarity import EMBEDDING, chosen_prompt

# Texts that are tokens at a time: memory stays flat however many there are.
_CHUNK = 4096
# The names under which models have a prompt for what is looked for, and for what is looked through.
_QUERY = ("query",)
_DOCUMENT = ("document", "passage", "corpus")

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Pool:
    """Processes with a session each; they open the bundle when the first texts come."""

    executor: ProcessPoolExecutor
    processes: int


class SentenceEncoder(Closing):
    """A hub id, a directory in the layout of sentence-transformers, or a bundle; built once where it is none."""

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
        wish = Wish(
            task=TASK,
            choice=choice,
            revision=revision,
            file_name=file_name,
            pooling=pooling,
            data=str(data) if data is not None else None,
            trust_remote_code=trust_remote_code,
        )
        self.bundle = bundle_of(model, wish, progress)
        if (own := self.bundle.manifest.task.name) != TASK:
            raise PlanError(
                f"{model} is a bundle for {own}, and gives no vectors of texts", hint="hasten.load takes it"
            )
        spec = self.bundle.manifest.task
        self._spec = replace(
            spec,
            prompts=spec.prompts | (prompts or {}),
            default_prompt=default_prompt_name if default_prompt_name is not None else spec.default_prompt,
        )
        # Here too, so that a default that is not there is said at once.
        chosen_prompt(self._spec, None, None)
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
        """A vector for a text, an array of them for a list: rows in the order of the texts, whichever ran together.

        A tensor with `convert_to_tensor`, a list of tensors without either.
        """
        if output_value != "sentence_embedding":
            raise UnsupportedError(
                f"output_value {output_value!r}: a bundle pools inside its graph, and gives vectors of texts alone",
                hint="hasten.pipeline('feature-extraction', model) gives one a token",
            )
        if precision != "float32":
            hint = "sentence_transformers.util.quantize_embeddings takes what this gives"
            raise UnsupportedError(f"embeddings come in float32, not in {precision!r}", hint=hint)
        if device is not None and str(device).partition(":")[0] != self.device:
            raise UnsupportedError(f"it runs on {self.device}, not on {device}", hint="SentenceEncoder(…, device=…)")
        for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise InputError(f"{name} is {size!r}; it must be a whole number, at least 1")
        is_one = isinstance(sentences, str)
        if not is_one and (not isinstance(sentences, Iterable) or isinstance(sentences, Mapping | bytes)):
            raise InputError(f"sentences is {type(sentences).__name__}; it must be a text or a list of texts")
        given = [sentences] if isinstance(sentences, str) else list(sentences)
        texts = [checked_text(text, f"text {place}", may_be_empty=True) for place, text in enumerate(given, 1)]
        before = chosen_prompt(self._spec, prompt_name, prompt)
        shows = logger.getEffectiveLevel() <= logging.INFO if show_progress_bar is None else show_progress_bar
        progress = Display() if shows else Silent()
        if pool is not None:
            vectors = self._encode_apart(texts, before, batch_size, pool, chunk_size, progress)
        else:
            vectors = _encode(self._predictor, texts, before, batch_size, progress)
        limit = truncate_dim if truncate_dim is not None else self.truncate_dim
        if limit is not None:
            vectors = vectors[:, :limit]
        if normalize_embeddings:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        found = vectors if convert_to_numpy and not convert_to_tensor else _tensors(vectors, as_one=convert_to_tensor)
        return found[0] if is_one else found

    def encode_query(self, sentences: str | Sequence[str], prompt_name: str | None = None, **options: Any) -> Any:
        """With the model's prompt for what is looked for, where it has one."""
        return self.encode(sentences, prompt_name=prompt_name or self._known(_QUERY), **options)

    def encode_document(self, sentences: str | Sequence[str], prompt_name: str | None = None, **options: Any) -> Any:
        """With the model's prompt for what is looked through, where it has one."""
        return self.encode(sentences, prompt_name=prompt_name or self._known(_DOCUMENT), **options)

    def similarity(self, some: FloatArray, others: FloatArray) -> FloatArray:
        """The cosine of each with each."""
        units = [
            vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
            for vectors in (np.atleast_2d(some), np.atleast_2d(others))
        ]
        cosines: FloatArray = units[0] @ units[1].T
        return cosines

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> Pool:
        """A process for each entry, all on the CPU; without them, one a core. They share its cores between them.

        As with every pool of processes, a script starts it under `if __name__ == "__main__"`.
        """
        if self.device != "cpu" or any(device != "cpu" for device in target_devices or ()):
            raise UnsupportedError("a pool of processes is for the CPU: a GPU is filled by one", hint="encode() alone")
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
        pool.executor.shutdown()

    @property
    def device(self) -> str:
        return self._predictor.session.spec.device

    @property
    def max_seq_length(self) -> int:
        return self._predictor.tokenizer.spec.max_length

    @property
    def prompts(self) -> dict[str, str]:
        return dict(self._spec.prompts)

    def get_sentence_embedding_dimension(self) -> int:
        (output,) = self._predictor.session.spec.signature.outputs
        return min(int(output.shape[-1]), self.truncate_dim or int(output.shape[-1]))

    def close(self) -> None:
        self._predictor.close()

    def _known(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._spec.prompts), None)

    def _encode_apart(
        self, texts: list[str], prompt: str, batch_size: int, pool: Pool, chunk_size: int | None, progress: Progress
    ) -> FloatArray:
        """Neighbours in length go to one process; a few chunks each, so that none waits long for the last."""
        order = np.argsort([-len(text) for text in texts], kind="stable")
        size = chunk_size or min(_CHUNK, max(1, -(-len(texts) // (4 * pool.processes))))
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        jobs = [
            pool.executor.submit(_encode_in_worker, [texts[place] for place in chunk], prompt, batch_size)
            for chunk in chunks
        ]
        vectors = self._empty(len(texts))
        with step(progress, "encode", total=len(texts)):
            for chunk, job in zip(chunks, jobs, strict=True):
                vectors[chunk] = job.result()
                progress.advance(len(chunk))
        return vectors

    def _empty(self, rows: int) -> FloatArray:
        (output,) = self._predictor.session.spec.signature.outputs
        return np.empty((rows, int(output.shape[-1])), np.float32)


def _encode(predictor: Predictor, texts: Sequence[str], prompt: str, batch_size: int, progress: Progress) -> FloatArray:
    """Sorted by characters, so that a chunk's texts are of a length; in it, batches are made by tokens."""
    (output,) = predictor.session.spec.signature.outputs
    vectors = np.empty((len(texts), int(output.shape[-1])), np.float32)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    with step(progress, "encode", total=len(texts)):
        for start in range(0, len(order), _CHUNK):
            places = order[start : start + _CHUNK]
            tokens = predictor.tokenizer.encode([prompt + texts[place] for place in places])
            encoded = Encoded(tokens.batch, np.arange(len(places)), len(places), tokens.truncated, tokens.encodings)
            groups = by_length(tokens.batch.lengths, max_rows=batch_size)
            found = predictor.outputs(encoded, groups=groups, on_batch=progress.advance)
            vectors[places] = found[EMBEDDING]
    return vectors


def _tensors(vectors: FloatArray, *, as_one: bool) -> Any:
    """Of the same memory."""
    try:
        import torch
    except ImportError as error:
        raise missing_package("torch", "convert_to_tensor", None) from error
    whole = torch.from_numpy(vectors)
    return whole if as_one else list(whole)


_worker: Predictor


def _open_worker(path: Path, variant: str | None, threads: int) -> None:
    global _worker
    _worker = open_predictor(open_bundle(path), variant, RunOptions(threads))


def _encode_in_worker(texts: list[str], prompt: str, batch_size: int) -> FloatArray:
    return _encode(_worker, texts, prompt, batch_size, Silent())
