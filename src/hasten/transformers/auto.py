"""The classes people import: `from_pretrained` finds, builds or opens a bundle and makes a model of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.core.progress import Progress
    from hasten.core.variant import VariantChoice

# What transformers and Optimum call it, to what it is here.
_INSTEAD = {
    "torch_dtype": "precision='fp16'",
    "dtype": "precision='fp16'",
    "device_map": "device='cuda'",
    "provider": "device='cuda', or backend=",
    "quantization_config": "precision='int8'",
    "load_in_8bit": "precision='int8'",
    "load_in_4bit": "precision='int4'",
    "export": "nothing: models are exported when they are not yet",
    "cache_dir": "the variable HASTEN_CACHE",
    "force_download": "nothing: a new revision is built by itself",
    "attn_implementation": "nothing: the backend has its own",
}


class _Auto:
    task: str
    # transformers' class of what a model gives.
    output: str

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is not made, but loaded: {type(self).__name__}.from_pretrained(model)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        backend: str | None = None,
        precision: str | None = None,
        device: object = None,
        file_name: str | None = None,
        revision: str | None = None,
        data: str | Path | None = None,
        threads: int | None = None,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
        progress: Progress | None = None,
        **others: object,
    ) -> Any:
        """A model that answers like transformers' own: a hub id, a directory or a bundle.

        Without `precision` in fp32, or as the ONNX graph `file_name` is; `precision="best"` is the fastest of all that
        passes the gate, judged on `data` where there is some. Without `device` on a GPU where one can be used. What is
        not a bundle is built once and kept.
        """
        from hasten.core.variant import VariantChoice
        from hasten.on_demand import Wish, bundle_of

        for name in others:
            _refuse(name)
        choice = VariantChoice(backend, precision, _kind(device))
        wish = Wish(
            task=cls.task,
            choice=choice,
            revision=revision,
            file_name=file_name,
            data=str(data) if data is not None else None,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        return cls._open(bundle_of(model, wish, progress), choice, threads)

    @classmethod
    def _open(cls, bundle: Bundle, choice: VariantChoice, threads: int | None) -> Any:
        from hasten.transformers.model import open_model

        return open_model(bundle, cls.__name__, cls.output, choice, threads)


class _AutoWriter(_Auto):
    output = "text"

    @classmethod
    def _open(cls, bundle: Bundle, choice: VariantChoice, threads: int | None) -> Any:
        from hasten.transformers.writer import open_writer

        return open_writer(bundle, cls.__name__, cls.task, choice, threads)


class AutoModel(_Auto):
    task = "feature-extraction"
    output = "BaseModelOutput"


class AutoModelForCausalLM(_AutoWriter):
    task = "text-generation"


class AutoModelForSeq2SeqLM(_AutoWriter):
    task = "text2text-generation"


class AutoModelForMaskedLM(_Auto):
    task = "fill-mask"
    output = "MaskedLMOutput"


class AutoModelForMultipleChoice(_Auto):
    task = "multiple-choice"
    output = "MultipleChoiceModelOutput"


class AutoModelForQuestionAnswering(_Auto):
    task = "question-answering"
    output = "QuestionAnsweringModelOutput"


class AutoModelForSequenceClassification(_Auto):
    task = "text-classification"
    output = "SequenceClassifierOutput"


class AutoModelForTokenClassification(_Auto):
    task = "token-classification"
    output = "TokenClassifierOutput"


def _kind(device: object) -> str | None:
    """cpu or cuda, of whatever PyTorch takes for a device."""
    from hasten.core.errors import UnsupportedError
    from hasten.core.variant import CPU, CUDA

    if device is None:
        return None
    name = f"cuda:{device}" if isinstance(device, int) and device >= 0 else CPU if device == -1 else str(device)
    kind, _, number = name.partition(":")
    if kind not in (CPU, CUDA) or number not in ("", "0"):
        hint = "CUDA_VISIBLE_DEVICES chooses another GPU" if kind == CUDA else "cpu or cuda"
        raise UnsupportedError(f"models run on the CPU or on the first GPU, not on '{device}'", hint=hint)
    return kind


def _refuse(name: str) -> NoReturn:
    from hasten.core.errors import PlanError

    raise PlanError(
        f"from_pretrained takes no '{name}' here", hint=f"instead: {_INSTEAD[name]}" if name in _INSTEAD else None
    )
