"""transformer-deploy's command line: the same flags and lines, and one clear line for what is not there."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hasten.cli.convert_model import _order, parser, run
from hasten.core.errors import PlanError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.variant import Precision, Support, Variant
from hasten.deploy.convert import Latencies, Measures, max_error, place_graph
from hasten.graph import write_graph

MODEL = ["-m", "some/model"]


def test_defaults_are_those_of_transformer_deploy() -> None:
    given = vars(parser().parse_args(MODEL))
    expected = {
        "model": "some/model",
        "tokenizer": None,
        "task": "classification",
        "auth_token": None,
        "batch_size": [1, 1, 1],
        "seq_len": [16, 16, 16],
        "quantization": False,
        "workspace_size": 10000,
        "output": Path("triton_models"),
        "name": "transformer",
        "verbose": False,
        "fast": False,
        "backend": ["onnx"],
        "device": None,
        "nb_threads": 1,
        "nb_instances": 1,
        "warmup": 10,
        "nb_measures": 1000,
        "seed": 123,
        "atol": 0.3,
        "load_external_data": False,
        "generative_model": None,
    }
    assert {name: given[name] for name in expected} == expected


def test_every_short_form_and_arity() -> None:
    words = "-m m -t t -b 1 2 4 -s 8 16 32 -q -w 5 -o out -n name -v -d cpu --backend onnx pytorch --fast"
    given = parser().parse_args(words.split())
    assert (given.tokenizer, given.batch_size, given.seq_len) == ("t", [1, 2, 4], [8, 16, 32])
    assert (given.quantization, given.workspace_size, given.output) == (True, 5, Path("out"))
    assert (given.name, given.verbose, given.device, given.backend) == ("name", True, "cpu", ["onnx", "pytorch"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--seqlen 1 1 1", 2, "unknown option --seqlen: did you mean '--seq-len'?"),
        ("--quantisation", 2, "unknown option --quantisation: did you mean '--quantization'?"),
        ("-x", 2, "unrecognized arguments: -x"),
        ("-b 1 2", 2, "argument -b/--batch-size: expected 3 arguments"),
        ("-b 4 2 1", 2, "--batch-size 4 2 1 is out of order"),
        ("--backend openvino", 2, "invalid choice: 'openvino'"),
        ("--backend", 2, "nothing else would be deployed"),
        ("--backend pytorch", 2, "nothing else would be deployed"),
        ("--backend tensorrt onnx -d cpu", 2, "TensorRT runs on GPUs, and --device is cpu"),
        ("--backend tensorrt onnx", 3, "the backend tensorrt does not run here"),
        ("--backend tensorrt --runtime python", 3, "--runtime python does not run TensorRT"),
        ("-d cuda", 3, "the backend onnx does not run on 'cuda' here"),
        ("-d cuda -q", 2, "int8 of the backend onnx is for processors, and --device is cuda"),
        ("--generative-model t5", 2, "--generative-model t5 writes, and --task is classification"),
        ("--task text-generation --backend tensorrt", 3, "models that write are deployed for the CPU"),
        ("--task text-generation -d cuda", 3, "models that write are deployed for the CPU"),
        ("--task clasification", 2, "unknown task 'clasification'"),
        ("--nb-threads 0", 2, "--nb-threads 0 is less than one"),
        ("--nb-instances 0", 2, "--nb-instances 0 is less than one"),
        ("--nb-measures 0", 2, "--nb-measures 0 measures nothing"),
        ("--warmup -1", 2, "--warmup -1 is less than nothing"),
        ("--atol nan", 2, "--atol nan is not zero or more"),
        ("-n ../x", 2, "../x"),
    ],
)
def test_refusals(
    words: str,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any work: one line, a hint, and nothing written."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    Path("model/model.safetensors").touch()
    try:
        ended = run(["-m", "model", *words.split()])
    except SystemExit as stop:
        ended = stop.code
    first, *rest = capsys.readouterr().err.splitlines()
    assert ended == code
    assert first.startswith("error: ")
    assert told in first
    assert all(line.startswith("  hint: ") for line in rest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("words", "backends"),
    [
        ("", ("onnxruntime",)),
        ("--backend tensorrt", ("tensorrt",)),
        ("--backend onnx tensorrt", ("tensorrt", "onnxruntime")),
        ("--backend tensorrt pytorch -d cuda", ("tensorrt",)),
        ("--backend onnx -d cuda", ("onnxruntime",)),
        ("-q --backend tensorrt", ("tensorrt",)),
        ("-q --backend tensorrt onnx", ("tensorrt", "onnxruntime")),
    ],
)
def test_what_is_asked_for_is_what_is_deployed(words: str, backends: tuple[str, ...]) -> None:
    order = _order(parser().parse_args([*MODEL, *words.split()]))
    assert order.backends == backends
    asked = [Variant.parse(name) for name in order.plan.variants]
    assert {one.backend for one in asked} == set(backends)
    for backend in backends:
        precisions = {one.precision for one in asked if one.backend == backend}
        assert (Precision.INT8 in precisions) is ("-q" in words)
        assert precisions - {Precision.INT8}, "what int8 is compared with"


@pytest.mark.parametrize(("words", "hint"), [("", "-d cpu"), ("--backend tensorrt onnx", "leave -d out")])
def test_int8_for_the_gpu_is_tensorrts(
    words: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hasten.cli.convert_model._support", lambda _: Support.yes())
    assert run([*MODEL, "-q", "-d", "cuda", *words.split()]) == 2
    told = capsys.readouterr().err
    assert "int8 of the backend onnx is for processors, and --device is cuda" in told
    assert hint in told


@pytest.mark.parametrize(
    ("packages", "loading", "told"),
    [
        (
            Support.no("the package 'tensorrt' is not installed", "pip install 'hasten[tensorrt]'"),
            None,
            "not installed",
        ),
        (Support.yes(), "libnvinfer.so.11: cannot open shared object file", "TensorRT does not load: libnvinfer.so.11"),
    ],
)
def test_what_is_missing_of_tensorrt_is_named(
    packages: Support,
    loading: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside a GPU, before any work: the package, or the libraries that it comes without."""
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580.0"),))
    monkeypatch.setattr("hasten.core.hardware.this_machine", lambda: machine)
    monkeypatch.setattr("hasten.backends.tensorrt.probe_packages", lambda _: packages)
    monkeypatch.setattr("hasten.backends.tensorrt.loading_error", lambda: loading)
    assert run([*MODEL, "--backend", "tensorrt", "-o", str(tmp_path / "out")]) == 3
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("error: the backend tensorrt does not run here: ")
    assert told in first
    assert hint.startswith("  hint: ")
    assert not list(tmp_path.iterdir())


