"""Answer rows with an encoder, through the predictor's overlap of tokenization and session."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.backends import SupportsPipelining
from hasten.core.errors import InputError, translate_mismatch
from hasten.core.tensors import BATCH, SEQUENCE, Batch, FloatArray
from hasten.core.variant import CPU
from hasten.corpus.operator import AnsweredWindow, InputColumns, Operator, Rejected, reason_of
from hasten.corpus.settings import AnswerSettings, OnLong
from hasten.corpus.task_columns import AnswerContext, answer_columns
from hasten.corpus.windows import Window
from hasten.predictor import Predictor, truncated_items
from hasten.tasks import Encoded

if TYPE_CHECKING:
    import pyarrow as pa

_NO_ROWS = Encoded(Batch({}, np.zeros(0, np.int32)), np.zeros(0, np.int64), 0, (), ())


@dataclass(slots=True)
class _Prepared:
    """A window on its way through the predictor."""

    window: Window
    indices: list[int]
    rows: list[dict[str, Any]]
    rejected: dict[int, Rejected]
    items: list[Any] = field(default_factory=list)


class EncoderOperator(Operator):
    """Answers rows with a predictor."""

    default_rows_per_file = 16384

    def __init__(
        self, predictor: Predictor, schema: pa.Schema, settings: AnswerSettings, sample: FloatArray | None
    ) -> None:
        self._predictor, self._task = predictor, predictor.task
        self._options = self._task.options(predictor.spec, settings.options)
        inputs = InputColumns(self._task, schema, settings.columns)
        columns = answer_columns(AnswerContext(predictor, self._options, tuple(inputs.by_name), settings, sample))
        super().__init__(inputs, columns, settings)
        # Outputs per token or over a vocabulary are large. More rows would hardly fill the batches better, but progress
        # and sessions would advance in larger steps.
        shapes = [output.shape for output in predictor.session.spec.signature.outputs]
        is_small = all(BATCH in shape and SEQUENCE not in shape for shape in shapes)
        self.window_rows = 1024 if is_small else 256
        session = predictor.session
        self.may_run_beside_others = session.spec.device == CPU and not isinstance(session, SupportsPipelining)

    def run(self, windows: Iterable[Window]) -> Generator[AnsweredWindow, None, None]:
        running: deque[_Prepared] = deque()
        begin = time.perf_counter()
        # The seconds outside the model, and those of the model that are counted already.
        other_s = model_s = 0.0
        thread = threading.get_ident()

        def encode(current: _Prepared) -> Encoded:
            nonlocal other_s
            start = time.perf_counter()
            encoded = self._encode(current)
            seconds = time.perf_counter() - start
            self.stages.add("tokenize", seconds)
            if threading.get_ident() == thread:  # on a CPU, tokenizer and session take turns
                other_s += seconds
            return encoded

        def prepared() -> Iterator[_Prepared]:
            nonlocal other_s
            iterator = iter(windows)
            while True:
                start = time.perf_counter()
                window = next(iterator, None)
                other_s += time.perf_counter() - start
                if window is None:
                    return
                running.append(_Prepared(window, *self.read(window)))
                yield running[-1]

        with (
            translate_mismatch(f"the model does not fit its task, {self._task.name}"),
            closing(self._predictor.run_in_chunks(prepared(), encode, on_batch=self.check_stop)) as results,
        ):
            for encoded, outputs in results:
                current = running.popleft()
                start = time.perf_counter()
                self.stages.add("model", max(0.0, start - begin - other_s - model_s))
                model_s = start - begin - other_s
                answers = self._task.decode(outputs, encoded, self._options) if encoded.items else []
                answered = self._finish(current, encoded, answers)
                self.stages.add("decode", time.perf_counter() - start)
                yield answered
                other_s += time.perf_counter() - start

    def close(self) -> None:
        self._predictor.close()

    def _encode(self, prepared: _Prepared) -> Encoded:
        """Encode the rows that can be encoded; the others are rejected. Called on threads."""
        try:
            prepared.items = self._task.parse(prepared.rows) if prepared.rows else []
        except InputError:
            prepared.items = self._only_valid(prepared, lambda row: self._task.parse([row])[0])
        if not prepared.items:
            return _NO_ROWS
        try:
            return self._task.encode(prepared.items, self._predictor.tokenizer, self._options)
        except InputError:
            prepared.items = self._only_valid(prepared, self._encode_alone)
        if not prepared.items:
            return _NO_ROWS
        return self._task.encode(prepared.items, self._predictor.tokenizer, self._options)

    def _encode_alone(self, row: dict[str, Any]) -> Any:
        (item,) = self._task.parse([row])
        self._task.encode([item], self._predictor.tokenizer, self._options)
        return item

    def _only_valid(self, prepared: _Prepared, check: Callable[[dict[str, Any]], Any]) -> list[Any]:
        """Return the items of the rows that pass a check; the others are rejected with its message."""
        indices, rows, items = [], [], []
        for index, row in zip(prepared.indices, prepared.rows, strict=True):
            try:
                items.append(check(row))
            except InputError as error:
                prepared.rejected[index] = self.rejection(prepared.window, index, reason_of(error), row)
                continue
            indices.append(index)
            rows.append(row)
        prepared.indices, prepared.rows = indices, rows
        return items

    def _finish(self, prepared: _Prepared, encoded: Encoded, answers: Sequence[Any]) -> AnsweredWindow:
        truncated = truncated_items(encoded)
        indices, remaining_answers = prepared.indices, list(answers)
        if truncated and self.settings.on_long is OnLong.ERROR:
            limit = self._predictor.tokenizer.spec.max_length
            for item in truncated:
                index = indices[item]
                reason = f"the text is longer than the model's limit of {limit} tokens"
                prepared.rejected[index] = self.rejection(prepared.window, index, reason, prepared.rows[item])
            remaining_answers = [answer for item, answer in enumerate(answers) if item not in truncated]
            indices = [index for item, index in enumerate(indices) if item not in truncated]
            truncated = set()
        return self.answered(
            prepared.window,
            indices,
            remaining_answers,
            prepared.rejected,
            tokens=encoded.batch.tokens,
            truncated=len(truncated),
        )
