"""What every model here is beside answering: it has a device it stays on, is not trained, and can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import transformers

from hasten.bundle import Bundle
from hasten.core.errors import BundleError, UnsupportedError
from hasten.transformers.saving import push, save


class StandIn:
    """What pipelines and programs ask of a transformers model that answers; what only training needs is refused."""

    main_input_name = "input_ids"
    input_modalities = ("text",)
    output_modalities = ("text",)
    training = False

    def __init__(self, bundle: Bundle, place: str, precision: str) -> None:
        self.bundle = bundle
        self.config = _config(bundle)
        self.base_model_prefix = str(self.config.model_type)
        self.name_or_path = bundle.manifest.model.id
        self.device = torch.device(place)
        # Of what goes in and out; what is computed in is the bundle's.
        self.dtype = torch.float32
        self._precision = precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

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
        """The same to a repository on the hub; returns its address. from_pretrained takes it by its id.

        It holds the texts that it was judged on: mind that where they are your own `data`.
        """
        return push(self.bundle, repo_id, private=private, token=token, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path}, {self._precision} on {self.device})"

    def _refuse(self, what: str, hint: str | None = None) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} of hasten: {what}", hint=hint)


def _config(bundle: Bundle) -> Any:
    file = bundle.configuration("config.json")
    if file is None:
        raise BundleError(f"{bundle.path} holds no config.json, which transformers asks for", hint="build it again")
    about, _ = transformers.PreTrainedConfig.get_config_dict(file.parent)
    known = about.get("model_type") in transformers.CONFIG_MAPPING
    # A model with code of its own has a configuration class that is not here; the common one holds all it says.
    return (transformers.AutoConfig if known else transformers.PreTrainedConfig).from_pretrained(file.parent)
