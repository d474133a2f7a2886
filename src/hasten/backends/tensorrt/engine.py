"""Call TensorRT: build a plan from a typed graph, load it as an engine, and run it on NumPy arrays."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hasten.backends import to_dims
from hasten.backends.tensorrt.engine_spec import Dims, EnginePlatform, EngineSpec, find_profile, timing_cache_name
from hasten.backends.tensorrt.library import TENSORRT, Library
from hasten.backends.tensorrt.memory import Buffer, Stream
from hasten.core.errors import StageError, UnsupportedError, missing_package
from hasten.core.system.cache import cache_directory
from hasten.core.system.closing import Closing
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import DType, Signature

if TYPE_CHECKING:
    import tensorrt as tensorrt_types

logger = logging.getLogger("hasten")

FOLDER = "tensorrt"


def current_platform(library: Library) -> EnginePlatform:
    """Return the GPU of this machine and the version of the library."""
    gpus = this_machine().gpus
    if not gpus:
        raise UnsupportedError(f"{library.name} needs an NVIDIA GPU, and this machine has none")
    return EnginePlatform(gpus[0].name, gpus[0].capability, library.version)


def build(library: Library, graph: Path, signature: Signature, engine_spec: EngineSpec, plan: Path) -> None:
    """Build an engine and write it to `plan`.

    TensorRT takes minutes, because it times kernels; the timing cache of the same kind of GPU is reused. TensorRT for
    RTX takes seconds and needs no GPU: it builds for all GPUs that it supports.
    """
    tensorrt, log = library.load(), _log(library)
    log.errors.clear()
    builder: tensorrt_types.Builder = tensorrt.Builder(log)
    # TensorRT 10 needs the flag; 11 and TensorRT for RTX have only strongly typed networks and ignore it.
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser: tensorrt_types.OnnxParser = tensorrt.OnnxParser(network, log)
    # Parsed from the file, because its weights may be in other files of the folder.
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise StageError(f"{library.name} cannot read {graph.name}: {'; '.join(errors) or log.message()}")
    config = builder.create_builder_config()
    # With TF32, the inputs of fp32 matmuls would be rounded to a mantissa of ten bits.
    config.clear_flag(tensorrt.BuilderFlag.TF32)
    if engine_spec.workspace_bytes is not None:
        config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, engine_spec.workspace_bytes)
    specs = {spec.name: spec for spec in signature.inputs}
    for profile in engine_spec.profiles:
        optimization_profile = builder.create_optimization_profile()
        for name in [network.get_input(index).name for index in range(network.num_inputs)]:
            sizes = [to_dims(specs[name], shape) for shape in (profile.min, profile.opt, profile.max)]
            optimization_profile.set_shape(name, *(tensorrt.Dims(list(size)) for size in sizes))
        config.add_optimization_profile(optimization_profile)
    timing_cache: Path | None = None
    if library.has_timing_cache:
        timing_cache = cache_directory() / FOLDER / timing_cache_name(current_platform(library))
        for content in (_read(timing_cache), b""):  # a cache of another driver is rejected
            cache = config.create_timing_cache(content)  # None if the content is damaged
            if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
                break
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise StageError(f"{library.name} cannot build an engine from {graph.name}: {log.message()}")
    plan.write_bytes(memoryview(built))
    if timing_cache is None:
        return
    try:
        write_atomically(timing_cache, memoryview(config.get_timing_cache().serialize()))
    except OSError as error:
        logger.warning("the timing cache of TensorRT cannot be saved: %s", error)


def write_atomically(file: Path, content: bytes | memoryview) -> None:
    """Replace a file so that other processes see the old or the new content, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
        try:
            stream.write(content)
            stream.close()
            Path(stream.name).replace(file)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise


def load_engine(plan: Path | str, library: Library = TENSORRT) -> Engine:
    """Load an engine file on this GPU, for scripts: `infer(load_engine("model.plan"), {"input_ids": ids, …})`."""
    file = Path(plan)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StageError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return Engine(content, file.name, library)
    except ImportError as error:
        raise missing_package(error.name or library.module, "running an engine", library.backend) from error


