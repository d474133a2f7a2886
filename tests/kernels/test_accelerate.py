"""`hasten.accelerate`: the same module, the same types, the same numbers, and back."""

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

import encoders
import hasten
import tiny
from encoders import DEVICE, FAMILIES, FEW_LAYERS, POSITIONS, TOLERANCE
from hasten.acceleration import attach, bare_model
from hasten.core.errors import AccuracyError, InputError, UnsupportedError
from hasten.core.hardware import this_machine

QUICK = ("Bert", "Albert")
SLOW = ("TokenClassification", "QuestionAnswering", "MaskedLM", "MultipleChoice")
families = pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)


def model_of(family: str, kind: str, **about: Any) -> Any:
    return encoders.model_of(family, kind, layers=FEW_LAYERS, **about).to(DEVICE)


def accelerated(model: Any) -> Any:
    if DEVICE == "cuda":
        return hasten.accelerate(model)
    attach(bare_model(model), torch.float32)
    return model


def feeds_of(*lengths: int, pads_left: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if pads_left else mask
    ids = torch.where(mask, torch.randint(5, 50, mask.shape), 1)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.long().to(DEVICE)}


def ask(model: Any, *given: Any, **feeds: Any) -> Any:
    with torch.inference_mode():
        return model(*given, **feeds)


def check(found: Any, expected: Any, where: Any | None = None) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.device == expected.device
    if where is not None:
        found, expected = found[where.bool()], expected[where.bool()]
    assert (found - expected).norm() / expected.norm() <= TOLERANCE  # which no NaN is


