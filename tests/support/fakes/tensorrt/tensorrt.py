"""Fake the part of TensorRT's Python API that hasten calls, with the signatures of 11.4, by running ONNX Runtime.

No engine can be run where tests run. The fake verifies our side of the calls (profiles, buffers, split batches, rebuilt
engines), and nothing of TensorRT itself. An "engine" is the graph and its profiles; parsing and building never fail.
Names and parameters are compared with those of NVIDIA's module for RTX, whose parser and builder are tested for real
(test_tensorrt_rtx.py).
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import os
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np

__version__ = os.environ.get("STANDIN_VERSION", "11.4.0")

STREAM = 77
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 0})
BuilderFlag = Enum("BuilderFlag", ["TF32"])
MemoryPoolType = Enum("MemoryPoolType", ["WORKSPACE"])
TensorIOMode = Enum("TensorIOMode", ["INPUT", "OUTPUT"])
DataType = Enum("DataType", {"FLOAT": "float", "HALF": "float16", "INT32": "int32", "INT64": "int64"})
NUMPY = {"float": np.float32, "float16": np.float16, "int32": np.int32, "int64": np.int64}


class ILogger:
    Severity = Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self) -> None:
        pass


class Dims(list):
    pass


def session(graph: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Its int8 matmuls do not take fp16 scales: values are rounded to 8 bits and multiplied in fp16.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class INetworkDefinition:
    def __init__(self) -> None:
        self.graph, self.inputs = b"", []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self.network = network

    def parse_from_file(self, model: str) -> bool:
        self.network.graph = Path(model).read_bytes()
        self.network.inputs = session(self.network.graph).get_inputs()
        return True


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[Dims]] = {}

    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        self.shapes[input] = [min, opt, max]


class ITimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return b"timings"


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiles: list[Any] = []
        self.cache: ITimingCache | None = None

    def clear_flag(self, flag: Any) -> None:
        assert flag is BuilderFlag.TF32

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        assert pool is MemoryPoolType.WORKSPACE
        assert pool_size > 0

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return ignore_mismatch or cache.content in (b"", b"timings")

    def get_timing_cache(self) -> ITimingCache | None:
        return self.cache


class Builder:
    def __init__(self, logger: ILogger) -> None:
        pass

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes:
        graph = base64.b85encode(network.graph).decode()
        return json.dumps({"version": __version__, "graph": graph, "profiles": config.profiles}).encode()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            raw = json.loads(serialized_engine)
            if raw["version"] != __version__:
                raise ValueError(f"the engine was built with {raw['version']}")
            return ICudaEngine(session(base64.b85decode(raw["graph"])), raw["profiles"])
        except Exception as error:
            self.logger.log(ILogger.Severity.ERROR, str(error))
            return None


class ICudaEngine:
    def __init__(self, graph: Any, profiles: list[Any]) -> None:
        self.graph, self.profiles = graph, profiles
        self.inputs = {tensor.name: tensor for tensor in graph.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in graph.get_outputs()}
        self.tensors = self.inputs | self.outputs
        self.num_io_tensors, self.num_optimization_profiles = len(self.tensors), len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType(self.tensors[name].type.removeprefix("tensor(").removesuffix(")"))

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self.profiles[profile_index][name]]

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        # Selecting a profile discards the shapes set before.
        self.profile, self.shapes = profile_index, {}
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        smallest, _, largest = self.engine.profiles[self.profile][name]
        self.shapes[name] = tuple(shape)
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(size if isinstance(size, int) else self._sizes().get(size, -1) for size in self._shape(name))

    def get_max_output_size(self, name: str) -> int:
        if self.shapes.keys() != self.engine.inputs.keys():
            return -1
        sizes = self._sizes()
        upper_bound = math.prod(sizes.values())
        count = math.prod(size if isinstance(size, int) else sizes.get(size, upper_bound) for size in self._shape(name))
        return count * self._dtype(name).itemsize

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        feeds = {}
        for name, shape in self.shapes.items():
            dtype = self._dtype(name)
            content = ctypes.string_at(self.addresses[name], math.prod(shape) * dtype.itemsize)
            feeds[name] = np.frombuffer(content, dtype).reshape(shape)
        for name, value in zip(self.engine.outputs, self.engine.graph.run(None, feeds), strict=True):
            ctypes.memmove(self.addresses[name], value.tobytes(), value.nbytes)
        return True

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(NUMPY[self.engine.get_tensor_dtype(name).value])

    def _shape(self, name: str) -> list[Any]:
        return self.engine.tensors[name].shape

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the named axes."""
        pairs = [pair for name, shape in self.shapes.items() for pair in zip(self._shape(name), shape, strict=True)]
        return {axis: size for axis, size in pairs if isinstance(axis, str)}
