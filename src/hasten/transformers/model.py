"""The object that stands in for a transformers model: tensors in, transformers' own output classes out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import transformers
from torch import Tensor

from hasten.backends import RunOptions, Session
from hasten.bundle import Bundle
from hasten.core.errors import BundleError, InputError, PlanError, UnsupportedError
from hasten.core.variant import VariantChoice
from hasten.on_demand import variant_of
from hasten.predictor import open_predictor
from hasten.tasks import TASKS
from hasten.transformers.saving import push, save
from hasten.transformers.tensors import check, padded, unpadded

_CHOICES = "multiple-choice"


class Model:
    """What pipelines and programs ask of a model that answers; what only training needs is refused.

    Safe to share between threads: one runs at a time.
    """

    main_input_name = "input_ids"
    input_modalities = ("text",)
    training = False

    def __init__(self, bundle: Bundle, session: Session, config: Any, output: Any) -> None:
        self.bundle = bundle
        self.config = config
        self.base_model_prefix = str(config.model_type)
        self.name_or_path = bundle.manifest.model.id
        self._session = session
        self._output = output
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

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
        rows = unpadded(given, signature)
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

    @property
    def device(self) -> torch.device:
        return torch.device(self._session.spec.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of what goes in and out; what is computed in, `bundle` tells."""
        return torch.float32

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Where it is already. It cannot be moved: what a bundle holds was made for one device and one precision."""
        for wanted in (*args, *kwargs.values()):
            if isinstance(wanted, torch.dtype) and wanted != self.dtype:
                self._refuse(f"it cannot become {wanted}", hint="from_pretrained(…, precision='fp16')")
            if isinstance(wanted, str | int | torch.device) and not isinstance(wanted, bool):
                device = torch.device(wanted)
                if device.type != self.device.type or (device.index or 0) != 0:
                    hint = f"from_pretrained(…, device='{device.type}'), or pipeline(…, device='{self.device}')"
                    self._refuse(f"it runs on {self.device} and cannot be moved to {device}", hint=hint)
        return self

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device = "cuda") -> Self:
        return self.to(device)

    def float(self) -> Self:
        return self

    def half(self) -> Self:
        return self.to(torch.float16)

    def eval(self) -> Self:
        return self

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._refuse("it answers and cannot be trained", hint="train the original, and build from that")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return self.train(requires_grad)

    def can_generate(self) -> bool:
        return False

    def num_parameters(self) -> NoReturn:
        self._refuse("its weights are the backend's own", hint="hasten inspect tells what a bundle holds")

    def save_pretrained(self, save_directory: str | Path, *, push_to_hub: bool = False, **options: Any) -> None:
        """The bundle, with the files beside it that AutoConfig and AutoTokenizer read."""
        save(self.bundle, Path(save_directory))
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, **options: Any
    ) -> str:
        """The same to a repository on the hub; returns its address. from_pretrained takes it by its id."""
        return push(self.bundle, repo_id, private=private, token=token, **options)

    def close(self) -> None:
        self._session.close()

    def __repr__(self) -> str:
        entry = self._session.spec
        return f"{type(self).__name__}({self.name_or_path}, {entry.precision} on {entry.device})"

    def _refuse(self, what: str, hint: str | None = None) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} of hasten: {what}", hint=hint)


def open_model(bundle: Bundle, kind: str, output: str, choice: VariantChoice, threads: int | None) -> Model:
    """The bundle as a model of one of transformers' Auto classes, if it is one."""
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
    made: Model = named(bundle, predictor.session, _config(bundle), getattr(transformers.modeling_outputs, output))
    return made


def _config(bundle: Bundle) -> Any:
    file = bundle.configuration("config.json")
    if file is None:
        raise BundleError(f"{bundle.path} holds no config.json, which transformers asks for", hint="build it again")
    about, _ = transformers.PreTrainedConfig.get_config_dict(file.parent)
    known = about.get("model_type") in transformers.CONFIG_MAPPING
    # A model with code of its own has a configuration class that is not here; the common one holds all it says.
    return (transformers.AutoConfig if known else transformers.PreTrainedConfig).from_pretrained(file.parent)
