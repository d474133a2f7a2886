"""Options of a model repository for tritonserver: the parser imports this module, so it imports no heavy library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from hasten.core.errors import PlanError
from hasten.core.options import Option, parse_whole
from hasten.core.variant import CPU, CUDA

_DEVICES = (CPU, CUDA)
# Stricter than tritonserver: names become parts of URLs and paths, and file names of other tools.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Runtime(StrEnum):
    """The backend of the server that runs the model: its ONNX Runtime or TensorRT backend, or its Python backend."""

    NATIVE = "native"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a model repository."""

    name: Annotated[str, Option(str, "NAME", "prefix of the model names", flags=("--name", "-n"))] = "transformer"
    runtime: Annotated[
        Runtime,
        Option(
            Runtime,
            "NAME",
            "backend of the server: its ONNX Runtime or TensorRT (native), or Python",
            choices=tuple(map(str, Runtime)),
        ),
    ] = Runtime.NATIVE
    variant: Annotated[
        str | None, Option(str, "NAME", "variant to deploy (default: the fastest that tritonserver can run)")
    ] = None
    instances: Annotated[int, Option(parse_whole, "N", "instances per model")] = 1
    threads: Annotated[
        int | None,
        Option(
            parse_whole,
            "N",
            "threads per instance (default: that of ONNX Runtime; with --runtime python, an equal share of the cores)",
        ),
    ] = None
    device: Annotated[
        str | None,
        Option(
            str,
            "DEVICE",
            "device to run on (default: the device of the build, or the choice of the server)",
            choices=_DEVICES,
        ),
    ] = None
    # The server must be started with a cache, too.
    cache: Annotated[bool, Option(bool, "", "enable the response cache of the server")] = False
    max_delay_us: Annotated[
        int | None,
        Option(parse_whole, "N", "maximum queue delay of the dynamic batcher (default: from the benchmark)"),
    ] = None
    # The maximum number of texts in a batch. None: the maximum that the bundle was built for.
    max_rows: int | None = None
    # Whether texts have the shape [n], as transformer-deploy's clients send them, instead of [n, 1]. Requests are then
    # tokenized one at a time, and run together only if their texts are equally long.
    is_flat: bool = False
    # The name of the only output of the inference model. None: the name in the model.
    output: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PlanError(
                f"'{self.name}' is not a valid name for a model in tritonserver",
                hint="use up to 100 letters, digits, '_', '-' and '.', beginning with a letter or a digit",
            )
        for flag, value, minimum in (
            ("--instances", self.instances, 1),
            ("--threads", self.threads, 1),
            ("--max-delay-us", self.max_delay_us, 0),
            ("max_rows", self.max_rows, 1),
        ):
            if value is not None and value < minimum:
                raise PlanError(f"{flag} {value} is less than {minimum}")
        if self.device is not None and self.device not in _DEVICES:
            raise PlanError(f"unknown device '{self.device}'", hint=f"known: {', '.join(_DEVICES)}")
