"""Text generation in fp16 with an fp16 KV cache: the graphs and the CUDA session, run here on the CPU."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder, check_decoder_placements
from hasten.builder.inspect import inspect
from hasten.builder.preflight import preview
from hasten.bundle import Bundle
from hasten.core.plan import Plan
from hasten.core.tensors import Signature
from hasten.core.variant import Precision, Support, Variant
from hasten.generation.generator import Generator, open_decoder
from hasten.onnx_graph import operators, read_graph
from support.assertions import assert_same_greedy_tokens
from support.fake_bench import fake_benchmark
from support.models import tiny_generators

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HALF = "onnxruntime-fp16@cuda"
ON_DEVICE = partial(CudaDecoder, device="cpu")
STARTS = (2, 5)
ENCODED = ("t5", "bart")
MORE = ("qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "marian")
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]
# Relative to the largest logit. Random weights round badly; wrong logits would differ by all of it.
CLOSE = 0.05


def exported(module: Any, folder: Path) -> dict[str, Path]:
    from hasten.builder.export.decoder import export_decoder, rotary_tables
    from hasten.builder.export.encoder_decoder import export_encoder_decoder
    from hasten.quantize.methods.fp16 import fuse_norms

    graphs, context = {DECODER: folder / "decoder.onnx"}, tiny_generators.CONTEXT
    if module.config.is_encoder_decoder:
        graphs = export_encoder_decoder(module, folder, STARTS, (context, context))
    else:
        export_decoder(module, graphs[DECODER], rotary_tables(module, context))
    (folder / "joined").mkdir()
    return fuse_norms(graphs, folder / "joined")


def convert_to_fp16(
    graphs: dict[str, Path], folder: Path, overflows: dict[str, frozenset[str]] | None = None
) -> dict[str, Path]:
    from hasten.quantize.methods.fp16 import convert_to_fp16

    folder.mkdir()
    return convert_to_fp16(graphs, folder, overflows or {})


def opened(graphs: dict[str, Path], precision: Precision = Precision.FP16) -> CudaDecoder:
    signature = Signature((), (), max_length=tiny_generators.CONTEXT)
    names = {name: file.name for name, file in graphs.items()}
    artifact = Artifact(Variant("onnxruntime", precision, "cuda"), signature, graphs[DECODER].parent, names)
    return ON_DEVICE(artifact, RunOptions(1), 4)


def logits(module: Any, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    feeds = {"input_ids": torch.tensor([[*prompt.tolist(), *tokens]])}
    if module.config.is_encoder_decoder:
        feeds = {"input_ids": torch.from_numpy(prompt)[None], "decoder_input_ids": torch.tensor([[*STARTS, *tokens]])}
    with torch.inference_mode():
        result: np.ndarray = module(**feeds, use_cache=False).logits[0, -1].numpy()
    return result


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *ENCODED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_fp16_logits_are_close_to_the_original(name: str, tmp_path: Path) -> None:
    module = tiny_generators.module(name)
    graphs = convert_to_fp16(exported(module, tmp_path), tmp_path / "fp16")
    for graph in graphs.values():
        ends = read_graph(graph, with_weights=False).graph
        kinds = {end.name: end.type.tensor_type.elem_type for end in (*ends.input, *ends.output)}
        assert stored_precision(graph) is Precision.FP16
        # Nothing but the logits leaves the device in fp32.
        assert {end for end, kind in kinds.items() if kind == 1} <= {"logits"}
        assert sum(kind == 10 for kind in kinds.values()) >= 4
    assert not operators(graphs[DECODER]).get("ReduceMean")
    texts: list[list[int]] = [[] for _ in PROMPTS]
    random = np.random.default_rng(0)
    with opened(graphs) as session:
        for slot, prompt in enumerate(PROMPTS):
            expected = logits(module, prompt, [])
            np.testing.assert_allclose(
                session.prefill(slot, prompt), expected, rtol=0, atol=CLOSE * abs(expected).max()
            )
        for turn in range(6):
            slots = [3, 0] if turn == 3 else [0, 1, 2, 3]
            ids = random.integers(3, 300, len(slots))
            for slot, token, result in zip(slots, ids, session.decode(slots, ids), strict=True):
                texts[slot].append(int(token))
                expected = logits(module, PROMPTS[slot], texts[slot])
                np.testing.assert_allclose(result, expected, rtol=0, atol=CLOSE * abs(expected).max())


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_blockwise_weights_run_with_fp16_activations(precision: Precision, tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir", reason="quantizing weights in blocks")
    from hasten.quantize.methods.blocks import BLOCK_FORMATS, quantize_decoder_blocks

    module = tiny_generators.module("gpt2")
    (tmp_path / "blocks").mkdir()
    blocks = quantize_decoder_blocks(exported(module, tmp_path), tmp_path / "blocks", BLOCK_FORMATS[precision])
    graphs = convert_to_fp16(blocks, tmp_path / "fp16")
    assert stored_precision(graphs[DECODER]) is precision
    scales = {
        tensor.data_type
        for tensor in read_graph(graphs[DECODER]).graph.initializer
        if any(tensor.name in node.input[2:3] for node in read_graph(graphs[DECODER]).graph.node
               if node.op_type in ("MatMulNBits", "GatherBlockQuantized"))
    }  # fmt: skip
    assert scales == {10}
    with opened(graphs, precision) as session:
        result, expected = session.prefill(0, PROMPTS[0]), logits(module, PROMPTS[0], [])
    assert 0 < np.linalg.norm(result - expected) / np.linalg.norm(expected) < 0.1


def test_overflowing_tensors_stay_in_fp32(tmp_path: Path) -> None:
    from hasten.quantize.analysis.overflow import DecoderText, find_decoder_overflows

    module = tiny_generators.module("llama")
    with torch.no_grad():  # as real ones do, at a few places, in the layers between the first and the last
        module.model.layers[0].mlp.down_proj.weight[3] *= 1e5
    graphs = exported(module, tmp_path)
    result = find_decoder_overflows(graphs, [DecoderText(prompt) for prompt in PROMPTS])
    overflows = {name: frozenset(one.tensor for one in tensors) for name, tensors in result.items()}
    assert overflows[DECODER]
    expected = logits(module, PROMPTS[0], [])
    with opened(convert_to_fp16(graphs, tmp_path / "broken")) as session:
        assert not np.isfinite(session.prefill(0, PROMPTS[0])).all()
    with opened(convert_to_fp16(graphs, tmp_path / "kept", overflows)) as session:
        np.testing.assert_allclose(session.prefill(0, PROMPTS[0]), expected, rtol=0, atol=CLOSE * abs(expected).max())


def test_encoder_overflows_are_found(tmp_path: Path) -> None:
    from hasten.quantize.analysis.overflow import DecoderText, find_decoder_overflows

    module = tiny_generators.module("t5")
    with torch.no_grad():
        module.encoder.block[0].layer[1].DenseReluDense.wo.weight[3] *= 1e6
    graphs = exported(module, tmp_path)
    result = find_decoder_overflows(graphs, [DecoderText(np.array([*STARTS, 7, 9]), prompt) for prompt in PROMPTS])
    assert [one for one in result[ENCODER] if "/encoder/" in one.tensor]
    overflows = {name: frozenset(one.tensor for one in tensors) for name, tensors in result.items()}
    expected = logits(module, PROMPTS[0], [])
    with opened(convert_to_fp16(graphs, tmp_path / "kept", overflows)) as session:
        np.testing.assert_allclose(session.prefill(0, PROMPTS[0]), expected, rtol=0, atol=CLOSE * abs(expected).max())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("fp16")
    with pytest.MonkeyPatch.context() as patch, fake_benchmark():
        _pretend(patch)
        model = tiny_generators.save("gpt2", folder / "model")
        return hasten.build(model, folder / "bundle", min_agreement=0.8, keep="all", threads=1)


def _pretend(patch: pytest.MonkeyPatch) -> None:
    """Run the CUDA session on the CPU, and skip the check of operator placement."""
    patch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.yes())
    patch.setattr("hasten.backends.onnxruntime.check_decoder_placements", lambda _: None)
    patch.setattr("hasten.backends.onnxruntime.CudaDecoder", ON_DEVICE)


def test_gpu_build_holds_fp16_and_blockwise_variants(bundle: Bundle) -> None:
    entries = {entry.name: entry for entry in bundle.manifest.variants}
    others = {"onnxruntime-int8@cuda", "onnxruntime-int4@cuda"} if find_spec("onnx_ir") is not None else set()
    assert set(entries) == {HALF, *others}
    assert {entry.device for entry in entries.values()} == {"cuda"}
    assert entries[HALF].agreement.value == 1.0
    assert entries[HALF].metric is not None
    for entry in entries.values():
        assert stored_precision(bundle.artifact(entry).path(DECODER)) is entry.precision
    passes = [(done.name, done.variants) for done in bundle.report.passes]
    assert ("fp16", (HALF,)) in passes
    # Keys and values of two layers of four heads, two bytes a number.
    assert inspect(bundle).cache.bytes_per_token == 2 * 2 * 4 * 16 * 2
    for name in others:
        assert {("quantize", (name,)), ("fp16", (name,))} <= set(passes)
    bundle.check()


def test_gpu_bundle_matches_transformers(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    _pretend(monkeypatch)
    theirs = AutoModelForCausalLM.from_pretrained(bundle.manifest.model.id).eval()
    decoder = open_decoder(bundle.artifact(bundle.entry(HALF)), RunOptions(1), 4)
    assert isinstance(decoder, CudaDecoder)
    with decoder:
        for prompt in PROMPTS:
            tokens = [int(decoder.prefill(0, prompt).argmax())]
            while len(tokens) < 32:
                tokens.append(int(decoder.decode([0], np.array(tokens[-1:]))[0].argmax()))
            decoder.free(0)
            assert_same_greedy_tokens(theirs, prompt.tolist(), tokens)


def test_cuda_decoder_matches_the_cpu_decoder(bundle: Bundle, tmp_path: Path) -> None:
    """In fp32, so that differences can only come from wrong copies."""
    with fake_benchmark():
        exact = hasten.build(bundle.manifest.model.id, tmp_path / "exact", variants="onnxruntime-fp32", threads=1)
    prompts = ["the cat sat", "a dog", "is this", "she reads old books", "what a film"]
    artifact = exact.artifact(exact.entry("onnxruntime-fp32"))
    with hasten.load(exact.path, threads=1) as there:
        decoder = ON_DEVICE(artifact, RunOptions(1), there.decoder.slots)
        with Generator(there.spec, there.tokenizer, decoder) as here:
            for options in ({"num_beams": 3, "max_tokens": 12}, {"max_tokens": 20, "temperature": 1.0, "seed": 3}):
                assert here(prompts, **options) == there(prompts, **options)


def test_gpu_bundle_runs_in_server_and_dropin(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.server.models.generative_model import GenerativeModel
    from hasten.server.scheduling.core_scheduler import CoreScheduler
    from hasten.server.scheduling.generation_engine import GenerationObserver
    from hasten.server.settings import Settings
    from hasten.transformers import AutoModelForCausalLM

    _pretend(monkeypatch)
    served = GenerativeModel("fp16", bundle, Settings(threads=1, variant=HALF), CoreScheduler(1), GenerationObserver())
    assert served.variant.name == HALF
    assert served.close()
    with fake_benchmark():
        model = AutoModelForCausalLM.from_pretrained(bundle.manifest.model.id, device="cuda", threads=1)
    assert [entry.name for entry in model.bundle.manifest.variants] == [HALF]
    assert model.device.type == "cuda"
    ids = torch.tensor([PROMPTS[0].tolist()])
    result = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert result.shape[1] > ids.shape[1]
    model.close()


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, "cuda"), ({"precision": "int8"}, "cuda"), ({"precision": "fp32"}, "cpu"), ({"device": "cpu"}, "cpu")],
    ids=["default", "precision of both devices", "precision of CPUs", "explicit device"],
)
def test_gpu_is_used_if_available(
    bundle: Bundle, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(bundle.manifest.model.id, **options)
    monkeypatch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.no("there is none"))
    assert preview(plan, tmp_path / "bundle").device == "cpu"
    _pretend(monkeypatch)
    assert preview(plan, tmp_path / "bundle").device == device


def test_unsupported_gpu_builds_are_rejected(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, target = bundle.manifest.model.id, tmp_path / "bundle"
    with monkeypatch.context() as patch:
        _pretend(patch)
        expected_reason = "onnxruntime-fp32@cuda does not support text generation: ONNX Runtime's GroupQueryAttention"
        with pytest.raises(hasten.UnsupportedError, match=expected_reason) as caught:
            hasten.build(model, target, variants="onnxruntime-fp32@cuda")
        assert caught.value.hint == f"--variants {HALF}"
        with pytest.raises(hasten.UnsupportedError, match="has no fp32 kernel for GPUs"):
            hasten.build(model, target, device="cuda", precision="fp32")

        def without_bias(*_: object) -> None:
            raise hasten.StageError("ONNX Runtime failed on 1 rows: attention_bias is not supported in it")

        patch.setattr("hasten.backends.onnxruntime.check_decoder_placements", check_decoder_placements)
        patch.setattr("hasten.backends.onnxruntime.cuda_decoder._profile_decoder", without_bias)
        # One that the build picked by itself is passed over, one that was asked for is an error.
        expected_reason = "the GroupQueryAttention of this ONNX Runtime takes no bias on a GPU"
        with pytest.raises(hasten.StageError, match=f"no variant of .* runs on 'cuda': {expected_reason}") as caught:
            hasten.build(model, target, device="cuda")
        assert caught.value.hint == "--device cpu"
        with pytest.raises(hasten.UnsupportedError, match=expected_reason):
            hasten.build(model, target, variants=HALF)
    assert not target.exists()


def test_int8_encoder_is_cpu_only(tiny_classifier: Any, tmp_path: Path) -> None:
    with pytest.raises(hasten.UnsupportedError, match="ONNX Runtime runs int8 encoder graphs only on CPUs"):
        hasten.build(tiny_classifier("bert"), tmp_path / "bundle", variants="onnxruntime-int8@cuda")
