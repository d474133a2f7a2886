"""Tiny embedders of many architectures in the layouts of published models, saved by sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.models import tiny_encoders
from support.models.tiny_encoders import WIDTH

_INSTRUCTION = {"query": "find the answer : ", "document": ""}


def _pooling(mode: str, **options: Any) -> list[Any]:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    return [Pooling(WIDTH, pooling_mode=mode, **options), Normalize()]


def _with_dense(mode: str, *widths: int, **options: Any) -> list[Any]:
    """Return pooling and linear layers without biases, as T5's and Gemma's embedders have them."""
    import torch
    from sentence_transformers.base.modules import Dense

    pooling, normalize = _pooling(mode, **options)
    sizes = zip((WIDTH, *widths), widths, strict=False)
    linear = [Dense(*size, bias=False, activation_function=torch.nn.Identity()) for size in sizes]
    return [pooling, *linear, normalize]


# The architecture, the modules after it, and the prompts.
EMBEDDERS: dict[str, tuple[str, Callable[[], list[Any]], dict[str, str]]] = {
    "embedding-gemma": ("gemma3_text", lambda: _with_dense("mean", 96, 24), _INSTRUCTION),
    "llama": ("llama", lambda: _pooling("lasttoken"), {}),
    "e5-mistral": ("mistral", lambda: _pooling("lasttoken"), _INSTRUCTION),
    "qwen3-embedding": ("qwen3", lambda: _pooling("lasttoken"), _INSTRUCTION),
    "sentence-t5": ("t5", lambda: _with_dense("mean", 24), {}),
    "umt5": ("umt5", lambda: _pooling("mean"), {}),
    "instructor": ("t5", lambda: _with_dense("mean", 24, include_prompt=False), _INSTRUCTION),
}


def save(name: str, folder: Path) -> Path:
    """Save an embedder with weights that depend only on its architecture."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    architecture, make_modules, prompts = EMBEDDERS[name]
    tiny_encoders.save(architecture, tiny_encoders.EMBEDDING_ARCHITECTURES[architecture].base, folder / "transformer")
    torch.manual_seed(11)
    modules = [Transformer(str(folder / "transformer")), *make_modules()]
    saved = folder / name
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save_pretrained(
        str(saved), create_model_card=False
    )
    return saved


def save_sparse(
    folder: Path, *, architecture: str = "bert", pooling: dict[str, Any] | None = None, **settings: Any
) -> Path:
    """Save a sparse encoder (SPLADE); `settings` are those of sentence-transformers' SparseEncoder."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    tiny_encoders.save(architecture, "ForMaskedLM", folder / "transformer")
    transformer = Transformer(str(folder / "transformer"), transformer_task="fill-mask", max_seq_length=32)
    modules = [transformer, SpladePooling(**pooling or {})]
    SparseEncoder(modules=modules, device="cpu", **settings).save_pretrained(
        str(folder / "sparse"), create_model_card=False
    )
    return folder / "sparse"


def save_multi_vector(
    folder: Path, *, expansion: dict[str, Any] | None = None, normalize: bool = True, **settings: Any
) -> Path:
    """Save a multi-vector encoder (ColBERT); `settings` are those of sentence-transformers' MultiVectorEncoder."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    tiny_encoders.save("bert", "Model", folder / "transformer")
    torch.manual_seed(11)
    transformer = Transformer(str(folder / "transformer"), document_length=32, query_expansion=expansion)
    options = {"bias": False, "activation_function": torch.nn.Identity(), "module_input_name": "token_embeddings"}
    modules = [transformer, Dense(WIDTH, 24, **options), MultiVectorMask([".", "?", "the"])]
    modules += [Normalize(module_input_name="token_embeddings")] if normalize else []
    MultiVectorEncoder(modules=modules, device="cpu", **settings).save_pretrained(
        str(folder / "multi-vector"), create_model_card=False
    )
    return folder / "multi-vector"
