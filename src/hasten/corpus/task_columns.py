"""Choose the answer columns of each encoder task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray
from hasten.corpus.answer_columns import (
    AnswerColumns,
    JsonColumn,
    StructColumns,
    ValueColumn,
    VectorColumn,
    VectorEncoding,
)
from hasten.corpus.settings import AnswerSettings, VectorType
from hasten.predictor import Predictor

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The predictor, options and settings that decide the columns of answers."""

    predictor: Predictor
    # The options of the task.
    options: Any
    # The task's names of the columns that are read.
    inputs: Sequence[str]
    settings: AnswerSettings
    # Vectors of the bundle's reference, if they are needed.
    sample: FloatArray | None

    def encoding(self) -> VectorEncoding:
        """Return the encoding of vectors."""
        width = self.predictor.session.spec.signature.outputs[0].shape[-1]
        if not isinstance(width, int):
            raise PlanError("the bundle does not say how many dimensions its vectors have", hint="build it again")
        return VectorEncoding.of(self.settings, width, self.sample)


def answer_columns(context: AnswerContext) -> AnswerColumns:
    """Return the columns of a task's answers; those of tasks from other packages are JSON."""
    name, settings = context.predictor.spec.name, context.settings
    choose = _CHOICES.get(name)
    columns = choose(context) if choose is not None else JsonColumn()
    if not isinstance(columns, VectorColumn) and (settings.dimensions or settings.vectors is not VectorType.FLOAT32):
        raise PlanError(f"--vectors and --dimensions apply to vectors, and {name} answers with none")
    return columns


def _score() -> pa.DataType:
    import pyarrow as pa

    # Scores are computed in fp32.
    return pa.float32()


def _struct(**types: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return pa.struct(list(types.items()))


def _similarity(context: AnswerContext) -> AnswerColumns:
    """Return a column of vectors or, if rows are pairs, of cosine similarities."""
    if "text_pair" in context.inputs:
        return ValueColumn("similarity", _score())
    return VectorColumn("embedding", context.encoding())


def _features(context: AnswerContext) -> AnswerColumns:
    return VectorColumn("token_embeddings", context.encoding(), is_per_token=True)


def _terms(context: AnswerContext) -> AnswerColumns:
    """Return the terms of a text and their weights or, if rows are pairs, similarities."""
    import pyarrow as pa

    if "text_pair" in context.inputs:
        return ValueColumn("similarity", _score())
    return StructColumns({"indices": pa.list_(pa.int64()), "values": pa.list_(_score())})


def _late_interaction(context: AnswerContext) -> AnswerColumns:
    """Return the vectors of a text's tokens, the scores of pairs or the ranked documents of queries."""
    if "text" in context.inputs and "text_pair" not in context.inputs:
        return _features(context)
    return _scored_documents(context)


def _scored_documents(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    if "documents" not in context.inputs:
        return ValueColumn("score", _score())
    text = {"text": pa.string()} if context.options.has_documents else {}
    return ValueColumn("ranking", pa.list_(_struct(corpus_id=pa.int32(), score=_score(), **text)))


def _classification(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    if context.options.is_single:
        return StructColumns({"label": pa.string(), "score": _score()})
    return ValueColumn("labels", pa.list_(_struct(label=pa.string(), score=_score())))


def _tokens(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    is_grouped = context.options.aggregation.value != "none"
    index = {} if is_grouped else {"index": pa.int32()}
    entity = "entity_group" if is_grouped else "entity"
    span = {"word": pa.string(), "start": pa.int32(), "end": pa.int32()}
    return ValueColumn("entities", pa.list_(_struct(**{entity: pa.string()}, score=_score(), **index, **span)))


def _answers(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    types = {"answer": pa.string(), "score": _score(), "start": pa.int32(), "end": pa.int32()}
    return (
        StructColumns(types)
        if context.options.top_k == 1
        else ValueColumn("answers", pa.list_(_struct(**types)), _as_list)
    )


def _choices(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    types = {"answer": pa.string(), "index": pa.int32(), "score": _score()}
    if isinstance(context.options.top_k, msgspec.UnsetType):
        return StructColumns(types)
    return ValueColumn("answers", pa.list_(_struct(**types)))


def _zero_shot(_: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    return StructColumns({"labels": pa.list_(pa.string()), "scores": pa.list_(_score())})


def _masks(_: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    token = _struct(score=_score(), token=pa.int32(), token_str=pa.string(), sequence=pa.string())
    return ValueColumn("masks", pa.list_(pa.list_(token)), _by_mask)


def _ranking(context: AnswerContext) -> AnswerColumns:
    import pyarrow as pa

    if "documents" not in context.inputs and context.options.scores > 1:
        return ValueColumn("scores", pa.list_(_score(), context.options.scores))
    return _scored_documents(context)


def _as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _by_mask(answer: Any) -> list[Any]:
    """Return a list of tokens per mask, also for a text with a single mask."""
    return answer if answer and isinstance(answer[0], list) else [answer]


_CHOICES: dict[str, Callable[[AnswerContext], AnswerColumns]] = {
    "feature-extraction": _features,
    "fill-mask": _masks,
    "multi-vector-embedding": _late_interaction,
    "multiple-choice": _choices,
    "question-answering": _answers,
    "sentence-similarity": _similarity,
    "sparse-embedding": _terms,
    "text-classification": _classification,
    "text-ranking": _ranking,
    "token-classification": _tokens,
    "zero-shot-classification": _zero_shot,
}
