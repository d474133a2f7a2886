"""Where patching begins and ends: threads, people's own classes over models of transformers, attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tiny
from sources import importing

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hasten.core.errors import PlanError, UnsupportedError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.rewrite import is_rewritten  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    tiny.save("bert", "ForSequenceClassification", made, initializer_range=0.15)
    return made


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """A file of somebody's own, imported."""
    with importing(tmp_path, "import torch\nfrom torch import nn\nimport transformers\n") as load:
        yield load


def feeds_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(list(tiny.CORPUS), padding=True, return_tensors="pt")


def plain_layers(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]


def test_contexts_of_two_threads_end_in_any_order(folder: Path) -> None:
    kind = transformers.BertForSequenceClassification
    before = (vars(kind)["__init__"], vars(transformers.PreTrainedModel)["__init_subclass__"])
    made: dict[str, Any] = {}
    is_entered, is_second, is_left = threading.Event(), threading.Event(), threading.Event()

    def make(name: str) -> None:
        made[name] = kind(transformers.AutoConfig.from_pretrained(folder))

    def first() -> None:
        with qdq.patched():
            is_entered.set()
            assert is_second.wait(60)
            make("first")
        is_left.set()

    def second() -> None:
        assert is_entered.wait(60)
        with qdq.patched("fp8"):
            is_second.set()
            assert is_left.wait(60)
            make("second")

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    assert is_entered.wait(60)
    make("neither")
    for thread in threads:
        thread.join()
    assert {part.precision for part in qdq.quantizers(made["first"]).values()} == {"int8"}
    assert {part.precision for part in qdq.quantizers(made["second"]).values()} == {"fp8"}
    assert type(made["neither"]) is kind
    assert (vars(kind)["__init__"], vars(transformers.PreTrainedModel)["__init_subclass__"]) == before
    make("after")
    assert not is_rewritten(type(made["after"]))


