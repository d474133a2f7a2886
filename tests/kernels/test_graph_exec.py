"""Executable CUDA graphs launch on any stream and free the driver's handle."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hasten.core.errors import StageError
from hasten.kernels.cuda import graph_exec
from hasten.kernels.cuda.graph_exec import GraphExec, capture_graph
from support.models.fused_encoders import DEVICE


class FakeDriver:
    """Records the calls of the driver API, which needs a GPU."""

    def __init__(self, **statuses: int) -> None:
        self.calls: list[str] = []
        self._statuses = statuses

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.calls.append(name)
            return self._statuses.get(name, 0)

        return call


def test_handle_is_destroyed_once_and_failed_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(cuGraphLaunch=700)
    monkeypatch.setattr(graph_exec, "driver", lambda: fake)
    executable = GraphExec(SimpleNamespace(raw_cuda_graph=lambda: 1))
    with pytest.raises(StageError, match="cuGraphLaunch failed with status 700"):
        executable.launch(SimpleNamespace(cuda_stream=2))
    del executable
    gc.collect()
    assert fake.calls == ["cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphExecDestroy"]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_graph_runs_on_any_stream_and_thread() -> None:
    x, stream = torch.zeros(1000, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with capture_graph(stream) as graph:
        x += 1
    executable = GraphExec(graph)
    executable.launch(stream)
    stream.synchronize()
    other = torch.cuda.Stream()
    thread = threading.Thread(target=executable.launch, args=(other,))
    thread.start()
    thread.join()
    other.synchronize()
    assert torch.equal(x, torch.full_like(x, 2))
    assert executable.device_seconds(stream) > 0
