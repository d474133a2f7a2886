"""Test generative models on a real GPU: built, compared with transformers, benchmarked, loaded and served.

Tests that need no GPU are in contract/generation/test_fp16.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from packaging.version import Version

import hasten
from hasten.backends import BACKENDS, DECODER, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.report import Status
from hasten.core.system.hardware import this_machine
from hasten.core.variant import Precision, Variant
from hasten.generation.generator import open_decoder
from support.assertions import assert_same_greedy_tokens
from support.models import tiny_generators
from support.server_process import Server

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FP16 = Variant.parse("onnxruntime-fp16@cuda")
SUPPORT = BACKENDS.get("onnxruntime").probe(this_machine(), FP16)
pytestmark = pytest.mark.skipif(not SUPPORT.ok, reason=f"ONNX Runtime has no usable GPU: {SUPPORT.reason}")

COUNT = 32
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]


def build(name: str, folder: Path, **options: Any) -> Bundle:
    model = tiny_generators.save(name, folder / "model")
    defaults = {"device": "cuda", "bench_budget_s": 0.2, "batch_size": 2, "seq_len": 8, "keep": "all"}
    # Random weights agree on fewer tokens than trained ones.
    return hasten.build(model, folder / "bundle", **({"min_agreement": 0.8} | defaults | options))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A build without named variants; one that cannot be made here is reported and does not stop the others."""
    return build("gpt2", tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def decoder(bundle: Bundle) -> Iterator[CudaDecoder]:
    opened = open_decoder(bundle.artifact(bundle.entry(FP16.name)), RunOptions(1), 4)
    assert isinstance(opened, CudaDecoder)
    with opened:
        yield opened


def greedy(decoder: Any, prompt: np.ndarray, count: int = COUNT) -> list[int]:
    tokens = [int(decoder.prefill(0, prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(decoder.decode([0], np.array(tokens[-1:]))[0].argmax()))
    decoder.free(0)
    return tokens


def transformers_model(bundle: Bundle, kind: str = "AutoModelForCausalLM") -> Any:
    return getattr(transformers, kind).from_pretrained(bundle.manifest.model.id).eval()


def test_build_contains_gpu_variants(bundle: Bundle) -> None:
    names = [entry.name for entry in bundle.manifest.variants]
    assert FP16.name in names
    assert all(name.endswith("@cuda") for name in names)
    for entry in bundle.manifest.variants:
        assert stored_precision(bundle.artifact(entry).path(DECODER)) is entry.precision
    assert bundle.entry(FP16.name).agreement.value >= 0.9
    # Missing variants are reported with a reason.
    rejected = {candidate.variant: candidate for candidate in bundle.report.candidates}
    for precision in ("int8", "int4"):
        name = f"onnxruntime-{precision}@cuda"
        assert name in names or (rejected[name].status in (Status.FAILED, Status.INACCURATE) and rejected[name].reason)
    bundle.check()


def test_bench_compares_with_pytorch_on_gpu(bundle: Bundle) -> None:
    timed = {timing.variant for timing in bundle.report.bench.timings}
    assert {"torch-fp32@cuda", FP16.name} <= timed
    assert bundle.report.bench.baseline == "torch-fp32@cuda"


def test_greedy_tokens_equal_transformers(bundle: Bundle, decoder: CudaDecoder) -> None:
    theirs = transformers_model(bundle)
    for prompt in PROMPTS:
        assert_same_greedy_tokens(theirs, prompt.tolist(), greedy(decoder, prompt))


def test_batched_decode_equals_single_after_free_and_fork(bundle: Bundle, decoder: CudaDecoder) -> None:
    """Moving and copying rows of the KV cache does not change logits."""
    alone = [greedy(decoder, prompt, 8) for prompt in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        decoder.prefill(slot, prompt)
    decoder.free(1)  # the last row moves into the gap
    decoder.prefill(1, PROMPTS[1])
    for step in range(4):
        slots = [3, 0, 2, 1]
        decoder.decode(slots, np.array([alone[slot][step] for slot in slots]))
    # A cycle of three slots; slot 3 is unchanged.
    decoder.fork([1, 2, 0], [0, 1, 2])
    order = {0: 1, 1: 2, 2: 0, 3: 3}
    logits = decoder.decode([0, 1, 2, 3], np.array([alone[order[slot]][4] for slot in range(4)]))
    theirs = transformers_model(bundle)
    for slot, row in order.items():
        ids = torch.tensor([[*PROMPTS[row].tolist(), *alone[row][:5]]])
        with torch.inference_mode():
            expected = theirs(ids).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[slot], expected, rtol=0, atol=0.05 * abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_decoder_architecture_equals_transformers_on_gpu(name: str, tmp_path: Path) -> None:
    bundle = build(name, tmp_path, variants=FP16.name)
    with open_decoder(bundle.artifact(bundle.entry(FP16.name)), RunOptions(1), 4) as decoder:
        assert_same_greedy_tokens(transformers_model(bundle), PROMPTS[0].tolist(), greedy(decoder, PROMPTS[0]))


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_encoder_decoder_passes_gate_on_gpu(name: str, tmp_path: Path) -> None:
    bundle = build(name, tmp_path, variants=FP16.name)
    assert bundle.entry(FP16.name).agreement.value >= 0.8


def test_t5_runs_or_is_rejected_with_operator_name(tmp_path: Path) -> None:
    """Only newer versions of ONNX Runtime support its position bias on a GPU."""
    rejection, bundle = "", None
    try:
        bundle = build("t5", tmp_path, variants=FP16.name)
    except hasten.UnsupportedError as error:
        rejection = error.message
    if bundle is None:
        assert "GroupQueryAttention" in rejection
        assert Version(onnxruntime.__version__) < Version("1.31.1")
    else:
        assert bundle.entry(FP16.name).agreement.value >= 0.8


def test_gpu_variant_loads_verifies_and_generates_in_dropin(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    from hasten.transformers import AutoModelForCausalLM

    with hasten.load(bundle.path, variant=FP16.name) as generate:
        (answer,) = generate("the cat sat", max_tokens=8)
        assert answer["generated_text"].startswith("the cat sat")
        assert generate("the cat sat", max_tokens=8, num_beams=3)
    assert main(["verify", str(bundle.path)]) == 0
    assert FP16.name in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(bundle.path, device="cuda", precision="fp16")
    ids = torch.tensor([PROMPTS[0].tolist()], device="cuda")
    output = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert output.device.type == "cuda"
    assert output.shape[1] > ids.shape[1]
    model.close()


def test_gpu_variant_is_served(bundle: Bundle) -> None:
    pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
    server = Server(str(bundle.path), "--threads", "1")
    try:
        request = {"model": bundle.path.name, "prompt": "the cat sat", "max_tokens": 8, "temperature": 0}
        answer = server.json("POST", "/v1/completions", request)
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_fp32_decoder_is_rejected_on_gpu(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(hasten.UnsupportedError, match="GroupQueryAttention"):
        hasten.build(bundle.manifest.model.id, tmp_path / "bundle", variants="onnxruntime-fp32@cuda")
    assert stored_precision(bundle.artifact(bundle.entry(FP16.name)).path(DECODER)) is Precision.FP16
