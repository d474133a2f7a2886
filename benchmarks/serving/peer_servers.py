"""The peers: how each is started, and the configurations that the throughput study tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from contenders import Contender, ServedModel
from environments import PEERS
from http_requests import binary_format, json_format
from peers.options import Options

from hasten.core.system.hardware import usable_cores

_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of another project; its script is in `peers/`."""

    name: str
    file: str
    # Whether it can batch requests; it then runs batches one after another, else requests side by side.
    has_batching: bool = True
    # Whether it runs an ONNX graph.
    has_graph: bool = True
    is_busy_when_idle: bool = False

    def row_name(self, graph_name: str) -> str:
        """Return the name in the result file."""
        return f"{self.name}, {graph_name if self.has_graph else 'transformers'}"

    def server(self, model: ServedModel, graph: Path, graph_name: str, options: Options) -> Contender:
        """Return the server with this graph and configuration."""
        name = self.row_name(graph_name)
        arguments = (str(PEERS / self.file), str(model.model), str(graph), "{port}")
        if self == TRITON:
            command = (model.triton, *arguments, "{grpc}", "{folder}", *options.arguments())
            request_format = binary_format("classifier", "scores", [1, 1], model.labels)
            return Contender(name, command, request_format, "/v2/health/ready", options=options)
        command = (model.peers, *arguments, *options.arguments())
        return Contender(name, command, json_format(), is_busy_when_idle=self.is_busy_when_idle, options=options)

    def configurations(self) -> Iterator[Options]:
        """Yield every configuration that the throughput study tries."""
        cores = usable_cores()
        lone, pair = Options(1, cores), Options(2, max(1, cores // 2))
        yield from (lone, pair)
        if self.has_batching:
            # As in tutorials: a batch is padded to its longest text.
            yield replace(lone, max_batch_size=_BATCH_SIZE)
            for options in (lone, pair):
                yield replace(options, max_batch_size=_BATCH_SIZE, has_buckets=True)
            yield replace(lone, max_batch_size=2 * _BATCH_SIZE, has_buckets=True)
        else:
            # Its requests run side by side, so that one instance uses all cores with one thread per request.
            yield Options(1, 1)


FASTAPI = Peer("FastAPI", "fastapi_onnxruntime.py", has_batching=False)
TRITON = Peer("tritonserver", "triton_onnxruntime.py")
ALL_PEERS = (
    Peer("FastAPI", "fastapi_transformers.py", has_graph=False),
    FASTAPI,
    Peer("LitServe", "litserve_onnxruntime.py", is_busy_when_idle=True),
    Peer("Ray Serve", "ray_onnxruntime.py", is_busy_when_idle=True),
    TRITON,
)


def lone_request_options() -> Options:
    """Return the configuration with the lowest latency for one request at a time."""
    return Options(instances=1, threads=usable_cores())
