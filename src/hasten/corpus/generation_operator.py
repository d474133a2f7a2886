"""Answer rows with generated text; all prompts of a window share the slots of the decoder."""

from __future__ import annotations

from collections.abc import Generator as Iteration
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hasten.core.errors import InputError, PlanError
from hasten.corpus.answer_columns import AnswerColumns, ValueColumn
from hasten.corpus.operator import AnsweredWindow, InputColumns, Operator, reason_of
from hasten.corpus.settings import AnswerSettings
from hasten.corpus.windows import Window
from hasten.generation.generator import Generator, full_text, params_per_sequence
from hasten.generation.options import sampling_params
from hasten.generation.prompts import Prompt
from hasten.measure.generation_reference import TextColumn

if TYPE_CHECKING:
    import pyarrow as pa


class GenerationOperator(Operator):
    """Answers rows with a generator, as a call with a list of prompts does."""

    default_rows_per_file = 512
    window_rows = 128

    def __init__(self, generator: Generator, task: str, schema: pa.Schema, settings: AnswerSettings) -> None:
        options = dict(settings.options)
        several = options.pop("num_return_sequences", 1)
        is_full = options.pop("return_full_text", None)
        self._sampling = sampling_params(generator.defaults, options)
        if self._sampling.temperature > 0 and self._sampling.seed is None:
            raise PlanError(
                "sampled text differs from run to run, so a resumed job would not equal an uninterrupted one",
                hint="-O seed=0, or -O temperature=0 for greedy decoding",
            )
        self._params = params_per_sequence(self._sampling, several)
        self._returns_full_text = not generator.spec.decoder_start_token_ids if is_full is None else bool(is_full)
        self._generator = generator
        super().__init__(InputColumns(TextColumn(task), schema, settings.columns), self._columns(), settings)

    def run(self, windows: Iterable[Window]) -> Iteration[AnsweredWindow, None, None]:
        for window in windows:
            indices, rows, rejected = self.read(window)
            prompts: list[Prompt] = []
            row_indices: list[int] = []
            with self.stages.timed("tokenize"):
                for index, row in zip(indices, rows, strict=True):
                    try:
                        prompt = self._generator.parse(row["text"])
                        self._generator.check(prompt, self._sampling)
                    except InputError as error:
                        rejected[index] = self.rejection(window, index, reason_of(error), row)
                        continue
                    prompts.append(prompt)
                    row_indices.append(index)
            with self.stages.timed("model"):
                texts = self._generator.generate(prompts, self._params)
            answers = [self._answer(prompt, group) for prompt, group in zip(prompts, texts, strict=True)]
            tokens = sum(len(prompt.ids) for prompt in prompts)
            yield self.answered(window, row_indices, answers, rejected, tokens=tokens, truncated=0)

    def close(self) -> None:
        self._generator.close()

    def _columns(self) -> AnswerColumns:
        import pyarrow as pa

        is_single = len(self._params) == 1
        return ValueColumn(self._generator.preset.key, pa.string() if is_single else pa.list_(pa.string()))

    def _answer(self, prompt: Prompt, texts: list[str]) -> Any:
        """Return the text or texts of a prompt; a chat is answered by the new message alone."""
        joins = self._returns_full_text and isinstance(prompt.source, str)
        answers = [full_text(prompt.source, text) if joins else text for text in texts]
        return answers[0] if len(self._params) == 1 else answers
