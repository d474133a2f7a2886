"""The Auto classes: `from_pretrained` finds or builds a bundle and opens it as a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.variant import CPU, CUDA, VariantChoice

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.core.progress import Progress

# Arguments of transformers and Optimum, and what to use instead.
_ALTERNATIVES = {
    "torch_dtype": "precision='fp16'",
    "dtype": "precision='fp16'",
    "device_map": "device='cuda'",
    "provider": "device='cuda', or backend=",
    "quantization_config": "precision='int8'",
    "load_in_8bit": "precision='int8'",
    "load_in_4bit": "precision='int4'",
    "export": "nothing: models are exported automatically",
    "cache_dir": "the environment variable HASTEN_CACHE",
    "force_download": "nothing: a new revision is built automatically",
    "attn_implementation": "nothing: the backend chooses its attention",
}


class _Auto:
    task: str
    # The name of transformers' output class.
    output: str

    def __init__(self) -> None:
        raise TypeError(
            f"{type(self).__name__} cannot be instantiated; use {type(self).__name__}.from_pretrained(model)"
        )

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
        """Load a model that answers like that of transformers from a hub id, a directory or a bundle.

        The default precision is fp32, or that of the ONNX graph `file_name`; `precision="best"` takes the fastest
        variant that passes the accuracy gate, judged on `data` if it is passed. The default device is a GPU if one can
        be used. A model that is not a bundle is built once and stored in the cache.
        """
        from hasten.auto_build import bundle_for, name_of_model
        from hasten.core.plan import Plan

        for name in others:
            hint = f"instead: {_ALTERNATIVES[name]}" if name in _ALTERNATIVES else None
            raise PlanError(f"from_pretrained does not support '{name}'", hint=hint)
        choice = VariantChoice(backend, precision, _kind(device))
        plan = Plan(
            model=name_of_model(model),
            task=cls.task,
            revision=revision,
            file_name=file_name,
            data=str(data) if data is not None else None,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        return cls._open(bundle_for(plan, choice, progress), choice, threads)

    @classmethod
    def _open(cls, bundle: Bundle, choice: VariantChoice, threads: int | None) -> Any:
        from hasten.transformers.encoder import open_model

        return open_model(bundle, cls.__name__, cls.output, choice, threads)


class _AutoGenerationModel(_Auto):
    output = "text"

    @classmethod
    def _open(cls, bundle: Bundle, choice: VariantChoice, threads: int | None) -> Any:
        from hasten.transformers.generation import open_generative_model

        return open_generative_model(bundle, cls.__name__, cls.task, choice, threads)


class AutoModel(_Auto):
    """Encoders without a head: hidden states of tokens."""

    task = "feature-extraction"
    output = "BaseModelOutput"


class AutoModelForCausalLM(_AutoGenerationModel):
    """Decoders, for text generation."""

    task = "text-generation"


class AutoModelForSeq2SeqLM(_AutoGenerationModel):
    """Encoder-decoders, for text generation."""

    task = "text2text-generation"


class AutoModelForMaskedLM(_Auto):
    """Encoders that fill masks."""

    task = "fill-mask"
    output = "MaskedLMOutput"


class AutoModelForMultipleChoice(_Auto):
    """Encoders that choose among several answers."""

    task = "multiple-choice"
    output = "MultipleChoiceModelOutput"


class AutoModelForQuestionAnswering(_Auto):
    """Encoders that find answers in a context."""

    task = "question-answering"
    output = "QuestionAnsweringModelOutput"


class AutoModelForSequenceClassification(_Auto):
    """Encoders that classify texts."""

    task = "text-classification"
    output = "SequenceClassifierOutput"


class AutoModelForTokenClassification(_Auto):
    """Encoders that classify tokens."""

    task = "token-classification"
    output = "TokenClassifierOutput"


def _kind(device: object) -> str | None:
    """Return cpu or cuda for any value that PyTorch accepts as a device."""
    if device is None:
        return None
    name = f"cuda:{device}" if isinstance(device, int) and device >= 0 else CPU if device == -1 else str(device)
    device_type, _, number = name.partition(":")
    if device_type not in (CPU, CUDA) or number not in ("", "0"):
        hint = "select another GPU with CUDA_VISIBLE_DEVICES" if device_type == CUDA else "use cpu or cuda"
        raise UnsupportedError(f"models run on the CPU or on the first GPU, not on '{device}'", hint=hint)
    return device_type
