"""Fake TensorRT for RTX: the fake of TensorRT, without timing caches, which are deprecated there."""

import tensorrt
from tensorrt import (
    BuilderFlag,
    DataType,
    Dims,
    ILogger,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParser,
    Runtime,
    TensorIOMode,
)

__all__ = [
    "Builder",
    "BuilderFlag",
    "DataType",
    "Dims",
    "ILogger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "Runtime",
    "TensorIOMode",
]
__version__ = "1.7.1"


class IBuilderConfig(tensorrt.IBuilderConfig):
    create_timing_cache = set_timing_cache = get_timing_cache = None


class Builder(tensorrt.Builder):
    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()
