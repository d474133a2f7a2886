"""Quantization by rewriting on every supported architecture: calibration, export, training and execution."""

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

from support.models import tiny_encoders

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from hasten.bundle import open_bundle  # noqa: E402
from hasten.core.errors import PlanError, StageError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.export import export_graph  # noqa: E402
from hasten.quantize.qdq.rules import find_violations  # noqa: E402

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
# Relative to the largest logit. Both round to the same 8-bit numbers; they differ in the order of additions and, where
# that moves a value past the middle between two steps, by one step of one quantizer.
CLOSE = 0.05
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders: dict[str, Path] = {}

    def find(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            # Weights of a usual size: with large ones every rounding changes the outputs.
            tiny_encoders.save(architecture, "ForSequenceClassification", folders[architecture], initializer_range=0.15)
        return folders[architecture]

    return find


def load(folder: Path, kind: str = KIND, **options: Any) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, **options).eval()


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def batches_of(folder: Path, size: int = 4) -> list[Any]:
    tokenizer = tokenizer_of(folder)
    texts = list(tiny_encoders.CORPUS)
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
    """Return ONNX Runtime's output, and the operators that it runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # By default, ONNX Runtime on x86 moves signed activations to unsigned ones, whose sums saturate on some CPUs, and
    # leaves matmuls in float that read them. Slower kernels for signed ones compute the exported graph as it is.
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    options.optimized_model_filepath = str(file.with_name("optimized.onnx"))
    if is_plain:
        # ONNX Runtime fuses float8 into integer operators that do not support it, and drops a ReLU before them.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    inputs = {entry.name: feeds[entry.name].numpy().astype(np.int32) for entry in session.get_inputs()}
    [output] = session.run(None, inputs)
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return output, Counter(node.op_type for node in nodes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_calibrates_exports_and_runs_in_integers(
    architecture: str, folder_of: Folders, tmp_path: Path
) -> None:
    folder = folder_of(architecture)
    feeds = batches_of(folder, size=3)[0]
    plain = logits(load(folder, attn_implementation="eager"), feeds)

    with qdq.patched(residuals=True, embeddings=True):
        model = load(folder)
    assert torch.equal(logits(model, feeds), plain), "without ranges it equals the float model bit for bit"
    with qdq.calibration("max") as calibrate:
        calibrate(model, batches_of(folder))
    rounded = logits(model, feeds)
    assert not torch.equal(rounded, plain)
    assert float((rounded - plain).abs().max()) < 0.5 * float(plain.abs().max())
    qdq.disable(model)
    assert torch.equal(logits(model, feeds), plain), "disabled it equals the float model bit for bit"

    qdq.enable(model)
    file = qdq.export(model, tokenizer_of(folder), tmp_path)
    output, operators = run(file, feeds)
    assert np.abs(output - rounded.numpy()).max() < CLOSE * float(plain.abs().max())
    # Matmuls of linear layers and of attention; a head on one token stays a Gemm.
    layers = 2
    assert operators["MatMulIntegerToFloat"] + operators["QLinearMatMul"] >= 4 * layers + 2 * layers
    assert not operators["MatMul"] + operators["FusedMatMul"]


def test_cumsum_of_integers_is_exported_in_float(folder_of: Folders) -> None:
    """RoBERTa counts positions with CumSum, which TensorRT supports for floats only."""
    folder = folder_of("roberta")
    graph = export_graph(quantized(folder), tokenizer_of(folder)).graph
    [count] = [node for node in graph.node if node.op_type == "CumSum"]
    [cast] = [node for node in graph.node if node.output[0] == count.input[0]]
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", onnx.TensorProto.FLOAT)


def functions(module: Any) -> dict[str, Any]:
    """Return everything defined in a module, including the members of its classes."""
    members = {}
    for name, value in vars(module).items():
        members[name] = value
        if isinstance(value, type) and value.__module__ == module.__name__:
            members |= {f"{name}.{inner}": each for inner, each in vars(value).items()}
    return members


def test_leaving_the_context_restores_the_original_functions(folder_of: Folders) -> None:
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
    # transformers records attentions by class, in a registry of the process.
    outside = load(folder, attn_implementation="eager")
    assert len(outside(**batches_of(folder)[0], output_attentions=True).attentions) == 2
    assert len(inside(**batches_of(folder)[0], output_attentions=True).attentions) == 2


def test_quantizer_names_follow_the_module_tree(folder_of: Folders) -> None:
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
def test_half_precision_module_exports_in_fp32(dtype: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("bert")
    model = quantized(folder).to(getattr(torch, dtype))
    feeds = batches_of(folder, size=3)[0]
    output, _ = run(qdq.export(model, tokenizer_of(folder), tmp_path), feeds)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    expected = logits(model.float(), feeds)
    assert np.abs(output - expected.numpy()).max() < CLOSE * float(expected.abs().max())


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "distilbert"])
def test_float8_export_agrees_with_the_module(architecture: str, folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of(architecture)
    model = quantized(folder, precision="fp8")
    feeds = batches_of(folder, size=3)[0]
    expected = logits(model, feeds)
    file = qdq.export(model, tokenizer_of(folder), tmp_path)
    kinds = {tensor.data_type for tensor in onnx.load(file).graph.initializer if len(tensor.dims) == 2}
    assert onnx.TensorProto.FLOAT8E4M3FN in kinds
    output, _ = run(file, feeds, is_plain=True)
    assert np.abs(output - expected.numpy()).max() < CLOSE * float(expected.abs().max())


def test_weights_are_exported_in_int8(folder_of: Folders, tmp_path: Path) -> None:
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


def test_training_lowers_the_loss_and_updates_weight_ranges(folder_of: Folders, tmp_path: Path) -> None:
    """transformers' Trainer is used unchanged."""
    folder = folder_of("distilbert")
    model = quantized(folder)
    tokenizer = tokenizer_of(folder)
    rows = [{**tokenizer(text), "labels": index % 2} for index, text in enumerate(tiny_encoders.CORPUS)]
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


