"""transformer-deploy's command line: the same flags and output, and one-line errors for unsupported options."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hasten.cli.convert_model import _conversion, parser, run
from hasten.core.errors import PlanError
from hasten.core.system.hardware import Gpu, this_machine
from hasten.core.variant import Precision, Support, Variant
from hasten.deploy.convert import BenchOptions, Latencies, max_error, write_graph_model
from hasten.onnx_graph import write_graph

MODEL = ["-m", "some/model"]


def test_defaults_are_those_of_transformer_deploy() -> None:
    arguments = vars(parser().parse_args(MODEL))
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
    assert {name: arguments[name] for name in expected} == expected


def test_short_flags_and_their_arity_match_transformer_deploy() -> None:
    words = "-m m -t t -b 1 2 4 -s 8 16 32 -q -w 5 -o out -n name -v -d cpu --backend onnx pytorch --fast"
    arguments = parser().parse_args(words.split())
    assert (arguments.tokenizer, arguments.batch_size, arguments.seq_len) == ("t", [1, 2, 4], [8, 16, 32])
    assert (arguments.quantization, arguments.workspace_size, arguments.output) == (True, 5, Path("out"))
    assert (arguments.name, arguments.verbose, arguments.device) == ("name", True, "cpu")
    assert arguments.backend == ["onnx", "pytorch"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--seqlen 1 1 1", 2, "unknown option --seqlen: did you mean '--seq-len'?"),
        ("--quantisation", 2, "unknown option --quantisation: did you mean '--quantization'?"),
        ("-x", 2, "unrecognized arguments: -x"),
        ("-b 1 2", 2, "argument -b/--batch-size: expected 3 arguments"),
        ("-b 4 2 1", 2, "--batch-size 4 2 1 is out of order"),
        ("--backend openvino", 2, "invalid choice: 'openvino'"),
        ("--backend", 2, "no other backend would be deployed"),
        ("--backend pytorch", 2, "no other backend would be deployed"),
        ("--backend tensorrt onnx -d cpu", 2, "TensorRT needs a GPU, and --device is cpu"),
        ("--backend tensorrt onnx", 3, "the backend tensorrt does not run here"),
        ("--backend tensorrt --runtime python", 3, "--runtime python does not run TensorRT"),
        ("-d cuda", 3, "the backend onnx does not run on 'cuda' here"),
        ("-d cuda -q", 2, "the backend onnx runs int8 on CPUs only, and --device is cuda"),
        ("--generative-model t5", 2, "--generative-model t5 does not fit --task classification"),
        ("--task text-generation --backend tensorrt", 3, "text generation is deployed for the CPU only"),
        ("--task text-generation -d cuda", 3, "text generation is deployed for the CPU only"),
        ("--task clasification", 2, "unknown task 'clasification'"),
        ("--nb-threads 0", 2, "--nb-threads 0 is less than one"),
        ("--nb-instances 0", 2, "--nb-instances 0 is less than one"),
        ("--nb-measures 0", 2, "--nb-measures 0 is less than 1"),
        ("--warmup -1", 2, "--warmup -1 is negative"),
        ("--atol nan", 2, "--atol nan is not zero or more"),
        ("-n ../x", 2, "../x"),
    ],
)
def test_unsupported_options_are_rejected_before_any_work(
    words: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is one line with a hint, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    Path("model/model.safetensors").touch()
    try:
        exit_code = run(["-m", "model", *words.split()])
    except SystemExit as stop:
        exit_code = stop.code
    first, *rest = capsys.readouterr().err.splitlines()
    assert exit_code == code
    assert first.startswith("error: ")
    assert message in first
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
def test_requested_backends_and_precisions_are_deployed(words: str, backends: tuple[str, ...]) -> None:
    request = _conversion(parser().parse_args([*MODEL, *words.split()]))
    assert request.backends == backends
    variants = [Variant.parse(name) for name in request.plan.variants]
    assert {variant.backend for variant in variants} == set(backends)
    for backend in backends:
        precisions = {variant.precision for variant in variants if variant.backend == backend}
        assert (Precision.INT8 in precisions) is ("-q" in words)
        assert precisions - {Precision.INT8}, "the baseline of int8"


@pytest.mark.parametrize(("words", "hint"), [("", "-d cpu"), ("--backend tensorrt onnx", "omit -d to use the CPU")])
def test_int8_of_onnxruntime_is_rejected_on_a_gpu(
    words: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hasten.cli.convert_model._support", lambda _: Support.yes())
    assert run([*MODEL, "-q", "-d", "cuda", *words.split()]) == 2
    errors = capsys.readouterr().err
    assert "the backend onnx runs int8 on CPUs only, and --device is cuda" in errors
    assert hint in errors


@pytest.mark.parametrize(
    ("packages", "loading", "message"),
    [
        (
            Support.no("the package 'tensorrt' is not installed", "pip install 'hasten[tensorrt]'"),
            None,
            "not installed",
        ),
        (Support.yes(), "libnvinfer.so.11: cannot open shared object file", "TensorRT does not load: libnvinfer.so.11"),
    ],
)
def test_missing_part_of_tensorrt_is_named(
    packages: Support,
    loading: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any work, on a machine with a GPU: the package, or the libraries that it does not include."""
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580.0"),))
    monkeypatch.setattr("hasten.core.system.hardware.this_machine", lambda: machine)
    monkeypatch.setattr("hasten.backends.tensorrt.probe_packages", lambda _: packages)
    monkeypatch.setattr("hasten.backends.tensorrt.loading_error", lambda _: loading)
    assert run([*MODEL, "--backend", "tensorrt", "-o", str(tmp_path / "out")]) == 3
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("error: the backend tensorrt does not run here: ")
    assert message in first
    assert hint.startswith("  hint: ")
    assert not list(tmp_path.iterdir())


