"""Drop-in encoder models: tensors in, output classes of transformers out."""

from __future__ import annotations

import threading
from typing import Any

import transformers
from torch import Tensor

from hasten.auto_build import variant_of
from hasten.backends import RunOptions, Session
from hasten.bundle import Bundle
from hasten.core.errors import InputError, PlanError
from hasten.core.variant import VariantChoice
from hasten.families import family_of
from hasten.predictor import open_predictor
from hasten.tasks import TASKS
from hasten.transformers.base import InferenceModel
from hasten.transformers.tensors import check, padded, unpadded

_CHOICES = "multiple-choice"


class EncoderModel(InferenceModel):
    """An encoder. Thread-safe: one call runs at a time."""

    def __init__(self, bundle: Bundle, session: Session, output: Any) -> None:
        super().__init__(bundle, session.spec.device, session.spec.precision)
        self._session = session
        self._output = output
        self._lock = threading.Lock()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Run the encoder; unsupported arguments raise an error."""
        for name, value in others.items():
            if value is not None and value is not False:
                self._unsupported(f"'{name}' is not supported: a bundle computes only the outputs of its task")
        if input_ids is None:
            raise InputError(
                "input_ids are missing", hint="model(**tokenizer(texts, padding=True, return_tensors='pt'))"
            )
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        is_choice = self.bundle.manifest.task.name == _CHOICES
        check(inputs, axes=("rows", "choices", "tokens") if is_choice else ("rows", "tokens"))
        if is_choice:  # each choice is a row; the outputs are reshaped below
            inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        signature = self._session.spec.signature
        rows = unpadded(inputs, signature, getattr(self.config, "vocab_size", None))
        with self._lock:
            results = self._session.run(rows.batch)
        outputs = {
            spec.name: padded(results[spec.name], spec, rows, signature.mask_id).to(self.device)
            for spec in signature.outputs
        }
        if is_choice:
            outputs = {name: value.reshape(input_ids.shape[:-1]) for name, value in outputs.items()}
        answer = self._output(**outputs)
        return answer.to_tuple() if return_dict is False else answer

    def close(self) -> None:
        """Free the session."""
        self._session.close()


def open_model(bundle: Bundle, kind: str, output: str, choice: VariantChoice, threads: int | None) -> EncoderModel:
    """Open a bundle as a model of one of transformers' Auto classes; raise an error if it is for another one."""
    task = bundle.manifest.task.name
    auto_class = family_of(task).auto_class(task)
    fields = getattr(transformers.modeling_outputs, output).__dataclass_fields__
    if auto_class != kind or not set(TASKS.get(task).outputs) <= set(fields):
        raise PlanError(
            f"{bundle.path} is for {task}, and {kind} is not",
            hint="use hasten.SentenceEncoder" if auto_class == "AutoModel" else f"use {auto_class}",
        )
    predictor = open_predictor(bundle, variant_of(bundle, choice), RunOptions(threads))
    # Pipelines of transformers identify supported models by the names of their classes.
    named_class = type(bundle.manifest.model.architecture or kind, (EncoderModel,), {})
    model: EncoderModel = named_class(bundle, predictor.session, getattr(transformers.modeling_outputs, output))
    return model
