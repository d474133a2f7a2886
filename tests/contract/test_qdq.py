"""Quantizing by rewriting, on every architecture that is promised: in, out, trained, exported, run."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from hasten.bundle import open_bundle  # noqa: E402
from hasten.core.errors import PlanError, StageError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.export import exported  # noqa: E402
from hasten.quantize.qdq.rules import misplaced  # noqa: E402

ARCHITECTURES = [
    "albert",
    "bert",
    "camembert",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
]
KIND = "AutoModelForSequenceClassification"
# Relative to the largest logit. Both round to the same eight bits: what is left is the order of additions, and where
# that moves a value over the middle between two steps, one step of one quantizer.
CLOSE = 0.05
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def find(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            # Weights of a usual size: wide ones make every rounding a different answer.
            tiny.save(architecture, "ForSequenceClassification", made[architecture], initializer_range=0.15)
        return made[architecture]

    return find


def load(folder: Path, kind: str = KIND, **options: Any) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, **options).eval()


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def batches_of(folder: Path, size: int = 4) -> list[Any]:
    tokenizer = tokenizer_of(folder)
    texts = list(tiny.CORPUS)
    return [
        tokenizer(texts[begin : begin + size], padding=True, return_tensors="pt")
        for begin in range(0, len(texts), size)
    ]


def quantized(folder: Path, method: str = "max", **options: Any) -> Any:
    with qdq.patched(**options), qdq.calibration(method) as calibrate:
        model = load(folder)
        calibrate(model, batches_of(folder))
    return model


def logits(model: Any, feeds: Any) -> Any:
    with torch.inference_mode():
        return model(**feeds).logits


def run(file: Path, feeds: Any, *, is_plain: bool = False) -> tuple[Any, Counter[str]]:
    """What ONNX Runtime answers, and the operators that it really runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(file.with_name("optimized.onnx"))
    if is_plain:
        # Of float8 ONNX Runtime makes integer operators that do not take it, and it drops a ReLU in front.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    wanted = {entry.name: feeds[entry.name].numpy().astype(np.int32) for entry in session.get_inputs()}
    [answer] = session.run(None, wanted)
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return answer, Counter(node.op_type for node in nodes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_calibrates_exports_and_runs_in_integers(
    architecture: str, folder_of: Folders, tmp_path: Path
) -> None:
    folder = folder_of(architecture)
    feeds = batches_of(folder, size=3)[0]
    plain = logits(load(folder, attn_implementation="eager"), feeds)

    with qdq.patched(residuals=True, embeddings=True):
        model = load(folder)
    assert torch.equal(logits(model, feeds), plain), "without ranges it is the original, bit for bit"
    with qdq.calibration("max") as calibrate:
        calibrate(model, batches_of(folder))
    rounded = logits(model, feeds)
    assert not torch.equal(rounded, plain)
    assert float((rounded - plain).abs().max()) < 0.5 * float(plain.abs().max())
    qdq.disable(model)
    assert torch.equal(logits(model, feeds), plain), "switched off it is the original, bit for bit"

    qdq.enable(model)
    file = qdq.export(model, tokenizer_of(folder), tmp_path)
    answer, operators = run(file, feeds)
    assert np.abs(answer - rounded.numpy()).max() < CLOSE * float(plain.abs().max())
    # Products of linear layers and of attention; a head on one token stays a Gemm.
    layers = 2
    assert operators["MatMulIntegerToFloat"] + operators["QLinearMatMul"] >= 4 * layers + 2 * layers
    assert not operators["MatMul"] + operators["FusedMatMul"]


def test_whole_numbers_are_counted_as_tensorrt_takes_it(folder_of: Folders) -> None:
    """RoBERTa's positions: CumSum of floats."""
    folder = folder_of("roberta")
    graph = exported(quantized(folder), tokenizer_of(folder)).graph
    [count] = [node for node in graph.node if node.op_type == "CumSum"]
    [cast] = [node for node in graph.node if node.output[0] == count.input[0]]
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", onnx.TensorProto.FLOAT)


def functions(module: Any) -> dict[str, Any]:
    """Everything in a module that can be called, classes with all that is written in them."""
    found = {}
    for name, value in vars(module).items():
        found[name] = value
        if isinstance(value, type) and value.__module__ == module.__name__:
            found |= {f"{name}.{inner}": each for inner, each in vars(value).items()}
    return found


def test_leaving_restores_the_very_same_functions(folder_of: Folders) -> None:
    from transformers import PreTrainedModel
    from transformers.models.bert import modeling_bert

    folder = folder_of("bert")
    before = functions(modeling_bert) | {f"base.{name}": value for name, value in vars(PreTrainedModel).items()}
    with qdq.patched():
        inside = load(folder)
        direct = modeling_bert.BertForSequenceClassification(inside.config)
    with pytest.raises(OSError, match="no such model"), qdq.patched():
        load(folder / "no such model")
    after = functions(modeling_bert) | {f"base.{name}": value for name, value in vars(PreTrainedModel).items()}
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []

    assert qdq.quantizers(inside).keys() == qdq.quantizers(direct).keys()
    assert isinstance(inside, modeling_bert.BertForSequenceClassification)
    outside = load(folder)
    assert type(outside) is modeling_bert.BertForSequenceClassification
    with pytest.raises(PlanError, match="has no quantizers"):
        qdq.quantizers(outside)
    # Attentions are recorded by class, in a registry of the process.
    outside = load(folder, attn_implementation="eager")
    assert len(outside(**batches_of(folder)[0], output_attentions=True).attentions) == 2
    assert len(inside(**batches_of(folder)[0], output_attentions=True).attentions) == 2


def test_names_say_where_quantizers_stand(folder_of: Folders) -> None:
    with qdq.patched():
        names = list(qdq.quantizers(load(folder_of("bert"))))
    layer = "bert.encoder.layer.0"
    assert [name for name in names if name.startswith(layer)] == [
        f"{layer}.{name}"
        for name in (
            "attention.self.query_quantizer",
            "attention.self.key_quantizer",
            "attention.self.attn_weights_quantizer",
            "attention.self.value_quantizer",
            "attention.self.query.input_quantizer",
            "attention.self.query.weight_quantizer",
            "attention.self.key.input_quantizer",
            "attention.self.key.weight_quantizer",
            "attention.self.value.input_quantizer",
            "attention.self.value.weight_quantizer",
            "attention.output.hidden_states_quantizer",
            "attention.output.input_tensor_quantizer",
            "attention.output.dense.input_quantizer",
            "attention.output.dense.weight_quantizer",
            "intermediate.dense.input_quantizer",
            "intermediate.dense.weight_quantizer",
            "output.hidden_states_quantizer",
            "output.input_tensor_quantizer",
            "output.dense.input_quantizer",
            "output.dense.weight_quantizer",
        )
    ]
    with qdq.patched():
        assert list(qdq.quantizers(load(folder_of("bert")))) == names


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_module_in_halves_exports_as_one_in_fp32(dtype: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("bert")
    model = quantized(folder).to(getattr(torch, dtype))
    feeds = batches_of(folder, size=3)[0]
    answer, _ = run(qdq.export(model, tokenizer_of(folder), tmp_path), feeds)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    expected = logits(model.float(), feeds)
    assert np.abs(answer - expected.numpy()).max() < CLOSE * float(expected.abs().max())


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "distilbert"])
def test_float8_exports_and_agrees(architecture: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of(architecture)
    model = quantized(folder, precision="fp8")
    feeds = batches_of(folder, size=3)[0]
    expected = logits(model, feeds)
    file = qdq.export(model, tokenizer_of(folder), tmp_path)
    kinds = {tensor.data_type for tensor in onnx.load(file).graph.initializer if len(tensor.dims) == 2}
    assert onnx.TensorProto.FLOAT8E4M3FN in kinds
    answer, _ = run(file, feeds, is_plain=True)
    assert np.abs(answer - expected.numpy()).max() < CLOSE * float(expected.abs().max())


def test_weights_are_stored_in_bytes(folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("bert")
    model = quantized(folder)
    graph = onnx.load(qdq.export(model, tokenizer_of(folder), tmp_path)).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    in_bytes = [tensor for tensor in stored.values() if tensor.data_type == onnx.TensorProto.INT8 and tensor.dims]
    assert sum(np.prod(tensor.dims) for tensor in in_bytes if len(tensor.dims) == 2) == linear
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    floats = [tensor for tensor in stored.values() if tensor.data_type == onnx.TensorProto.FLOAT]
    assert not [tensor.name for tensor in floats if len(tensor.dims) == 2 and tensor.name not in tables]


def test_training_lowers_the_loss_and_moves_what_is_quantized(folder_of: Folders, tmp_path: Path) -> None:
    """With transformers' own Trainer, as it is."""
    folder = folder_of("distilbert")
    model = quantized(folder)
    tokenizer = tokenizer_of(folder)
    rows = [{**tokenizer(text), "labels": place % 2} for place, text in enumerate(tiny.CORPUS)]
    before = {name: part.amax.clone() for name, part in qdq.quantizers(model).items()}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=30,
        learning_rate=2e-3,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory.*")
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    after = qdq.quantizers(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    weights = [name for name in before if name.endswith("weight_quantizer")]
    assert any(not torch.equal(before[name], after[name].amax) for name in weights)
    assert all(torch.equal(before[name], part.amax) for name, part in after.items() if name not in weights)


def test_saved_ranges_come_back(folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("roberta")
    model = quantized(folder)
    feeds = batches_of(folder)[0]
    model.save_pretrained(tmp_path)
    with qdq.patched():
        again = load(tmp_path)
    assert torch.equal(logits(again, feeds), logits(model, feeds))


def test_sensitivity_tells_what_a_search_then_switches_off(folder_of: Folders) -> None:
    folder = folder_of("bert")
    feeds = batches_of(folder)[0]
    reference = logits(load(folder, attn_implementation="eager"), feeds)
    model = quantized(folder)
    # One that is clearly wrong.
    costly = "bert.encoder.layer.1.output.dense.input_quantizer"
    qdq.quantizers(model)[costly].set_range(0.01)

    def closeness(candidate: Any) -> float:
        return -float((logits(candidate, feeds) - reference).norm() / reference.norm())

    before = closeness(model)
    found = qdq.sensitivity(model, closeness)
    assert found.reference == 0.0
    assert found.costs[0].name == costly
    assert str(found).splitlines()[1].startswith(costly)
    assert "█" in str(found).splitlines()[1]
    assert all(part.is_enabled for name, part in qdq.quantizers(model).items() if name == costly)
    assert closeness(model) == before
    off = qdq.relax(model, closeness, found, max_drop=-before / 2)
    assert off == [costly, costly.replace("input_", "weight_")]
    assert closeness(model) > before / 2


def test_grid_search_keeps_the_best(folder_of: Folders) -> None:
    folder = folder_of("bert")
    feeds = batches_of(folder)[0]
    reference = logits(load(folder, attn_implementation="eager"), feeds)
    with qdq.patched():
        model = load(folder)
    ranked = qdq.grid_search(
        model, batches_of(folder), lambda candidate: -float((logits(candidate, feeds) - reference).norm())
    )
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True)
    assert len(ranked) == 6
    assert -float((logits(model, feeds) - reference).norm()) == next(iter(ranked.values()))


def test_pairs_stand_where_tensorrt_takes_them(folder_of: Folders) -> None:
    folder = folder_of("bert")
    model = quantized(folder, residuals=True)
    graph = exported(model, tokenizer_of(folder))
    assert misplaced(graph) == []
    # Each rule, broken on purpose.
    lost = onnx.ModelProto()
    lost.CopyFrom(graph)
    product = next(node for node in lost.graph.node if node.op_type == "MatMul")
    product.input[0] = next(node for node in lost.graph.node if node.output[0] == product.input[0]).input[0]
    assert any("read by something else" in line for line in misplaced(lost))
    scaled = onnx.ModelProto()
    scaled.CopyFrom(graph)
    scale = next(node for node in scaled.graph.node if node.op_type == "QuantizeLinear").input[1]
    for tensor in scaled.graph.initializer:
        if tensor.name == scale:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(-1), scale))
    assert any("not positive" in line for line in misplaced(scaled))
    half = quantized(folder)
    qdq.disable(half, "*.query.weight_quantizer")
    with pytest.raises(StageError, match=r"one of its inputs is in eight bits"):
        exported(half, tokenizer_of(folder))


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    """Every step of it, on its tiny model; the published one needs a hub."""
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "examples" / "mnli_roberta.py", "--tiny", "--steps", "4", "--output", tmp_path]
    paths = {"PYTHONPATH": os.pathsep.join(str(path) for path in (root / "src", os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, check=False)
    assert done.returncode == 0, done.stderr
    assert "left in float:" in done.stdout
    assert "onnxruntime-int8+qdq: " in done.stdout
    bundle = open_bundle(tmp_path / "bundle")
    assert [entry.name for entry in bundle.manifest.variants]
    [candidate] = [each for each in bundle.report.candidates if each.variant == "onnxruntime-int8+qdq"]
    assert candidate.verdict.drop_interval is not None
    # Not after all its work, but at once.
    again = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, check=False)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith(f"error: {tmp_path / 'bundle'} is there already")
