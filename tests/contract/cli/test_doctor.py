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

from hasten.backends import BACKENDS, SupportsSelfTest
from hasten.core.onnx.probe_graph import INPUT, OPERATORS, WIDTH, probe_graph
from hasten.core.system.hardware import this_machine, usable_cores
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


def test_doctor_reports_no_problems_on_a_healthy_machine(healthy: tuple[int, dict[str, Any], str]) -> None:
    code, report, imported = healthy
    assert (code, report["problems"], imported) == (0, [], "")
    machine = this_machine()
    assert (report["machine"]["cpu"], report["machine"]["cores"]) == (machine.cpu, usable_cores())
    versions = {package["name"]: package["version"] for package in report["packages"]}
    assert versions["numpy"] == np.__version__
    assert all(package["is_supported"] for package in report["packages"])


def test_every_backend_is_reported(healthy: tuple[int, dict[str, Any], str]) -> None:
    backend_reports = {backend["name"]: backend for backend in healthy[1]["backends"]}
    assert sorted(backend_reports) == BACKENDS.names()
    for backend in BACKENDS.all():
        backend_report = backend_reports[backend.name]
        support = backend.probe(this_machine())
        assert (backend_report["health"] == "works") == support.ok
        if support.ok:
            assert backend_report["variants"] == [variant.name for variant in backend.variants(this_machine())]
        else:
            assert (backend_report["reason"], backend_report["hint"]) == (support.reason, support.hint)


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS.all() if isinstance(backend, SupportsSelfTest)])
def test_self_tests_report_where_operators_ran(healthy: tuple[int, dict[str, Any], str], name: str) -> None:
    backend_report = next(backend for backend in healthy[1]["backends"] if backend["name"] == name)
    if backend_report["health"] != "works":
        pytest.skip(backend_report["reason"])
    assert backend_report["trials"]
    assert all(trial["is_ok"] and (trial["executed"] or trial["note"]) for trial in backend_report["trials"])


def test_provider_that_runs_nothing_is_reported(healthy: tuple[int, dict[str, Any], str]) -> None:
    """The CPU wheels offer a provider for a remote service, which runs no ordinary operator."""
    trials = next(backend["trials"] for backend in healthy[1]["backends"] if backend["name"] == "onnxruntime")
    by_provider = {trial["requested"]: trial for trial in trials}
    ran = [{"operator": name, "on": "CPUExecutionProvider", "count": 1} for name in OPERATORS]
    assert by_provider["CPUExecutionProvider"]["executed"] == ran
    if "AzureExecutionProvider" not in by_provider:
        pytest.skip("this ONNX Runtime has no provider but the CPU's")
    azure = by_provider["AzureExecutionProvider"]
    assert (azure["executed"], azure["note"]) == (ran, "it executes none of them")


def test_precision_that_is_not_applied_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    openvino: Any = BACKENDS.get("openvino")
    support = openvino.probe(this_machine(), Variant("openvino", Precision.FP32))
    if not support.ok:
        pytest.skip(support.reason)
    assert {trial.requested: trial.is_ok for trial in openvino.trials(this_machine())}["CPU fp32"]
    # A CPU that computes in another precision than requested.
    monkeypatch.setitem(sys.modules["hasten.backends.openvino"].__dict__["_HINTS"], Precision.FP32, "bf16")
    trial = next(trial for trial in openvino.trials(this_machine()) if trial.requested == "CPU fp32")
    if any(ran.on == "CPU fp32" and ran.operator == "FullyConnected" for ran in trial.executed):
        pytest.skip("this CPU computes in fp32 only")
    assert not trial.is_ok


def test_broken_packages_and_extensions_are_reported(tmp_path: Path) -> None:
    """An old package, a broken one, two in conflict, and an extension that does not load."""
    _install(tmp_path, "transformers", "4.40.0", "")
    _install(tmp_path, "torch", "2.13.0", "raise OSError('libtorch_cpu.so: cannot open shared object file')")
    _install(tmp_path, "openvino", "2026.4.1", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    _install(tmp_path, "onnxruntime-gpu", "1.30.0", None, record="onnxruntime/__init__.py,,\n")
    points = "[hasten.tasks]\nhaiku = acme_poems:TASK\n"
    points += "[hasten.backends]\nabacus = acme_beads:BACKEND\nfinger = acme:FINGER\n"
    _install(tmp_path, "acme", "1.0", "FINGER = 'not a backend'", points=points)
    code, report, imported = diagnosis(tmp_path)
    assert (code, imported) == (3, "")
    problems = {problem["message"]: problem["hint"] for problem in report["problems"]}
    assert _one(problems, "transformers 4.40.0 is not in the range") == "pip install --upgrade 'transformers>=5.0'"
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in _one(problems, "onnxruntime and onnxruntime-gpu are")
    assert _one(problems, "'torch' is broken: OSError: libtorch_cpu.so: cannot open shared object file")
    assert _one(problems, "'openvino' is broken: it crashed its process (SIGSEGV)").endswith("openvino")
    assert _one(problems, "the task 'haiku' of acme_poems:TASK cannot be loaded")
    assert _one(problems, "the backend 'abacus' of acme_beads:BACKEND cannot be loaded")
    assert _one(problems, "the object registered as the backend 'finger' is not a backend") == ""
    health = {backend["name"]: backend["health"] for backend in report["backends"]}
    expected = {"graph": "works", "onnxruntime": "works", "tensorrt": "absent", "tensorrt-rtx": "absent"}
    assert health == {**expected, **dict.fromkeys(("fused", "inductor", "openvino", "torch"), "broken")}


def _one(problems: dict[str, str], part: str) -> str:
    matching = [hint for problem_text, hint in problems.items() if part in problem_text]
    assert len(matching) == 1, problems
    return matching[0]


def _install(
    site: Path, name: str, version: str, code: str | None, *, record: str | None = None, points: str = ""
) -> None:
    """Write a distribution as pip would: a folder with code, and its metadata."""
    module = name.replace("-", "_")
    if code is not None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(code)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record or f"{module}/__init__.py,,\n")
    (info / "entry_points.txt").write_text(points)


def test_probe_graph_is_valid() -> None:
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
