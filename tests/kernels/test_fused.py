"""The fused backend gives the outputs of transformers for every architecture and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hasten.backends import Artifact, RunOptions, Source
from hasten.backends.fused import BACKEND, FILE
from hasten.backends.fused.session import METADATA_FILE, FusedSession, read_metadata
from hasten.backends.torch import ModuleSession
from hasten.builder.sources.export_wrapper import Exportable, MaskPositionHead, Pooled, PoolingHead, SingleChoice
from hasten.core.errors import InputError, StageError, UnsupportedError
from hasten.core.system.hardware import Gpu, this_machine
from hasten.core.tensors import BATCH, MASKS, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Precision, Variant
from hasten.kernels.cuda.packed_buckets import Bucket, round_up
from hasten.kernels.encoder import Encoder, Geometry
from hasten.tasks import Pooling
from support.models.fused_encoders import FAMILIES, FEW_LAYERS, TOLERANCE, batch_of, model_of, open_session

INPUTS = ("input_ids", "attention_mask")
VARIANT = Variant("fused", Precision.FP16, "cuda")
# The other families differ from these in parameter names only.
pytestmark = pytest.mark.usefixtures("exact_transformed_weights")
QUICK = ("Bert", "MPNet", "Albert", "ModernBert")
MASK_ID = 4


def families(*quick: str) -> Any:
    """Parametrize over all families; those that are not quick need --slow."""
    parameters = [family if family in quick else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
    return pytest.mark.parametrize("family", parameters)


def signature_of(*outputs: str, per_token: bool = False, mask_id: int | None = None) -> Signature:
    shape = (BATCH, SEQUENCE) if per_token else (BATCH,) if mask_id is None else (MASKS,)
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    specs = tuple(TensorSpec(name, DType.FLOAT32, (*shape, *([2] if len(outputs) == 1 else []))) for name in outputs)
    return Signature(inputs, specs, max_length=140, mask_id=mask_id)


def make_pair(module: Any, signature: Signature, folder: Path) -> tuple[ModuleSession, FusedSession]:
    artifact = BACKEND.make(Source(signature, {}, module), VARIANT, folder)
    return ModuleSession(module, artifact, RunOptions(1)), open_session(artifact)


def compare(original: Any, fused: Any, batch: Batch) -> None:
    expected, actual = original.run(batch), fused.run(batch)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        error = np.linalg.norm(actual[name] - value) / np.linalg.norm(value)
        assert error <= TOLERANCE


@families(*QUICK)
def test_text_classification_matches_for_every_family(family: str, tmp_path: Path) -> None:
    module = Exportable(model_of(family, "ForSequenceClassification"), INPUTS, ["logits"])
    original, fused = make_pair(module, signature_of("logits"), tmp_path)
    compare(original, fused, batch_of(7))
    # Larger than the small-batch kernels support.
    compare(original, fused, batch_of(70, 1, 60))


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("ForTokenClassification", ["logits"]), ("ForQuestionAnswering", ["start_logits", "end_logits"])],
)
def test_per_token_scores_match(kind: str, outputs: list[str], tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", kind, layers=FEW_LAYERS), INPUTS, outputs)
    original, fused = make_pair(module, signature_of(*outputs, per_token=True), tmp_path)
    compare(original, fused, batch_of(5, 17, 1))


def test_ids_out_of_range_are_rejected(tmp_path: Path) -> None:
    """The kernels would read past the end of the tables."""
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    _, fused = make_pair(module, signature_of("logits"), tmp_path)
    for token in (50, -1):
        batch = batch_of(4)
        batch.values["input_ids"][2] = token
        with pytest.raises(InputError, match=f"the token {token} is out of range: the maximum is 49"):
            fused.run(batch)


@families("MPNet")
def test_multiple_choice_matches_for_every_family(family: str, tmp_path: Path) -> None:
    module = SingleChoice(model_of(family, "ForMultipleChoice", layers=FEW_LAYERS), INPUTS, ["logits"])
    compare(*make_pair(module, signature_of("logits"), tmp_path), batch_of(7, 3))


@families("Albert")
def test_masked_lm_matches_for_every_family(family: str, tmp_path: Path) -> None:
    module = MaskPositionHead(model_of(family, "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID)
    original, fused = make_pair(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    # The output embeddings are tied to the word embeddings.
    assert "output_embeddings" not in load_file(tmp_path / FILE)
    batch = batch_of(5, 3, 1, mask_id=MASK_ID)
    batch.values["input_ids"][:2] = MASK_ID
    compare(original, fused, batch)


def test_untied_output_embeddings_match(tmp_path: Path) -> None:
    model = model_of("Bert", "ForMaskedLM", layers=FEW_LAYERS)
    model.cls.predictions.decoder.weight = torch.nn.Parameter(model.bert.embeddings.word_embeddings.weight.data.flip(0))
    module = MaskPositionHead(model, INPUTS, ["logits"], MASK_ID)
    original, fused = make_pair(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    compare(original, fused, batch_of(5, mask_id=MASK_ID))
    # A batch without masks, as in warm-up.
    assert fused.run(batch_of(3))["logits"].shape == (0, 50)


def test_batch_with_many_masks_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    module = MaskPositionHead(model_of("Roberta", "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID)
    original, fused = make_pair(module, signature_of("logits", mask_id=MASK_ID), tmp_path)
    monkeypatch.setattr(packing, "MAX_PICKED", 1)
    compare(original, fused, batch_of(5, 3, mask_id=MASK_ID))


def test_large_batch_is_split_and_survives_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    module = Exportable(model_of("Roberta", "Model", layers=FEW_LAYERS), INPUTS, ["last_hidden_state"])
    original, fused = make_pair(module, signature_of("last_hidden_state", per_token=True), tmp_path)
    monkeypatch.setattr(packing, "MAX_TOKENS", 9)
    monkeypatch.setattr(packing, "PART_TOKENS", 9)
    batch = batch_of(5, 9, 3, 3, 8, 1, 7)
    compare(original, fused, batch)
    # A failure in the middle does not affect the next batch.
    prepare, remaining = fused._bucket_and_fill, iter(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_bucket_and_fill", lambda *args: (next(remaining), prepare(*args))[1])
        with pytest.raises(StageError, match="a batch of 7 failed"):
            fused.run(batch)
    compare(original, fused, batch)


def test_batches_that_run_together_match_and_may_be_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    module = Exportable(model_of("Roberta", "Model", layers=FEW_LAYERS), INPUTS, ["last_hidden_state"])
    original, fused = make_pair(module, signature_of("last_hidden_state", per_token=True), tmp_path)
    monkeypatch.setattr(packing, "MAX_TOKENS", 9)
    monkeypatch.setattr(packing, "PART_TOKENS", 9)
    batches = [batch_of(*lengths) for lengths in ([5, 9, 3], [2], [8, 1, 7, 4], [9], [3, 3])]
    taken: list[int] = []

    def take() -> Iterator[Batch]:
        for index, batch in enumerate(batches):
            taken.append(index)
            yield batch

    results = fused.run_many(take())
    for index, batch in enumerate(batches):
        (name, actual), *_ = next(results).items()
        expected = original.run(batch)[name]
        assert actual.shape == expected.shape
        assert np.linalg.norm(actual - expected) <= TOLERANCE * np.linalg.norm(expected)
        assert len(taken) > index + 1 or index == len(batches) - 1  # later batches are taken meanwhile
    assert next(results, None) is None
    # Neither a caller that stops nor an error of its iterator affects the next batch.
    with closing(fused.run_many(iter(batches))) as results:
        next(results)
    compare(original, fused, batches[0])
    with pytest.raises(KeyError, match="no more"):
        list(fused.run_many(batch if index < 2 else {}["no more"] for index, batch in enumerate(batches)))
    compare(original, fused, batches[2])


def test_batches_run_in_larger_buckets_while_their_own_are_not_prepared(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    original, fused = make_pair(module, signature_of("logits"), tmp_path)
    replay = fused.slot.replay
    fused.uses_larger_buckets = True
    # Without a larger bucket, the batch prepares its own.
    compare(original, fused, batch_of(3))
    fused.prepare(batch_of(30, 5, 9))
    assert fused.uses_larger_buckets
    batch = batch_of(12, 8)
    assert replay.smallest_holding(Bucket.of(20, 2)) == Bucket.of(44, 3)
    assert replay.smallest_holding(Bucket.of(20, 2), 1.25) == Bucket.of(20, 2)
    compare(original, fused, batch)
    fused.prepare(batch)
    assert replay.smallest_holding(Bucket.of(20, 2)) == Bucket.of(20, 2)
    compare(original, fused, batch)


def test_parts_run_in_prepared_buckets_that_are_little_larger(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    original, fused = make_pair(module, signature_of("logits"), tmp_path)
    large, smaller, small = batch_of(*[30] * 5), batch_of(*[28] * 5), batch_of(9)
    assert [Bucket.of(tokens, 5).tokens for tokens in (150, 140)] == [160, 144]
    expected = [original.run(batch) for batch in (large, large, smaller, small)]
    for outputs, reference in zip(fused.run_many([large, large, smaller, small]), expected, strict=True):
        error = np.linalg.norm(outputs["logits"] - reference["logits"]) / np.linalg.norm(reference["logits"])
        assert error <= TOLERANCE
    prepared = [set(slot.replay._graphs) for slot in fused._slots]
    assert prepared == [{Bucket.of(150, 5)}, {Bucket.of(150, 5), Bucket.of(9, 1)}]
    # A batch on its own runs in its own bucket.
    fused.run(smaller)
    assert Bucket.of(140, 5) in fused.slot.replay._graphs


def test_hidden_states_match_with_padding_token_in_text(tmp_path: Path) -> None:
    module = Exportable(model_of("Roberta", "Model", layers=FEW_LAYERS), INPUTS, ["last_hidden_state"])
    original, fused = make_pair(module, signature_of("last_hidden_state", per_token=True), tmp_path)
    batch = batch_of(5, 9)
    # RoBERTa does not count padding tokens as positions.
    batch.values["input_ids"][7] = 1
    compare(original, fused, batch)


def test_dense_layers_after_pooling_match(tmp_path: Path) -> None:
    activations = [torch.nn.Tanh(), torch.nn.Identity(), torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Sigmoid()]
    sizes = [64, 24, 17, 32, 8, 8]
    layers = [
        torch.nn.Sequential(torch.nn.Linear(before, after, bias=after != 17), activation)
        for before, after, activation in zip(sizes, sizes[1:], activations, strict=False)
    ]
    module = Pooled(
        model_of("Bert", "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], PoolingHead([Pooling.MEAN], layers, False)
    )
    compare(*make_pair(module, signature_of("embedding"), tmp_path), batch_of(5, 1))
    module.head.dense[0][1] = torch.nn.SiLU()
    with pytest.raises(UnsupportedError, match="does not support a dense layer with SiLU"):
        BACKEND.make(Source(signature_of("embedding"), {}, module), VARIANT, tmp_path)


def pooled_model(family: str, kind: Pooling) -> Pooled:
    head = PoolingHead([kind], [], normalize=False)
    return Pooled(model_of(family, "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], head)


@pytest.mark.parametrize(
    ("make", "mask_id"),
    [
        (lambda: Exportable(model_of("MPNet", "ForSequenceClassification"), INPUTS, ["logits"]), None),
        (
            lambda: MaskPositionHead(model_of("Bert", "ForMaskedLM", layers=FEW_LAYERS), INPUTS, ["logits"], MASK_ID),
            MASK_ID,
        ),
        pytest.param(lambda: pooled_model("Bert", Pooling.CLS), None, marks=pytest.mark.slow),
        pytest.param(lambda: pooled_model("Albert", Pooling.LAST_TOKEN), None, marks=pytest.mark.slow),
    ],
    ids=["classification", "masks", "first token", "last token"],
)
def test_last_layer_is_pruned_to_tokens_that_are_read(
    make: Callable[[], Any], mask_id: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, large_batch = [], Encoder.large_batch
    monkeypatch.setattr(Encoder, "large_batch", lambda *args: states.append(large_batch(*args)) or states[-1])
    module = make()
    original, fused = make_pair(module, signature_of(module.outputs[0], mask_id=mask_id), tmp_path)
    # Larger than the small-batch kernels support, in a bucket with an unused sequence and mask.
    batch = batch_of(7, 3, 9, mask_id=mask_id)
    compare(original, fused, batch)
    assert len(states[-1]) == 4


def test_pruning_can_be_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, large_batch = [], Encoder.large_batch
    monkeypatch.setattr(Encoder, "large_batch", lambda *args: states.append(large_batch(*args)) or states[-1])
    original, fused = make_pair(pooled_model("Bert", Pooling.CLS), signature_of("embedding"), tmp_path)
    fused.prunes = False
    compare(original, fused, batch_of(7, 3, 9))
    assert len(states[-1]) == 32


@pytest.mark.parametrize("pooling", [[kind] for kind in Pooling] + [[Pooling.CLS, Pooling.MEAN]], ids=str)
def test_embeddings_match_for_every_pooling(pooling: list[Pooling], tmp_path: Path) -> None:
    head = PoolingHead(pooling, [], normalize=True)
    module = Pooled(model_of("Bert", "Model", layers=FEW_LAYERS), INPUTS, ["embedding"], head)
    original, fused = make_pair(module, signature_of("embedding"), tmp_path)
    compare(original, fused, batch_of(5, 17, 1))


def test_row_outputs_do_not_depend_on_batch(tmp_path: Path) -> None:
    module = Exportable(model_of("Roberta", "ForSequenceClassification", layers=FEW_LAYERS), INPUTS, ["logits"])
    _, fused = make_pair(module, signature_of("logits"), tmp_path)
    # By the small-batch and the large-batch kernels.
    batch = batch_of(3, 17, 1)
    together = fused.run(batch)["logits"]
    alone = np.concatenate([fused.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))])
    assert np.allclose(together, alone, rtol=TOLERANCE, atol=TOLERANCE * np.abs(together).max())


def test_bucket_count_and_padding_are_bounded() -> None:
    for tokens in range(1, 5000):
        room = round_up(tokens)
        assert room >= tokens
        assert tokens <= 128 or room <= 1.125 * tokens + 1
    assert len({round_up(tokens) for tokens in range(16, 16385)}) <= 60
    assert Bucket.of(52, 3) == Bucket(64, 4)


def test_unknown_architecture_is_rejected_with_supported_list(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64)
    module = Exportable(transformers.XLNetModel(config), INPUTS, ["logits"])
    with pytest.raises(UnsupportedError, match="the fused backend does not support 'xlnet'") as caught:
        BACKEND.make(Source(signature_of("logits"), {}, module), VARIANT, tmp_path)
    assert "roberta" in (caught.value.hint or "")


def test_probe_reports_gpu_and_modifier_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    machine = this_machine()
    assert not BACKEND.probe(replace(machine, gpus=())).ok
    old = replace(machine, gpus=(Gpu("Tesla T4", 2**34, "7.5", "580"),))
    assert BACKEND.probe(old).reason == "needs compute capability 8.0; Tesla T4 has 7.5"
    new = replace(machine, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cannot use the GPU" in BACKEND.probe(new, VARIANT).reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [variant.name for variant in BACKEND.variants(new)] == ["fused-fp16@cuda", "fused-fp16+tanhgelu@cuda"]
    smooth = Variant("fused", Precision.FP16, "cuda", ("smooth",))
    assert "supports are 'tanhgelu', in" in BACKEND.probe(new, smooth).reason
    assert "not on 'cpu'" in BACKEND.probe(new, Variant("fused", Precision.FP16)).reason
    assert "fp32" in BACKEND.probe(new, Variant("fused", Precision.FP32, "cuda")).reason
    assert "in fp8 'fastaccum'" in BACKEND.probe(new, Variant.parse("fused-int8+fastaccum@cuda")).reason
    fp8, int8 = (Variant.parse(f"fused-{name}+tanhgelu+keep2@cuda") for name in ("fp8", "int8"))
    ampere = replace(machine, gpus=(Gpu("NVIDIA A100", 2**36, "8.0", "580"),))
    assert BACKEND.probe(new, fp8).ok
    assert BACKEND.probe(ampere, int8).ok
    assert BACKEND.probe(ampere, fp8).reason == "fp8 needs compute capability 8.9; NVIDIA A100 has 8.0"


def test_closed_session_rejects_batches(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=1), INPUTS, ["logits"])
    _, fused = make_pair(module, signature_of("logits"), tmp_path)
    fused.close()
    fused.close()
    with pytest.raises(StageError, match="the session is closed"):
        fused.run(batch_of(3))


def test_too_long_row_is_rejected(tmp_path: Path) -> None:
    module = Exportable(model_of("Bert", "ForSequenceClassification", layers=1), INPUTS, ["logits"])
    _, fused = make_pair(module, signature_of("logits"), tmp_path)
    with pytest.raises(StageError, match="a row has 141 tokens, and the model takes 140"):
        fused.run(batch_of(141))


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"[]", b"3", b"\xff", b'{"geometry": {"layers": 1}}'])
def test_broken_metadata_raises_stage_error(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(StageError, match=r"cannot be loaded: fused\.json"):
        read_metadata(Artifact(VARIANT, signature_of("logits"), tmp_path, {}))


def test_small_batch_kernels_fit_shared_memory() -> None:
    """The shared memory per program of an L4, an A100 and an H200."""
    mini, base = Geometry(6, 384, 12, 1536, 1e-12, "gelu"), Geometry(12, 768, 12, 3072, 1e-5, "gelu")
    max_tokens = {
        limit: [Encoder(shape, {}, shared_bytes=limit).small_batch_max_tokens for shape in (mini, base)]
        for limit in (101_376, 166_912, 232_448)
    }
    assert max_tokens == {101_376: [16, 0], 166_912: [128, 32], 232_448: [128, 64]}