def test_contexts_nest(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    with qdq.patched():
        with qdq.patched("fp8"):
            inner = transformers.AutoModel.from_config(config)
        outer = transformers.AutoModel.from_config(config)
    assert {part.precision for part in qdq.quantizers(inner).values()} == {"fp8"}
    assert {part.precision for part in qdq.quantizers(outer).values()} == {"int8"}
    assert qdq.quantizers(inner).keys() == qdq.quantizers(outer).keys()


OWN = """
    class Encoder(transformers.BertModel):
        pass


    class Scaled(transformers.BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Linear(config.num_labels, config.num_labels)
            self.post_init()

        def forward(self, **feeds):
            answer = super().forward(**feeds)
            answer.logits = self.scale(answer.logits)
            return answer


    class Headed(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, config):
            super().__init__(config)
            self.encoder = transformers.AutoModel.from_config(config)
            self.head = nn.Linear(config.hidden_size, 2)
            self.post_init()

        def forward(self, **feeds):
            return self.head(self.encoder(**feeds).last_hidden_state[:, 0])
"""


@pytest.mark.parametrize("name", ["Encoder", "Scaled", "Headed"])
def test_what_people_build_on_a_model_is_quantized_whole(
    name: str, folder: Path, module_of: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    own = getattr(module_of(OWN), name)
    plain = own(transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")).eval()
    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = own(transformers.AutoConfig.from_pretrained(folder)).eval()
        model.load_state_dict(plain.state_dict(), strict=False)
        calibrate(model, [feeds_of(folder)])
    assert isinstance(model, own)
    assert plain_layers(plain)
    assert plain_layers(model) == []
    assert not [record for record in caplog.records if "stays in float" in record.message]
    products = [entry for entry in qdq.quantizers(model) if entry.endswith("0.attention.self.query_quantizer")]
    assert len(products) == 1
    with torch.inference_mode():
        before = plain(**feeds_of(folder))
        assert not torch.equal(model(**feeds_of(folder))[0], before[0])
        qdq.disable(model)
        assert torch.equal(model(**feeds_of(folder))[0], before[0])


def test_bases_that_cannot_be_rewritten_are_refused_with_their_own_line(module_of: Callable[[str], ModuleType]) -> None:
    own = module_of("class Own(transformers.XLNetModel):\n    pass\n").Own
    with pytest.raises(UnsupportedError, match=r"torch\.einsum in '.*modeling_xlnet\.py:\d+"), qdq.patched():
        own(transformers.XLNetConfig(vocab_size=40, d_model=32, n_layer=1, n_head=4, d_inner=64))


def test_layers_that_rewriting_does_not_reach_are_told_of(
    folder: Path, module_of: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        KINDS = {"linear": nn.Linear}


        class Own(transformers.BertPreTrainedModel):
            def __init__(self, config):
                super().__init__(config)
                self.bert = transformers.BertModel(config)
                self.head = KINDS["linear"](config.hidden_size, 2)
                self.post_init()
    """
    with qdq.patched():
        module_of(source).Own(transformers.AutoConfig.from_pretrained(folder))
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "'head' of Own stays in float: it is made where rewriting does not reach; such layers: 1"


def test_convolutions_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    about = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    groups = {f"{name}_groups": 4 for name in ("q", "k", "v", "intermediate", "output")}
    config = transformers.SqueezeBertConfig(**about, **groups, embedding_size=32, intermediate_size=64)
    with qdq.patched():
        transformers.SqueezeBertModel(config)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.endswith("of SqueezeBertModel stays in float: convolutions are not quantized; such layers: 6")


def test_parts_made_in_a_way_nobody_sees_are_refused_if_they_compute(
    folder: Path, module_of: Callable[[str], ModuleType]
) -> None:
    source = """
        class Product(nn.Module):
            def forward(self, a):
                return a @ a


        class Derived(Product):
            pass


        class Nothing(nn.Module):
            def forward(self, a):
                return a


        KINDS = {"product": Product, "derived": Derived, "nothing": Nothing}


        class Own(transformers.BertPreTrainedModel):
            def __init__(self, config, kind):
                super().__init__(config)
                self.part = KINDS[kind]()
                self.layer = nn.Linear(2, 2)
    """
    own, config = module_of(source).Own, transformers.AutoConfig.from_pretrained(folder)
    for kind in ("product", "derived"):
        with pytest.raises(UnsupportedError, match=f"'part' of Own .*: a plain {kind.title()}"), qdq.patched():
            own(config, kind)
    with qdq.patched():
        assert list(qdq.quantizers(own(config, "nothing"))) == ["layer.input_quantizer", "layer.weight_quantizer"]


def test_classes_without_a_file_to_read_are_refused(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    source = "class Own(transformers.BertModel):\n    pass\n"
    namespace: dict[str, Any] = {"__name__": "never_imported", "transformers": transformers}
    exec(source, namespace)
    with pytest.raises(UnsupportedError, match="never_imported comes without its source"), qdq.patched():
        namespace["Own"](config)

    class Local(transformers.BertModel):  # type: ignore[misc]
        pass

    said = r"Local is not written at the top of .*inside of a function"
    with pytest.raises(UnsupportedError, match=said), qdq.patched():
        Local(config)


@pytest.mark.parametrize("asked", ["sdpa", "flex_attention", "flash_attention_2"])
def test_attention_that_would_pass_quantizers_by_is_refused(asked: str, folder: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    with pytest.raises(UnsupportedError, match=f"'{asked}' is another.*eager"), qdq.patched():
        kind.from_pretrained(folder, attn_implementation=asked)
    with qdq.patched():
        model = kind.from_pretrained(folder)
    with pytest.raises(UnsupportedError, match=f"'{asked}' is another"):
        model.set_attn_implementation(asked)
    assert model.config._attn_implementation == "eager"


def test_a_model_made_before_stays_what_it_is(folder: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    said = r"has no quantizers \(make it inside"
    with pytest.raises(PlanError, match=said), qdq.patched(), qdq.calibration() as calibrate:
        calibrate(model, [feeds_of(folder)])
    assert plain_layers(model)
