"""`hasten doctor` as a whole: what works is proven by running it, what is broken is named.

Nothing falls back silently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, HasTrials
from hasten.core.hardware import this_machine
from hasten.core.probe_graph import INPUT, OPERATORS, WIDTH, probe_graph
from hasten.core.variant import Precision, Variant

# The doctor, and what it left in its own process.
PROGRAM = (
    "import sys\nfrom hasten.cli import main\ncode = main(['doctor', '--json'])\n"
    "heavy = {'torch', 'transformers', 'openvino', 'onnxruntime'}\n"
    "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
)


# It tries every library in processes of their own.
pytestmark = pytest.mark.slow


def diagnosis(*first: Path) -> tuple[int, dict[str, Any], str]:
    paths = [*map(str, first), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    return done.returncode, json.loads(done.stdout), done.stderr.strip()


@pytest.fixture(scope="module")
def healthy() -> tuple[int, dict[str, Any], str]:
    return diagnosis()


def test_a_healthy_machine(healthy: tuple[int, dict[str, Any], str]) -> None:
    code, found, imported = healthy
    assert (code, found["problems"], imported) == (0, [], "")
    machine = this_machine()
    assert (found["machine"]["cpu"], found["machine"]["cores"]) == (machine.cpu, machine.cores)
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["numpy"] == np.__version__
    assert all(package["is_supported"] for package in found["packages"])


def test_every_backend_is_told_of(healthy: tuple[int, dict[str, Any], str]) -> None:
    told = {backend["name"]: backend for backend in healthy[1]["backends"]}
    assert sorted(told) == BACKENDS.names()
    for backend in BACKENDS.all():
        about = told[backend.name]
        support = backend.probe(this_machine())
        assert (about["health"] == "works") == support.ok
        if support.ok:
            assert about["variants"] == [variant.name for variant in backend.variants(this_machine())]
        else:
            assert (about["reason"], about["hint"]) == (support.reason, support.hint)


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS.all() if isinstance(backend, HasTrials)])
def test_trials_are_what_really_ran(healthy: tuple[int, dict[str, Any], str], name: str) -> None:
    about = next(backend for backend in healthy[1]["backends"] if backend["name"] == name)
    if about["health"] != "works":
        pytest.skip(about["reason"])
    assert about["trials"]
    assert all(trial["is_ok"] and (trial["executed"] or trial["note"]) for trial in about["trials"])


def test_a_provider_that_does_nothing_is_seen(healthy: tuple[int, dict[str, Any], str]) -> None:
    """The wheels for the CPU offer a provider for a remote service, which takes no ordinary operator."""
    trials = next(backend["trials"] for backend in healthy[1]["backends"] if backend["name"] == "onnxruntime")
    by_provider = {trial["asked"]: trial for trial in trials}
    ran = [{"operator": name, "on": "CPUExecutionProvider", "count": 1} for name in OPERATORS]
    assert by_provider["CPUExecutionProvider"]["executed"] == ran
    if "AzureExecutionProvider" not in by_provider:
        pytest.skip("this ONNX Runtime has no provider but the CPU's")
    azure = by_provider["AzureExecutionProvider"]
    assert (azure["executed"], azure["note"]) == (ran, "it executes none of them")


def test_a_precision_that_is_only_a_hint_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    openvino: Any = BACKENDS.get("openvino")
    support = openvino.probe(this_machine(), Variant("openvino", Precision.FP32))
    if not support.ok:
        pytest.skip(support.reason)
    assert {trial.asked: trial.is_ok for trial in openvino.trials(this_machine())}["CPU fp32"]
    # A processor that computes in another precision than it was asked for.
    monkeypatch.setitem(sys.modules["hasten.backends.openvino"].__dict__["_HINTS"], Precision.FP32, "bf16")
    trial = next(trial for trial in openvino.trials(this_machine()) if trial.asked == "CPU fp32")
    if any(ran.on == "CPU fp32" and ran.operator == "FullyConnected" for ran in trial.executed):
        pytest.skip("this processor computes in fp32 only")
    assert not trial.is_ok


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    """All at once: an old package, a broken one, two that collide, an extension that does not load."""
    _install(tmp_path, "transformers", "4.40.0", "")
    _install(tmp_path, "torch", "2.13.0", "raise OSError('libtorch_cpu.so: cannot open shared object file')")
    _install(tmp_path, "openvino", "2026.4.1", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    _install(tmp_path, "onnxruntime-gpu", "1.30.0", None, record="onnxruntime/__init__.py,,\n")
    points = "[hasten.tasks]\nhaiku = acme_poems:TASK\n"
    points += "[hasten.backends]\nabacus = acme_beads:BACKEND\nfinger = acme:FINGER\n"
    _install(tmp_path, "acme", "1.0", "FINGER = 'not a backend'", points=points)
    code, found, imported = diagnosis(tmp_path)
    assert (code, imported) == (3, "")
    problems = {problem["what"]: problem["hint"] for problem in found["problems"]}
    assert _one(problems, "transformers 4.40.0 is not in the range") == "pip install --upgrade 'transformers>=5.0'"
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in _one(problems, "onnxruntime and onnxruntime-gpu are")
    assert _one(problems, "'torch' is broken: OSError: libtorch_cpu.so: cannot open shared object file")
    assert _one(problems, "'openvino' is broken: it crashed its process (SIGSEGV)").endswith("openvino")
    assert _one(problems, "the task 'haiku' of acme_poems:TASK cannot be loaded")
    assert _one(problems, "the backend 'abacus' of acme_beads:BACKEND cannot be loaded")
    assert _one(problems, "what is registered as the backend 'finger' is none") == ""
    health = {backend["name"]: backend["health"] for backend in found["backends"]}
    expected = {"graph": "works", "onnxruntime": "works", "onnxruntime-tensorrt": "absent", "tensorrt": "absent"}
    assert health == {**expected, **dict.fromkeys(("fused", "inductor", "openvino", "torch"), "broken")}


def _one(problems: dict[str, str], part: str) -> str:
    matching = [hint for what, hint in problems.items() if part in what]
    assert len(matching) == 1, problems
    return matching[0]


def _install(
    site: Path, name: str, version: str, code: str | None, *, record: str | None = None, points: str = ""
) -> None:
    """A distribution as pip leaves one: a folder with code, its metadata beside it."""
    module = name.replace("-", "_")
    if code is not None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(code)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record or f"{module}/__init__.py,,\n")
    (info / "entry_points.txt").write_text(points)


def test_the_probe_graph_is_sound() -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = onnx.load_from_string(probe_graph())
    onnx.checker.check_model(model, full_check=True)
    assert tuple(node.op_type for node in model.graph.node) == OPERATORS
    weight, bias, scale = map(onnx.numpy_helper.to_array, model.graph.initializer)
    x = np.random.default_rng(3).normal(size=(5, WIDTH)).astype(np.float32)
    sums = x @ weight + bias
    normal = (sums - sums.mean(1, keepdims=True)) / np.sqrt(sums.var(1, keepdims=True) + 1e-5) * scale + bias
    expected = np.exp(normal) / np.exp(normal).sum(1, keepdims=True)
    session = onnxruntime.InferenceSession(probe_graph(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {INPUT: x})[0], expected, atol=1e-5)
