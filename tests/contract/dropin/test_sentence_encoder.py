"""SentenceEncoder compared with SentenceTransformer on the same tiny model, option by option."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.core.errors import InputError, PlanError, UnsupportedError
from support.fake_bench import fake_benchmark
from support.import_probe import modules_after

TEXTS = ["a dog ran", "", "what a wonderful film, I would watch it again tomorrow", "the cat " * 40, "a dog ran", "x"]
PROMPTS = {"query": "find: ", "document": "read: "}
# Up to 1.8e-6 on x86-64 with AVX-512 (2026-11), for unnormalized vectors with values up to 2.5.
NEAR = {"rtol": 0, "atol": 6e-6}


@dataclass
class Pair:
    ours: hasten.SentenceEncoder
    theirs: Any
    folder: Path


@pytest.fixture(scope="module")
def pair(tiny_embedder: Any, texts_file: Path) -> Iterator[Pair]:
    from sentence_transformers import SentenceTransformer

    # Without a Normalize module, so that normalize_embeddings has an effect.
    folder = tiny_embedder(modules=(), prompts=PROMPTS, default_prompt_name="document")
    with fake_benchmark(), hasten.SentenceEncoder(folder, backend="onnxruntime", data=texts_file, threads=1) as ours:
        yield Pair(ours, SentenceTransformer(str(folder), device="cpu"), folder)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "batches of two": {"batch_size": 2},
    "another prompt of the model": {"prompt_name": "query"},
    "a prompt": {"prompt": "say: "},
    "no prompt": {"prompt": ""},
    "normalized": {"normalize_embeddings": True},
    "truncated": {"truncate_dim": 8},
    "truncated and normalized": {"truncate_dim": 8, "normalize_embeddings": True},
    "a tensor": {"convert_to_tensor": True},
    "tensors": {"convert_to_numpy": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_vectors_equal_those_of_sentence_transformers(options: dict[str, Any], pair: Pair) -> None:
    ours, theirs = pair.ours.encode(TEXTS, **options), pair.theirs.encode(TEXTS, **options)
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        assert [type(vector) for vector in ours] == [type(vector) for vector in theirs]
        ours, theirs = np.stack(ours), np.stack(theirs)
    assert np.allclose(ours, theirs, **NEAR)
    ours, theirs = pair.ours.encode(TEXTS[0], **options), pair.theirs.encode(TEXTS[0], **options)
    assert type(ours) is type(theirs)
    assert np.allclose(ours, theirs, **NEAR)


def test_queries_documents_and_similarity_equal_those_of_sentence_transformers(pair: Pair) -> None:
    for name in ("encode_query", "encode_document"):
        assert np.allclose(getattr(pair.ours, name)(TEXTS), getattr(pair.theirs, name)(TEXTS), **NEAR)
    vectors = pair.ours.encode(TEXTS)
    assert np.allclose(pair.ours.similarity(vectors, vectors[:2]), pair.theirs.similarity(vectors, vectors[:2]), **NEAR)
    assert pair.ours.prompts == PROMPTS
    assert pair.ours.max_seq_length == pair.theirs.max_seq_length
    assert pair.ours.get_sentence_embedding_dimension() == 32


def test_texts_of_several_chunks_are_encoded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair.ours.encode(TEXTS * 3)
    monkeypatch.setattr("hasten.sentence_encoder._CHUNK_TEXTS", 4)
    assert np.allclose(pair.ours.encode(TEXTS * 3), whole, **NEAR)
    assert pair.ours.encode([]).shape == (0, 32)


def test_process_pool_encodes_on_the_cpu_only(pair: Pair) -> None:
    pool = pair.ours.start_multi_process_pool(["cpu", "cpu"])
    try:
        vectors = pair.ours.encode(TEXTS * 4, pool=pool, chunk_size=5, normalize_embeddings=True)
    finally:
        pair.ours.stop_multi_process_pool(pool)
    assert np.allclose(vectors, pair.theirs.encode(TEXTS * 4, normalize_embeddings=True), **NEAR)
    with pytest.raises(UnsupportedError, match="on the CPU only"):
        pair.ours.start_multi_process_pool(["cuda:0"])


def test_progress_is_shown_on_request_or_at_info_level(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """As in sentence-transformers, the log level is the default."""
    logger = logging.getLogger("hasten")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "level", logging.WARNING)
        pair.ours.encode(TEXTS)
        assert capsys.readouterr().err == ""
        patch.setattr(logger, "level", logging.INFO)
        pair.ours.encode(TEXTS)
        assert "encode" in capsys.readouterr().err
    pair.ours.encode(TEXTS, show_progress_bar=True)
    assert "encode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"output_value": "token_embeddings"}, UnsupportedError, "returns sentence embeddings only"),
        ({"precision": "binary"}, UnsupportedError, "precision 'binary' is not supported"),
        ({"device": "cuda"}, UnsupportedError, "runs on cpu, not on cuda"),
        ({"batch_size": 0}, InputError, "batch_size is 0"),
        ({"batch_size": "8"}, InputError, "batch_size is '8'; it must be a whole number, at least 1"),
        # A negative size would give no chunks and uninitialized vectors.
        ({"chunk_size": -3}, InputError, "chunk_size is -3"),
        ({"prompt_name": "quest"}, InputError, "no prompt 'quest'.*query, document"),
    ],
)
def test_unsupported_and_invalid_options_are_rejected(
    options: dict[str, Any], error: type[Exception], reason: str, pair: Pair
) -> None:
    with pytest.raises(error, match=reason):
        pair.ours.encode(TEXTS, **options)


def test_inputs_other_than_texts_and_other_bundles_are_rejected(
    pair: Pair, quick_build: Any, tiny_classifier: Any
) -> None:
    with pytest.raises(InputError, match="text 2 is int, not a string"):
        pair.ours.encode(["a", 1])  # type: ignore[list-item]
    for wrong in (None, 5, {"a text": 1}, b"a text"):
        with pytest.raises(InputError, match="must be a text or a list of texts"):
            pair.ours.encode(wrong)  # type: ignore[arg-type]
    bundle = quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32"])
    with pytest.raises(PlanError, match="is a bundle for text-classification, not for sentence embeddings"):
        hasten.SentenceEncoder(bundle.path)


def test_torch_device_is_accepted(pair: Pair) -> None:
    import torch

    assert pair.ours.encode("a", device=torch.device("cpu")).shape == pair.ours.encode("a").shape


def test_user_prompts_are_used(pair: Pair) -> None:
    with pytest.raises(InputError, match="the model has no prompt 'titel'"):
        hasten.SentenceEncoder(pair.ours.bundle.path, default_prompt_name="titel")
    with hasten.SentenceEncoder(pair.ours.bundle.path, prompts={"title": "t: "}, default_prompt_name="title") as ours:
        assert np.allclose(ours.encode(TEXTS), pair.theirs.encode(TEXTS, prompt="t: "), **NEAR)


def test_encoding_imports_no_heavy_library(pair: Pair) -> None:
    code = "import hasten; hasten.SentenceEncoder(sys.argv[1]).encode(['a text', 'another'])"
    modules = modules_after(code, str(pair.ours.bundle.path))
    assert not modules & {"torch", "transformers", "sentence_transformers", "onnx"}
