"""A bundle on a machine it was not built on: what is refused there, and what proves itself when it is loaded."""

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
from hasten.core.hardware import this_machine
from hasten.core.plan import Gate
from hasten.core.progress import Silent
from hasten.core.report import Status
from hasten.measure.reverify import reverify

FAST, SLOW = "onnxruntime-fp32", "openvino-fp32"
INT8 = "onnxruntime-int8"
TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def built(tiny_classifier: Any, quick_build: Any) -> Bundle:
    # A random model keeps few labels in int8; what it must keep is not the subject here.
    return quick_build(
        tiny_classifier("bert"),
        variants=[INT8, FAST, SLOW],
        keep="all",
        min_agreement=0.0,
        speeds={INT8: 1.0, FAST: 2.0, SLOW: 3.0},
    )


@pytest.fixture
def copied(built: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    """The bundle with some of its variants, and another machine it was built on."""

    def copy(*names: str, **changes: Any) -> Bundle:
        path = tmp_path / "bundle"
        shutil.copytree(built.path, path)
        kept = tuple(built.entry(name) for name in names) or built.manifest.variants
        return sealed(Bundle(path, replace(built.manifest, variants=kept, **changes)))

    return copy


def sealed(bundle: Bundle) -> Bundle:
    """As if it had been built this way: with the hashes of the files as they are now."""
    files = {name: sha256(bundle.path / name) for name in bundle.manifest.files}
    manifest = replace(bundle.manifest, files=files).sealed()
    (bundle.path / "manifest.json").write_bytes(manifest.to_json())
    return open_bundle(bundle.path)


def with_other_answers(bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> Bundle:
    stored = bundle.reference().outputs
    np.savez_compressed(bundle.path / REFERENCE_OUTPUTS, **{name: change(value) for name, value in stored.items()})
    return sealed(bundle)


def with_broken(bundle: Bundle, name: str, value: float) -> Bundle:
    """Another bias at the end of one ONNX variant."""
    import onnx

    file = bundle.artifact(bundle.entry(name)).path()
    model = onnx.load(file)
    bias = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("classifier.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([value, 0, 0], np.float32), bias.name))
    onnx.save(model, file)
    return sealed(bundle)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine without what int8 needs."""
    machine = replace(this_machine(), instructions=("avx2",), cpu="An old CPU")
    monkeypatch.setattr("hasten.predictor.this_machine", lambda: machine)


# --- instructions


def test_int8_says_what_it_needs(built: Bundle) -> None:
    needed = {entry.name: entry.instructions for entry in built.manifest.variants}
    can_saturate = not this_machine().has("amx_int8", "avx512_vnni", "avx_vnni", "neon")
    assert needed[INT8] == (() if can_saturate else ("amx_int8", "avx512_vnni", "avx_vnni", "neon"))
    assert needed[FAST] == needed[SLOW] == ()


@pytest.mark.usefixtures("avx2")
def test_a_variant_for_missing_instructions_is_passed_over(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = needing(copied())
    with hasten.load(bundle.path, threads=1) as predictor:
        assert predictor.session.spec.precision == "fp32"
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == (
        f"passing over {INT8}, which does not run here: made for avx512_vnni; this processor has avx2: its sums would"
        f" saturate; using {FAST} instead"
    )


@pytest.mark.usefixtures("avx2")
def test_asked_for_it_is_refused_and_another_named(copied: Any) -> None:
    bundle = needing(copied())
    with pytest.raises(UnsupportedError, match="made for avx512_vnni; this processor has avx2") as caught:
        hasten.load(bundle.path, INT8)
    assert caught.value.hint == f"{FAST} of the same bundle runs here"
    candidates = reverify(bundle, None, Gate(), [], 1, Silent())
    (refused,) = [candidate for candidate in candidates if candidate.status is Status.UNAVAILABLE]
    assert (refused.variant, refused.verdict) == (INT8, None)
    with pytest.raises(UnsupportedError, match="made for avx512_vnni"):
        reverify(bundle, None, Gate(), [INT8], 1, Silent())


def test_with_the_instructions_it_runs(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- a line for who looks for it


@pytest.mark.usefixtures("avx2")
def test_another_processor_is_told_quietly(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(copied(FAST).path, threads=1).close()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "and this is An old CPU: --strict, or hasten verify, proves it here" in record.getMessage()


def test_another_version_of_the_runtime_is_told_quietly(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    here = this_machine()
    other = replace(here, libraries=here.libraries | {"onnxruntime": "1.0", "openvino": "1.0"})
    hasten.load(copied(FAST, machine=other).path, threads=1).close()
    (record,) = caplog.records
    assert f"with onnxruntime 1.0, and this is {here.libraries['onnxruntime']}" in record.getMessage()


def test_on_the_same_machine_nothing_is_told(built: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(built.path, FAST, threads=1).close()
    assert caplog.records == []


# --- strict


def test_an_intact_bundle_proves_itself(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    bundle = copied(FAST, SLOW)
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor(TEXT) == hasten.load(bundle.path, FAST, threads=1)(TEXT)
    assert f"{FAST} answers like the original here: largest error" in caplog.text
    assert main(["run", str(bundle.path), TEXT, "--strict"]) == 0


def test_a_bundle_that_no_longer_answers_like_the_original_is_refused(
    copied: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = with_other_answers(copied(FAST, SLOW), lambda value: value + 0.5)
    hasten.load(bundle.path, threads=1).close()
    with pytest.raises(AccuracyError, match="no variant answers like the original here") as caught:
        hasten.load(bundle.path, threads=1, strict=True)
    assert [candidate.variant for candidate in caught.value.candidates] == [FAST, SLOW, "graph-fp32"]
    with pytest.raises(AccuracyError, match=f"{SLOW} does not answer like the original here"):
        hasten.load(bundle.path, SLOW, threads=1, strict=True)
    assert main(["run", str(bundle.path), TEXT, "--strict"]) == 5
    assert "like the original" in capsys.readouterr().err


def test_the_next_variant_is_used_where_the_first_fails(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = with_broken(copied(FAST, SLOW), FAST, 2.0)
    expected = hasten.load(bundle.path, SLOW, threads=1)(TEXT)
    assert hasten.load(bundle.path, threads=1)(TEXT) != expected
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor(TEXT) == expected
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"passing over {FAST}, which does not answer like the original here: largest error 2.0")
    assert said.endswith(f"; using {SLOW} instead")


def test_where_all_variants_fail_the_graph_is_used(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    bundle = with_broken(copied(FAST), FAST, 2.0)
    with hasten.load(bundle.path, threads=1, strict=True) as predictor:
        assert predictor.session.spec.precision == "fp32"
    assert "using graph-fp32 instead" in caplog.text


def test_numbers_that_are_not_finite_are_refused_by_name(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    hasten.load(with_broken(copied(FAST, SLOW), FAST, np.inf).path, threads=1, strict=True).close()
    assert "some outputs are not finite numbers: first at /model/classifier/Gemm" in caplog.text


def test_a_few_unlucky_rows_are_not_the_whole(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rows of which one may flip: one alone that does is no reason to refuse what was accepted."""
    gate = Gate(min_agreement=0.85)
    bundle = with_other_answers(copied(INT8, gate=gate), lambda value: value)
    own = hasten.load(bundle.path, INT8, threads=1)
    answers = own.outputs(own.encode(list(bundle.reference().rows)))["logits"]
    flipped = np.concatenate([-answers[:1], answers[1:]])
    bundle = with_other_answers(bundle, lambda _: flipped)
    monkeypatch.setattr("hasten.measure.strict._FEW", 1)
    hasten.load(bundle.path, INT8, threads=1, strict=True).close()
    with pytest.raises(AccuracyError):
        hasten.load(with_other_answers(bundle, lambda _: -answers).path, INT8, threads=1, strict=True)


def test_where_few_rows_do_not_do_it_is_judged_as_it_was_built(copied: Any) -> None:
    """Dynamic int8 at every batch size, as `hasten verify` does."""
    bundle = with_other_answers(copied(INT8, gate=Gate(min_agreement=0.5)), lambda value: -value)
    assert bundle.entry(INT8).depends_on_batch
    with pytest.raises(AccuracyError) as caught:
        hasten.load(bundle.path, INT8, threads=1, strict=True)
    (refused,) = caught.value.candidates
    assert refused.verdict is not None
    assert [at.size for at in refused.verdict.by_batch] == list(bundle.report.plan.shapes.batches)


# --- building for another target


def test_a_build_for_another_target_says_so(tiny_classifier: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_classifier("bert"), variants=[INT8, FAST], keep="all", min_agreement=0.0, target="avx2")
    assert bundle.report.plan.target == "avx2"
    assert all(entry.instructions == () for entry in bundle.manifest.variants)
    assert largest_weight(bundle) <= 64
    notes = next(stage.notes for stage in bundle.report.stages if stage.name == "search")
    assert "int8 weights in seven bits: sums of two products saturate on avx2" in notes


def largest_weight(bundle: Bundle) -> int:
    """Of the products in int8."""
    import onnx

    tensors = onnx.load(bundle.artifact(bundle.entry(INT8)).path()).graph.initializer
    found = [onnx.numpy_helper.to_array(tensor) for tensor in tensors if tensor.data_type == onnx.TensorProto.INT8]
    return max(int(np.abs(values.astype(int)).max(initial=0)) for values in found if values.ndim == 2)


def test_an_unknown_target_is_refused_at_once(tiny_classifier: Any, no_leftovers: Path) -> None:
    model = str(tiny_classifier("bert"))
    assert main(["build", model, "-o", str(no_leftovers), "--target", "avx3"]) == 2
