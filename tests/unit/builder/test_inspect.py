"""Test `hasten inspect` without a model: older reports, OpenVINO graphs, invalid input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from hasten.backends import DECODER, MODEL
from hasten.builder.inspect import inspect, open_viewer
from hasten.bundle import Bundle, Manifest, VariantEntry, open_bundle
from hasten.bundle.manifest import sha256
from hasten.cli import main
from hasten.core.errors import BundleError, PlanError, StageError
from hasten.core.report import Pass, Report, Unfused

PASS = Pass("fuse", {"Softmax": 2, "Erf": 1}, {"Softmax": 2, "Gelu": 1}, ("onnxruntime-fp32",), ("a note",))
LEFT = (Unfused("attention", "/layer.0/Softmax", "unknown"),)


def test_report_round_trips_with_passes(report: Report) -> None:
    recorded = replace(report, passes=(replace(PASS, unfused=LEFT),))
    assert msgspec.json.decode(msgspec.json.encode(recorded), type=Report) == recorded


def test_older_report_has_no_passes(report: Report) -> None:
    raw = json.loads(msgspec.json.encode(report))
    del raw["passes"]
    assert msgspec.convert(raw, Report).passes == ()


OPENVINO = """<?xml version="1.0"?>
<net name="n" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"/>
<layer id="1" name="w" type="Const" version="opset1"/>
<layer id="2" name="b" type="Const" version="opset1"/>
<layer id="3" name="y" type="MatMul" version="opset1"><data type="f32"/></layer>
</layers><edges><edge from-layer="0" to-layer="3"/></edges></net>"""


@pytest.fixture
def with_openvino(
    bundle: Bundle, make_manifest: Callable[..., Manifest], reseal: Callable[..., None]
) -> Callable[[str], Bundle]:
    """Add a variant whose graph is the given XML to a bundle, with valid digests."""

    def write(xml: str) -> Bundle:
        folder = bundle.path / "variants" / "openvino-fp32"
        folder.mkdir()
        (folder / "model.xml").write_text(xml)
        entry: VariantEntry = make_manifest("openvino-fp32").variants[0]
        entry = replace(entry, graphs={MODEL: "model.xml"})
        files = bundle.manifest.files | {"variants/openvino-fp32/model.xml": sha256(folder / "model.xml")}
        reseal(bundle, variants=(*bundle.manifest.variants, entry), files=files)
        return open_bundle(bundle.path)

    return write


def test_openvino_layers_are_counted_without_openvino(
    with_openvino: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    view = inspect(with_openvino(OPENVINO), "openvino-fp32").graphs[0]
    assert view.file == "variants/openvino-fp32/model.xml"
    assert view.operators == {"Const": 2, "Parameter": 1, "MatMul": 1}
    assert view.executed == ()
    assert len(view.notes) == 1
    assert "pip install 'hasten[openvino]'" in view.notes[0]


@pytest.mark.parametrize("xml", ["", "<net>", "<net><layers><layer id='0'/></layers></net>"])
def test_invalid_openvino_graph_is_rejected(with_openvino: Callable[[str], Bundle], xml: str) -> None:
    with pytest.raises(BundleError, match="is not an OpenVINO graph"):
        inspect(with_openvino(xml), "openvino-fp32")


def test_invalid_onnx_graph_is_rejected(bundle: Bundle) -> None:
    with pytest.raises(StageError, match="is not an ONNX graph"):
        inspect(bundle)


@pytest.mark.parametrize(("shape", "name"), [([1, 2, 3, 4], b"past\xff0"), ([1, 2], b"past.0")])
def test_invalid_decoder_graph_is_rejected(
    bundle: Bundle, reseal: Callable[..., None], shape: list[int], name: bytes
) -> None:
    onnx = pytest.importorskip("onnx")
    entry = bundle.manifest.variants[0]
    past = onnx.helper.make_tensor_value_info("past.0", onnx.TensorProto.FLOAT, shape)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "decoder", [past], []))
    relative = f"variants/{entry.name}/model.onnx"
    (bundle.path / relative).write_bytes(model.SerializeToString().replace(b"past.0", name))
    files = bundle.manifest.files | {relative: sha256(bundle.path / relative)}
    reseal(bundle, variants=(replace(entry, graphs={DECODER: "model.onnx"}),), graphs={}, files=files)
    with pytest.raises(BundleError, match="is not the graph of a decoder"):
        inspect(open_bundle(bundle.path))


def test_changed_file_is_rejected(bundle: Bundle) -> None:
    (bundle.path / "reference" / "inputs.jsonl").write_text("{}")
    with pytest.raises(BundleError, match="was changed after it was built"):
        inspect(bundle)


def test_invalid_port_is_rejected(bundle: Bundle) -> None:
    pytest.importorskip("netron")
    with pytest.raises(PlanError, match="not between 0 and 65535"):
        open_viewer(bundle, port=65536)


def test_unknown_variant_gets_a_suggestion(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle.path), "--variant", "onnxruntime-fp23"]) == 2
    assert "did you mean 'onnxruntime-fp32'" in capsys.readouterr().err
