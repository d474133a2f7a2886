"""`hasten.accelerate` keeps the module, its output types and its numbers, and can be undone."""

from __future__ import annotations

import copy
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hasten
from hasten.acceleration import attach, base_model_of
from hasten.core.errors import AccuracyError, InputError, UnsupportedError
from hasten.core.system.hardware import this_machine
from support.models import fused_encoders, tiny_encoders
from support.models.fused_encoders import DEVICE, FAMILIES, FEW_LAYERS, POSITIONS, TOLERANCE

pytestmark = pytest.mark.usefixtures("exact_transformed_weights")
QUICK = ("Bert", "Albert")
SLOW = ("TokenClassification", "QuestionAnswering", "MaskedLM", "MultipleChoice")
families = pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)


def model_of(family: str, kind: str, **options: Any) -> Any:
    return fused_encoders.model_of(family, kind, layers=FEW_LAYERS, **options).to(DEVICE)


def accelerated(model: Any) -> Any:
    if DEVICE == "cuda":
        return hasten.accelerate(model)
    attach(base_model_of(model), torch.float32)
    return model


def inputs_of(*lengths: int, pads_left: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if pads_left else mask
    ids = torch.where(mask, torch.randint(5, 50, mask.shape), 1)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def run(model: Any, *args: Any, **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(*args, **inputs)


def check(actual: Any, expected: Any, mask: Any | None = None) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.device == expected.device
    if mask is not None:
        actual, expected = actual[mask.bool()], expected[mask.bool()]
    assert (actual - expected).norm() / expected.norm() <= TOLERANCE  # false for NaN


@families
def test_every_family_keeps_its_outputs(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(family, "Model")
    # Left padding shifts BERT's positions, but not RoBERTa's.
    calls = [inputs_of(7, 3), inputs_of(3, 5, pads_left=True)]
    if DEVICE == "cuda":
        calls.append(inputs_of(70, 1, 60))
    expected = [run(model, **inputs) for inputs in calls]
    assert accelerated(model) is model
    with caplog.at_level(logging.WARNING, logger="hasten"):
        # Run all calls before comparing: no call may overwrite the result of another.
        answers = [run(model, **inputs) for inputs in calls]
    assert not caplog.records
    for inputs, original, actual in zip(calls, expected, answers, strict=True):
        assert type(actual) is type(original)
        assert list(actual) == list(original)
        check(actual.last_hidden_state, original.last_hidden_state, inputs["attention_mask"])
        assert not actual.last_hidden_state[inputs["attention_mask"] == 0].any()


def test_supported_arguments_are_accelerated() -> None:
    model = model_of("Bert", "Model")
    inputs = inputs_of(5, 5)
    types = torch.tensor([[0, 0, 1, 1, 1]] * 2, device=DEVICE)
    calls = [
        lambda: model(input_ids=inputs["input_ids"].int()),
        lambda: model(**(inputs | {"attention_mask": inputs["attention_mask"].bool()}), token_type_ids=types),
        lambda: model(inputs["input_ids"], inputs["attention_mask"], types, return_dict=False),
    ]
    with torch.no_grad():
        expected = [call() for call in calls]
        accelerated(model)
        for call, original in zip(calls, expected, strict=True):
            actual = call()
            assert type(actual) is type(original)
            check(actual[0], original[0])
            check(actual[1], original[1])
    assert list(inspect.signature(model.forward).parameters)[:3] == ["input_ids", "attention_mask", "token_type_ids"]


@pytest.mark.parametrize(
    "kind",
    [
        "ForSequenceClassification",
        *(pytest.param(f"For{kind}", marks=pytest.mark.slow) for kind in SLOW),
    ],
)
def test_heads_are_unchanged(kind: str) -> None:
    model = model_of("Roberta", kind).to(DEVICE)
    inputs = inputs_of(5, 5)
    if kind == "ForMultipleChoice":
        inputs = {name: value.unsqueeze(0) for name, value in inputs.items()}
    expected = run(model, **inputs)
    actual = run(accelerated(model), **inputs)
    assert type(actual) is type(expected)
    for name, value in expected.items():
        check(actual[name], value)


def test_restore_brings_back_original_forward() -> None:
    model = model_of("Bert", "ForSequenceClassification")
    inputs, before = inputs_of(5, 2), {name: value.clone() for name, value in model.state_dict().items()}
    forward, expected = model.bert.forward, run(model, **inputs).logits
    accelerated(accelerated(model))
    assert model.bert.forward != forward
    with pytest.raises(UnsupportedError, match="restore"):
        copy.deepcopy(model)
    assert hasten.restore(model) is model
    assert model.bert.forward == forward
    assert "forward" not in vars(model.bert)
    assert torch.equal(run(model, **inputs).logits, expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hasten.restore(model) is model


def test_unsupported_calls_fall_back_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("MPNet", "Model")
    inputs, holes = inputs_of(5, 4), inputs_of(5, 4)
    holes["attention_mask"][0, 2] = 0
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    positions = torch.arange(2, 7, device=DEVICE).expand(2, 5)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("'output_hidden_states' is not supported", {**inputs, "output_hidden_states": True}),
        ("'output_attentions' is not supported", {**inputs, "output_attentions": True}),
        ("'position_ids' is not supported", {**inputs, "position_ids": positions}),
        ("'inputs_embeds' is not supported", {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}),
        ("another shape", {**inputs, "attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool, device=DEVICE)}),
        ("the mask has holes", holes),
    ]
    expected = [run(model, **arguments) for _, arguments in calls]
    accelerated(model)
    with caplog.at_level(logging.WARNING, logger="hasten"):
        for (reason, arguments), original in zip(calls, expected, strict=True):
            caplog.clear()
            for _ in range(2):
                actual = run(model, **arguments)
                assert list(actual) == list(original)
                assert torch.equal(actual.last_hidden_state, original.last_hidden_state)
            assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_accelerated_model_keeps_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = accelerated(model_of("Bert", "ForSequenceClassification"))
    inputs, labels = inputs_of(5, 2), torch.tensor([0, 1], device=DEVICE)
    with caplog.at_level(logging.WARNING, logger="hasten"):
        model(**inputs, labels=labels).loss.backward()
        assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0
        assert "gradients are enabled" in caplog.text
        caplog.clear()
        model.train()
        run(model, **inputs)
        assert "training mode" in caplog.text
        model.eval()
        caplog.clear()
        # A head on a frozen encoder learns from the output of the kernels.
        model.bert.requires_grad_(False)
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        assert model.classifier.weight.grad.abs().sum() > 0
        assert not caplog.records


def test_large_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    model = model_of("Bert", "Model")
    inputs = inputs_of(9, 4, 13)
    expected = run(model, **inputs).last_hidden_state
    accelerated(model)
    monkeypatch.setattr(packing, "MAX_TOKENS", 16)
    monkeypatch.setattr(packing, "PART_TOKENS", 16)
    check(run(model, **inputs).last_hidden_state, expected, inputs["attention_mask"])


def test_fully_masked_rows_are_zero() -> None:
    model = accelerated(model_of("Bert", "Model"))
    inputs = inputs_of(4, 4)
    inputs["attention_mask"][0] = 0
    assert not run(model, **inputs).last_hidden_state[0].any()
    inputs["attention_mask"][:] = 0
    assert not run(model, **inputs).last_hidden_state.any()


def test_ids_out_of_range_are_rejected() -> None:
    model = accelerated(model_of("Roberta", "Model"))
    inputs = inputs_of(3)
    with pytest.raises(InputError, match="the token 50 is out of range: the maximum is 49"):
        run(model, input_ids=inputs["input_ids"] * 0 + 50)
    with pytest.raises(InputError, match="the token type 2 is out of range: the maximum is 1"):
        run(model, **inputs, token_type_ids=inputs["input_ids"] * 0 + 2)
    # The first two positions are reserved for padding.
    with pytest.raises(InputError, match=f"the position {POSITIONS} is out of range: the maximum is {POSITIONS - 1}"):
        run(model, **inputs_of(POSITIONS - 1))


def test_invalid_calls_raise_like_original() -> None:
    model, inputs = accelerated(model_of("Bert", "Model")), inputs_of(3)
    with pytest.raises(TypeError, match="multiple values"):
        run(model, inputs["input_ids"], input_ids=inputs["input_ids"])
    with pytest.raises(RuntimeError):
        run(model, input_ids=inputs["input_ids"].float())


def test_modified_model_is_rejected() -> None:
    model = model_of("Bert", "Model")
    model.encoder.layer[0].register_forward_hook(lambda *args: -args[-1])
    with pytest.raises(AccuracyError, match="do not match the model"):
        accelerated(model)
    assert "forward" not in vars(model)


def test_unsupported_models_are_rejected_with_reason() -> None:
    model = model_of("Bert", "Model")
    with pytest.raises(UnsupportedError, match="training mode"):
        accelerated(model.train())
    with pytest.raises(UnsupportedError, match="Linear contains no transformers model"):
        accelerated(torch.nn.Linear(2, 2))
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64)
    with pytest.raises(UnsupportedError, match="does not support 'xlnet'"):
        accelerated(transformers.XLNetModel(config).to(DEVICE).eval())
    with pytest.raises(UnsupportedError, match="does not support decoders"):
        accelerated(model_of("Roberta", "Model", is_decoder=True))


@pytest.mark.skipif(bool(this_machine().gpus), reason="runs only on machines without an accelerator")
def test_accelerate_without_gpu_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="there is no NVIDIA GPU here"):
        hasten.accelerate(model_of("Bert", "Model"))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_model_on_cpu_or_unsupported_dtype_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="the model is on cpu"):
        hasten.accelerate(model_of("Bert", "Model").cpu())
    with pytest.raises(UnsupportedError, match=r"not in torch\.float32"):
        hasten.accelerate(model_of("Bert", "Model").cuda(), dtype=torch.float32)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_bfloat16_and_models_in_half_precision() -> None:
    model = model_of("Bert", "Model")
    inputs = inputs_of(70, 1, 60)
    expected = run(model, **inputs).last_hidden_state
    actual = run(hasten.accelerate(model, dtype=torch.bfloat16), **inputs).last_hidden_state
    mask = inputs["attention_mask"].bool()
    # bf16 has eight times the rounding error of fp16.
    assert (actual - expected)[mask].norm() / expected[mask].norm() <= 8 * TOLERANCE
    assert run(hasten.accelerate(model.half()), **inputs).last_hidden_state.dtype == torch.float16


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_threads_with_their_own_streams_share_a_model() -> None:
    model = model_of("Bert", "Model")
    calls = [inputs_of(*lengths) for lengths in ((5, 2), (70, 60), (9,), (30, 1, 4))]
    expected = [run(model, **inputs).last_hidden_state for inputs in calls]
    accelerated(model)
    torch.cuda.synchronize()

    def repeat(index: int) -> list[Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            actual = [run(model, **calls[index]).last_hidden_state for _ in range(50)]
        stream.synchronize()
        return actual

    with ThreadPoolExecutor(len(calls)) as threads:
        for inputs, original, actual in zip(calls, expected, threads.map(repeat, range(len(calls))), strict=True):
            for states in actual:
                check(states, original, inputs["attention_mask"])


def test_unmerged_adapter_is_rejected() -> None:
    peft = pytest.importorskip("peft")
    model = model_of("Bert", "Model")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).to(DEVICE).eval()
    with pytest.raises(UnsupportedError, match="merge adapters"):
        accelerated(lora)


def test_sentence_transformer_keeps_its_embeddings(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    tiny_encoders.save("bert", "Model", tmp_path, hidden_size=64)
    model = library.SentenceTransformer(str(tmp_path), device=DEVICE)
    texts = ["the cat sat on the mat", "a dog", "what a wonderful film, I would watch it again tomorrow"]
    expected = model.encode(texts)
    actual = accelerated(model).encode(texts)
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) <= TOLERANCE
