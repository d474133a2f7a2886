"""TensorRT's own calls: a typed graph becomes a plan, a plan an engine that takes and gives NumPy arrays."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hasten.backends.tensorrt.memory import Buffer, Stream
from hasten.backends.tensorrt.planning import Dims, Order, Place, dims, fitting, timings_name
from hasten.core.cache import cache_directory
from hasten.core.closing import Closing
from hasten.core.errors import StageError, UnsupportedError, missing_package
from hasten.core.hardware import this_machine
from hasten.core.tensors import DType, Signature

if TYPE_CHECKING:
    import tensorrt

logger = logging.getLogger("hasten")

FOLDER = "tensorrt"


@cache
def loading_error() -> str | None:
    """Why its library, or CUDA's, does not load: the packages alone, as PyPI has them, do not."""
    try:
        for module in ("tensorrt", "cuda.bindings.runtime"):
            import_module(module)
    except Exception as error:  # the loader's, or whatever a package does when it is imported
        return str(error)
    return None


def this_place() -> Place:
    import tensorrt

    gpus = this_machine().gpus
    if not gpus:
        raise UnsupportedError("TensorRT needs an NVIDIA GPU, and this machine has none")
    return Place(gpus[0].name, gpus[0].capability, tensorrt.__version__)


def build(graph: Path, signature: Signature, order: Order, plan: Path) -> None:
    """Takes minutes: kernels are timed, and what was timed before on such a GPU is not timed again."""
    import tensorrt

    log = _log()
    log.errors.clear()
    builder = tensorrt.Builder(log)
    # A flag that 10 wants, and 11, where nothing else is left, ignores.
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, log)
    # From the file, since weights may lie beside it.
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(place).desc() for place in range(parser.num_errors)]
        raise StageError(f"TensorRT cannot read {graph.name}: {'; '.join(errors) or log.told()}")
    config = builder.create_builder_config()
    # fp32 means fp32: with it, products of fp32 would be rounded to ten bits.
    config.clear_flag(tensorrt.BuilderFlag.TF32)
    if order.workspace_bytes is not None:
        config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, order.workspace_bytes)
    specs = {spec.name: spec for spec in signature.inputs}
    for profile in order.profiles:
        shapes = builder.create_optimization_profile()
        for name in [network.get_input(place).name for place in range(network.num_inputs)]:
            sizes = [dims(specs[name], shape) for shape in (profile.min, profile.opt, profile.max)]
            shapes.set_shape(name, *(tensorrt.Dims(list(size)) for size in sizes))
        config.add_optimization_profile(shapes)
    timings = cache_directory() / FOLDER / timings_name(this_place())
    for known in (_read(timings), b""):  # what another driver timed is not taken
        cache = config.create_timing_cache(known)  # none of what is damaged
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            break
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise StageError(f"TensorRT cannot build an engine of {graph.name}: {log.told()}")
    plan.write_bytes(memoryview(built))
    try:
        write_whole(timings, memoryview(config.get_timing_cache().serialize()))
    except OSError as error:
        logger.warning("what TensorRT has timed is not kept: %s", error)


def write_whole(file: Path, content: bytes | memoryview) -> None:
    """Another process that reads it meanwhile sees the old one, or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
        try:
            stream.write(content)
            stream.close()
            Path(stream.name).replace(file)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise


def load_engine(plan: Path | str) -> Engine:
    """An engine file on this GPU, for scripts: `infer(load_engine("model.plan"), {"input_ids": ids, …})`."""
    file = Path(plan)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StageError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return Engine(content, file.name)
    except ImportError as error:
        raise missing_package(error.name or "tensorrt", "running an engine", "tensorrt") from error


def infer(engine: Engine, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Arrays by the names of the engine's inputs; its outputs by theirs."""
    return engine.infer(feeds)


