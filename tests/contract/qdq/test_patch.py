"""The scope of patching: threads, custom classes over transformers models, attention implementations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.models import tiny_encoders
from support.temp_modules import importing

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hasten.core.errors import PlanError, UnsupportedError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.rewrite import is_rewritten  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    tiny_encoders.save("bert", "ForSequenceClassification", directory, initializer_range=0.15)
    return directory


@pytest.fixture
def module_of(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module from custom source."""
    with importing(tmp_path, "import torch\nfrom torch import nn\nimport transformers\n") as load:
        yield load


def feeds_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(
        list(tiny_encoders.CORPUS), padding=True, return_tensors="pt"
    )


def plain_layers(model: Any) -> list[str]:
    return [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]


def test_contexts_of_two_threads_may_end_in_any_order(folder: Path) -> None:
    kind = transformers.BertForSequenceClassification
    before = (vars(kind)["__init__"], vars(transformers.PreTrainedModel)["__init_subclass__"])
    models: dict[str, Any] = {}
    is_entered, is_second, is_left = threading.Event(), threading.Event(), threading.Event()

    def make(name: str) -> None:
        models[name] = kind(transformers.AutoConfig.from_pretrained(folder))

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
    assert {part.precision for part in qdq.quantizers(models["first"]).values()} == {"int8"}
    assert {part.precision for part in qdq.quantizers(models["second"]).values()} == {"fp8"}
    assert type(models["neither"]) is kind
    assert (vars(kind)["__init__"], vars(transformers.PreTrainedModel)["__init_subclass__"]) == before
    make("after")
    assert not is_rewritten(type(models["after"]))


def test_contexts_may_be_nested(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    with qdq.patched():
        with qdq.patched("fp8"):
            inner = transformers.AutoModel.from_config(config)
        outer = transformers.AutoModel.from_config(config)
    assert {part.precision for part in qdq.quantizers(inner).values()} == {"fp8"}
    assert {part.precision for part in qdq.quantizers(outer).values()} == {"int8"}
    assert qdq.quantizers(inner).keys() == qdq.quantizers(outer).keys()


CUSTOM = """
    class Encoder(transformers.BertModel):
        pass


    class Scaled(transformers.BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Linear(config.num_labels, config.num_labels)
            self.post_init()

        def forward(self, **feeds):
            result = super().forward(**feeds)
            result.logits = self.scale(result.logits)
            return result


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
def test_custom_class_over_a_model_is_quantized_completely(
    name: str, folder: Path, module_of: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    custom = getattr(module_of(CUSTOM), name)
    plain = custom(transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")).eval()
    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = custom(transformers.AutoConfig.from_pretrained(folder)).eval()
        model.load_state_dict(plain.state_dict(), strict=False)
        calibrate(model, [feeds_of(folder)])
    assert isinstance(model, custom)
    assert plain_layers(plain)
    assert plain_layers(model) == []
    assert not [record for record in caplog.records if "stays in float" in record.message]
    matmuls = [entry for entry in qdq.quantizers(model) if entry.endswith("0.attention.self.query_quantizer")]
    assert len(matmuls) == 1
    with torch.inference_mode():
        before = plain(**feeds_of(folder))
        assert not torch.equal(model(**feeds_of(folder))[0], before[0])
        qdq.disable(model)
        assert torch.equal(model(**feeds_of(folder))[0], before[0])


def test_unsupported_base_class_is_rejected_with_its_line(module_of: Callable[[str], ModuleType]) -> None:
    custom = module_of("class Custom(transformers.XLNetModel):\n    pass\n").Custom
    with pytest.raises(UnsupportedError, match=r"torch\.einsum in '.*modeling_xlnet\.py:\d+"), qdq.patched():
        custom(transformers.XLNetConfig(vocab_size=40, d_model=32, n_layer=1, n_head=4, d_inner=64))


def test_layers_out_of_reach_are_logged(
    folder: Path, module_of: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        KINDS = {"linear": nn.Linear}


        class Custom(transformers.BertPreTrainedModel):
            def __init__(self, config):
                super().__init__(config)
                self.bert = transformers.BertModel(config)
                self.head = KINDS["linear"](config.hidden_size, 2)
                self.post_init()
    """
    with qdq.patched():
        module_of(source).Custom(transformers.AutoConfig.from_pretrained(folder))
    [message] = [record.getMessage() for record in caplog.records]
    reason = "it is constructed where rewriting does not reach (layers like it: 1)"
    assert message == f"'head' of Custom stays in float: {reason}"


def test_convolutions_in_float_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    groups = {f"{name}_groups": 4 for name in ("q", "k", "v", "intermediate", "output")}
    config = transformers.SqueezeBertConfig(**sizes, **groups, embedding_size=32, intermediate_size=64)
    with qdq.patched():
        transformers.SqueezeBertModel(config)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("of SqueezeBertModel stays in float: convolutions are not quantized (layers like it: 6)")


def test_computing_submodules_out_of_reach_are_rejected(folder: Path, module_of: Callable[[str], ModuleType]) -> None:
    source = """
        class Multiply(nn.Module):
            def forward(self, a):
                return a @ a


        class Derived(Multiply):
            pass


        class Passthrough(nn.Module):
            def forward(self, a):
                return a


        KINDS = {"multiply": Multiply, "derived": Derived, "passthrough": Passthrough}


        class Custom(transformers.BertPreTrainedModel):
            def __init__(self, config, kind):
                super().__init__(config)
                self.part = KINDS[kind]()
                self.layer = nn.Linear(2, 2)
    """
    custom, config = module_of(source).Custom, transformers.AutoConfig.from_pretrained(folder)
    for kind in ("multiply", "derived"):
        with pytest.raises(UnsupportedError, match=f"'part' of Custom .*: a plain {kind.title()}"), qdq.patched():
            custom(config, kind)
    with qdq.patched():
        assert list(qdq.quantizers(custom(config, "passthrough"))) == [
            "layer.input_quantizer",
            "layer.weight_quantizer",
        ]


def test_classes_without_readable_source_are_rejected(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    source = "class Custom(transformers.BertModel):\n    pass\n"
    namespace: dict[str, Any] = {"__name__": "never_imported", "transformers": transformers}
    exec(source, namespace)
    with pytest.raises(UnsupportedError, match="never_imported has no source"), qdq.patched():
        namespace["Custom"](config)

    class Local(transformers.BertModel):  # type: ignore[misc]
        pass

    message = r"Local is not defined at the top level of .*out of the function"
    with pytest.raises(UnsupportedError, match=message), qdq.patched():
        Local(config)


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention", "flash_attention_2"])
def test_attention_other_than_eager_is_rejected(attention: str, folder: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    with pytest.raises(UnsupportedError, match=f"only with eager attention, not with '{attention}'"), qdq.patched():
        kind.from_pretrained(folder, attn_implementation=attention)
    with qdq.patched():
        model = kind.from_pretrained(folder)
    with pytest.raises(UnsupportedError, match=f"only with eager attention, not with '{attention}'"):
        model.set_attn_implementation(attention)
    assert model.config._attn_implementation == "eager"


def test_model_constructed_before_patching_has_no_quantizers(folder: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    message = r"has no quantizers \(construct it inside"
    with pytest.raises(PlanError, match=message), qdq.patched(), qdq.calibration() as calibrate:
        calibrate(model, [feeds_of(folder)])
    assert plain_layers(model)
