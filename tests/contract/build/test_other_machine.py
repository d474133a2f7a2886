"""Test bundles on another machine than the one they were built on: missing instructions, and strict loading."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle, open_bundle
from hasten.bundle.manifest import sha256
from hasten.bundle.read import REFERENCE_OUTPUTS
from hasten.cli import main
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Status
from hasten.core.system.hardware import this_machine
from hasten.measure.verify_bundle import verify_bundle

FAST, SLOW = "onnxruntime-fp32", "openvino-fp32"
INT8 = "onnxruntime-int8"
TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def built(tiny_classifier: Any, quick_build: Any) -> Bundle:
    # A random model keeps few labels in int8; the gate is not the subject here.
    return quick_build(
        tiny_classifier("bert"),
        variants=[INT8, FAST, SLOW],
        keep="all",
        min_agreement=0.0,
        speeds={INT8: 1.0, FAST: 2.0, SLOW: 3.0},
    )


@pytest.fixture
def copied(built: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    """Copy the bundle with some of its variants and other fields of its manifest."""

    def copy(*names: str, **changes: Any) -> Bundle:
        path = tmp_path / "bundle"
        shutil.copytree(built.path, path)
        entries = tuple(built.entry(name) for name in names) or built.manifest.variants
        return sealed(Bundle(path, replace(built.manifest, variants=entries, **changes)))

    return copy


def sealed(bundle: Bundle) -> Bundle:
    """Write a manifest with the hashes of the current files, as if it had been built this way."""
    files = {name: sha256(bundle.path / name) for name in bundle.manifest.files}
    manifest = replace(bundle.manifest, files=files).sealed()
    (bundle.path / "manifest.json").write_bytes(manifest.to_json())
    return open_bundle(bundle.path)


def with_other_answers(bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> Bundle:
    stored = bundle.reference().outputs
    np.savez_compressed(bundle.path / REFERENCE_OUTPUTS, **{name: change(value) for name, value in stored.items()})
    return sealed(bundle)


def with_broken(bundle: Bundle, name: str, value: float) -> Bundle:
    """Change the last bias of an ONNX variant."""
    import onnx

    file = bundle.artifact(bundle.entry(name)).path()
    model = onnx.load(file)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("classifier.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([value, 0, 0], np.float32), bias.name))
    onnx.save(model, file)
    return sealed(bundle)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine without the instructions that int8 needs."""
    machine = replace(this_machine(), instructions=("avx2",), cpu="An old CPU")
    monkeypatch.setattr("hasten.predictor.this_machine", lambda: machine)


# --- instructions


def test_int8_entry_lists_its_instructions(built: Bundle) -> None:
    needed = {entry.name: entry.instructions for entry in built.manifest.variants}
    can_saturate = not this_machine().has("amx_int8", "avx512_vnni", "avx_vnni", "neon")
    assert needed[INT8] == (() if can_saturate else ("amx_int8", "avx512_vnni", "avx_vnni", "neon"))
    assert needed[FAST] == needed[SLOW] == ()