@families
def test_every_family_gives_what_it_gave(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(family, "Model")
    # On the left padding moves BERT's places, and not RoBERTa's.
    asked = [feeds_of(7, 3), feeds_of(3, 5, pads_left=True)]
    if DEVICE == "cuda":
        asked.append(feeds_of(70, 1, 60))
    expected = [ask(model, **feeds) for feeds in asked]
    assert accelerated(model) is model
    with caplog.at_level(logging.WARNING, logger="hasten"):
        # All before any is looked at: no call may overwrite what another gave.
        answers = [ask(model, **feeds) for feeds in asked]
    assert not caplog.records
    for feeds, their, found in zip(asked, expected, answers, strict=True):
        assert type(found) is type(their)
        assert list(found) == list(their)
        check(found.last_hidden_state, their.last_hidden_state, feeds["attention_mask"])
        assert not found.last_hidden_state[feeds["attention_mask"] == 0].any()


def test_every_argument_of_a_call() -> None:
    model = model_of("Bert", "Model")
    feeds = feeds_of(5, 5)
    types = torch.tensor([[0, 0, 1, 1, 1]] * 2, device=DEVICE)
    ways = [
        lambda: model(input_ids=feeds["input_ids"].int()),
        lambda: model(**(feeds | {"attention_mask": feeds["attention_mask"].bool()}), token_type_ids=types),
        lambda: model(feeds["input_ids"], feeds["attention_mask"], types, return_dict=False),
    ]
    with torch.no_grad():
        expected = [way() for way in ways]
        accelerated(model)
        for way, their in zip(ways, expected, strict=True):
            found = way()
            assert type(found) is type(their)
            check(found[0], their[0])
            check(found[1], their[1])
    assert list(inspect.signature(model.forward).parameters)[:3] == ["input_ids", "attention_mask", "token_type_ids"]


@pytest.mark.parametrize(
    "kind",
    [
        "ForSequenceClassification",
        *(pytest.param(f"For{kind}", marks=pytest.mark.slow) for kind in SLOW),
    ],
)
def test_heads_stay_as_they_are(kind: str) -> None:
    model = model_of("Roberta", kind).to(DEVICE)
    feeds = feeds_of(5, 5)
    if kind == "ForMultipleChoice":
        feeds = {name: value.unsqueeze(0) for name, value in feeds.items()}
    expected = ask(model, **feeds)
    found = ask(accelerated(model), **feeds)
    assert type(found) is type(expected)
    for name, value in expected.items():
        check(found[name], value)


def test_the_original_comes_back() -> None:
    model = model_of("Bert", "ForSequenceClassification")
    feeds, before = feeds_of(5, 2), {name: value.clone() for name, value in model.state_dict().items()}
    forward, expected = model.bert.forward, ask(model, **feeds).logits
    accelerated(accelerated(model))
    assert model.bert.forward != forward
    with pytest.raises(UnsupportedError, match="restore"):
        copy.deepcopy(model)
    assert hasten.restore(model) is model
    assert model.bert.forward == forward
    assert "forward" not in vars(model.bert)
    assert torch.equal(ask(model, **feeds).logits, expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hasten.restore(model) is model


def test_what_it_does_not_do_the_original_does_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("MPNet", "Model")
    feeds, holes = feeds_of(5, 4), feeds_of(5, 4)
    holes["attention_mask"][0, 2] = 0
    embeds = model.get_input_embeddings()(feeds["input_ids"]).detach()
    places = torch.arange(2, 7, device=DEVICE).expand(2, 5)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("'output_hidden_states' is given", {**feeds, "output_hidden_states": True}),
        ("'output_attentions' is given", {**feeds, "output_attentions": True}),
        ("'position_ids' is given", {**feeds, "position_ids": places}),
        ("'inputs_embeds' is given", {"inputs_embeds": embeds, "attention_mask": feeds["attention_mask"]}),
        ("another shape", {**feeds, "attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool, device=DEVICE)}),
        ("the mask has holes", holes),
    ]
    expected = [ask(model, **given) for _, given in asked]
    accelerated(model)
    with caplog.at_level(logging.WARNING, logger="hasten"):
        for (reason, given), their in zip(asked, expected, strict=True):
            caplog.clear()
            for _ in range(2):
                found = ask(model, **given)
                assert list(found) == list(their)
                assert torch.equal(found.last_hidden_state, their.last_hidden_state)
            assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_who_learns_gets_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = accelerated(model_of("Bert", "ForSequenceClassification"))
    feeds, labels = feeds_of(5, 2), torch.tensor([0, 1], device=DEVICE)
    with caplog.at_level(logging.WARNING, logger="hasten"):
        model(**feeds, labels=labels).loss.backward()
        assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0
        assert "gradients are on" in caplog.text
        caplog.clear()
        model.train()
        ask(model, **feeds)
        assert "training mode" in caplog.text
        model.eval()
        caplog.clear()
        # A head on an encoder that is frozen learns from what the kernels give.
        model.bert.requires_grad_(False)
        model.zero_grad()
        model(**feeds, labels=labels).loss.backward()
        assert model.classifier.weight.grad.abs().sum() > 0
        assert not caplog.records


def test_more_tokens_than_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.kernels import packing

    model = model_of("Bert", "Model")
    feeds = feeds_of(9, 4, 13)
    expected = ask(model, **feeds).last_hidden_state
    accelerated(model)
    monkeypatch.setattr(packing, "MOST_TOKENS", 16)
    monkeypatch.setattr(packing, "PART_TOKENS", 16)
    check(ask(model, **feeds).last_hidden_state, expected, feeds["attention_mask"])


def test_rows_without_a_token_are_zero() -> None:
    model = accelerated(model_of("Bert", "Model"))
    feeds = feeds_of(4, 4)
    feeds["attention_mask"][0] = 0
    assert not ask(model, **feeds).last_hidden_state[0].any()
    feeds["attention_mask"][:] = 0
    assert not ask(model, **feeds).last_hidden_state.any()


def test_what_would_be_read_past_the_end_is_refused() -> None:
    model = accelerated(model_of("Roberta", "Model"))
    feeds = feeds_of(3)
    with pytest.raises(InputError, match="the token 50 is beyond the model's 50"):
        ask(model, input_ids=feeds["input_ids"] * 0 + 50)
    with pytest.raises(InputError, match="the token type 2 is beyond the model's 2"):
        ask(model, **feeds, token_type_ids=feeds["input_ids"] * 0 + 2)
    # The first two places are for padding.
    with pytest.raises(InputError, match=f"the place {POSITIONS} is beyond the model's {POSITIONS}"):
        ask(model, **feeds_of(POSITIONS - 1))


def test_what_the_original_refuses_is_refused() -> None:
    model, feeds = accelerated(model_of("Bert", "Model")), feeds_of(3)
    with pytest.raises(TypeError, match="multiple values"):
        ask(model, feeds["input_ids"], input_ids=feeds["input_ids"])
    with pytest.raises(RuntimeError):
        ask(model, input_ids=feeds["input_ids"].float())


def test_a_model_that_computes_something_else_is_refused() -> None:
    model = model_of("Bert", "Model")
    model.encoder.layer[0].register_forward_hook(lambda *given: -given[-1])
    with pytest.raises(AccuracyError, match="do not answer like the model"):
        accelerated(model)
    assert "forward" not in vars(model)


def test_what_cannot_be_accelerated_says_why() -> None:
    model = model_of("Bert", "Model")
    with pytest.raises(UnsupportedError, match="training mode"):
        accelerated(model.train())
    with pytest.raises(UnsupportedError, match="no transformers model in Linear"):
        accelerated(torch.nn.Linear(2, 2))
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=2, d_inner=64)
    with pytest.raises(UnsupportedError, match="'xlnet' is no architecture"):
        accelerated(transformers.XLNetModel(config).to(DEVICE).eval())
    with pytest.raises(UnsupportedError, match="tokens that see only those before them"):
        accelerated(model_of("Roberta", "Model", is_decoder=True))


@pytest.mark.skipif(bool(this_machine().gpus), reason="it would be accelerated here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnsupportedError, match="there is no NVIDIA GPU here"):
        hasten.accelerate(model_of("Bert", "Model"))


@pytest.mark.skipif(DEVICE == "cpu", reason="of a machine with a GPU")
def test_on_a_gpu_it_says_where_the_model_lies() -> None:
    with pytest.raises(UnsupportedError, match="the model lies on cpu"):
        hasten.accelerate(model_of("Bert", "Model").cpu())
    with pytest.raises(UnsupportedError, match=r"not in torch\.float32"):
        hasten.accelerate(model_of("Bert", "Model").cuda(), dtype=torch.float32)


@pytest.mark.skipif(DEVICE == "cpu", reason="of what a GPU computes in")
def test_in_the_other_half_precision_and_for_a_model_in_one() -> None:
    model = model_of("Bert", "Model")
    feeds = feeds_of(70, 1, 60)
    expected = ask(model, **feeds).last_hidden_state
    found = ask(hasten.accelerate(model, dtype=torch.bfloat16), **feeds).last_hidden_state
    where = feeds["attention_mask"].bool()
    # With eight times the rounding of fp16.
    assert (found - expected)[where].norm() / expected[where].norm() <= 8 * TOLERANCE
    assert ask(hasten.accelerate(model.half()), **feeds).last_hidden_state.dtype == torch.float16


@pytest.mark.skipif(DEVICE == "cpu", reason="of streams, which a GPU has")
def test_threads_share_it_each_on_a_stream_of_its_own() -> None:
    model = model_of("Bert", "Model")
    asked = [feeds_of(*lengths) for lengths in ((5, 2), (70, 60), (9,), (30, 1, 4))]
    expected = [ask(model, **feeds).last_hidden_state for feeds in asked]
    accelerated(model)
    torch.cuda.synchronize()

    def repeat(place: int) -> list[Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [ask(model, **asked[place]).last_hidden_state for _ in range(50)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(len(asked)) as threads:
        for feeds, their, found in zip(asked, expected, threads.map(repeat, range(len(asked))), strict=True):
            for one in found:
                check(one, their, feeds["attention_mask"])


def test_adapters_must_be_merged() -> None:
    peft = pytest.importorskip("peft")
    model = model_of("Bert", "Model")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).to(DEVICE).eval()
    with pytest.raises(UnsupportedError, match="merged"):
        accelerated(lora)


def test_sentence_transformers_embed_as_before(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    tiny.save("bert", "Model", tmp_path, hidden_size=64)
    model = library.SentenceTransformer(str(tmp_path), device=DEVICE)
    texts = ["the cat sat on the mat", "a dog", "what a wonderful film, I would watch it again tomorrow"]
    expected = model.encode(texts)
    found = accelerated(model).encode(texts)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= TOLERANCE
