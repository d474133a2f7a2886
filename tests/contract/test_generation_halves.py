"""Models that write in fp16, their caches too: the graphs and the session for a GPU, run here without one."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import tiny_writers
from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder, check_decoder_placements
from hasten.builder.inspect import inspect
from hasten.builder.outline import outline
from hasten.bundle import Bundle
from hasten.core.plan import Plan
from hasten.core.tensors import Signature
from hasten.core.variant import Precision, Support, Variant
from hasten.generation.generator import Generator, open_decoder
from hasten.graph import operators, read_graph
from untimed import untimed
from written_alike import assert_written_alike

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HALF = "onnxruntime-fp16@cuda"
ON_DEVICE = partial(CudaDecoder, device="cpu")
STARTS = (2, 5)
ENCODED = ("t5", "bart")
MORE = ("qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "marian")
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]
# Of the largest logit. Weights this random round badly; halves of the wrong numbers would be off by all of it.
CLOSE = 0.05


def exported(module: Any, folder: Path) -> dict[str, Path]:
    from hasten.builder.decoder import export_decoder, rotation_tables
    from hasten.builder.encoder_decoder import export_encoder_decoder
    from hasten.quantize.written_half import join_norms

    graphs, context = {DECODER: folder / "decoder.onnx"}, tiny_writers.CONTEXT
    if module.config.is_encoder_decoder:
        graphs = export_encoder_decoder(module, folder, STARTS, (context, context))
    else:
        export_decoder(module, graphs[DECODER], rotation_tables(module, context))
    (folder / "joined").mkdir()
    return join_norms(graphs, folder / "joined")


def halved(graphs: dict[str, Path], folder: Path, beyond: dict[str, frozenset[str]] | None = None) -> dict[str, Path]:
    from hasten.quantize.written_half import halve_written

    folder.mkdir()
    return halve_written(graphs, folder, beyond or {})


def opened(graphs: dict[str, Path], precision: Precision = Precision.FP16) -> CudaDecoder:
    signature = Signature((), (), max_length=tiny_writers.CONTEXT)
    names = {name: file.name for name, file in graphs.items()}
    artifact = Artifact(Variant("onnxruntime", precision, "cuda"), signature, graphs[DECODER].parent, names)
    return ON_DEVICE(artifact, RunOptions(1), 4)


def logits(module: Any, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    feeds = {"input_ids": torch.tensor([[*prompt.tolist(), *tokens]])}
    if module.config.is_encoder_decoder:
        feeds = {"input_ids": torch.from_numpy(prompt)[None], "decoder_input_ids": torch.tensor([[*STARTS, *tokens]])}
    with torch.inference_mode():
        found: np.ndarray = module(**feeds, use_cache=False).logits[0, -1].numpy()
    return found


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *ENCODED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_rows_step_together_near_the_original(name: str, tmp_path: Path) -> None:
    module = tiny_writers.module(name)
    graphs = halved(exported(module, tmp_path), tmp_path / "halves")
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
            np.testing.assert_allclose(session.begin(slot, prompt), expected, rtol=0, atol=CLOSE * abs(expected).max())
        for turn in range(6):
            slots = [3, 0] if turn == 3 else [0, 1, 2, 3]
            ids = random.integers(3, 300, len(slots))
            for slot, token, found in zip(slots, ids, session.step(slots, ids), strict=True):
                texts[slot].append(int(token))
                expected = logits(module, PROMPTS[slot], texts[slot])
                np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * abs(expected).max())


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_weights_in_blocks_multiply_halves(precision: Precision, tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir", reason="quantizing weights in blocks")
    from hasten.quantize.written import BLOCKS, quantize_written

    module = tiny_writers.module("gpt2")
    (tmp_path / "blocks").mkdir()
    blocks = quantize_written(exported(module, tmp_path), tmp_path / "blocks", BLOCKS[precision])
    graphs = halved(blocks, tmp_path / "halves")
    assert stored_precision(graphs[DECODER]) is precision
    scales = {
        tensor.data_type
        for tensor in read_graph(graphs[DECODER]).graph.initializer
        if any(tensor.name in node.input[2:3] for node in read_graph(graphs[DECODER]).graph.node
               if node.op_type in ("MatMulNBits", "GatherBlockQuantized"))
    }  # fmt: skip
    assert scales == {10}
    with opened(graphs, precision) as session:
        found, expected = session.begin(0, PROMPTS[0]), logits(module, PROMPTS[0], [])
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.1


def test_what_leaves_the_range_stays_in_fp32(tmp_path: Path) -> None:
    from hasten.quantize.written_range import Text, overflows_written

    module = tiny_writers.module("llama")
    with torch.no_grad():  # as real ones do, at a few places, in the layers between the first and the last
        module.model.layers[0].mlp.down_proj.weight[3] *= 1e5
    graphs = exported(module, tmp_path)
    found = overflows_written(graphs, [Text(prompt) for prompt in PROMPTS])
    beyond = {name: frozenset(one.tensor for one in tensors) for name, tensors in found.items()}
    assert beyond[DECODER]
    expected = logits(module, PROMPTS[0], [])
    with opened(halved(graphs, tmp_path / "broken")) as session:
        assert not np.isfinite(session.begin(0, PROMPTS[0])).all()
    with opened(halved(graphs, tmp_path / "kept", beyond)) as session:
        np.testing.assert_allclose(session.begin(0, PROMPTS[0]), expected, rtol=0, atol=CLOSE * abs(expected).max())


def test_of_an_encoder_too_what_is_large_is_seen(tmp_path: Path) -> None:
    from hasten.quantize.written_range import Text, overflows_written

    module = tiny_writers.module("t5")
    with torch.no_grad():
        module.encoder.block[0].layer[1].DenseReluDense.wo.weight[3] *= 1e6
    graphs = exported(module, tmp_path)
    found = overflows_written(graphs, [Text(np.array([*STARTS, 7, 9]), prompt) for prompt in PROMPTS])
    assert [one for one in found[ENCODER] if "/encoder/" in one.tensor]
    beyond = {name: frozenset(one.tensor for one in tensors) for name, tensors in found.items()}
    expected = logits(module, PROMPTS[0], [])
    with opened(halved(graphs, tmp_path / "kept", beyond)) as session:
        np.testing.assert_allclose(session.begin(0, PROMPTS[0]), expected, rtol=0, atol=CLOSE * abs(expected).max())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("halves")
    with pytest.MonkeyPatch.context() as patch, untimed():
        _pretend(patch)
        model = tiny_writers.save("gpt2", folder / "model")
        return hasten.build(model, folder / "bundle", min_agreement=0.8, keep="all", threads=1)


def _pretend(patch: pytest.MonkeyPatch) -> None:
    """The session for a GPU runs on the CPU, and nobody looks what landed there."""
    patch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.yes())
    patch.setattr("hasten.backends.onnxruntime.check_decoder_placements", lambda _: None)
    patch.setattr("hasten.backends.onnxruntime.CudaDecoder", ON_DEVICE)


def test_a_build_for_a_gpu_holds_halves_and_blocks(bundle: Bundle) -> None:
    entries = {entry.name: entry for entry in bundle.manifest.variants}
    others = {"onnxruntime-int8@cuda", "onnxruntime-int4@cuda"} if find_spec("onnx_ir") is not None else set()
    assert set(entries) == {HALF, *others}
    assert {entry.device for entry in entries.values()} == {"cuda"}
    assert entries[HALF].agreement.value == 1.0
    assert entries[HALF].metric is not None
    for entry in entries.values():
        assert stored_precision(bundle.artifact(entry).path(DECODER)) is entry.precision
    passes = [(done.name, done.variants) for done in bundle.report.passes]
    assert ("halve", (HALF,)) in passes
    # Keys and values of two layers of four heads, two bytes a number.
    assert inspect(bundle).cache.bytes_per_token == 2 * 2 * 4 * 16 * 2
    for name in others:
        assert {("quantize", (name,)), ("halve", (name,))} <= set(passes)
    bundle.check()


def test_its_bundle_writes_what_transformers_writes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    _pretend(monkeypatch)
    theirs = AutoModelForCausalLM.from_pretrained(bundle.manifest.model.id).eval()
    decoder = open_decoder(bundle.artifact(bundle.entry(HALF)), RunOptions(1), 4)
    assert isinstance(decoder, CudaDecoder)
    with decoder:
        for prompt in PROMPTS:
            tokens = [int(decoder.begin(0, prompt).argmax())]
            while len(tokens) < 32:
                tokens.append(int(decoder.step([0], np.array(tokens[-1:]))[0].argmax()))
            decoder.end(0)
            assert_written_alike(theirs, prompt.tolist(), tokens)


def test_texts_beams_and_chance_are_those_of_a_processor(bundle: Bundle, tmp_path: Path) -> None:
    """In fp32, so that what differs is what was copied wrongly."""
    with untimed():
        exact = hasten.build(bundle.manifest.model.id, tmp_path / "exact", variants="onnxruntime-fp32", threads=1)
    prompts = ["the cat sat", "a dog", "is this", "she reads old books", "what a film"]
    artifact = exact.artifact(exact.entry("onnxruntime-fp32"))
    with hasten.load(exact.path, threads=1) as there:
        decoder = ON_DEVICE(artifact, RunOptions(1), there.decoder.slots)
        with Generator(there.spec, there.tokenizer, decoder) as here:
            for options in ({"beams": 3, "max_tokens": 12}, {"max_tokens": 20, "temperature": 1.0, "seed": 3}):
                assert here(prompts, **options) == there(prompts, **options)


def test_served_and_as_a_class_of_transformers(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.server.fairness import Turns
    from hasten.server.served import ModelSettings
    from hasten.server.served_writer import ServedWriter
    from hasten.server.writing import WritingObserver
    from hasten.transformers import AutoModelForCausalLM

    _pretend(monkeypatch)
    served = ServedWriter("halves", bundle, ModelSettings(threads=1, variant=HALF), Turns(1), WritingObserver())
    assert served.variant.name == HALF
    assert served.close()
    with untimed():
        model = AutoModelForCausalLM.from_pretrained(bundle.manifest.model.id, device="cuda", threads=1)
    assert [entry.name for entry in model.bundle.manifest.variants] == [HALF]
    assert model.device.type == "cuda"
    ids = torch.tensor([PROMPTS[0].tolist()])
    found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert found.shape[1] > ids.shape[1]
    model.close()


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, "cuda"), ({"precision": "int8"}, "cuda"), ({"precision": "fp32"}, "cpu"), ({"device": "cpu"}, "cpu")],
    ids=["by itself", "in what both have", "in what processors have", "asked for"],
)
def test_a_gpu_is_taken_where_there_is_one(
    bundle: Bundle, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(bundle.manifest.model.id, **options)
    monkeypatch.setattr("hasten.backends.onnxruntime.probe_provider", lambda _: Support.no("there is none"))
    assert outline(plan, tmp_path / "bundle").device == "cpu"
    _pretend(monkeypatch)
    assert outline(plan, tmp_path / "bundle").device == device


def test_what_a_gpu_cannot_do_is_refused_in_a_line(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, target = bundle.manifest.model.id, tmp_path / "bundle"
    with monkeypatch.context() as patch:
        _pretend(patch)
        refused = "onnxruntime-fp32@cuda does not write: ONNX Runtime's GroupQueryAttention"
        with pytest.raises(hasten.UnsupportedError, match=refused) as told:
            hasten.build(model, target, variants="onnxruntime-fp32@cuda")
        assert told.value.hint == f"--variants {HALF}"
        with pytest.raises(hasten.UnsupportedError, match="does not compute in fp32 on a GPU"):
            hasten.build(model, target, device="cuda", precision="fp32")

        def without_bias(*_: object) -> None:
            raise hasten.StageError("ONNX Runtime failed on 1 rows: attention_bias is not supported in it")

        patch.setattr("hasten.backends.onnxruntime.check_decoder_placements", check_decoder_placements)
        patch.setattr("hasten.backends.onnxruntime.cuda_decoder._placed", without_bias)
        # One that the build picked by itself is passed over, one that was asked for is an error.
        refused = "the GroupQueryAttention of this ONNX Runtime takes no bias on a GPU"
        with pytest.raises(hasten.StageError, match=f"nothing of .* runs on 'cuda': {refused}") as told:
            hasten.build(model, target, device="cuda")
        assert told.value.hint == "--device cpu"
        with pytest.raises(hasten.UnsupportedError, match=refused):
            hasten.build(model, target, variants=HALF)
    assert not target.exists()


def test_an_encoder_in_int8_is_for_processors(tiny_classifier: Any, tmp_path: Path) -> None:
    with pytest.raises(hasten.UnsupportedError, match="int8 graphs of encoders are for processors"):
        hasten.build(tiny_classifier("bert"), tmp_path / "bundle", variants="onnxruntime-int8@cuda")
