"""Models that write, from their weights to a bundle: graphs and sessions against transformers' own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import tiny_writers
from hasten.backends import DECODER, ENCODER, Artifact, RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.cuda_decoder import CudaDecoder
from hasten.backends.onnxruntime.decoder import DecoderSession
from hasten.bundle import Bundle
from hasten.core.tensors import Signature
from hasten.core.variant import Precision, Variant

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ENCODED = ("t5", "bart", "marian")
STARTS = (2, 5)
PROMPTS = [np.random.default_rng(seed).integers(3, 300, length) for seed, length in enumerate((11, 4, 30, 1))]
CLOSE = 2e-5


class Original:
    """What a module says after a prompt and some tokens."""

    def __init__(self, name: str) -> None:
        self.module = tiny_writers.module(name)
        self.has_encoder = name in ENCODED

    def __call__(self, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
        given = torch.from_numpy(prompt)[None]
        after = torch.tensor([[*STARTS, *tokens]]) if self.has_encoder else torch.tensor([tokens], dtype=torch.long)
        feeds = {"input_ids": given, "decoder_input_ids": after}
        if not self.has_encoder:
            feeds = {"input_ids": torch.cat([given, after], dim=1)}
        with torch.inference_mode():
            return self.module(**feeds, use_cache=False).logits[0, -1].numpy()


# The session for a GPU, with everything it does but the GPU.
ON_DEVICE = partial(CudaDecoder, device="cpu")


def open_session(
    graphs: dict[str, Path], context: int = tiny_writers.CONTEXT, kind: Callable[..., DecoderSession] = DecoderSession
) -> DecoderSession:
    signature = Signature(inputs=(), outputs=(), max_length=context)
    names = {name: file.name for name, file in graphs.items()}
    artifact = Artifact(Variant("onnxruntime", Precision.FP32), signature, graphs[DECODER].parent, names)
    return kind(artifact, RunOptions(1), 4)


def exported(original: Original, folder: Path, context: int = tiny_writers.CONTEXT) -> dict[str, Path]:
    from hasten.builder.decoder import export_decoder, rotation_tables

    if original.has_encoder:
        from hasten.builder.encoder_decoder import export_encoder_decoder

        return export_encoder_decoder(original.module, folder, STARTS, (context, context))
    file = folder / "decoder.onnx"
    export_decoder(original.module, file, rotation_tables(original.module, context))
    return {DECODER: file}


@pytest.fixture(scope="module")
def llama() -> Original:
    return Original("llama")


@pytest.fixture(scope="module")
def llama_graphs(llama: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return exported(llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=[DecoderSession, ON_DEVICE], ids=["processor", "device"])
def session(llama_graphs: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[DecoderSession]:
    with open_session(llama_graphs, kind=request.param) as opened:
        yield opened


@pytest.mark.parametrize("name", [name for name in tiny_writers.WRITERS if name != "bloom"])
def test_rows_of_different_lengths_step_together_as_the_original_does(name: str, tmp_path: Path) -> None:
    original = Original(name)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    random = np.random.default_rng(0)
    with open_session(exported(original, tmp_path)) as session:
        for slot, prompt in enumerate(PROMPTS):
            expected = original(prompt, [])
            np.testing.assert_allclose(session.begin(slot, prompt), expected, rtol=0, atol=CLOSE * abs(expected).max())
        for turn in range(12):
            slots = [3, 0] if turn % 4 == 3 else [0, 1, 2, 3]  # some are left out, in another order
            ids = random.integers(3, 300, len(slots))
            for slot, token, found in zip(slots, ids, session.step(slots, ids), strict=True):
                texts[slot].append(int(token))
                expected = original(PROMPTS[slot], texts[slot])
                np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * abs(expected).max())


def test_rows_come_go_and_are_copied(llama: Original, session: DecoderSession) -> None:
    texts: dict[int, list[int]] = {}
    random = np.random.default_rng(1)
    worst = 0.0
    for _ in range(120):
        match random.integers(0, 6):
            case 0 if len(texts) < 4:
                slot = int(random.choice([slot for slot in range(4) if slot not in texts]))
                texts[slot] = random.integers(3, 300, random.integers(1, 20)).tolist()
                session.begin(slot, np.array(texts[slot]))
            case 1 if texts:
                slot = int(random.choice(list(texts)))
                session.end(slot)
                del texts[slot]
            case 2 if texts:
                sources, targets = random.choice(list(texts), 2), random.choice(4, 2, replace=False)
                session.copy(sources.tolist(), targets.tolist())
                before = dict(texts)
                texts |= {int(to): list(before[int(of)]) for of, to in zip(sources, targets, strict=True)}
            case _ if slots := [slot for slot in texts if len(texts[slot]) < tiny_writers.CONTEXT]:
                slots = random.permutation(slots)[: random.integers(1, len(slots) + 1)].tolist()
                ids = random.integers(3, 300, len(slots))
                for slot, token, found in zip(slots, ids, session.step(slots, ids), strict=True):
                    texts[slot].append(int(token))
                    expected = llama(np.array(texts[slot]), [])
                    worst = max(worst, float(abs(found - expected).max() / abs(expected).max()))
    assert worst < CLOSE


def test_rows_outgrow_the_first_room(tmp_path: Path) -> None:
    original = Original("gpt2")
    original.module.config.n_positions = 600
    wider = torch.nn.Embedding(600, 64)
    original.module.transformer.wpe = wider
    prompts = [np.random.default_rng(5).integers(3, 300, length) for length in (250, 3)]
    graphs = exported(original, tmp_path, 600)
    after = list(range(20, 40))
    for kind in (DecoderSession, ON_DEVICE):
        with open_session(graphs, 600, kind) as session:
            for slot, prompt in enumerate(prompts):
                session.begin(slot, prompt)
            for token in after:
                found = session.step([0, 1], np.array([token, token]))
        for slot, prompt in enumerate(prompts):
            expected = original(prompt, after)
            np.testing.assert_allclose(found[slot], expected, rtol=0, atol=CLOSE * abs(expected).max())


def test_what_a_session_refuses(session: DecoderSession) -> None:
    session.begin(0, np.array([5]))
    with pytest.raises(hasten.StageError, match="slot 0 is not empty"):
        session.begin(0, np.array([5]))
    with pytest.raises(hasten.StageError, match="there is no slot 4: there are 4"):
        session.begin(4, np.array([5]))
    with pytest.raises(hasten.StageError, match="slot 2 is empty"):
        session.step([2], np.array([5]))
    with pytest.raises(hasten.StageError, match="a prompt of 97 tokens does not fit into a context of 96"):
        session.begin(1, np.ones(97, np.int32))
    session.begin(1, np.ones(96, np.int32))
    with pytest.raises(hasten.StageError, match="a row has no room left: the context is 96 tokens"):
        session.step([0, 1], np.array([5, 5]))
    session.close()
    with pytest.raises(hasten.StageError, match="the session is closed"):
        session.step([0], np.array([5]))


def test_weights_are_stored_once(llama: Original, llama_graphs: dict[str, Path], tmp_path: Path) -> None:
    for original, graphs in ((llama, llama_graphs), (bart := Original("bart"), exported(bart, tmp_path))):
        weights = sum(part.numel() * 4 for part in original.module.parameters())
        stored = sum(file.stat().st_size for file in graphs[DECODER].parent.glob("*.data"))
        # Each weight begins on a page of its own.
        assert stored < weights + 4096 * len(list(original.module.parameters()))
        assert len(list(graphs[DECODER].parent.glob("*.data"))) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_weights_in_blocks_stay_near_and_share_their_table(name: str, precision: Precision, tmp_path: Path) -> None:
    from hasten.graph import operators
    from hasten.quantize.written import BLOCKS, quantize_written

    original = Original(name)
    whole, folder = exported(original, tmp_path), tmp_path / "blocks"
    folder.mkdir()
    graphs = quantize_written(whole, folder, BLOCKS[precision])
    assert {stored_precision(file) for file in graphs.values()} == {precision}
    for file in graphs.values():
        assert operators(file)["GatherBlockQuantized"] == 1
    with open_session(graphs) as session:
        expected, found = original(PROMPTS[0], []), session.begin(0, PROMPTS[0])
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < error < (0.05 if precision is Precision.INT8 else 0.6)


def test_an_architecture_that_attends_in_a_way_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hasten.UnsupportedError, match="BloomForCausalLM does not attend through transformers'") as told:
        exported(Original("bloom"), tmp_path)
    assert told.value.hint is not None
    assert "Llama" in told.value.hint


def greedy(bundle: Bundle, prompt: np.ndarray, count: int) -> list[int]:
    from hasten.backends import BACKENDS

    entry = bundle.entry("onnxruntime-fp32")
    decoder = BACKENDS.get("onnxruntime").open_decoder(bundle.artifact(entry), RunOptions(1), 1)
    tokens = [int(decoder.begin(0, prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(decoder.step([0], np.array(tokens[-1:]))[0].argmax()))
    decoder.close()
    return tokens


def generated(folder: Path, kind: str, prompt: np.ndarray, count: int) -> list[int]:
    import transformers

    module: Any = getattr(transformers, kind).from_pretrained(folder)
    ids = torch.from_numpy(prompt)[None]
    found = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count,
                            max_new_tokens=count, eos_token_id=None)[0].tolist()  # fmt: skip
    return found[-count:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("llama", "AutoModelForCausalLM", "text-generation"),
        ("t5", "AutoModelForSeq2SeqLM", "text2text-generation"),
    ],
)
def test_a_bundle_writes_what_transformers_writes(name: str, kind: str, task: str, tmp_path: Path) -> None:
    folder = tiny_writers.save(name, tmp_path / "model")
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
    about = bundle.manifest
    assert about.task.name == task
    assert about.generation is not None
    assert (about.generation.context, about.generation.vocabulary) == (tiny_writers.CONTEXT, 300)
    assert about.generation.end_ids == (2,)
    assert about.generation.start_ids == ((0,) if name == "t5" else ())
    assert about.generation.special_tokens["eos_token"] == "</s>"
    assert "message" in about.generation.chat_template
    entries = {entry.name: entry for entry in about.variants}
    assert set(entries) == {"onnxruntime-fp32", "onnxruntime-int8"}
    assert entries["onnxruntime-fp32"].agreement.flips == 0
    assert (entries["onnxruntime-int8"].metric is not None) == (name == "llama")
    assert set(entries["onnxruntime-fp32"].graphs) == ({DECODER, ENCODER} if name == "t5" else {DECODER})
    bundle.check()
    timed = {(timing.variant, str(timing.shape)) for timing in bundle.report.bench.timings}
    assert {("torch-fp32", "1×16"), ("onnxruntime-int8", "2×16")} <= timed
    assert greedy(bundle, PROMPTS[0], 24) == generated(folder, kind, PROMPTS[0], 24)
    assert not (bundle.path / "graph").exists()


def test_what_is_refused_before_the_weights_are_read(tiny_classifier: Any, tmp_path: Path) -> None:
    folder = tiny_writers.save("gpt2", tmp_path / "model")
    with pytest.raises(hasten.PlanError, match="--pooling is not for text-generation"):
        hasten.build(folder, tmp_path / "bundle", pooling="mean")
    with pytest.raises(hasten.UnsupportedError, match="openvino-fp32 does not write"):
        hasten.build(folder, tmp_path / "bundle", variants="openvino-fp32")
    with pytest.raises(hasten.PlanError, match=r"GPT2LMHeadModel, which has no head for text2text-generation; it fits"):
        hasten.build(folder, tmp_path / "bundle", task="text2text-generation")
    with pytest.raises(hasten.PlanError, match="has no head for text-generation; it fits text-classification"):
        hasten.build(tiny_classifier("bert"), tmp_path / "bundle", task="text-generation")
    assert not (tmp_path / "bundle").exists()


def test_one_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    folder = tiny_writers.save("llama", tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(hasten.StageError, match="model has no tokenizer: no"):
        hasten.build(folder, tmp_path / "bundle")


@pytest.mark.parametrize("name", ["gpt2", "llama", *ENCODED])
def test_what_it_is_for_is_found_by_its_class(name: str, tmp_path: Path) -> None:
    from hasten.builder.outline import outline
    from hasten.core.plan import Plan

    found = outline(Plan(str(tiny_writers.save(name, tmp_path / "model"))), tmp_path / "bundle")
    assert found.task == ("text2text-generation" if name in ENCODED else "text-generation")


def test_a_gate_that_no_variant_passes_leaves_nothing(tmp_path: Path) -> None:
    folder = tiny_writers.save("llama", tmp_path / "model")
    with pytest.raises(hasten.AccuracyError, match=r"no variant of .* may be used") as told:
        hasten.build(folder, tmp_path / "bundle", variants="onnxruntime-int4", min_agreement=1.0)
    assert [candidate.variant for candidate in told.value.candidates] == ["onnxruntime-int4"]
    assert not (tmp_path / "bundle").exists()


def test_what_nobody_does_is_named() -> None:
    from types import SimpleNamespace

    from transformers import GenerationConfig

    from hasten.builder.written import unknown_options

    def named(has_encoder: bool, **about: Any) -> list[str]:
        config = SimpleNamespace(is_encoder_decoder=has_encoder)
        return unknown_options(SimpleNamespace(generation_config=GenerationConfig(**about), config=config))

    assert named(True, num_beams=2, early_stopping=True, min_length=3, typical_p=1.0, epsilon_cutoff=0.0) == []
    assert named(True, typical_p=0.5, guidance_scale=1.5) == ["guidance_scale=1.5", "typical_p=0.5"]
    assert named(False, token_healing=True) == ["token_healing=True"]
    assert named(False, early_stopping="never", min_length=3) == ["early_stopping=never", "min_length=3"]