def test_what_lies_at_the_output_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    for words in ([], ["--force"]):
        assert run(["-m", "model", "-o", str(tmp_path), *words]) == 2
        assert "is not empty and holds no deployment" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_lines_are_those_of_transformer_deploy() -> None:
    shown = str(Latencies("ONNX Runtime (optimized)", (1.0, 2.0, 3.0, 4.0), 0.0))
    assert shown == (
        "[ONNX Runtime (optimized)] mean=2.50ms, sd=1.12ms, min=1.00ms, max=4.00ms,"
        " median=2.50ms, 95p=3.85ms, 99p=3.97ms"
    )


def test_the_largest_difference_counts() -> None:
    ours = [{"a": np.array([1.0, 2.0]), "b": np.array([0.0])}, {"a": np.array([5.0, 5.0]), "b": np.array([1.0])}]
    theirs = [{"a": np.array([1.0, 2.5]), "b": np.array([0.0])}, {"a": np.array([5.0, 5.0]), "b": np.array([3.0])}]
    assert max_error(ours, theirs) == 2.0
    theirs[0]["a"][0] = math.nan
    assert math.isnan(max_error(ours, theirs))


def test_two_graphs_in_one_directory_keep_their_weights(tmp_path: Path) -> None:
    """Both were called model.onnx, and model.onnx.data what lies beside them."""
    onnx = pytest.importorskip("onnx")
    for folder, value in (("a", 1.0), ("b", 2.0)):
        weights = onnx.numpy_helper.from_array(np.full(1024, value, np.float32), "weights")
        node = onnx.helper.make_node("Identity", ["weights"], ["out"])
        out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1024])
        model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", [], [out], [weights]))
        (tmp_path / folder).mkdir()
        write_graph(model, tmp_path / folder / "model.onnx", external_data=True)
        assert (tmp_path / folder / "model.onnx.data").is_file()
        place_graph(tmp_path / folder / "model.onnx", tmp_path / f"{folder}.onnx")
    for name, value in (("a.onnx", 1.0), ("b.onnx", 2.0)):
        found = onnx.numpy_helper.to_array(onnx.load(tmp_path / name).graph.initializer[0])
        assert (found == value).all()


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"count": 0}, {"seed": -1}, {"atol": -0.1}, {"atol": math.nan}])
def test_measures_that_measure_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        Measures(**wrong)


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys\nfrom hasten.cli.convert_model import run\n"
        "try: run(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'onnxruntime', 'rich', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
