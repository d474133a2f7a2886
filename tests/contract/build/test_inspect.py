"""Test `hasten inspect`: recorded passes match the files, and reported operators are those that run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import BACKENDS, ReportsPlacement
from hasten.builder.inspect import GRAPH, inspect
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.system.hardware import this_machine
from hasten.core.variant import Variant

ORT_FP32, ORT_INT8, OPENVINO = "onnxruntime-fp32", "onnxruntime-int8+attention", "openvino-fp32"


@pytest.fixture(scope="module")
def bundle(quick_build: Any, tiny_classifier: Any) -> Bundle:
    variants = [ORT_FP32, ORT_INT8, OPENVINO]
    return quick_build(tiny_classifier("bert"), variants=variants, keep="all", min_agreement=0.0)


def count_operators(file: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(file).graph.node)


PASSES = ["export", "fold", "prune", "fuse", "prune", "split norms", "quantize"]


def test_recorded_passes_match_the_graphs(bundle: Bundle) -> None:
    passes = bundle.report.passes
    assert [step.name for step in passes] == PASSES
    export, fold, prune, fuse, prune_fused, split_norms, quantize = passes
    files = [bundle.graph().path(), *(bundle.artifact(bundle.entry(name)).path() for name in (ORT_FP32, ORT_INT8))]
    plain, fused, quantized = map(count_operators, files)
    assert export.operators_before == {}
    assert fold.operators_before == export.operators_after
    assert (prune.operators_before, prune.operators_after) == (fold.operators_after, plain)
    assert fuse.operators_before == fold.operators_after
    assert prune_fused.operators_before == fuse.operators_after
    assert (split_norms.operators_before, split_norms.operators_after) == (prune_fused.operators_after, fused)
    assert (quantize.operators_before, quantize.operators_after) == (fused, quantized)
    assert set(export.variants) == set(fold.variants) == {ORT_FP32, ORT_INT8, OPENVINO}
    assert prune.variants == (OPENVINO,)
    assert fuse.variants == prune_fused.variants == split_norms.variants == (ORT_FP32, ORT_INT8)
    assert quantize.variants == (ORT_INT8,)
    assert fuse.notes[0] == "attention fused in 2 of 2 layers"
    assert fuse.unfused == ()
    assert plain["Softmax"] == 2
    # The attention of the pruned layer has fewer queries than keys, which needs another operator.
    assert (fused["Softmax"], fused["Attention"], fused["MultiHeadAttention"]) == (0, 1, 1)


def test_unfused_attention_is_reported_with_its_reason(
    quick_build: Any, tiny_classifier: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MPNet adds a relative position bias to its attention scores, which the fused operator does not support."""
    import onnx
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_classifier("bert"))
    sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.MPNetConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=66, **sizes
    )
    torch.manual_seed(7)
    transformers.MPNetForSequenceClassification(config).eval().save_pretrained(tmp_path / "mpnet")
    tokenizer.save_pretrained(tmp_path / "mpnet")
    bundle = quick_build(tmp_path / "mpnet", variants=[ORT_FP32])
    nodes = onnx.load(bundle.artifact(bundle.entry(ORT_FP32)).path()).graph.node
    left = next(step.unfused for step in bundle.report.passes if step.name == "fuse")
    assert [part.node for part in left] == [node.name for node in nodes if node.op_type == "Softmax"]
    assert len(left) == 5
    assert {(part.pattern, part.reason) for part in left} == {
        ("attention", "a relative position bias is added to its scores")
    }
    assert main(["inspect", str(bundle.path)]) == 0
    printed = capsys.readouterr().out
    assert left[0].node in printed
    assert "and 2 more" in printed


def test_unexplained_unfused_operator_has_an_unknown_reason(bundle: Bundle) -> None:
    import onnx

    from hasten.builder.passes.fuse import unfused

    nodes = onnx.load(bundle.graph().path()).graph.node
    left = unfused(nodes, "bert")
    assert Counter((part.pattern, part.reason) for part in left) == {
        ("attention", "unknown"): 2,
        ("GELU", "unknown"): 2,
    }


def test_operators_are_counted_in_each_graph_file(bundle: Bundle) -> None:
    views = {view.name: view for view in inspect(bundle).graphs}
    assert list(views) == [GRAPH, *(entry.name for entry in bundle.manifest.variants)]
    for view in views.values():
        assert (view.notes, view.executed) == ((), ())
        if view.file.endswith(".onnx"):
            assert view.operators == count_operators(bundle.path / view.file)
    openvino = pytest.importorskip("openvino")
    layers = openvino.Core().read_model(bundle.path / views[OPENVINO].file).get_ops()
    assert sum(views[OPENVINO].operators.values()) == len(layers)
    assert views[OPENVINO].operators["MatMul"] == sum(layer.get_type_name() == "MatMul" for layer in layers)


