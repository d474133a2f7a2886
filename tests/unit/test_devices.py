"""Whose variants contend, what they are compared with, and what landed where it should not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import requiring
from hasten.backends import BACKENDS, Backend, Dialect, dialect_of, fused, tensorrt
from hasten.backends.onnxruntime.cuda import left_to_cpu
from hasten.backends.onnxruntime.session import CPU_PROVIDER, CUDA_PROVIDER, Placement
from hasten.builder.choose import GRAPH, MODULE, compared_with, contenders, device_of
from hasten.builder.search import ladder
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.hardware import Gpu, Machine, this_machine
from hasten.core.plan import Plan
from hasten.core.variant import Precision, Support, Variant

MACHINE = replace(this_machine(), gpus=())
WITH_GPU = replace(MACHINE, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))


class Known:
    """A backend that runs what it says, on a GPU where there is one."""

    requires: tuple[str, ...] = ()
    extra = None

    def __init__(self, dialect: Dialect, *variants: str, is_stored: bool = True) -> None:
        self.dialect, self.is_stored = dialect, is_stored
        self._variants = [Variant.parse(name) for name in variants]
        self.name = self._variants[0].backend

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is None:
            return Support.yes() if self.variants(machine) else Support.no("there is no NVIDIA GPU here")
        return Support.yes() if variant in self.variants(machine) else Support.no("it does not", "buy a GPU")

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return [variant for variant in self._variants if machine.gpus or variant.device == "cpu"]


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As many as the questions need: what is installed here does not matter."""
    known = [
        Known(Dialect.MODULE, "torch-fp32", "torch-fp32@cuda", "torch-fp16@cuda", is_stored=False),
        Known(Dialect.ORT, "onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-fp16@cuda"),
        Known(Dialect.ONNX, "openvino-fp32"),
        Known(Dialect.MODULE, "fused-fp16@cuda"),
        Known(Dialect.ONNX, "graph-fp32"),
    ]
    found: dict[str, Any] = {backend.name: backend for backend in known}
    monkeypatch.setattr(BACKENDS, "_loaded", found)
    monkeypatch.setattr(BACKENDS, "all", lambda: list(found.values()))
    return found


def names(variants: Sequence[Variant]) -> list[str]:
    return [variant.name for variant in variants]


def test_a_gpu_is_taken_where_there_is_one() -> None:
    assert device_of(Plan("m"), MACHINE, MODULE) == "cpu"
    assert device_of(Plan("m"), WITH_GPU, MODULE) == "cuda"
    assert device_of(Plan("m", device="cpu"), WITH_GPU, MODULE) == "cpu"


def test_but_not_for_pytorch_alone(backends: dict[str, Any]) -> None:
    del backends["fused"]
    backends["onnxruntime"] = Known(Dialect.ORT, "onnxruntime-fp32")
    assert device_of(Plan("m"), WITH_GPU, MODULE) == "cpu"
    with pytest.raises(UnsupportedError, match="nothing that a bundle may hold runs on the GPU here") as caught:
        device_of(Plan("m", device="cuda"), WITH_GPU, MODULE)
    assert "onnxruntime: it does not" in caught.value.message
    assert caught.value.hint == "buy a GPU"


def test_one_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, and there is none here"):
        device_of(Plan("m", device="cuda"), MACHINE, MODULE)
    with pytest.raises(PlanError, match="unknown device 'tpu'"):
        Plan("m", device="tpu")
    with pytest.raises(PlanError, match="a recipe makes int8 for processors"):
        Plan("m", device="cuda", recipe="recipe.toml")


def test_variants_that_were_named_bring_their_device() -> None:
    assert device_of(Plan("m", variants=("onnxruntime-fp32",)), WITH_GPU, MODULE) == "cpu"
    both = Plan("m", variants=("onnxruntime-fp32", "onnxruntime-fp16@cuda"), device="cpu")
    assert device_of(both, WITH_GPU, MODULE) == "cuda"


@pytest.mark.parametrize(("device", "variant"), [("cuda", "onnxruntime-fp32"), ("cpu", "onnxruntime-fp16@cuda")])
def test_a_device_that_contradicts_the_variants(device: str, variant: str) -> None:
    with pytest.raises(PlanError, match=f"--device {device} contradicts --variants {variant}"):
        device_of(Plan("m", device=device, variants=(variant,)), WITH_GPU, MODULE)


