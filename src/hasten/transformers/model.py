"""Models that read: tensors in, transformers' own output classes out."""

from __future__ import annotations

import threading
from typing import Any

import transformers
from torch import Tensor

from hasten.backends import RunOptions, Session
from hasten.bundle import Bundle
from hasten.core.errors import InputError, PlanError
from hasten.core.variant import VariantChoice
from hasten.on_demand import variant_of
from hasten.predictor import open_predictor
from hasten.tasks import TASKS
from hasten.transformers.stand_in import StandIn
from hasten.transformers.tensors import check, padded, unpadded

_CHOICES = "multiple-choice"


class Model(StandIn):
    """A model that reads. Safe to share between threads: one runs at a time."""

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
        for name, value in others.items():
            if value is not None and value is not False:
                self._refuse(f"'{name}' is not taken: a bundle answers, and gives what its task needs")
        if input_ids is None:
            raise InputError("no input_ids given", hint="model(**tokenizer(texts, padding=True, return_tensors='pt'))")
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        is_choice = self.bundle.manifest.task.name == _CHOICES
        check(given, axes=("rows", "choices", "tokens") if is_choice else ("rows", "tokens"))
        if is_choice:  # each is a row, and which belong together is put right again below
            given = {name: tensor.flatten(0, 1) for name, tensor in given.items()}
        signature = self._session.spec.signature
        rows = unpadded(given, signature, getattr(self.config, "vocab_size", None))
        with self._lock:
            found = self._session.run(rows.batch)
        outputs = {
            spec.name: padded(found[spec.name], spec, rows, signature.mask_id).to(self.device)
            for spec in signature.outputs
        }
        if is_choice:
            outputs = {name: value.reshape(input_ids.shape[:-1]) for name, value in outputs.items()}
        answer = self._output(**outputs)
        return answer.to_tuple() if return_dict is False else answer

    def close(self) -> None:
        self._session.close()


def open_model(bundle: Bundle, kind: str, output: str, choice: VariantChoice, threads: int | None) -> Model:
    """The bundle as a model of one of transformers' Auto classes, if it is one."""
    if bundle.manifest.generation is not None:
        raise PlanError(f"{bundle.path} writes text, which {kind} does not", hint="AutoModelForCausalLM, …ForSeq2SeqLM")
    task = TASKS.get(bundle.manifest.task.name)
    fields = getattr(transformers.modeling_outputs, output).__dataclass_fields__
    if task.auto_class != kind or not set(task.outputs) <= set(fields):
        is_pooled = task.auto_class == "AutoModel"
        raise PlanError(
            f"{bundle.path} is for {task.name}, which {kind} is not",
            hint="hasten.SentenceEncoder takes it" if is_pooled else f"{task.auto_class} takes it",
        )
    predictor = open_predictor(bundle, variant_of(bundle, choice), RunOptions(threads))
    # Pipelines know what they support by the names of classes.
    named = type(bundle.manifest.model.architecture or kind, (Model,), {})
    made: Model = named(bundle, predictor.session, getattr(transformers.modeling_outputs, output))
    return made
