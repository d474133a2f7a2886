"""Models that write on a real GPU: built for it, held to transformers' own words, timed, loaded and served.

What can be shown without one is in test_generation_halves.py.
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
import tiny_writers
from hasten.backends import BACKENDS, DECODER, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.hardware import this_machine
from hasten.core.report import Status
from hasten.core.variant import Precision, Variant
from hasten.generation.generator import open_decoder
from serving import Server
from written_alike import assert_written_alike

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HALF = Variant.parse("onnxruntime-fp16@cuda")
SUPPORT = BACKENDS.get("onnxruntime").probe(this_machine(), HALF)
pytestmark = pytest.mark.skipif(not SUPPORT.ok, reason=f"no GPU that ONNX Runtime can use: {SUPPORT.reason}")

COUNT = 32
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]


def built(name: str, folder: Path, **options: Any) -> Bundle:
    model = tiny_writers.save(name, folder / "model")
    asked = {"device": "cuda", "bench_budget_s": 0.2, "batch_size": 2, "seq_len": 8, "keep": "all"}
    # Of weights this random the gate keeps fewer words than of a real model's.
    return hasten.build(model, folder / "bundle", **({"min_agreement": 0.8} | asked | options))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The build picks what it tries; where one of them cannot be made here, it is named, and the others are."""
    return built("gpt2", tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def decoder(bundle: Bundle) -> Iterator[CudaDecoder]:
    opened = open_decoder(bundle.artifact(bundle.entry(HALF.name)), RunOptions(1), 4)
    assert isinstance(opened, CudaDecoder)
    with opened:
        yield opened


def greedy(decoder: Any, prompt: np.ndarray, count: int = COUNT) -> list[int]:
    tokens = [int(decoder.begin(0, prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(decoder.step([0], np.array(tokens[-1:]))[0].argmax()))
    decoder.end(0)
    return tokens


def original(bundle: Bundle, kind: str = "AutoModelForCausalLM") -> Any:
    return getattr(transformers, kind).from_pretrained(bundle.manifest.model.id).eval()


def test_a_build_holds_what_was_made_for_the_gpu(bundle: Bundle) -> None:
    names = [entry.name for entry in bundle.manifest.variants]
    assert HALF.name in names
    assert all(name.endswith("@cuda") for name in names)
    for entry in bundle.manifest.variants:
        assert stored_precision(bundle.artifact(entry).path(DECODER)) is entry.precision
    assert bundle.entry(HALF.name).agreement.value >= 0.9
    # Whatever is not there says why.
    told = {one.variant: one for one in bundle.report.candidates}
    for precision in ("int8", "int4"):
        name = f"onnxruntime-{precision}@cuda"
        assert name in names or (told[name].status in (Status.FAILED, Status.INACCURATE) and told[name].reason)
    bundle.check()


def test_it_was_timed_beside_pytorch_on_the_gpu(bundle: Bundle) -> None:
    timed = {timing.variant for timing in bundle.report.bench.timings}
    assert {"torch-fp32@cuda", HALF.name} <= timed
    assert bundle.report.bench.baseline == "torch-fp32@cuda"


def test_it_writes_what_transformers_writes(bundle: Bundle, decoder: CudaDecoder) -> None:
    theirs = original(bundle)
    for prompt in PROMPTS:
        assert_written_alike(theirs, prompt.tolist(), greedy(decoder, prompt))


def test_rows_step_together_come_go_and_are_copied(bundle: Bundle, decoder: CudaDecoder) -> None:
    """The same rows alone and together: what is copied or moved on the device must not show."""
    alone = [greedy(decoder, prompt, 8) for prompt in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        decoder.begin(slot, prompt)
    decoder.end(1)  # the last row moves into its place
    decoder.begin(1, PROMPTS[1])
    for place in range(4):
        slots = [3, 0, 2, 1]
        decoder.step(slots, np.array([alone[slot][place] for slot in slots]))
    # A circle, and one that is lost.
    decoder.copy([1, 2, 0], [0, 1, 2])
    order = {0: 1, 1: 2, 2: 0, 3: 3}
    found = decoder.step([0, 1, 2, 3], np.array([alone[order[slot]][4] for slot in range(4)]))
    theirs = original(bundle)
    for slot, row in order.items():
        ids = torch.tensor([[*PROMPTS[row].tolist(), *alone[row][:5]]])
        with torch.inference_mode():
            expected = theirs(ids).logits[0, -1].numpy()
        np.testing.assert_allclose(found[slot], expected, rtol=0, atol=0.05 * abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_other_decoders(name: str, tmp_path: Path) -> None:
    made = built(name, tmp_path, variants=HALF.name)
    with open_decoder(made.artifact(made.entry(HALF.name)), RunOptions(1), 4) as decoder:
        assert_written_alike(original(made), PROMPTS[0].tolist(), greedy(decoder, PROMPTS[0]))


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_models_with_an_encoder(name: str, tmp_path: Path) -> None:
    made = built(name, tmp_path, variants=HALF.name)
    assert made.entry(HALF.name).agreement.value >= 0.8


def test_t5_writes_or_is_refused_by_the_name_of_the_operator(tmp_path: Path) -> None:
    """ONNX Runtime's operator takes its bias of positions on a GPU in newer versions alone."""
    refused, made = "", None
    try:
        made = built("t5", tmp_path, variants=HALF.name)
    except hasten.UnsupportedError as error:
        refused = error.message
    if made is None:
        assert "GroupQueryAttention" in refused
        assert Version(onnxruntime.__version__) < Version("1.31.1")
    else:
        assert made.entry(HALF.name).agreement.value >= 0.8


def test_loaded_verified_and_as_a_class_of_transformers(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    from hasten.transformers import AutoModelForCausalLM

    with hasten.load(bundle.path, variant=HALF.name) as write:
        (answer,) = write("the cat sat", max_tokens=8)
        assert answer["generated_text"].startswith("the cat sat")
        assert write("the cat sat", max_tokens=8, beams=3)
    assert main(["verify", str(bundle.path)]) == 0
    assert HALF.name in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(bundle.path, device="cuda", precision="fp16")
    ids = torch.tensor([PROMPTS[0].tolist()], device="cuda")
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert found.device.type == "cuda"
    assert found.shape[1] > ids.shape[1]
    model.close()


def test_served(bundle: Bundle) -> None:
    pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
    server = Server(str(bundle.path), "--threads", "1")
    try:
        asked = {"model": bundle.path.name, "prompt": "the cat sat", "max_tokens": 8, "temperature": 0}
        answer = server.json("POST", "/v1/completions", asked)
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_fp32_is_refused_with_the_reason(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(hasten.UnsupportedError, match="GroupQueryAttention"):
        hasten.build(bundle.manifest.model.id, tmp_path / "bundle", variants="onnxruntime-fp32@cuda")
    assert stored_precision(bundle.artifact(bundle.entry(HALF.name)).path(DECODER)) is Precision.FP16
