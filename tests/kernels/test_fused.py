"""The fused backend against transformers: every architecture and head, packed, mixed and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hasten.backends import RunOptions, Source
from hasten.backends.fused import BACKEND, FILE, FusedSession, read_about
from hasten.backends.torch import ModuleSession
from hasten.builder.head import Exportable, Pooled, PoolingHead
from hasten.core.errors import UnsupportedError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Precision, Variant
from hasten.kernels.packing import Bucket, round_up
from hasten.tasks import Pooling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 150,
}
NARROW = SIZES | {"embedding_size": 32}
DISTILLED = {"vocab_size": 50, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
FAMILIES = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "XLMRoberta": SIZES,
    "Camembert": SIZES,
    "Electra": NARROW,
    "DistilBert": DISTILLED,
    "MPNet": SIZES,
    "Albert": NARROW,
}
INPUTS = ("input_ids", "attention_mask")
VARIANT = Variant("fused", Precision.FP16, "cuda")
# fp16 on a GPU; through the interpreter in fp32, where only the order of additions differs.
TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-5
# The others differ from these in names.
QUICK = ("Bert", "MPNet", "Albert")


def model_of(family: str, kind: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], num_labels=2)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for parameter in model.parameters():
        # Large enough for every weight to matter.
        mean, spread = (0.0, 0.2) if parameter.dim() > 1 else (0.3, 0.3)
        torch.nn.init.normal_(parameter, mean, spread)
        # As the backend will hold it, so that what differs is what it computes.
        parameter.data = parameter.data.half().float()
    return model


def signature_of(*outputs: str, per_token: bool = False) -> Signature:
    shape = (BATCH, SEQUENCE) if per_token else (BATCH,)
    inputs = tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in INPUTS)
    specs = tuple(TensorSpec(name, DType.FLOAT32, (*shape, *([2] if len(outputs) == 1 else []))) for name in outputs)
    return Signature(inputs, specs, max_length=140)


def both(module: Any, signature: Signature, folder: Path) -> tuple[ModuleSession, FusedSession]:
    artifact = BACKEND.make(Source(signature, {}, module), VARIANT, folder)
    if DEVICE == "cuda":
        return ModuleSession(module, artifact, RunOptions(1)), BACKEND.open(artifact, RunOptions(1))
    from safetensors.torch import load_file

    weights = {name: tensor.float() for name, tensor in load_file(folder / FILE).items()}
    ours = FusedSession(read_about(artifact), weights, artifact, device="cpu", is_dependent=False)
    return ModuleSession(module, artifact, RunOptions(1)), ours


def batch_of(*lengths: int) -> Batch:
    rows = np.random.default_rng(3)
    return Batch.from_rows({"input_ids": [rows.integers(5, 50, length).tolist() for length in lengths]})


def compare(theirs: Any, ours: Any, batch: Batch) -> None:
    expected, found = theirs.run(batch), ours.run(batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error <= TOLERANCE


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
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
    module = Exportable(model_of("Bert", kind), INPUTS, outputs)
    theirs, ours = both(module, signature_of(*outputs, per_token=True), tmp_path)
    compare(theirs, ours, batch_of(5, 17, 1))


@pytest.mark.parametrize("pooling", [[kind] for kind in Pooling] + [[Pooling.CLS, Pooling.MEAN]], ids=str)
def test_embeddings_of_every_pooling(pooling: list[Pooling], tmp_path: Path) -> None:
    head = PoolingHead(pooling, [], normalize=True)
    module = Pooled(model_of("Bert", "Model"), INPUTS, ["embedding"], head)
    theirs, ours = both(module, signature_of("embedding"), tmp_path)
    compare(theirs, ours, batch_of(5, 17, 1))


def test_a_row_is_answered_alike_in_any_company(tmp_path: Path) -> None:
    module = Exportable(model_of("Roberta", "ForSequenceClassification"), INPUTS, ["logits"])
    _, ours = both(module, signature_of("logits"), tmp_path)
    batch = batch_of(3, 129, 1)
    together = ours.run(batch)["logits"]
    alone = np.concatenate([ours.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))])
    assert np.allclose(together, alone, rtol=TOLERANCE, atol=TOLERANCE * np.abs(together).max())


def test_buckets_waste_little_and_are_few() -> None:
    for tokens in range(1, 5000):
        room = round_up(tokens)
        assert room >= tokens
        assert tokens <= 128 or room <= 1.125 * tokens + 1
    assert len({round_up(tokens) for tokens in range(16, 16385)}) <= 60
    assert Bucket.of([3, 40, 9]) == Bucket(64, 4)


def test_what_it_does_not_know_is_refused_with_the_list(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64)
    module = Exportable(transformers.XLNetModel(config), INPUTS, ["logits"])
    with pytest.raises(UnsupportedError, match="'xlnet' is no architecture of the fused backend") as caught:
        BACKEND.make(Source(signature_of("logits"), {}, module), VARIANT, tmp_path)
    assert "roberta" in (caught.value.hint or "")


def test_it_says_which_gpu_it_needs() -> None:
    from dataclasses import replace

    machine = this_machine()
    assert not BACKEND.probe(replace(machine, gpus=())).ok
    old = replace(machine, gpus=(Gpu("Tesla T4", 2**34, "7.5", "580"),))
    assert BACKEND.probe(old).reason == "it needs compute capability 8.0, and Tesla T4 has 7.5"
    new = replace(machine, gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))
    assert [variant.name for variant in BACKEND.variants(new)] == ["fused-fp16@cuda", "fused-fp16+gelu@cuda"]
    assert "'gelu' alone" in BACKEND.probe(new, Variant("fused", Precision.FP16, "cuda", ("smooth",))).reason
    assert "not on 'cpu'" in BACKEND.probe(new, Variant("fused", Precision.FP16)).reason
    assert "fp32" in BACKEND.probe(new, Variant("fused", Precision.FP32, "cuda")).reason