@pytest.mark.parametrize("backend", [fused.BACKEND, tensorrt.BACKEND], ids=lambda backend: backend.name)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_device_that_is_wrong_on_any_machine(backend: Backend, device: str) -> None:
    """Also on one without a GPU, which is not the reason."""
    variant = Variant(backend.name, Precision.FP16, device)
    assert backend.probe(MACHINE, variant).reason == f"it runs on 'cuda', not on '{device}'"


def test_only_its_variants_contend(backends: dict[str, Any]) -> None:
    wanted, unavailable = contenders(Plan("m"), WITH_GPU, MODULE, "cuda")
    assert names(wanted) == ["torch-fp16@cuda", "onnxruntime-fp16@cuda", "fused-fp16@cuda"]
    assert {one.variant: one.reason for one in unavailable} == {
        "openvino": "it runs on cpu, not on cuda: --device cpu",
        "graph": "it runs on cpu, not on cuda: --device cpu",
    }
    further, refused = ladder(wanted, WITH_GPU)
    assert not further
    eight = ["fused-fp8@cuda", "fused-fp8+gelu@cuda", "fused-fp8+gelu+fast@cuda", "fused-int8@cuda"]
    assert {one.variant: one.reason for one in refused} == dict.fromkeys(eight, "it does not")
    backends["fused"] = Known(Dialect.MODULE, "fused-fp16@cuda", *eight)
    assert names(ladder(wanted, WITH_GPU)[0]) == eight
    wanted, unavailable = contenders(Plan("m"), WITH_GPU, MODULE, "cpu")
    assert names(wanted) == ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "graph-fp32"]
    assert [one.reason for one in unavailable] == ["it runs on cuda, not on cpu: --device cuda"]


def test_a_graph_is_not_run_by_what_needs_a_module() -> None:
    wanted, _ = contenders(Plan("m"), WITH_GPU, GRAPH, "cuda")
    assert names(wanted) == ["onnxruntime-fp16@cuda"]


def test_the_original_moves_along_where_it_can() -> None:
    module, graph = Variant.parse("torch-fp32"), Variant.parse("graph-fp32")
    assert compared_with(module, "cpu", WITH_GPU) == module
    assert compared_with(module, "cuda", WITH_GPU).name == "torch-fp32@cuda"
    assert compared_with(graph, "cuda", WITH_GPU) == graph


def test_graphs_for_gpus_are_others() -> None:
    assert dialect_of(Variant.parse("onnxruntime-fp16@cuda")) is Dialect.ORT_CUDA
    assert dialect_of(Variant.parse("onnxruntime-fp32")) is Dialect.ORT
    assert dialect_of(Variant.parse("fused-fp16@cuda")) is Dialect.MODULE


def test_nodes_that_landed_on_the_cpu_are_named() -> None:
    shape = Placement("/shape", "Shape", CPU_PROVIDER, 16)
    compute = Placement("/attention", "Attention", CUDA_PROVIDER, 4096)
    assert left_to_cpu([shape, compute]) == ()
    copied = Placement("Memcpy_1", "MemcpyToHost", CUDA_PROVIDER, 512)
    lost = Placement("/positions", "CumSum", CPU_PROVIDER, 512)
    assert left_to_cpu([shape, copied, lost, compute]) == ("CumSum '/positions'", "Shape '/shape'")
    assert left_to_cpu([copied, compute]) == ("Memcpy_1",)
    # Where a size goes over that the GPU computes with, it is told how large sizes are.
    size = Placement("Memcpy_2", "MemcpyFromHost", CPU_PROVIDER, 8)
    assert left_to_cpu([shape, size, compute]) == ("Shape '/shape'", "MemcpyFromHost 'Memcpy_2'")
    assert left_to_cpu([shape, size, compute], 64) == ()
    assert left_to_cpu([shape, size, copied, lost, compute], 64)[0] == "CumSum '/positions'"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("torch-fp16@cuda: there is no NVIDIA GPU here", "gpu"),
        ("openvino-fp32: the package 'openvino' is not installed", "openvino"),
        ("takes a minute: run with --slow", None),
        ("a gpus file", None),
    ],
)
def test_what_is_required_fails_where_it_is_skipped(reason: str, expected: str | None) -> None:
    assert requiring.lacking(reason, ["gpu", "openvino"]) == expected
