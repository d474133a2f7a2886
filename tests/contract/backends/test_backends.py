"""Test that every variant of every registered backend keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Session, Source, dialect_of
from hasten.core.errors import StageError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.system.hardware import Gpu, this_machine
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Layout, Shape, TensorSpec
from hasten.core.variant import Precision, Variant
from support.int8 import recipe_here

FULL = 64
AWKWARD = {
    "one row": [9],
    "seven rows": [5] * 7,
    "one token": [1],
    "one token in seven rows": [1] * 7,
    "full length": [FULL],
    "ragged": [1, FULL, 3, 17, 2, 30, 9],
}

# In fp32 only the order of additions differs: largest error relative to the largest output.
FP32_ERROR = 1e-4
# Lower precisions are judged by the norm of the error over the norm of the output. The model is random and wide, not
# trained, so errors are far larger than on a real one: these bounds are between rounding errors (measured: bf16 up to
# 0.05, int8 up to 0.18) and a defect such as a lost mask (0.6 to 0.8). Accuracy itself is decided by the gate.
REDUCED_ERROR = {
    Precision.FP16: 2e-2,  # 11 bits
    Precision.BF16: 1e-1,  # 8 bits
    Precision.INT8: 4e-1,  # 8 bits, one scale for all activations of a tensor
}

MARKS = {
    # torch.compile takes a minute for the first batches. It uses deprecated functions, suggests TF32, and first
    # captures an empty CUDA graph.
    "inductor": (
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
        pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    )
}


# Variants that run on a GPU and are skipped elsewhere.
ON_GPU = {
    "torch": ("torch-fp32@cuda", "torch-fp16@cuda", "torch-bf16@cuda"),
    "inductor": ("inductor-fp16@cuda",),
    "onnxruntime": ("onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"),
}


def variants() -> list[Any]:
    """Return the variants that each backend offers here, or fp32 if it offers none."""
    params = []
    for backend in BACKENDS.all():
        offered = backend.variants(this_machine()) if backend.probe(this_machine()).ok else []
        tested = [*(offered or [Variant(backend.name, Precision.FP32)])]
        tested += map(Variant.parse, ON_GPU.get(backend.name, ()))
        params += [
            pytest.param(variant, id=variant.name, marks=MARKS.get(backend.name, ()))
            for variant in dict.fromkeys(tested)
        ]
    return params


@pytest.fixture(scope="module")
def sources(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, dict[Dialect, Path]]]:
    """Return a model with one output per row, and one per token, whose padding a session removes."""
    from hasten.builder.sources.export_wrapper import Exportable
    from hasten.quantize.methods.dynamic import quantize_dynamic
    from hasten.quantize.methods.fp16 import convert_to_fp16

    rows = load_tiny(tiny_classifier("bert"))
    inputs = [spec.name for spec in rows.signature.inputs]
    output = TensorSpec("last_hidden_state", DType.FLOAT32, (BATCH, SEQUENCE, 32))
    tokens = replace(
        rows,
        module=Exportable(rows.module.model.bert, inputs, [output.name]),
        signature=replace(rows.signature, outputs=(output,)),
    )
    models = {}
    for name, loaded in {"per row": rows, "per token": tokens}.items():
        graphs = make_graphs(loaded, tmp_path_factory.mktemp("graphs"))
        quantized = graphs[Dialect.ORT].with_name("int8.onnx")
        recipe = recipe_here("onnxruntime-int8", attention=True)
        quantize_dynamic(graphs[Dialect.ORT], quantized, recipe, external_data=False)
        fp16 = convert_to_fp16({MODEL: graphs[Dialect.ORT_CUDA]}, tmp_path_factory.mktemp("fp16"), {})[MODEL]
        models[name] = (loaded, graphs | {"int8": quantized, "fp16": fp16})
    return models


def source_for(variant: Variant, loaded: Any, graphs: dict[Any, Path]) -> Source:
    dialect = dialect_of(variant)
    if dialect is Dialect.MODULE:
        return Source(loaded.signature, {}, loaded.module)
    is_made = dialect in (Dialect.ORT, Dialect.ORT_CUDA) and variant.precision.is_reduced
    return Source(loaded.signature, {"model": graphs[variant.precision.value if is_made else dialect]})


def skip_unless_supported(variant: Variant) -> None:
    support = BACKENDS.get(variant.backend).probe(this_machine(), variant)
    if not support.ok:
        pytest.skip(f"{variant}: {support.reason}")


def make(variant: Variant, sources: dict[str, Any], kind: str, folder: Path) -> Artifact:
    skip_unless_supported(variant)
    folder.mkdir(exist_ok=True)
    return BACKENDS.get(variant.backend).make(source_for(variant, *sources[kind]), variant, folder)


def open_artifact(artifact: Artifact) -> Session:
    return BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions(2))


@pytest.fixture(scope="module", params=variants())
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture(scope="module")
def session(variant: Variant, sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with open_artifact(make(variant, sources, "per row", tmp_path_factory.mktemp("variant"))) as opened:
        yield opened


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    total = sum(lengths)
    draw = np.random.default_rng(seed)
    values = {
        "input_ids": draw.integers(5, 150, total).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, total).astype(np.int32),
    }
    return Batch(values, np.asarray(lengths, np.int32))


def reference(loaded: Any, batch: Batch) -> np.ndarray:
    """Run plain PyTorch one row at a time, without padding or batching."""
    import torch

    answers = []
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        feeds = {
            name: torch.tensor(column[start:end], dtype=torch.int64)[None] for name, column in batch.values.items()
        }
        with torch.inference_mode():
            output = loaded.module.model(**feeds)
        answers.append(output.logits if "logits" in output else output.last_hidden_state[0])
    return torch.cat(answers).numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray, precision: Precision) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    if precision.is_reduced:
        assert np.linalg.norm(ours - theirs) <= REDUCED_ERROR[precision] * np.linalg.norm(theirs)
    else:
        assert np.abs(ours - theirs).max() <= FP32_ERROR * np.abs(theirs).max()


@pytest.mark.parametrize("lengths", AWKWARD.values(), ids=AWKWARD)
def test_outputs_equal_reference(session: Session, sources: Any, variant: Variant, lengths: list[int]) -> None:
    loaded, _ = sources["per row"]
    batch = batch_of(lengths)
    assert_close(session.run(batch)["logits"], reference(loaded, batch), variant.precision)


def test_outputs_per_token_come_back_unpadded(variant: Variant, sources: Any, tmp_path: Path) -> None:
    if variant.backend == "inductor":
        pytest.skip("shares its session with torch; a second compilation takes another minute")
    loaded, _ = sources["per token"]
    batch = batch_of(AWKWARD["ragged"])
    with open_artifact(make(variant, sources, "per token", tmp_path)) as session:
        ours = session.run(batch)["last_hidden_state"]
    assert ours.shape == (batch.tokens, 32)
    assert_close(ours, reference(loaded, batch), variant.precision)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
@pytest.mark.parametrize("kind", ["per row", "per token"])
def test_cuda_session_answers_from_buckets(sources: Any, kind: str, precision: Precision) -> None:
    """Runs on the CPU, which casts fp16, and covers everything except CUDA graphs."""
    from hasten.backends.onnxruntime.cuda import CudaSession

    loaded, graphs = sources[kind]
    variant = Variant("onnxruntime", precision, "cuda")
    graph = source_for(variant, loaded, graphs).graphs["model"]
    artifact = Artifact(variant, loaded.signature, graph.parent, {"model": graph.name})
    with CudaSession(artifact, RunOptions(1), device="cpu") as session:
        for lengths in AWKWARD.values():
            batch = batch_of(lengths)
            (ours,) = session.run(batch).values()
            assert_close(ours, reference(loaded, batch), precision)
        with pytest.raises(StageError, match="65 tokens"):
            session.run(batch_of([FULL + 1]))
    with pytest.raises(StageError, match="closed"):
        session.run(batch_of([3]))


def test_graph_is_rejected_if_no_node_runs_on_gpu(sources: Any) -> None:
    from hasten.backends.onnxruntime.cuda import CudaSession, check_placements

    loaded, graphs = sources["per row"]
    graph = graphs[Dialect.ORT_CUDA]
    artifact = Artifact(Variant.parse("onnxruntime-fp32@cuda"), loaded.signature, graph.parent, {"model": graph.name})
    with pytest.raises(StageError, match="none of the nodes on CUDAExecutionProvider"):
        check_placements(artifact, partial(CudaSession, device="cpu"))


def test_cuda_session_waits_while_another_captures(sources: Any) -> None:
    from hasten.backends.onnxruntime.cuda import CudaSession

    loaded, graphs = sources["per row"]
    variant = Variant("onnxruntime", Precision.FP32, "cuda")
    graph = source_for(variant, loaded, graphs).graphs["model"]
    artifact = Artifact(variant, loaded.signature, graph.parent, {"model": graph.name})
    known, new = batch_of([3]), batch_of([30])
    with ThreadPoolExecutor(1) as thread, CudaSession(artifact, RunOptions(1), device="cpu") as session:
        session.run(known)
        for call in (partial(session.run, known), partial(session.run, new), session.close):
            with capture_lock.exclusive():
                waiting = thread.submit(call)
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
            waiting.result(60)


def test_batched_outputs_equal_single(session: Session, variant: Variant) -> None:
    if variant.precision.is_reduced:
        pytest.skip("dynamic scales and rounding depend on the other rows of a batch")
    batch = batch_of(AWKWARD["ragged"])
    together = session.run(batch)["logits"]
    alone = [session.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))]
    assert_close(together, np.concatenate(alone), variant.precision)


def test_sessions_run_in_several_threads(variant: Variant, sources: Any, tmp_path: Path) -> None:
    """Batch shapes are new to each session: on a GPU each captures graphs while the others run."""
    if variant.backend == "inductor":
        pytest.skip("shares its session with torch; a compilation for each takes minutes")
    loaded, _ = sources["per row"]
    artifact = make(variant, sources, "per row", tmp_path)
    batches = [batch_of([length] * rows, seed=length) for rows, length in [(1, 3), (2, 20), (4, 33), (8, 50), (3, 64)]]
    expected = [reference(loaded, batch) for batch in batches]

    def run_all(offset: int) -> list[np.ndarray]:
        # Each session starts with another shape, so that it replays a graph while another session captures one.
        order = np.roll(np.arange(len(batches)), offset).tolist()
        with open_artifact(artifact) as session:
            logits = {index: session.run(batches[index])["logits"] for index in order * 3}
        return [logits[index] for index in range(len(batches))]

    with ThreadPoolExecutor(3) as threads:
        for answers in threads.map(run_all, range(3)):
            for ours, theirs in zip(answers, expected, strict=True):
                assert_close(ours, theirs, variant.precision)


def test_session_spec_describes_variant(session: Session, sources: Any, variant: Variant) -> None:
    spec = session.spec
    assert spec.signature == sources["per row"][0].signature
    assert spec.precision == variant.precision
    assert spec.device == variant.device
    assert spec.layout in Layout


def test_session_warms_up_shapes_beyond_max_length(session: Session) -> None:
    session.warm([Shape(1, 8), Shape(3, FULL), Shape(2, 10 * FULL)])


def test_outputs_are_not_overwritten_by_next_run(session: Session) -> None:
    first = session.run(batch_of([8, 4], seed=1))["logits"]
    expected = first.copy()
    session.run(batch_of([8, 4], seed=2))
    np.testing.assert_array_equal(first, expected)


def test_run_does_not_modify_batch(session: Session) -> None:
    batch = batch_of(AWKWARD["ragged"])
    before = {name: column.copy() for name, column in batch.values.items()}
    session.run(batch)
    assert all((batch.values[name] == column).all() for name, column in before.items())


def test_session_closes_more_than_once(variant: Variant, sources: Any, tmp_path: Path) -> None:
    session = open_artifact(make(variant, sources, "per row", tmp_path))
    with session as entered:
        assert entered is session
    session.close()


def test_too_long_batch_raises_stage_error(session: Session) -> None:
    with pytest.raises(StageError):
        session.run(batch_of([FULL + 1]))


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty", "missing"])
def test_damaged_artifact_raises_stage_error(variant: Variant, sources: Any, tmp_path: Path, damage: str) -> None:
    artifact = make(variant, sources, "per row", tmp_path)
    for file in artifact.directory.iterdir():
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            broken = {"garbage": b"not a model" * 100, "truncated": content[: len(content) // 2], "empty": b""}
            file.write_bytes(broken[damage])
    with pytest.raises(StageError):
        open_artifact(artifact).run(batch_of([3]))


def test_damaged_source_raises_stage_error(variant: Variant, sources: Any, tmp_path: Path) -> None:
    if BACKENDS.get(variant.backend).dialect is Dialect.MODULE:
        pytest.skip("made from a module in memory, not from a file")
    skip_unless_supported(variant)
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"not a graph")
    source = Source(sources["per row"][0].signature, {"model": graph})
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError):
        BACKENDS.get(variant.backend).make(source, variant, tmp_path / "out")


def test_graph_in_wrong_precision_is_rejected(sources: Any, tmp_path: Path) -> None:
    """Nothing after `make` checks that an int8 variant has int8 weights."""
    source = source_for(Variant("onnxruntime", Precision.FP32), *sources["per row"])
    with pytest.raises(StageError, match="fp32"):
        BACKENDS.get("onnxruntime").make(source, Variant("onnxruntime", Precision.INT8), tmp_path)


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize(("precision", "device"), [("fp32", "abacus:7"), ("fp8", "cpu")])
def test_probe_rejects_unsupported_variant_with_reason(name: str, precision: str, device: str) -> None:
    support = BACKENDS.get(name).probe(this_machine(), Variant(name, Precision(precision), device))
    assert not support.ok
    assert support.reason


@pytest.mark.parametrize("name", BACKENDS.names())
def test_every_offered_variant_runs_here(name: str) -> None:
    backend = BACKENDS.get(name)
    assert backend.name == name
    for variant in backend.variants(this_machine()):
        assert variant.backend == name
        assert backend.probe(this_machine(), variant).ok


@pytest.mark.parametrize("name", BACKENDS.names())
def test_missing_package_is_reported_with_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS.get(name)
    monkeypatch.setattr("hasten.backends.find_spec", lambda _: None)
    # A missing package is reported before a missing compiler. The machine has a GPU that all backends support, because
    # packages for GPUs are not suggested without one.
    monkeypatch.setattr("shutil.which", lambda _: None)
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA L40S", 2**35, "8.9", "580"),))
    for variant in (None, Variant(name, Precision.FP32)):
        support = backend.probe(machine, variant)
        assert not support.ok
        assert backend.requires[0] in support.reason
        assert support.hint.startswith("pip install")