class Engine(Closing):
    """A plan on the GPU with its own context, stream and buffers, these for its largest shapes. One thread's."""

    def __init__(self, plan: bytes, name: str) -> None:
        import tensorrt

        log = _log()
        log.errors.clear()
        self._runtime = tensorrt.Runtime(log)
        engine = self._runtime.deserialize_cuda_engine(plan)
        context = engine.create_execution_context() if engine is not None else None
        if engine is None or context is None:
            raise StageError(f"TensorRT cannot load {name}: {log.told()}")
        self._engine: tensorrt.ICudaEngine = engine
        self._context: tensorrt.IExecutionContext | None = context
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
        self.inputs = {name: _dtype(engine, name) for name in names if is_input[name]}
        self.outputs = {name: _dtype(engine, name) for name in names if not is_input[name]}
        self._ranges = [
            {name: _ends(engine, name, profile) for name in self.inputs}
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
        """`entries` is how many there are of an output whose number depends on the values of the inputs."""
        context = self._context
        if context is None:
            raise StageError("the engine is closed")
        if missing := sorted(self.inputs.keys() - feeds.keys()):
            raise StageError(f"the engine takes {', '.join(self.inputs)}, and {missing[0]} is not given")
        given = {name: np.asarray(feeds[name], dtype.value) for name, dtype in self.inputs.items()}
        shapes = {name: array.shape for name, array in given.items()}
        profile = fitting(self._ranges, shapes)
        if profile is None:
            raise StageError(f"the engine takes no inputs of {next(iter(shapes.values()))}")
        log = _log()
        log.errors.clear()
        self._choose(profile)
        for name, array in given.items():
            self._buffers[name].to_gpu(array)
            if not context.set_input_shape(name, array.shape):
                raise StageError(f"the engine takes no '{name}' of {array.shape}: {log.told()}")
        for name, buffer in self._buffers.items():
            context.set_tensor_address(name, buffer.address)
        if not context.execute_async_v3(self._stream.address):
            raise StageError(f"TensorRT fails: {log.told()}")
        found = {
            name: self._buffers[name].from_gpu(dtype.value, self._shape(name, entries))
            for name, dtype in self.outputs.items()
        }
        self._stream.wait()
        # Copied: the next call overwrites the buffers.
        return {name: array.copy() for name, array in found.items()}

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}
        if self._context is not None:
            self._context = None
            self._stream.close()

    def _choose(self, profile: int) -> None:
        if profile != self._profile:
            assert self._context is not None
            if not self._context.set_optimization_profile_async(profile, self._stream.address):
                raise StageError(f"TensorRT does not take up profile {profile}: {_log().told()}")
            self._profile = profile

    def _shape(self, name: str, entries: int | None) -> Dims:
        assert self._context is not None
        shape = _plain(self._context.get_tensor_shape(name))
        if entries is None and -1 in shape:
            raise StageError(f"how large '{name}' is depends on the values of the inputs, and nobody says it")
        return tuple(entries if size == -1 and entries is not None else size for size in shape)

    def _sizes(self) -> dict[str, int]:
        """Of each tensor, the most bytes that any profile asks for."""
        assert self._context is not None
        found = dict.fromkeys((*self.inputs, *self.outputs), 0)
        for profile, ranges in enumerate(self._ranges):
            self._choose(profile)
            self._stream.wait()
            for name, (_, most) in ranges.items():
                self._context.set_input_shape(name, most)
                found[name] = max(found[name], int(np.prod(most)) * np.dtype(self.inputs[name].value).itemsize)
            for name in self.outputs:
                found[name] = max(found[name], self._context.get_max_output_size(name))
        return found


def _ends(engine: tensorrt.ICudaEngine, name: str, profile: int) -> tuple[Dims, Dims]:
    least, _, most = engine.get_tensor_profile_shape(name, profile)
    return _plain(least), _plain(most)


def _plain(sizes: tensorrt.Dims) -> Dims:
    return tuple(sizes[place] for place in range(len(sizes)))


def _dtype(engine: tensorrt.ICudaEngine, name: str) -> DType:
    import tensorrt

    kinds = {
        tensorrt.DataType.INT32: DType.INT32,
        tensorrt.DataType.INT64: DType.INT64,
        tensorrt.DataType.HALF: DType.FLOAT16,
        tensorrt.DataType.FLOAT: DType.FLOAT32,
    }
    found = engine.get_tensor_dtype(name)
    if found not in kinds:
        raise StageError(f"the engine's tensor '{name}' is in {found}, which hasten does not exchange")
    return kinds[found]


def _read(file: Path) -> bytes:
    """Nothing where there is none: what TensorRT then begins with."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


@cache
def _log() -> Any:
    """One for the process: TensorRT keeps to the first that it is given."""
    import tensorrt

    class Log(tensorrt.ILogger):
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: tensorrt.ILogger.Severity, message: str) -> None:
            if severity in (tensorrt.ILogger.Severity.ERROR, tensorrt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == tensorrt.ILogger.Severity.WARNING:
                logger.info("TensorRT: %s", message)

        def told(self) -> str:
            return "; ".join(self.errors) or "it does not say why"

    return Log()
