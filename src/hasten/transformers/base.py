"""The base class of drop-in models: a fixed device, no training, saving and pushing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import transformers

from hasten.bundle import Bundle
from hasten.core.errors import BundleError, UnsupportedError
from hasten.transformers.saving import push, save


class InferenceModel:
    """The part of transformers' model interface that inference uses; methods that only training needs raise errors."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    output_modalities = ("text",)
    training = False

    def __init__(self, bundle: Bundle, device: str, precision: str) -> None:
        self.bundle = bundle
        self.config = _config(bundle)
        self.base_model_prefix = str(self.config.model_type)
        self.name_or_path = bundle.manifest.model.id
        self.device = torch.device(device)
        # Of inputs and outputs; the bundle determines the precision of the computation.
        self.dtype = torch.float32
        self._precision = precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model if it already has this device and dtype; it cannot be moved or converted."""
        for target in (*args, *kwargs.values()):
            if isinstance(target, torch.dtype) and target != self.dtype:
                self._unsupported(
                    f"conversion to {target} is not supported", hint="from_pretrained(…, precision='fp16')"
                )
            if isinstance(target, str | int | torch.device) and not isinstance(target, bool):
                device = torch.device(target)
                if device.type != self.device.type or (device.index or 0) != 0:
                    hint = f"from_pretrained(…, device='{device.type}'), or pipeline(…, device='{self.device}')"
                    self._unsupported(f"it runs on {self.device} and cannot be moved to {device}", hint=hint)
        return self

    def cpu(self) -> Self:
        """Return the model if it runs on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device = "cuda") -> Self:
        """Return the model if it runs on this GPU."""
        return self.to(device)

    def float(self) -> Self:
        """Return the model, whose inputs and outputs are fp32."""
        return self

    def half(self) -> Self:
        """Raise an error: the precision is chosen when the model is loaded."""
        return self.to(torch.float16)

    def eval(self) -> Self:
        """Return the model, which is always in inference mode."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Raise an error unless `mode` is False: bundles are for inference only."""
        if mode:
            self._unsupported(
                "training is not supported", hint="train the transformers model and build a bundle from it"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise an error unless `requires_grad` is False."""
        return self.train(requires_grad)

    def can_generate(self) -> bool:
        """Return whether the model has `generate`."""
        return False

    def num_parameters(self) -> NoReturn:
        """Raise an error: the backend holds the weights in its own format."""
        self._unsupported("its parameters cannot be counted", hint="hasten inspect shows the contents of a bundle")

    def save_pretrained(self, save_directory: str | Path, *, push_to_hub: bool = False, **options: Any) -> None:
        """Save the bundle with the files that AutoConfig and AutoTokenizer read."""
        save(self.bundle, Path(save_directory))
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", Path(save_directory).name), **options)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, **options: Any
    ) -> str:
        """Push the saved bundle to a repository on the hub and return its address; from_pretrained accepts its id.

        The bundle contains the texts it was judged on, which matters if they are private `data`.
        """
        return push(self.bundle, repo_id, private=private, token=token, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path}, {self._precision} on {self.device})"

    def _unsupported(self, message: str, hint: str | None = None) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} of hasten: {message}", hint=hint)


def _config(bundle: Bundle) -> Any:
    file = bundle.configuration("config.json")
    if file is None:
        raise BundleError(f"{bundle.path} has no config.json, which transformers needs", hint="build it again")
    config, _ = transformers.PreTrainedConfig.get_config_dict(file.parent)
    is_known = config.get("model_type") in transformers.CONFIG_MAPPING
    # The configuration class of a model with remote code is not available; the base class holds all its values.
    return (transformers.AutoConfig if is_known else transformers.PreTrainedConfig).from_pretrained(file.parent)
