"""Convert the answers of a task to typed Arrow columns."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray
from hasten.corpus.settings import AnswerSettings, VectorType

if TYPE_CHECKING:
    import pyarrow as pa

_INT8_MAX = 127


class AnswerColumns(ABC):
    """The columns of a task's answers. Stateless after construction."""

    fields: Sequence[pa.Field]

    @abstractmethod
    def arrays(self, answers: Sequence[Any]) -> Sequence[pa.Array]:
        """Return one array per field."""


class StructColumns(AnswerColumns):
    """One column for each part of an answer that is an object."""

    def __init__(self, types: Mapping[str, pa.DataType]) -> None:
        import pyarrow as pa

        self.fields = [pa.field(name, type_) for name, type_ in types.items()]

    def arrays(self, answers: Sequence[Any]) -> Sequence[pa.Array]:
        import pyarrow as pa

        return [pa.array([answer[field.name] for answer in answers], field.type) for field in self.fields]


class ValueColumn(AnswerColumns):
    """A column that holds the whole answer; `convert` changes answers whose shape varies to the one of the column."""

    def __init__(self, name: str, type_: pa.DataType, convert: Callable[[Any], Any] = lambda answer: answer) -> None:
        import pyarrow as pa

        self.fields = [pa.field(name, type_)]
        self._convert = convert

    def arrays(self, answers: Sequence[Any]) -> Sequence[pa.Array]:
        import pyarrow as pa

        return [pa.array(list(map(self._convert, answers)), self.fields[0].type)]


class JsonColumn(ValueColumn):
    """A column of JSON text, for tasks of other packages, whose answers have no known type."""

    def __init__(self) -> None:
        import pyarrow as pa

        super().__init__("answer", pa.string(), lambda answer: json.dumps(answer, default=lambda value: value.tolist()))


@dataclass(frozen=True, slots=True)
class VectorEncoding:
    """The element type of stored vectors, their dimensions, and the scale of int8."""

    type: VectorType
    dimensions: int
    scale: float = 1.0

    @classmethod
    def of(cls, settings: AnswerSettings, width: int, sample: FloatArray | None) -> VectorEncoding:
        """Return the encoding of vectors of this width; vectors of the bundle's reference decide on the scale."""
        dimensions = settings.dimensions or width
        if dimensions > width:
            raise PlanError(f"--dimensions is {dimensions}, and the vectors have {width}")
        if settings.vectors is not VectorType.INT8:
            return cls(settings.vectors, dimensions)
        if sample is None or not len(sample):
            raise PlanError("--vectors int8 needs vectors in the bundle's reference", hint="use --vectors float16")
        return cls(settings.vectors, dimensions, float(np.abs(sample[..., :dimensions]).max() / _INT8_MAX) or 1.0)

    @property
    def stored_width(self) -> int:
        """Return the number of elements per vector: eight dimensions share a byte of a binary vector."""
        return -(-self.dimensions // 8) if self.type is VectorType.BINARY else self.dimensions

    @property
    def metadata(self) -> dict[str, str]:
        """Return the description that the column carries."""
        described = {"hasten.vectors": self.type.value, "hasten.dimensions": str(self.dimensions)}
        if self.type is VectorType.INT8:
            described |= {"hasten.scale": repr(self.scale), "hasten.decode": "value = int8 × scale"}
        if self.type is VectorType.BINARY:
            described["hasten.decode"] = "one bit per dimension, the first in the highest bit of a byte: 1 if above 0"
        return described

    def arrow_type(self) -> pa.DataType:
        """Return the type of one vector."""
        import pyarrow as pa

        element = {
            VectorType.FLOAT32: pa.float32(),
            VectorType.FLOAT16: pa.float16(),
            VectorType.INT8: pa.int8(),
            VectorType.BINARY: pa.uint8(),
        }[self.type]
        return pa.list_(element, self.stored_width)

    def array(self, vectors: FloatArray) -> pa.Array:
        """Return the vectors (rows, width) as fixed-size lists."""
        import pyarrow as pa

        leading = vectors[:, : self.dimensions]
        encoded: Any
        if self.type is VectorType.BINARY:
            encoded = np.packbits(leading > 0, axis=1)
        elif self.type is VectorType.INT8:
            encoded = np.clip(np.rint(leading / self.scale), -_INT8_MAX, _INT8_MAX).astype(np.int8)
        else:
            encoded = leading.astype(self.type.value)
        flat = np.ascontiguousarray(encoded).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=self.arrow_type())


class VectorColumn(AnswerColumns):
    """A vector per row or, for tokens, a list of vectors."""

    def __init__(self, name: str, encoding: VectorEncoding, *, is_per_token: bool = False) -> None:
        import pyarrow as pa

        type_ = encoding.arrow_type()
        self.fields = [pa.field(name, pa.list_(type_) if is_per_token else type_, metadata=encoding.metadata)]
        self._encoding, self._is_per_token = encoding, is_per_token

    def arrays(self, answers: Sequence[Any]) -> Sequence[pa.Array]:
        import pyarrow as pa

        if not len(answers):
            return [pa.array([], self.fields[0].type)]
        if not self._is_per_token:
            return [self._encoding.array(np.stack(answers))]
        # feature-extraction answers with a batch of one matrix, as transformers' pipeline does.
        texts = [np.reshape(answer, (-1, np.shape(answer)[-1])) for answer in answers]
        offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
        vectors = self._encoding.array(np.concatenate(texts))
        return [pa.ListArray.from_arrays(pa.array(offsets), vectors, type=self.fields[0].type)]