def test_saved_ranges_are_restored(folder_of: Folders, tmp_path: Path) -> None:
    folder = folder_of("roberta")
    model = quantized(folder)
    feeds = batches_of(folder)[0]
    model.save_pretrained(tmp_path)
    with qdq.patched():
        restored = load(tmp_path)
    assert torch.equal(logits(restored, feeds), logits(model, feeds))


def test_relax_disables_the_most_sensitive_quantizers(folder_of: Folders) -> None:
    folder = folder_of("bert")
    feeds = batches_of(folder)[0]
    reference = logits(load(folder, attn_implementation="eager"), feeds)
    model = quantized(folder)
    # A range that is clearly too narrow.
    costly = "bert.encoder.layer.1.output.dense.input_quantizer"
    qdq.quantizers(model)[costly].set_range(0.01)

    def closeness(candidate: Any) -> float:
        return -float((logits(candidate, feeds) - reference).norm() / reference.norm())

    before = closeness(model)
    measured = qdq.sensitivity(model, closeness)
    assert measured.reference == 0.0
    assert measured.costs[0].name == costly
    assert str(measured).splitlines()[1].startswith(costly)
    assert "█" in str(measured).splitlines()[1]
    assert all(part.is_enabled for name, part in qdq.quantizers(model).items() if name == costly)
    assert closeness(model) == before
    disabled = qdq.relax(model, closeness, measured, max_drop=-before / 2)
    assert disabled == [costly, costly.replace("input_", "weight_")]
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


def test_qdq_pairs_follow_tensorrt_rules(folder_of: Folders) -> None:
    folder = folder_of("bert")
    model = quantized(folder, residuals=True)
    graph = export_graph(model, tokenizer_of(folder))
    assert find_violations(graph) == []
    # Rules broken on purpose.
    lost = onnx.ModelProto()
    lost.CopyFrom(graph)
    matmul = next(node for node in lost.graph.node if node.op_type == "MatMul")
    matmul.input[0] = next(node for node in lost.graph.node if node.output[0] == matmul.input[0]).input[0]
    assert any("a consumer other than DequantizeLinear" in line for line in find_violations(lost))
    scaled = onnx.ModelProto()
    scaled.CopyFrom(graph)
    scale = next(node for node in scaled.graph.node if node.op_type == "QuantizeLinear").input[1]
    for tensor in scaled.graph.initializer:
        if tensor.name == scale:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(-1), scale))
    assert any("not positive" in line for line in find_violations(scaled))
    one_sided = quantized(folder)
    qdq.disable(one_sided, "*.query.weight_quantizer")
    with pytest.raises(StageError, match=r"one of its inputs is in 8 bits"):
        export_graph(one_sided, tokenizer_of(folder))


@pytest.mark.slow
def test_example_script_runs(tmp_path: Path) -> None:
    """Every step runs on a tiny model; the published one needs access to the Hub."""
    root = Path(__file__).parents[3]
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
    # The target is checked before the work, not after it.
    again = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, check=False)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith(f"error: {tmp_path / 'bundle'} already exists")