def test_other_files_at_the_output_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    for words in ([], ["--force"]):
        assert run(["-m", "model", "-o", str(tmp_path), *words]) == 2
        assert "is not empty and holds no deployment" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_latency_line_matches_transformer_deploy() -> None:
    line = str(Latencies("ONNX Runtime (optimized)", (1.0, 2.0, 3.0, 4.0), 0.0))
    assert line == (
        "[ONNX Runtime (optimized)] mean=2.50ms, sd=1.12ms, min=1.00ms, max=4.00ms,"
        " median=2.50ms, 95p=3.85ms, 99p=3.97ms"
    )


def test_max_error_is_the_largest_difference() -> None:
    outputs = [{"a": np.array([1.0, 2.0]), "b": np.array([0.0])}, {"a": np.array([5.0, 5.0]), "b": np.array([1.0])}]
    reference = [{"a": np.array([1.0, 2.5]), "b": np.array([0.0])}, {"a": np.array([5.0, 5.0]), "b": np.array([3.0])}]
    assert max_error(outputs, reference) == 2.0
    reference[0]["a"][0] = math.nan
    assert math.isnan(max_error(outputs, reference))


def test_external_weights_of_two_graphs_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs are named model.onnx, and their weights model.onnx.data."""
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    onnx = pytest.importorskip("onnx")
    for folder, value in (("a", 1.0), ("b", 2.0)):
        weights = onnx.numpy_helper.from_array(np.full(1024, value, np.float32), "weights")
        node = onnx.helper.make_node("Identity", ["weights"], ["out"])
        out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1024])
        model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", [], [out], [weights]))
        (tmp_path / folder).mkdir()
        write_graph(model, tmp_path / folder / "model.onnx", external_data=True)
        assert (tmp_path / folder / "model.onnx.data").is_file()
        write_graph_model(tmp_path / folder / "model.onnx", tmp_path / f"{folder}.onnx")
    for name, value in (("a.onnx", 1.0), ("b.onnx", 2.0)):
        weights = onnx.numpy_helper.to_array(onnx.load(tmp_path / name).graph.initializer[0])
        assert (weights == value).all()


@pytest.mark.parametrize("options", [{"warmup": -1}, {"count": 0}, {"seed": -1}, {"atol": -0.1}, {"atol": math.nan}])
def test_invalid_bench_options_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        BenchOptions(**options)


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys\nfrom hasten.cli.convert_model import run\n"
        "try: run(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'onnxruntime', 'rich', 'msgspec') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"
