"""The checks of `hasten doctor` on real distributions, installed as by pip and really broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import packaging.requirements
import packaging.version  # noqa: F401 - before the path is replaced
import pytest

from hasten.core.placement import OperatorPlacement, SelfTest
from hasten.measure import isolated_probe
from hasten.measure.isolated_probe import check_backend, check_package
from hasten.measure.packages import Collision, Package, read_packages

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def install(site: Path) -> Install:
    """Return a function: `install("acme", "1.0", {"acme/__init__.py": "…"})` writes the files and their metadata."""

    def write(
        name: str, version: str, files: Mapping[str, str] | None = None, about: str = "", points: str = ""
    ) -> None:
        for path, content in (files or {}).items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(content)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{about}")
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in (*(files or {}), f"{info.name}/METADATA")))
        (info / "entry_points.txt").write_text(points)

    return write


@pytest.fixture
def alone(site: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all installed packages except those of the test and a hasten that requires some of them."""
    needs = [
        "numpy>=2.3",
        "onnxruntime>=1.24",
        'torch>=2.11; extra == "build"',
        'onnx>=1.20; extra == "build"',
        'onnx<3; extra == "inspect"',
        'scikit-learn>=1; extra == "inspect"',
        'hasten[build]; extra == "demo"',
        'ruff>=0.1; extra == "dev"',
    ]
    lines = [f"Requires-Dist: {need}\n" for need in needs]
    lines += [f"Provides-Extra: {extra}\n" for extra in ("build", "inspect", "demo", "dev")]
    install("hasten", "0.1.0", about="".join(lines))
    monkeypatch.setattr(sys, "path", [str(site)])


@pytest.fixture
def path_to_processes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the packages of the test first on the path of the processes it starts."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), before))))


def found(name: str) -> Package:
    return next(package for package in read_packages()[0] if package.name == name)


@pytest.mark.usefixtures("alone")
def test_requirements_come_from_the_metadata() -> None:
    packages = read_packages()[0]
    assert [(package.name, package.extras) for package in packages] == [
        ("numpy", ()),
        ("onnxruntime", ()),
        ("torch", ("build",)),
        ("onnx", ("build", "inspect")),
        ("scikit-learn", ("inspect",)),
    ]
    assert set(found("onnx").supported.split(",")) == {">=1.20", "<3"}
    assert all(package.version is None and package.is_supported for package in packages)
    assert found("torch").hint == "pip install 'hasten[build]'"
    assert found("numpy").hint == "pip install 'numpy>=2.3'"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.11.0", True), ("2.13.0+cu130", True), ("2.12.0rc1", True), ("2.10.9", False), ("banana", False)],
)
def test_unsupported_version_is_reported(install: Install, version: str, fits: bool) -> None:
    install("torch", version, {"torch/__init__.py": ""})
    assert (found("torch").version, found("torch").is_supported) == (version, fits)


@pytest.mark.usefixtures("alone")
def test_package_may_be_provided_by_another_distribution(install: Install) -> None:
    install("onnxruntime-gpu", "1.30.0", {"onnxruntime/__init__.py": ""})
    runtime = found("onnxruntime")
    assert (runtime.provider, runtime.version, runtime.module) == ("onnxruntime-gpu", "1.30.0", "onnxruntime")
    assert read_packages()[1] == []


@pytest.mark.usefixtures("alone")
def test_package_may_have_another_import_name(install: Install) -> None:
    install("scikit-learn", "1.9", {"_build/__init__.py": "", "sklearn/__init__.py": ""})
    assert found("scikit-learn").module == "sklearn"


@pytest.mark.usefixtures("alone")
def test_two_distributions_of_one_folder_conflict(install: Install) -> None:
    install("onnxruntime", "1.31.1", {"onnxruntime/__init__.py": ""})
    install("onnxruntime-gpu", "1.30.0", {"onnxruntime/__init__.py": ""})
    # A plugin that adds to the folder of another writes no __init__.py there.
    install("torch", "2.13.0", {"torch/__init__.py": ""})
    install("torch-plugin", "1.0", {"torch/plugin.py": ""})
    collision = Collision("onnxruntime", ("onnxruntime", "onnxruntime-gpu"))
    assert read_packages()[1] == [collision]
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in collision.hint