@pytest.mark.parametrize("name", [ORT_FP32, ORT_INT8, OPENVINO])
def test_inspecting_a_variant_reports_executed_operators(bundle: Bundle, name: str) -> None:
    backend = BACKENDS.get(Variant.parse(name).backend)
    support = backend.probe(this_machine(), Variant.parse(name))
    if not support.ok:
        pytest.skip(support.reason)
    assert isinstance(backend, ReportsPlacement)
    inspection = inspect(bundle, name)
    assert [view.name for view in inspection.graphs] == [name]
    assert all(name in step.variants for step in inspection.passes)
    executed = {(ran.operator, ran.on): ran.count for ran in inspection.graphs[0].executed}
    if name == OPENVINO:
        # Six linear layers each; the matmuls of attention are MatMul, or part of a fused layer.
        assert executed["FullyConnected", "CPU fp32"] >= 12
    else:
        assert {on for _, on in executed} == {"CPUExecutionProvider"}
        attention = "Attention" if name == ORT_FP32 else "QAttention"
        assert executed[attention, "CPUExecutionProvider"] == 1
        assert executed["MultiHeadAttention", "CPUExecutionProvider"] == 1


def test_profiles_are_not_left_behind(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    inspect(bundle, ORT_FP32)
    assert list(tmp_path.iterdir()) == []


def test_recorded_operators_are_shown_without_onnx(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with_onnx = {view.name: view.operators for view in inspect(bundle).graphs}
    monkeypatch.setitem(sys.modules, "onnx", None)
    for view in inspect(bundle).graphs:
        if view.name == GRAPH:
            assert view.operators == {}
            assert "pip install 'hasten[inspect]'" in view.notes[0]
        else:
            assert (view.operators, view.notes) == (with_onnx[view.name], ())


def test_inspect_prints_json(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["task"]["labels"] == ["bad", "fair", "good"]
    assert document["signature"]["max_length"] == 64
    assert document["files"]["graph/model.onnx"] == bundle.graph().path().stat().st_size
    assert [step["name"] for step in document["passes"]] == PASSES


def test_inspect_prints_tables(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle.path)]) == 0
    printed = capsys.readouterr().out
    for part in (
        "BertForSequenceClassification",
        "text-classification, up to 64 tokens",
        "bad, fair, good",
        "input_ids int32 (batch, sequence)",
        "logits float32 (batch, 3)",
        "variants/openvino-fp32/model.bin",
        "Attention +2",
        "last layer pruned",
        "attention fused in 2 of 2 layers",
    ):
        assert part in printed
    assert not re.search(r"for *$", printed, re.MULTILINE)
    assert main(["inspect", str(bundle.path), "--variant", ORT_INT8]) == 0
    assert re.search(r"QAttention +CPUExecutionProvider +1", capsys.readouterr().out)


def test_inspect_does_not_import_torch(bundle: Bundle) -> None:
    program = (
        "import sys\nfrom hasten.cli import main\nmain(['inspect', sys.argv[1], '--quiet', '--json'])\n"
        "print(*{'torch', 'transformers', 'openvino', 'netron'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, str(bundle.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip() == ""


@pytest.mark.parametrize(
    ("variant", "file"), [(None, "graph/model.onnx"), (OPENVINO, "variants/openvino-fp32/model.xml")]
)
def test_netron_shows_the_graph_until_interrupted(bundle: Bundle, variant: str | None, file: str) -> None:
    pytest.importorskip("netron")
    words = [sys.executable, "-m", "hasten", "inspect", str(bundle.path), "--netron", "--port", "0"]
    viewer = subprocess.Popen(
        [*words, *(["--variant", variant] if variant else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A browser that does nothing.
        env=os.environ | {"BROWSER": "true"},
    )
    try:
        assert viewer.stdout is not None
        address = re.search(r"http://localhost:\d+", viewer.stdout.readline())
        assert address
        with urllib.request.urlopen(address[0], timeout=30) as page:
            assert f'content="/data/{Path(file).name}"' in page.read().decode()
        with urllib.request.urlopen(f"{address[0]}/data/{Path(file).name}", timeout=30) as shown:
            assert shown.read() == (bundle.path / file).read_bytes()
        viewer.send_signal(signal.SIGINT)
        assert viewer.communicate(timeout=30)[1] == ""
        assert viewer.returncode == 0
    finally:
        viewer.kill()
        viewer.communicate()


def test_used_port_and_missing_netron_are_rejected(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("netron")
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        assert main(["inspect", str(bundle.path), "--netron", "--port", port]) == 4
    assert capsys.readouterr().err.splitlines()[1] == "  hint: --port 0 picks a free one"
    monkeypatch.setitem(sys.modules, "netron", None)
    assert main(["inspect", str(bundle.path), "--netron"]) == 3
    assert capsys.readouterr().err.splitlines()[1] == "  hint: pip install 'hasten[inspect]'"
