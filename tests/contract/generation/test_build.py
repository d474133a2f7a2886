"""Test builds of generative models: graphs and decoder sessions compared with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder
from hasten.backends.onnxruntime.decoder import DecoderSession
from hasten.bundle import Bundle
from hasten.core.tensors import Signature
from hasten.core.variant import Precision, Variant
from support.models import tiny_generators

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ENCODED = ("t5", "umt5", "bart", "marian", "m2m_100")
STARTS = (2, 5)
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]
CLOSE = 2e-5


class ReferenceModule:
    """A transformers module that returns the logits after a prompt and some tokens."""

    def __init__(self, name: str) -> None:
        self.module = tiny_generators.module(name)
        self.has_encoder = name in ENCODED

    def __call__(self, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
        prompt_ids = torch.from_numpy(prompt)[None]
        after = torch.tensor([[*STARTS, *tokens]]) if self.has_encoder else torch.tensor([tokens], dtype=torch.long)
        feeds = {"input_ids": prompt_ids, "decoder_input_ids": after}
        if not self.has_encoder:
            feeds = {"input_ids": torch.cat([prompt_ids, after], dim=1)}
        with torch.inference_mode():
            return self.module(**feeds, use_cache=False).logits[0, -1].numpy()


# The session for GPUs, run on the CPU.
ON_DEVICE = partial(CudaDecoder, device="cpu")


def open_session(
    graphs: dict[str, Path],
    context: int = tiny_generators.CONTEXT,
    kind: Callable[..., DecoderSession] = DecoderSession,
) -> DecoderSession:
    signature = Signature(inputs=(), outputs=(), max_length=context)
    names = {name: file.name for name, file in graphs.items()}
    artifact = Artifact(Variant("onnxruntime", Precision.FP32), signature, graphs[DECODER].parent, names)
    return kind(artifact, RunOptions(1), 4)


def exported(reference: ReferenceModule, folder: Path, context: int = tiny_generators.CONTEXT) -> dict[str, Path]:
    from hasten.builder.export.decoder import export_decoder, rotary_tables

    if reference.has_encoder:
        from hasten.builder.export.encoder_decoder import export_encoder_decoder

        return export_encoder_decoder(reference.module, folder, STARTS, (context, context))
    file = folder / "decoder.onnx"
    export_decoder(reference.module, file, rotary_tables(reference.module, context))
    return {DECODER: file}


@pytest.fixture(scope="module")
def llama() -> ReferenceModule:
    return ReferenceModule("llama")


@pytest.fixture(scope="module")
def llama_graphs(llama: ReferenceModule, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return exported(llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=[DecoderSession, ON_DEVICE], ids=["cpu", "cuda-session"])
def session(llama_graphs: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[DecoderSession]:
    with open_session(llama_graphs, kind=request.param) as opened:
        yield opened


@pytest.mark.parametrize("name", [name for name in tiny_generators.GENERATORS if name != "bloom"])
def test_batched_decode_of_different_lengths_matches_transformers(name: str, tmp_path: Path) -> None:
    reference = ReferenceModule(name)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    random = np.random.default_rng(0)
    with open_session(exported(reference, tmp_path)) as session:
        for slot, prompt in enumerate(PROMPTS):
            expected = reference(prompt, [])
            np.testing.assert_allclose(
                session.prefill(slot, prompt), expected, rtol=0, atol=CLOSE * abs(expected).max()
            )
        for turn in range(12):
            slots = [3, 0] if turn % 4 == 3 else [0, 1, 2, 3]  # a subset, in another order
            ids = random.integers(3, 300, len(slots))
            for slot, token, actual in zip(slots, ids, session.decode(slots, ids), strict=True):
                texts[slot].append(int(token))
                expected = reference(PROMPTS[slot], texts[slot])
                np.testing.assert_allclose(actual, expected, rtol=0, atol=CLOSE * abs(expected).max())
        if not reference.has_encoder:
            _check_chunks(session, reference)


def _check_chunks(session: DecoderSession, reference: ReferenceModule) -> None:
    """Fill the context of slot 1 with chunks of any length, each after a decode step of slot 3."""
    prompt = np.random.default_rng(7).integers(3, 300, tiny_generators.CONTEXT)
    session.free(1)
    session.prefill(1, prompt[:8])
    end = 8
    for length in (1, 20, 3, tiny_generators.CONTEXT - 32):
        session.decode([3], np.array([9]))
        actual = session.extend(1, prompt[end : end + length])
        end += length
        expected = reference(prompt[:end], [])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=CLOSE * abs(expected).max())
    with pytest.raises(hasten.StageError, match="a prompt of 97 tokens does not fit into a context of 96"):
        session.extend(1, prompt[:1])


def test_sequences_are_added_freed_and_forked(llama: ReferenceModule, session: DecoderSession) -> None:
    texts: dict[int, list[int]] = {}
    random = np.random.default_rng(1)
    max_error = 0.0
    for _ in range(120):
        match random.integers(0, 6):
            case 0 if len(texts) < 4:
                slot = int(random.choice([slot for slot in range(4) if slot not in texts]))
                texts[slot] = random.integers(3, 300, random.integers(1, 20)).tolist()
                session.prefill(slot, np.array(texts[slot]))
            case 1 if texts:
                slot = int(random.choice(list(texts)))
                session.free(slot)
                del texts[slot]
            case 3 if slots := [slot for slot in texts if len(texts[slot]) <= tiny_generators.CONTEXT - 5]:
                chunk = random.integers(3, 300, 5)
                slot = int(random.choice(slots))
                texts[slot] += chunk.tolist()
                session.extend(slot, chunk)
            case 2 if texts:
                sources, targets = random.choice(list(texts), 2), random.choice(4, 2, replace=False)
                session.fork(sources.tolist(), targets.tolist())
                before = dict(texts)
                texts |= {int(to): list(before[int(of)]) for of, to in zip(sources, targets, strict=True)}
            case _ if slots := [slot for slot in texts if len(texts[slot]) < tiny_generators.CONTEXT]:
                slots = random.permutation(slots)[: random.integers(1, len(slots) + 1)].tolist()
                ids = random.integers(3, 300, len(slots))
                for slot, token, actual in zip(slots, ids, session.decode(slots, ids), strict=True):
                    texts[slot].append(int(token))
                    expected = llama(np.array(texts[slot]), [])
                    max_error = max(max_error, float(abs(actual - expected).max() / abs(expected).max()))
    assert max_error < CLOSE


def test_kv_cache_grows_beyond_its_first_capacity(tmp_path: Path) -> None:
    reference = ReferenceModule("gpt2")
    reference.module.config.n_positions = 600
    wider = torch.nn.Embedding(600, 64)
    reference.module.transformer.wpe = wider
    prompts = [np.random.default_rng(5).integers(3, 300, length) for length in (250, 3)]
    graphs = exported(reference, tmp_path, 600)
    after = list(range(20, 40))
    for kind in (DecoderSession, ON_DEVICE):
        with open_session(graphs, 600, kind) as session:
            for slot, prompt in enumerate(prompts):
                session.prefill(slot, prompt)
            for token in after:
                actual = session.decode([0, 1], np.array([token, token]))
        for slot, prompt in enumerate(prompts):
            expected = reference(prompt, after)
            np.testing.assert_allclose(actual[slot], expected, rtol=0, atol=CLOSE * abs(expected).max())


def test_session_rejects_invalid_slots_and_lengths(session: DecoderSession) -> None:
    session.prefill(0, np.array([5]))
    with pytest.raises(hasten.StageError, match="slot 0 is not empty"):
        session.prefill(0, np.array([5]))
    with pytest.raises(hasten.StageError, match="there is no slot 4: there are 4"):
        session.prefill(4, np.array([5]))
    with pytest.raises(hasten.StageError, match="slot 2 is empty"):
        session.decode([2], np.array([5]))
    with pytest.raises(hasten.StageError, match="a prompt of 97 tokens does not fit into a context of 96"):
        session.prefill(1, np.ones(97, np.int32))
    session.prefill(1, np.ones(96, np.int32))
    with pytest.raises(hasten.StageError, match="a sequence has reached the end of the context of 96 tokens"):
        session.decode([0, 1], np.array([5, 5]))
    session.close()
    with pytest.raises(hasten.StageError, match="the session is closed"):
        session.decode([0], np.array([5]))


def test_weights_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    for name in ("llama", "bart"):
        reference, folder = ReferenceModule(name), tmp_path / name
        folder.mkdir()
        graphs = exported(reference, folder)
        weights = sum(part.numel() * 4 for part in reference.module.parameters())
        stored = sum(file.stat().st_size for file in graphs[DECODER].parent.glob("*.data"))
        # Each weight begins at a page boundary.
        assert stored < weights + 4096 * len(list(reference.module.parameters()))
        assert len(list(graphs[DECODER].parent.glob("*.data"))) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_blockwise_weights_are_close_and_share_the_embedding_table(
    name: str, precision: Precision, tmp_path: Path
) -> None:
    from hasten.onnx_graph import operators
    from hasten.quantize.methods.blocks import BLOCK_FORMATS, quantize_decoder_blocks

    reference = ReferenceModule(name)
    exported_graphs, folder = exported(reference, tmp_path), tmp_path / "blocks"
    folder.mkdir()
    graphs = quantize_decoder_blocks(exported_graphs, folder, BLOCK_FORMATS[precision])
    assert {stored_precision(file) for file in graphs.values()} == {precision}
    for file in graphs.values():
        assert operators(file)["GatherBlockQuantized"] == 1
    with open_session(graphs) as session:
        expected, actual = reference(PROMPTS[0], []), session.prefill(0, PROMPTS[0])
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 0 < error < (0.05 if precision is Precision.INT8 else 0.6)


def test_architecture_with_its_own_attention_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        hasten.UnsupportedError, match="BloomForCausalLM does not attend through transformers'"
    ) as caught:
        exported(ReferenceModule("bloom"), tmp_path)
    assert caught.value.hint is not None
    assert "Llama" in caught.value.hint


def greedy(bundle: Bundle, prompt: np.ndarray, count: int) -> list[int]:
    from hasten.backends import BACKENDS

    entry = bundle.entry("onnxruntime-fp32")
    decoder = BACKENDS.get("onnxruntime").open_decoder(bundle.artifact(entry), RunOptions(1), 1)
    tokens = [int(decoder.prefill(0, prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(decoder.decode([0], np.array(tokens[-1:]))[0].argmax()))
    decoder.close()
    return tokens


def generate_with_transformers(folder: Path, kind: str, prompt: np.ndarray, count: int) -> list[int]:
    import transformers

    module: Any = getattr(transformers, kind).from_pretrained(folder)
    ids = torch.from_numpy(prompt)[None]
    actual = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count,
                            max_new_tokens=count, eos_token_id=None)[0].tolist()  # fmt: skip
    return actual[-count:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("llama", "AutoModelForCausalLM", "text-generation"),
        ("t5", "AutoModelForSeq2SeqLM", "text2text-generation"),
    ],
)
def test_bundle_generates_the_tokens_of_transformers(name: str, kind: str, task: str, tmp_path: Path) -> None:
    folder = tiny_generators.save(name, tmp_path / "model")
    bundle = hasten.build(
        folder,
        tmp_path / "bundle",
        variants=["onnxruntime-fp32", "onnxruntime-int8"],
        min_agreement=0.5,
        bench_budget_s=0.2,
        keep="all",
        batch_size=2,
        seq_len=16,
    )
    manifest = bundle.manifest
    assert manifest.task.name == task
    assert manifest.generation is not None
    assert (manifest.generation.max_context, manifest.generation.vocab_size) == (tiny_generators.CONTEXT, 300)
    assert manifest.generation.eos_token_ids == (2,)
    assert manifest.generation.decoder_start_token_ids == ((0,) if name == "t5" else ())
    assert manifest.generation.special_tokens["eos_token"] == "</s>"
    assert "message" in manifest.generation.chat_template
    entries = {entry.name: entry for entry in manifest.variants}
    assert set(entries) == {"onnxruntime-fp32", "onnxruntime-int8"}
    assert entries["onnxruntime-fp32"].agreement.flips == 0
    assert (entries["onnxruntime-int8"].metric is not None) == (name == "llama")
    assert set(entries["onnxruntime-fp32"].graphs) == ({DECODER, ENCODER} if name == "t5" else {DECODER})
    bundle.check()
    timed = {(timing.variant, str(timing.shape)) for timing in bundle.report.bench.timings}
    assert {("torch-fp32", "1×16"), ("onnxruntime-int8", "2×16")} <= timed
    assert greedy(bundle, PROMPTS[0], 24) == generate_with_transformers(folder, kind, PROMPTS[0], 24)
    assert not (bundle.path / "graph").exists()


def test_invalid_options_are_rejected_before_the_weights_are_read(tiny_classifier: Any, tmp_path: Path) -> None:
    folder = tiny_generators.save("gpt2", tmp_path / "model")
    with pytest.raises(hasten.PlanError, match=r"--pooling is for sentence-similarity, and .* is for text-generation"):
        hasten.build(folder, tmp_path / "bundle", pooling="mean")
    with pytest.raises(hasten.UnsupportedError, match="openvino-fp32 does not support text generation"):
        hasten.build(folder, tmp_path / "bundle", variants="openvino-fp32")
    with pytest.raises(hasten.PlanError, match=r"GPT2LMHeadModel, which has no head for text2text-generation; it fits"):
        hasten.build(folder, tmp_path / "bundle", task="text2text-generation")
    with pytest.raises(hasten.PlanError, match="has no head for text-generation; it fits text-classification"):
        hasten.build(tiny_classifier("bert"), tmp_path / "bundle", task="text-generation")
    assert not (tmp_path / "bundle").exists()


def test_model_without_tokenizer_is_rejected(tmp_path: Path) -> None:
    folder = tiny_generators.save("llama", tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(hasten.StageError, match="model has no tokenizer: no"):
        hasten.build(folder, tmp_path / "bundle")


@pytest.mark.parametrize("name", ["gpt2", "llama", *ENCODED])
def test_generation_task_is_detected_from_the_class(name: str, tmp_path: Path) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    actual = preview(Plan(str(tiny_generators.save(name, tmp_path / "model"))), tmp_path / "bundle")
    assert actual.task == ("text2text-generation" if name in ENCODED else "text-generation")


def test_failed_gate_leaves_no_bundle(tmp_path: Path) -> None:
    folder = tiny_generators.save("llama", tmp_path / "model")
    with pytest.raises(hasten.AccuracyError, match=r"no variant of .* can be used") as caught:
        hasten.build(folder, tmp_path / "bundle", variants="onnxruntime-int4", min_agreement=1.0)
    assert [candidate.variant for candidate in caught.value.candidates] == ["onnxruntime-int4"]
    assert not (tmp_path / "bundle").exists()


def test_unsupported_generation_options_are_listed() -> None:
    from types import SimpleNamespace

    from transformers import GenerationConfig

    from hasten.builder.generation.load import unsupported_options

    def unsupported(has_encoder: bool, **options: Any) -> list[str]:
        config = SimpleNamespace(is_encoder_decoder=has_encoder)
        return unsupported_options(SimpleNamespace(generation_config=GenerationConfig(**options), config=config))

    assert unsupported(True, num_beams=2, early_stopping=True, min_length=3, typical_p=1.0, epsilon_cutoff=0.0) == []
    assert unsupported(True, typical_p=0.5, guidance_scale=1.5) == ["guidance_scale=1.5", "typical_p=0.5"]
    assert unsupported(False, token_healing=True) == ["token_healing=True"]
    assert unsupported(False, early_stopping="never", min_length=3) == ["early_stopping=never", "min_length=3"]
