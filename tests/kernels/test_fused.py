"""The fused backend against transformers: every architecture and head, packed, mixed and alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from encoders import FAMILIES, FEW_LAYERS, TOLERANCE, batch_of, model_of, opened
from hasten.backends import Artifact, RunOptions, Source
from hasten.backends.fused import BACKEND, FILE
from hasten.backends.fused.session import ABOUT, FusedSession, read_about
from hasten.backends.torch import ModuleSession
from hasten.builder.head import AtMasks, Exportable, OneChoice, Pooled, PoolingHead
from hasten.core.errors import InputError, StageError, UnsupportedError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.tensors import BATCH, MASKS, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Precision, Variant
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.packing import Bucket, round_up
from hasten.tasks import Pooling

INPUTS = ("input_ids", "attention_mask")
VARIANT = Variant("fused", Precision.FP16, "cuda")
# The others differ from these in names.
QUICK = ("Bert", "MPNet", "Albert")
MASK_ID = 4


def families(*quick: str) -> Any:
    """All, those that are not quick with --slow."""
    known = [family if family in quick else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
    return pytest.mark.parametrize("family", known)


def signature_of(*outputs: str, per_token: bool = False, mask_id: int | None = None) -> Signature:
    shape = (BATCH, SEQUENCE) if per_token else (BATCH,) if mask_id is None else (MASKS,)
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    specs = tuple(TensorSpec(name, DType.FLOAT32, (*shape, *([2] if len(outputs) == 1 else []))) for name in outputs)
    return Signature(inputs, specs, max_length=140, mask_id=mask_id)


def both(module: Any, signature: Signature, folder: Path) -> tuple[ModuleSession, FusedSession]:
    artifact = BACKEND.make(Source(signature, {}, module), VARIANT, folder)
    return ModuleSession(module, artifact, RunOptions(1)), opened(artifact)


def compare(theirs: Any, ours: Any, batch: Batch) -> None:
    expected, found = theirs.run(batch), ours.run(batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error <= TOLERANCE


@families(*QUICK)
def test_text_classification_of_every_family(family: str, tmp_path: Path) -> None:
    module = Exportable(model_of(family, "ForSequenceClassification"), INPUTS, ["logits"])
    theirs, ours = both(module, signature_of("logits"), tmp_path)
    compare(theirs, ours, batch_of(7))
    # More than the kernels for few tokens take.
    compare(theirs, ours, batch_of(70, 1, 60))


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("ForTokenClassification", ["logits"]), ("ForQuestionAnswering", ["start_logits", "end_logits"])],
)
def test_scores_of_every_token(kind: str, outputs: list[str], tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", kind, layers=FEW_LAYERS), INPUTS, outputs)
    theirs, ours = both(module, signature_of(*outputs, per_token=True), tmp_path)
    compare(theirs, ours, batch_of(5, 17, 1))


def test_ids_beyond_the_models_tables_are_refused(tmp_path: Path) -> None:
    """The kernels would read past their end."""
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    _, ours = both(module, signature_of("logits"), tmp_path)
    for token in (50, -1):
        batch = batch_of(4)
        batch.values["input_ids"][2] = token
        with pytest.raises(InputError, match=f"the token {token} is beyond the model's 50"):
            ours.run(batch)


@families("MPNet")
def test_choices_of_every_family(family: str, tmp_path: Path) -> None:
    module = OneChoice(model_of(family, "ForMultipleChoice", layers=FEW_LAYERS), INPUTS, ["logits"])
    compare(*both(module, signature_of("logits"), tmp_path), batch_of(7, 3))


@families("Albert")
def test_words_of_every_family(family: str, tmp_path: Path) -> None:
    module = AtMasks(model_of(family, "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID)
    theirs, ours = both(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    # By the very vectors that words came in by.
    assert "vocabulary" not in load_file(tmp_path / FILE)
    batch = batch_of(5, 3, 1, masks=MASK_ID)
    batch.values["input_ids"][:2] = MASK_ID
    compare(theirs, ours, batch)


def test_words_by_vectors_of_their_own(tmp_path: Path) -> None:
    model = model_of("Bert", "ForMaskedLM", layers=FEW_LAYERS)
    model.cls.predictions.decoder.weight = torch.nn.Parameter(model.bert.embeddings.word_embeddings.weight.data.flip(0))
    module = AtMasks(model, INPUTS, ["logits"], MASK_ID)
    theirs, ours = both(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    compare(theirs, ours, batch_of(5, masks=MASK_ID))
    # None at all, as in the texts that a server is warmed up with.
    assert ours.run(batch_of(3))["logits"].shape == (0, 50)


def test_more_masks_than_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    module = AtMasks(model_of("Roberta", "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID)
    theirs, ours = both(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    monkeypatch.setattr(packing, "MOST_PICKED", 1)
    compare(theirs, ours, batch_of(5, 3, masks=MASK_ID))


def test_more_tokens_than_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    module = Exportable(model_of("Roberta", "Model", layers=FEW_LAYERS), INPUTS, ["last_hidden_state"])
    theirs, ours = both(module, signature_of("last_hidden_state", per_token=True), tmp_path)
    monkeypatch.setattr(packing, "MOST_TOKENS", 9)
    monkeypatch.setattr(packing, "PART_TOKENS", 9)
    batch = batch_of(5, 9, 3, 3, 8, 1, 7)
    compare(theirs, ours, batch)
    # What fails in the middle leaves nothing behind.
    packing_of, asked = ours._packing, iter(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_packing", lambda *given: (next(asked), packing_of(*given))[1])
        with pytest.raises(StageError, match="a batch of 7 failed"):
            ours.run(batch)
    compare(theirs, ours, batch)


def test_states_of_every_token(tmp_path: Path) -> None:
    module = Exportable(model_of("Roberta", "Model", layers=FEW_LAYERS), INPUTS, ["last_hidden_state"])
    theirs, ours = both(module, signature_of("last_hidden_state", per_token=True), tmp_path)
    batch = batch_of(5, 9)
    # RoBERTa gives a padding token in a text no place.
    batch.values["input_ids"][7] = 1
    compare(theirs, ours, batch)


def test_dense_layers_behind_the_pooling(tmp_path: Path) -> None:
    activations = [torch.nn.Tanh(), torch.nn.Identity(), torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Sigmoid()]
    sizes = [64, 24, 17, 32, 8, 8]
    layers = [
        torch.nn.Sequential(torch.nn.Linear(before, after, bias=after != 17), activation)
        for before, after, activation in zip(sizes, sizes[1:], activations, strict=False)
    ]
    module = Pooled(
        model_of("Bert", "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], PoolingHead([Pooling.MEAN], layers, False)
    )
    compare(*both(module, signature_of("embedding"), tmp_path), batch_of(5, 1))
    module.head.dense[0][1] = torch.nn.SiLU()
    with pytest.raises(UnsupportedError, match="a dense layer that ends in SiLU"):
        BACKEND.make(Source(signature_of("embedding"), {}, module), VARIANT, tmp_path)


def pooled(family: str, kind: Pooling) -> Pooled:
    head = PoolingHead([kind], [], normalize=False)
    return Pooled(model_of(family, "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], head)


@pytest.mark.parametrize(
    ("make", "mask_id"),
    [
        (lambda: Exportable(model_of("MPNet", "ForSequenceClassification"), INPUTS, ["logits"]), None),
        (lambda: AtMasks(model_of("Bert", "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID), MASK_ID),
        pytest.param(lambda: pooled("Bert", Pooling.CLS), None, marks=pytest.mark.slow),
        pytest.param(lambda: pooled("Albert", Pooling.LAST_TOKEN), None, marks=pytest.mark.slow),
    ],
    ids=["classes", "masks", "first", "last"],
)
def test_the_last_layer_is_computed_for_what_is_read(
    make: Callable[[], Any], mask_id: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, many = [], Encoder.many
    monkeypatch.setattr(Encoder, "many", lambda *given: states.append(many(*given)) or states[-1])
    module = make()
    theirs, ours = both(module, signature_of(module.outputs[0], mask_id=mask_id), tmp_path)
    # More than the kernels for few tokens take, in a bucket with room for one more sequence and mask.
    batch = batch_of(7, 3, 9, masks=mask_id)
    compare(theirs, ours, batch)
    assert len(states[-1]) == 4


def test_the_last_layer_is_computed_for_all_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, many = [], Encoder.many
    monkeypatch.setattr(Encoder, "many", lambda *given: states.append(many(*given)) or states[-1])
    theirs, ours = both(pooled("Bert", Pooling.CLS), signature_of("embedding"), tmp_path)
    ours.prunes = False
    compare(theirs, ours, batch_of(7, 3, 9))
    assert len(states[-1]) == 32


@pytest.mark.parametrize("pooling", [[kind] for kind in Pooling] + [[Pooling.CLS, Pooling.MEAN]], ids=str)
def test_embeddings_of_every_pooling(pooling: list[Pooling], tmp_path: Path) -> None:
    head = PoolingHead(pooling, [], normalize=True)
    module = Pooled(model_of("Bert", "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], head)
    theirs, ours = both(module, signature_of("embedding"), tmp_path)
    compare(theirs, ours, batch_of(5, 17, 1))


def test_a_row_is_answered_alike_in_any_company(tmp_path: Path) -> None:
    module = Exportable(model_of("Roberta", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    _, ours = both(module, signature_of("logits"), tmp_path)
    # By the kernels for few tokens or by the others.
    batch = batch_of(3, 17, 1)
    together = ours.run(batch)["logits"]
    alone = np.concatenate([ours.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))])
    assert np.allclose(together, alone, rtol=TOLERANCE, atol=TOLERANCE * np.abs(together).max())


def test_buckets_waste_little_and_are_few() -> None:
    for tokens in range(1, 5000):
        room = round_up(tokens)
        assert room >= tokens
        assert tokens <= 128 or room <= 1.125 * tokens + 1
    assert len({round_up(tokens) for tokens in range(16, 16385)}) <= 60
    assert Bucket.of(52, 3) == Bucket(64, 4)


def test_what_it_does_not_know_is_refused_with_the_list(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64)
    module = Exportable(transformers.XLNetModel(config), INPUTS, ["logits"])
    with pytest.raises(UnsupportedError, match="'xlnet' is no architecture of the fused backend") as caught:
        BACKEND.make(Source(signature_of("logits"), {}, module), VARIANT, tmp_path)
    assert "roberta" in (caught.value.hint or "")


def test_it_says_which_gpu_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    machine = this_machine()
    assert not BACKEND.probe(replace(machine, gpus=())).ok
    old = replace(machine, gpus=(Gpu("Tesla T4", 2**34, "7.5", "580"),))
    assert BACKEND.probe(old).reason == "it needs compute capability 8.0, and Tesla T4 has 7.5"
    new = replace(machine, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cannot use the GPU" in BACKEND.probe(new, VARIANT).reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [variant.name for variant in BACKEND.variants(new)] == ["fused-fp16@cuda", "fused-fp16+gelu@cuda"]
    assert "knows 'gelu', in" in BACKEND.probe(new, Variant("fused", Precision.FP16, "cuda", ("smooth",))).reason
    assert "not on 'cpu'" in BACKEND.probe(new, Variant("fused", Precision.FP16)).reason
    assert "fp32" in BACKEND.probe(new, Variant("fused", Precision.FP32, "cuda")).reason
    assert "in fp8 'fast'" in BACKEND.probe(new, Variant.parse("fused-int8+fast@cuda")).reason
    fp8, int8 = (Variant.parse(f"fused-{name}+gelu+keep2@cuda") for name in ("fp8", "int8"))
    ampere = replace(machine, gpus=(Gpu("NVIDIA A100", 2**36, "8.0", "580"),))
    assert BACKEND.probe(new, fp8).ok
    assert BACKEND.probe(ampere, int8).ok
    assert BACKEND.probe(ampere, fp8).reason == "fp8 needs compute capability 8.9; NVIDIA A100 has 8.0"


def test_closed_it_says_so(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=1), INPUTS, ["logits"])
    _, ours = both(module, signature_of("logits"), tmp_path)
    ours.close()
    ours.close()
    with pytest.raises(StageError, match="the session is closed"):
        ours.run(batch_of(3))


def test_a_text_that_is_too_long_is_refused(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=1), INPUTS, ["logits"])
    _, ours = both(module, signature_of("logits"), tmp_path)
    with pytest.raises(StageError, match="a row has 141 tokens, and the model takes 140"):
        ours.run(batch_of(141))


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"[]", b"3", b"\xff", b'{"geometry": {"layers": 1}}'])
def test_a_broken_description_is_an_error_of_its_stage(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / ABOUT).write_bytes(content)
    with pytest.raises(StageError, match=r"cannot be loaded: fused\.json"):
        read_about(Artifact(VARIANT, signature_of("logits"), tmp_path, {}))


def test_kernels_for_few_tokens_fit_the_gpu() -> None:
    """What an L4, an A100 and an H200 let a program hold."""
    mini, base = Geometry(6, 384, 12, 1536, 1e-12, "gelu"), Geometry(12, 768, 12, 3072, 1e-5, "gelu")
    found = {
        limit: [Encoder(shape, {}, shared_bytes=limit).few_tokens for shape in (mini, base)]
        for limit in (101_376, 166_912, 232_448)
    }
    assert found == {101_376: [16, 0], 166_912: [128, 32], 232_448: [128, 64]}
