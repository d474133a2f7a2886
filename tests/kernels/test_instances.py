"""Of the instances of a graph the fastest is kept, and no more are made than it takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from encoders import DEVICE
from hasten.core.errors import StageError
from hasten.kernels import driver, instances
from hasten.kernels.counters import recorded
from hasten.kernels.instances import chosen, fastest

MICROSECOND = 1e-6


@pytest.mark.parametrize(
    ("times", "best", "made"),
    [
        ([80, 80.4, 72, 60], 2, 3),
        ([72, 80, 60], 0, 2),
        ([77, 77.3, 76.8], 2, 3),
        ([450, 60], 0, 1),
    ],
    ids=["the faster kind comes late", "it comes first", "all are of one kind", "it takes long"],
)
def test_the_fastest_stays(times: list[float], best: int, made: int) -> None:
    asked = []

    def timed() -> Iterator[tuple[int, float]]:
        for place, microseconds in enumerate(times):
            asked.append(place)
            yield place, microseconds * MICROSECOND

    assert chosen(timed()) == best
    assert len(asked) == made


def test_where_there_can_be_only_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lone:
        made = 0

        def __init__(self, graph: object) -> None:
            Lone.made += 1
            if Lone.made > 1:
                raise StageError("cuGraphInstantiateWithFlags failed with status 801")

        def seconds(self, stream: object) -> float:
            return 50 * MICROSECOND

    monkeypatch.setattr(instances, "Instance", Lone)
    assert isinstance(fastest(None, None), Lone)
    assert Lone.made == 2
    with pytest.raises(StageError):
        fastest(None, None)


class Driver:
    """Stands in for the real one, which needs a GPU: says what was asked of it."""

    def __init__(self, **statuses: int) -> None:
        self.asked: list[str] = []
        self._statuses = statuses

    def __getattr__(self, name: str) -> Callable[..., int]:
        def answer(*_: object) -> int:
            self.asked.append(name)
            return self._statuses.get(name, 0)

        return answer


def test_an_instance_is_given_back_once_and_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Driver(cuGraphLaunch=700)
    for module in (driver, instances):
        monkeypatch.setattr(module, "library", lambda: made)
    instance = instances.Instance(SimpleNamespace(raw_cuda_graph=lambda: 1))
    with pytest.raises(StageError, match="cuGraphLaunch failed with status 700"):
        instance.launch(SimpleNamespace(cuda_stream=2))
    del instance
    gc.collect()
    assert made.asked == ["cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphExecDestroy"]


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
def test_it_computes_what_was_recorded_on_any_stream_and_in_any_thread() -> None:
    x, stream = torch.zeros(1000, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with recorded(stream, None) as graph:
        x += 1
    instance = fastest(graph, stream)
    stream.synchronize()
    before = x[0].item()
    instance.launch(stream)
    stream.synchronize()
    other = torch.cuda.Stream()
    thread = threading.Thread(target=instance.launch, args=(other,))
    thread.start()
    thread.join()
    other.synchronize()
    assert torch.equal(x, torch.full_like(x, before + 2))
