"""Test which device's variants are candidates, their baseline, and graph nodes that run on the wrong device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hasten.backends import BACKENDS, Backend, Dialect, dialect_of, fused, tensorrt
from hasten.backends.onnxruntime.cuda import nodes_on_cpu
from hasten.backends.onnxruntime.session import CPU_PROVIDER, CUDA_PROVIDER, NodePlacement
from hasten.builder.resolved_plan import GRAPH, MODULE
from hasten.builder.search.candidates import baseline_for, candidate_variants, device_of
from hasten.builder.search.search import search_order
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.system.hardware import Gpu, Machine, this_machine
from hasten.core.variant import Precision, Support, Variant
from plugins import require

MACHINE = replace(this_machine(), gpus=())
WITH_GPU = replace(MACHINE, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))


class FakeBackend:
    """A backend that supports the given variants, those for GPUs only on a machine with one."""

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
    """Replace the registry, so that the installed packages do not matter."""
    known = [
        FakeBackend(Dialect.MODULE, "torch-fp32", "torch-fp32@cuda", "torch-fp16@cuda", is_stored=False),
        FakeBackend(Dialect.ORT, "onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-fp16@cuda"),
        FakeBackend(Dialect.ONNX, "openvino-fp32"),
        FakeBackend(Dialect.MODULE, "fused-fp16@cuda"),
        FakeBackend(Dialect.ONNX, "graph-fp32"),
        FakeBackend(Dialect.ONNX, "tensorrt-fp16@cuda"),
    ]
    registry: dict[str, Any] = {backend.name: backend for backend in known}
    monkeypatch.setattr(BACKENDS, "_loaded", registry)
    monkeypatch.setattr(BACKENDS, "all", lambda: list(registry.values()))
    return registry


def names(variants: Sequence[Variant]) -> list[str]:
    return [variant.name for variant in variants]


def test_gpu_is_the_default_device_if_present() -> None:
    assert device_of(Plan("m"), MACHINE, MODULE) == "cpu"
    assert device_of(Plan("m"), WITH_GPU, MODULE) == "cuda"
    assert device_of(Plan("m", device="cpu"), WITH_GPU, MODULE) == "cpu"


def test_gpu_is_not_chosen_for_pytorch_alone(backends: dict[str, Any]) -> None:
    del backends["fused"]
    backends["onnxruntime"] = FakeBackend(Dialect.ORT, "onnxruntime-fp32")
    assert device_of(Plan("m"), WITH_GPU, MODULE) == "cpu"
    with pytest.raises(UnsupportedError, match="no backend that a bundle can store runs on the GPU here") as caught:
        device_of(Plan("m", device="cuda"), WITH_GPU, MODULE)
    assert "onnxruntime: it does not" in caught.value.message
    assert caught.value.hint == "buy a GPU"


def test_unavailable_device_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU, and this machine has none"):
        device_of(Plan("m", device="cuda"), MACHINE, MODULE)
    with pytest.raises(PlanError, match="unknown device 'tpu'"):
        Plan("m", device="tpu")
    with pytest.raises(PlanError, match="a recipe makes int8 for CPUs"):
        Plan("m", device="cuda", recipe="recipe.toml")


def test_named_variants_determine_the_device() -> None:
    assert device_of(Plan("m", variants=("onnxruntime-fp32",)), WITH_GPU, MODULE) == "cpu"
    both = Plan("m", variants=("onnxruntime-fp32", "onnxruntime-fp16@cuda"), device="cpu")
    assert device_of(both, WITH_GPU, MODULE) == "cuda"


@pytest.mark.parametrize(("device", "variant"), [("cuda", "onnxruntime-fp32"), ("cpu", "onnxruntime-fp16@cuda")])
def test_device_that_contradicts_the_variants_is_rejected(device: str, variant: str) -> None:
    with pytest.raises(PlanError, match=f"--device {device} contradicts --variants {variant}"):
        device_of(Plan("m", device=device, variants=(variant,)), WITH_GPU, MODULE)


@pytest.mark.parametrize("backend", [fused.BACKEND, tensorrt.BACKEND], ids=lambda backend: backend.name)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_gpu_backend_rejects_other_devices_on_any_machine(backend: Backend, device: str) -> None:
    """The reason is the device even on a machine without a GPU."""
    variant = Variant(backend.name, Precision.FP16, device)
    assert backend.probe(MACHINE, variant).reason == f"it runs on 'cuda', not on '{device}'"


def test_candidates_are_the_variants_of_the_device(backends: dict[str, Any]) -> None:
    variants, unavailable = candidate_variants(Plan("m"), WITH_GPU, MODULE, "cuda")
    assert names(variants) == ["torch-fp16@cuda", "onnxruntime-fp16@cuda", "fused-fp16@cuda"]
    assert {candidate.variant: candidate.reason for candidate in unavailable} == {
        "openvino": "it runs on cpu, not on cuda: --device cpu",
        "graph": "it runs on cpu, not on cuda: --device cpu",
        "tensorrt": "experimental: tried only if it is named: --variants tensorrt-fp16@cuda",
    }
    further, rejected = search_order(variants, WITH_GPU)
    assert not further
    eight_bit = ["fused-fp8@cuda", "fused-fp8+tanhgelu@cuda", "fused-fp8+tanhgelu+fastaccum@cuda", "fused-int8@cuda"]
    assert {candidate.variant: candidate.reason for candidate in rejected} == dict.fromkeys(eight_bit, "it does not")
    backends["fused"] = FakeBackend(Dialect.MODULE, "fused-fp16@cuda", *eight_bit)
    assert names(search_order(variants, WITH_GPU)[0]) == eight_bit
    variants, unavailable = candidate_variants(Plan("m"), WITH_GPU, MODULE, "cpu")
    assert names(variants) == ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "graph-fp32"]
    reasons = {candidate.variant: candidate.reason for candidate in unavailable}
    assert reasons["fused"] == "it runs on cuda, not on cpu: --device cuda"


def test_graph_has_no_candidates_that_need_a_module() -> None:
    variants, _ = candidate_variants(Plan("m"), WITH_GPU, GRAPH, "cuda")
    assert names(variants) == ["onnxruntime-fp16@cuda"]


def test_baseline_runs_on_the_candidates_device_if_it_can() -> None:
    module, graph = Variant.parse("torch-fp32"), Variant.parse("graph-fp32")
    assert baseline_for(module, "cpu", WITH_GPU) == module
    assert baseline_for(module, "cuda", WITH_GPU).name == "torch-fp32@cuda"
    assert baseline_for(graph, "cuda", WITH_GPU) == graph


def test_gpu_variants_use_another_dialect() -> None:
    assert dialect_of(Variant.parse("onnxruntime-fp16@cuda")) is Dialect.ORT_CUDA
    assert dialect_of(Variant.parse("onnxruntime-fp32")) is Dialect.ORT
    assert dialect_of(Variant.parse("fused-fp16@cuda")) is Dialect.MODULE


def test_nodes_on_the_cpu_are_named() -> None:
    shape = NodePlacement("/shape", "Shape", CPU_PROVIDER, 16)
    compute = NodePlacement("/attention", "Attention", CUDA_PROVIDER, 4096)
    assert nodes_on_cpu([shape, compute]) == ()
    copied = NodePlacement("Memcpy_1", "MemcpyToHost", CUDA_PROVIDER, 512)
    lost = NodePlacement("/positions", "CumSum", CPU_PROVIDER, 512)
    assert nodes_on_cpu([shape, copied, lost, compute]) == ("CumSum '/positions'", "Shape '/shape'")
    assert nodes_on_cpu([copied, compute]) == ("Memcpy_1",)
    # Copies up to the given number of bytes are shape values, which may come from the CPU.
    size = NodePlacement("Memcpy_2", "MemcpyFromHost", CPU_PROVIDER, 8)
    assert nodes_on_cpu([shape, size, compute]) == ("Shape '/shape'", "MemcpyFromHost 'Memcpy_2'")
    assert nodes_on_cpu([shape, size, compute], 64) == ()
    assert nodes_on_cpu([shape, size, copied, lost, compute], 64)[0] == "CumSum '/positions'"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("torch-fp16@cuda: there is no NVIDIA GPU here", "gpu"),
        ("openvino-fp32: the package 'openvino' is not installed", "openvino"),
        ("takes a minute: run with --slow", None),
        ("a gpus file", None),
    ],
)
def test_required_package_turns_a_skip_into_a_failure(reason: str, expected: str | None) -> None:
    assert require.lacking(reason, ["gpu", "openvino"]) == expected