def infer(engine: Engine, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Run an engine on arrays by input name and return arrays by output name."""
    return engine.infer(feeds)


class Engine(Closing):
    """A loaded plan with its context, stream and buffers for its largest shapes. Not thread-safe."""

    def __init__(self, plan: bytes, name: str, library: Library) -> None:
        tensorrt = library.load()
        self._library = library
        self._log = _log(library)
        self._log.errors.clear()
        self._runtime: tensorrt_types.Runtime = tensorrt.Runtime(self._log)
        engine = self._runtime.deserialize_cuda_engine(plan) if self._runtime is not None else None
        context = engine.create_execution_context() if engine is not None else None
        if engine is None or context is None:
            raise StageError(f"{library.name} cannot load {name}: {self._log.message()}")
        self._engine: tensorrt_types.ICudaEngine = engine
        self._context: tensorrt_types.IExecutionContext | None = context
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
        self.inputs = {name: _dtype(tensorrt, engine, name) for name in names if is_input[name]}
        self.outputs = {name: _dtype(tensorrt, engine, name) for name in names if not is_input[name]}
        self._ranges = [
            {name: _bounds(engine, name, profile) for name in self.inputs}
            for profile in range(engine.num_optimization_profiles)
        ]
        self._profile = 0
        self._stream = Stream()
        self._buffers: dict[str, Buffer] = {}
        try:
            for name, size in self._sizes().items():
                self._buffers[name] = Buffer(size, self._stream)
        except BaseException:
            self.close()
            raise

    def infer(
        self, feeds: Mapping[str, npt.NDArray[Any]], entries: int | None = None
    ) -> dict[str, npt.NDArray[np.floating]]:
        """Run the engine; `entries` is the size of an output dimension that depends on the values of the inputs."""
        context = self._context
        if context is None:
            raise StageError("the engine is closed")
        if missing := sorted(self.inputs.keys() - feeds.keys()):
            raise StageError(f"the engine takes {', '.join(self.inputs)}, and {missing[0]} is missing")
        arrays = {name: np.asarray(feeds[name], dtype.value) for name, dtype in self.inputs.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        profile = find_profile(self._ranges, shapes)
        if profile is None:
            raise StageError(f"no optimization profile of the engine covers inputs of {next(iter(shapes.values()))}")
        self._log.errors.clear()
        self._select_profile(profile)
        for name, array in arrays.items():
            self._buffers[name].to_gpu(array)
            if not context.set_input_shape(name, array.shape):
                raise StageError(f"the engine rejects '{name}' of {array.shape}: {self._log.message()}")
        for name, buffer in self._buffers.items():
            context.set_tensor_address(name, buffer.address)
        if not context.execute_async_v3(self._stream.address):
            raise StageError(f"{self._library.name} failed: {self._log.message()}")
        outputs = {
            name: self._buffers[name].from_gpu(dtype.value, self._shape(name, entries))
            for name, dtype in self.outputs.items()
        }
        self._stream.wait()
        # Copied: the next call overwrites the buffers.
        return {name: array.copy() for name, array in outputs.items()}

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}
        if self._context is not None:
            self._context = None
            self._stream.close()

    def _select_profile(self, profile: int) -> None:
        if profile != self._profile:
            assert self._context is not None
            if not self._context.set_optimization_profile_async(profile, self._stream.address):
                raise StageError(
                    f"{self._library.name} cannot select optimization profile {profile}: {self._log.message()}"
                )
            self._profile = profile

    def _shape(self, name: str, entries: int | None) -> Dims:
        assert self._context is not None
        shape = _to_tuple(self._context.get_tensor_shape(name))
        if entries is None and -1 in shape:
            raise StageError(f"the size of '{name}' depends on the values of the inputs and is not known")
        return tuple(entries if size == -1 and entries is not None else size for size in shape)

    def _sizes(self) -> dict[str, int]:
        """Return the largest size in bytes that any profile needs, by tensor."""
        assert self._context is not None
        sizes = dict.fromkeys((*self.inputs, *self.outputs), 0)
        for profile, ranges in enumerate(self._ranges):
            self._select_profile(profile)
            self._stream.wait()
            for name, (_, largest) in ranges.items():
                self._context.set_input_shape(name, largest)
                sizes[name] = max(sizes[name], int(np.prod(largest)) * np.dtype(self.inputs[name].value).itemsize)
            for name in self.outputs:
                sizes[name] = max(sizes[name], self._context.get_max_output_size(name))
        return sizes


def _bounds(engine: tensorrt_types.ICudaEngine, name: str, profile: int) -> tuple[Dims, Dims]:
    smallest, _, largest = engine.get_tensor_profile_shape(name, profile)
    return _to_tuple(smallest), _to_tuple(largest)


def _to_tuple(dims: tensorrt_types.Dims) -> Dims:
    return tuple(dims[index] for index in range(len(dims)))


def _dtype(tensorrt: Any, engine: tensorrt_types.ICudaEngine, name: str) -> DType:
    dtypes = {
        tensorrt.DataType.INT32: DType.INT32,
        tensorrt.DataType.INT64: DType.INT64,
        tensorrt.DataType.HALF: DType.FLOAT16,
        tensorrt.DataType.FLOAT: DType.FLOAT32,
    }
    dtype = engine.get_tensor_dtype(name)
    if dtype not in dtypes:
        raise StageError(f"the engine's tensor '{name}' is of type {dtype}, which is not supported")
    return dtypes[dtype]


def _read(file: Path) -> bytes:
    """Return the content of a file, or an empty timing cache if it does not exist."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


@cache
def _log(library: Library) -> Any:
    """Return the process's only logger of a library, which uses the first one that it gets."""
    tensorrt = library.load()
    severities = tensorrt.ILogger.Severity

    # mypy cannot resolve a class of a module that is chosen at run time.
    class Log(tensorrt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (severities.ERROR, severities.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == severities.WARNING:
                logger.info("%s: %s", library.name, message)

        def message(self) -> str:
            return "; ".join(self.errors) or "no reason was logged"

    return Log()