@pytest.mark.usefixtures("alone")
def test_damaged_metadata_is_not_supported(site: Path) -> None:
    info = site / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("")
    assert (found("torch").version, found("torch").is_supported) == ("unknown", False)


@pytest.mark.usefixtures("path_to_processes")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("", ""),
        ("print('noise on stdout')", ""),
        ("import os; os.write(1, b'\\xff'); os.write(2, b'\\xff')", ""),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("raise OSError('libfoo.so.3: cannot open\\nand a second line')", "OSError: libfoo.so.3: cannot open"),
        ("raise RuntimeError", "RuntimeError: no message"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it crashed its process (SIGSEGV)"),
        ("import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(1)", "it ended its process: bye"),
        ("import sys; sys.exit('no licence')", "it ended its process: no licence"),
    ],
)
def test_package_is_imported_in_its_own_process(site: Path, code: str, error: str) -> None:
    (site / "acme_runtime.py").write_text(code)
    assert check_package("acme_runtime").error == error
    assert "acme_runtime" not in sys.modules


@pytest.mark.usefixtures("path_to_processes")
def test_package_that_hangs_is_timed_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "acme_runtime.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(isolated_probe, "_TIMEOUT_S", 0.5)
    assert "no answer within" in check_package("acme_runtime").error


BACKEND = """
from hasten.core.placement import OperatorPlacement, SelfTest
from hasten.core.variant import Precision, Support, Variant

PLACEMENTS = OperatorPlacement("MatMul", "npu", 2), OperatorPlacement("Erf", "cpu", 1)

class Acme:
    name, requires, extra = "acme", ("acme_runtime",), None

    def probe(self, machine, variant=None):
        return Support.{support}

    def variants(self, machine):
        return [Variant("acme", Precision.FP16, "npu")]

    def trials(self, machine):
        return [SelfTest("npu", PLACEMENTS, False, "half of it")]

BACKEND = Acme()
"""


@pytest.mark.usefixtures("path_to_processes")
def test_third_party_backend_is_probed(site: Path, install: Install) -> None:
    (site / "acme_runtime.py").touch()
    files = {"acme.py": BACKEND.format(support="yes()")}
    install("acme", "1.0", files, points="[hasten.backends]\nacme = acme:BACKEND\n")
    checked = check_backend("acme")
    assert checked.variants == ("acme-fp16@npu",)
    ran = (OperatorPlacement("MatMul", "npu", 2), OperatorPlacement("Erf", "cpu", 1))
    assert checked.trials == (SelfTest("npu", ran, False, "half of it"),)
    assert checked.trials[0].elsewhere == ran[1:]


@pytest.mark.usefixtures("path_to_processes")
def test_unsupported_backend_reports_reason_and_hint(site: Path, install: Install) -> None:
    (site / "acme_runtime.py").touch()
    files = {"acme.py": BACKEND.format(support="no('this machine has no NPU', 'buy one')")}
    install("acme", "1.0", files, points="[hasten.backends]\nacme = acme:BACKEND\n")
    checked = check_backend("acme")
    assert (checked.error, checked.reason, checked.hint) == ("", "this machine has no NPU", "buy one")


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hasten", "doctor", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("path_to_processes")
@pytest.mark.parametrize("package", ["numpy", pytest.param("msgspec", marks=pytest.mark.slow)])
def test_doctor_reports_a_broken_base_package(site: Path, package: str) -> None:
    (site / package).mkdir()
    (site / package / "__init__.py").write_text("raise ImportError('its core is missing')")
    for words in ((), ("--json",)):
        done = doctor(*words)
        assert (done.returncode, done.stderr) == (3, "")
        assert "does not import: ImportError: its core is missing" in done.stdout
    diagnosis = json.loads(done.stdout)
    # The first problem; others may follow from it.
    assert diagnosis["problems"][0]["message"].split()[0] == package
    assert diagnosis["problems"][0]["hint"] == f"pip install --force-reinstall {package}"
    assert diagnosis["machine"]["python"]