@pytest.mark.usefixtures("avx2")
def test_variant_for_missing_instructions_is_skipped(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = needing(copied())
    with hasten.load(bundle.path, threads=1) as predictor:
        assert predictor.session.spec.precision == "fp32"
    (printed,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert printed == (
        f"skipping {INT8}, which does not run here: made for avx512_vnni; this CPU has avx2, whose sums would"
        f" saturate; using {FAST} instead"
    )


@pytest.mark.usefixtures("avx2")
def test_named_variant_for_missing_instructions_is_rejected_with_an_alternative(copied: Any) -> None:
    bundle = needing(copied())
    with pytest.raises(UnsupportedError, match="made for avx512_vnni; this CPU has avx2") as caught:
        hasten.load(bundle.path, INT8)
    assert caught.value.hint == f"{FAST} of the same bundle runs here"
    candidates = verify_bundle(bundle, None, Gate(), [], 1, SilentProgress())
    (rejected,) = [candidate for candidate in candidates if candidate.status is Status.UNAVAILABLE]
    assert (rejected.variant, rejected.verdict) == (INT8, None)
    with pytest.raises(UnsupportedError, match="made for avx512_vnni"):
        verify_bundle(bundle, None, Gate(), [INT8], 1, SilentProgress())


def test_int8_variant_runs_with_its_instructions(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(), instructions=("avx2", "avx512_vnni"))
    monkeypatch.setattr("hasten.predictor.this_machine", lambda: machine)
    with hasten.load(needing(copied()).path, threads=1) as predictor:
        assert predictor.session.spec.precision == "int8"


def needing(bundle: Bundle) -> Bundle:
    entries = [
        replace(entry, instructions=("avx512_vnni",)) if entry.name == INT8 else entry
        for entry in bundle.manifest.variants
    ]
    return sealed(Bundle(bundle.path, replace(bundle.manifest, variants=tuple(entries))))


# --- log lines about another machine


@pytest.mark.usefixtures("avx2")
def test_other_cpu_is_logged_as_info(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(copied(FAST).path, threads=1).close()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "and this is An old CPU: --strict, or hasten verify, verifies it here" in record.getMessage()


def test_other_runtime_version_is_logged_as_info(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    this = this_machine()
    other = replace(this, libraries=this.libraries | {"onnxruntime": "1.0", "openvino": "1.0"})
    hasten.load(copied(FAST, machine=other).path, threads=1).close()
    (record,) = caplog.records
    assert f"with onnxruntime 1.0, and this is {this.libraries['onnxruntime']}" in record.getMessage()


def test_nothing_is_logged_on_the_same_machine(built: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(built.path, FAST, threads=1).close()
    assert caplog.records == []


# --- strict


def test_strict_load_accepts_an_intact_bundle(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    bundle = copied(FAST, SLOW)
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor(TEXT) == hasten.load(bundle.path, FAST, threads=1)(TEXT)
    assert f"{FAST} reproduces the reference answers here: largest error" in caplog.text
    assert main(["run", str(bundle.path), TEXT, "--strict"]) == 0


def test_strict_load_rejects_a_bundle_with_other_answers(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = with_other_answers(copied(FAST, SLOW), lambda value: value + 0.5)
    hasten.load(bundle.path, threads=1).close()
    with pytest.raises(AccuracyError, match="no variant reproduces the reference answers here") as caught:
        hasten.load(bundle.path, threads=1, strict=True)
    assert [candidate.variant for candidate in caught.value.candidates] == [FAST, SLOW, "graph-fp32"]
    with pytest.raises(AccuracyError, match=f"{SLOW} does not reproduce the reference answers here"):
        hasten.load(bundle.path, SLOW, threads=1, strict=True)
    assert main(["run", str(bundle.path), TEXT, "--strict"]) == 5
    assert "the reference answers" in capsys.readouterr().err


def test_strict_load_uses_the_next_variant_if_the_first_fails(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = with_broken(copied(FAST, SLOW), FAST, 2.0)
    expected = hasten.load(bundle.path, SLOW, threads=1)(TEXT)
    assert hasten.load(bundle.path, threads=1)(TEXT) != expected
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor(TEXT) == expected
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(
        f"skipping {FAST}, which does not reproduce the reference answers here: largest error 2.0"
    )
    assert message.endswith(f"; using {SLOW} instead")


def test_strict_load_uses_the_graph_if_all_variants_fail(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = with_broken(copied(FAST), FAST, 2.0)
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor.session.spec.precision == "fp32"
    assert "using graph-fp32 instead" in caplog.text


def test_strict_load_names_the_operator_of_non_finite_outputs(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    hasten.load(with_broken(copied(FAST, SLOW), FAST, np.inf).path, threads=1, strict=True).close()
    assert "some outputs are not finite numbers: first at /model/classifier/Gemm" in caplog.text


def test_strict_load_tolerates_few_flipped_rows(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of nine rows may flip: one is flipped here, and another one may depend on its batch."""
    gate = Gate(min_agreement=0.75)
    bundle = with_other_answers(copied(INT8, gate=gate), lambda value: value)
    predictor = hasten.load(bundle.path, INT8, threads=1)
    answers = predictor.outputs(predictor.encode(list(bundle.reference().rows)))["logits"]
    flipped = np.concatenate([-answers[:1], answers[1:]])
    bundle = with_other_answers(bundle, lambda _: flipped)
    monkeypatch.setattr("hasten.measure.encoder_judge._QUICK_CHECK_ROWS", 1)
    hasten.load(bundle.path, INT8, threads=1, strict=True).close()
    with pytest.raises(AccuracyError):
        hasten.load(with_other_answers(bundle, lambda _: -answers).path, INT8, threads=1, strict=True)


def test_strict_load_judges_all_rows_if_few_are_not_enough(copied: Any) -> None:
    """Dynamic int8 is judged at every batch size, as by `hasten verify`."""
    bundle = with_other_answers(copied(INT8, gate=Gate(min_agreement=0.5)), lambda value: -value)
    assert bundle.entry(INT8).depends_on_batch
    with pytest.raises(AccuracyError) as caught:
        hasten.load(bundle.path, INT8, threads=1, strict=True)
    (rejected,) = caught.value.candidates
    assert rejected.verdict is not None
    assert [at.size for at in rejected.verdict.by_batch] == list(bundle.report.plan.shapes.batches)


# --- building for another target


def test_build_for_another_target_notes_it(tiny_classifier: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_classifier("bert"), variants=[INT8, FAST], keep="all", min_agreement=0.0, target="avx2")
    assert bundle.report.plan.target == "avx2"
    assert all(entry.instructions == () for entry in bundle.manifest.variants)
    assert largest_weight(bundle) <= 64
    notes = next(stage.notes for stage in bundle.report.stages if stage.name == "search")
    assert "int8 weights use seven bits: sums of two products saturate on avx2" in notes


def largest_weight(bundle: Bundle) -> int:
    """Return the largest absolute int8 weight."""
    import onnx

    tensors = onnx.load(bundle.artifact(bundle.entry(INT8)).path()).graph.initializer
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in tensors if tensor.data_type == onnx.TensorProto.INT8]
    return max(int(np.abs(values.astype(int)).max(initial=0)) for values in weights if values.ndim == 2)


def test_unknown_target_is_rejected_at_once(tiny_classifier: Any, no_leftovers: Path) -> None:
    model = str(tiny_classifier("bert"))
    assert main(["build", model, "-o", str(no_leftovers), "--target", "avx3"]) == 2
