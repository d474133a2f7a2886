"""Every registered backend, each of its variants: the same answers, the same manners."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import BACKENDS, Artifact, Dialect, RunOptions, Session, Source, dialect_of
from hasten.core.errors import StageError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.recording import recording
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Layout, Shape, TensorSpec
from hasten.core.variant import Precision, Variant

FULL = 64
AWKWARD = {
    "one row": [9],
    "seven rows": [5] * 7,
    "one token": [1],
    "one token in seven rows": [1] * 7,
    "full length": [FULL],
    "ragged": [1, FULL, 3, 17, 2, 30, 9],
}

# fp32 differs by the order of additions alone: the largest error, as a share of the largest output.
FP32_ERROR = 1e-4
# Reduced precisions are judged by the norm of the error over the norm of the output. The model is random and wide, not
# trained to be robust, so they do far worse here than on a real one: these bounds stand between rounding (measured:
# bf16 up to 0.05, int8 up to 0.18) and a fault such as a lost mask (0.6 to 0.8). What is too much, the gate decides.
REDUCED_ERROR = {
    Precision.FP16: 2e-2,  # 11 bits
    Precision.BF16: 1e-1,  # 8 bits
    Precision.INT8: 4e-1,  # 8 bits, one scale for all activations of a tensor
}

MARKS = {
    # torch.compile takes a minute for the first batches. It imports what is deprecated, advises less exact products,
    # and begins with a CUDA graph of nothing.
    "inductor": (
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
        pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    )
}


# Those that run on a GPU, where there is one, and are said to be skipped elsewhere.
ON_GPU = {
    "torch": ("torch-fp32@cuda", "torch-fp16@cuda", "torch-bf16@cuda"),
    "inductor": ("inductor-fp16@cuda",),
    "onnxruntime": ("onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"),
    "onnxruntime-tensorrt": ("onnxruntime-tensorrt-fp16@cuda",),
}


def variants() -> list[Any]:
    """What each backend offers here; one that offers nothing on its own is tried in fp32."""
    found = []
    for backend in BACKENDS.all():
        offered = backend.variants(this_machine()) if backend.probe(this_machine()).ok else []
        tried = [*(offered or [Variant(backend.name, Precision.FP32)])]
        tried += map(Variant.parse, ON_GPU.get(backend.name, ()))
        found += [
            pytest.param(variant, id=variant.name, marks=MARKS.get(backend.name, ()))
            for variant in dict.fromkeys(tried)
        ]
    return found


@pytest.fixture(scope="module")
def sources(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, dict[Dialect, Path]]]:
    """One model that answers per row, and one per token, where a session has padding to take out again."""
    from hasten.builder.head import Exportable
    from hasten.quantize.dynamic import quantize_dynamic
    from hasten.quantize.half import halve
    from hasten.quantize.recipe import Method, Recipe

    rows = load_tiny(tiny_classifier("bert"))
    inputs = [spec.name for spec in rows.signature.inputs]
    output = TensorSpec("last_hidden_state", DType.FLOAT32, (BATCH, SEQUENCE, 32))
    tokens = replace(
        rows,
        module=Exportable(rows.module.model.bert, inputs, [output.name]),
        signature=replace(rows.signature, outputs=(output,)),
    )
    found = {}
    for name, loaded in {"per row": rows, "per token": tokens}.items():
        graphs = make_graphs(loaded, tmp_path_factory.mktemp("graphs"))
        quantized = graphs[Dialect.ORT].with_name("int8.onnx")
        recipe = Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="avx512_vnni", attention=True)
        quantize_dynamic(graphs[Dialect.ORT], quantized, recipe, external_data=False)
        halved = graphs[Dialect.ORT_CUDA].with_name("fp16.onnx")
        halve(graphs[Dialect.ORT_CUDA], halved, frozenset(), external_data=False)
        found[name] = (loaded, graphs | {"int8": quantized, "fp16": halved})
    return found


def source_for(variant: Variant, loaded: Any, graphs: dict[Any, Path]) -> Source:
    dialect = dialect_of(variant)
    if dialect is Dialect.MODULE:
        return Source(loaded.signature, {}, loaded.module)
    is_made = dialect in (Dialect.ORT, Dialect.ORT_CUDA) and variant.precision.is_reduced
    return Source(loaded.signature, {"model": graphs[variant.precision.value if is_made else dialect]})


def skip_unless_it_runs(variant: Variant) -> None:
    support = BACKENDS.get(variant.backend).probe(this_machine(), variant)
    if not support.ok:
        pytest.skip(f"{variant}: {support.reason}")


def make(variant: Variant, sources: dict[str, Any], kind: str, folder: Path) -> Artifact:
    skip_unless_it_runs(variant)
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
    """Plain PyTorch, one row at a time: nothing of hasten's padding or batching."""
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
def test_answers_like_the_reference(session: Session, sources: Any, variant: Variant, lengths: list[int]) -> None:
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
def test_the_session_for_gpus_answers_from_buckets(sources: Any, kind: str, precision: Precision) -> None:
    """On the CPU, which runs graphs of fp16 through casts: all of it but the CUDA graphs."""
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


def test_a_graph_of_which_a_gpu_computes_nothing_is_refused(sources: Any) -> None:
    from hasten.backends.onnxruntime.cuda import CudaSession, check_placements

    loaded, graphs = sources["per row"]
    graph = graphs[Dialect.ORT_CUDA]
    artifact = Artifact(Variant.parse("onnxruntime-fp32@cuda"), loaded.signature, graph.parent, {"model": graph.name})
    with pytest.raises(StageError, match="none of its nodes to CUDAExecutionProvider"):
        check_placements(artifact, partial(CudaSession, device="cpu"))


def test_the_session_for_gpus_keeps_still_while_another_records(sources: Any) -> None:
    from hasten.backends.onnxruntime.cuda import CudaSession

    loaded, graphs = sources["per row"]
    variant = Variant("onnxruntime", Precision.FP32, "cuda")
    graph = source_for(variant, loaded, graphs).graphs["model"]
    artifact = Artifact(variant, loaded.signature, graph.parent, {"model": graph.name})
    known, new = batch_of([3]), batch_of([30])
    with ThreadPoolExecutor(1) as thread, CudaSession(artifact, RunOptions(1), device="cpu") as session:
        session.run(known)
        for ask in (partial(session.run, known), partial(session.run, new), session.close):
            with recording.alone():
                waiting = thread.submit(ask)
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
            waiting.result(60)


def test_batched_equals_single(session: Session, variant: Variant) -> None:
    if variant.precision.is_reduced:
        pytest.skip("dynamic scales and rounding depend on the company a row keeps")
    batch = batch_of(AWKWARD["ragged"])
    together = session.run(batch)["logits"]
    alone = [session.run(batch.take(np.array([row])))["logits"] for row in range(len(batch))]
    assert_close(together, np.concatenate(alone), variant.precision)


def test_sessions_of_several_threads_do_not_disturb_each_other(variant: Variant, sources: Any, tmp_path: Path) -> None:
    """Sizes that none of them has seen yet: on a GPU each records graphs while the others compute."""
    if variant.backend == "inductor":
        pytest.skip("shares its session with torch; a compilation for each takes minutes")
    loaded, _ = sources["per row"]
    artifact = make(variant, sources, "per row", tmp_path)
    batches = [batch_of([length] * rows, seed=length) for rows, length in [(1, 3), (2, 20), (4, 33), (8, 50), (3, 64)]]
    expected = [reference(loaded, batch) for batch in batches]

    def ask(turn: int) -> list[np.ndarray]:
        # Each begins with another, so that what one knows another is recording.
        places = np.roll(np.arange(len(batches)), turn).tolist()
        with open_artifact(artifact) as session:
            found = {place: session.run(batches[place])["logits"] for place in places * 3}
        return [found[place] for place in range(len(batches))]

    with ThreadPoolExecutor(3) as threads:
        for answers in threads.map(ask, range(3)):
            for ours, theirs in zip(answers, expected, strict=True):
                assert_close(ours, theirs, variant.precision)


def test_says_what_it_is(session: Session, sources: Any, variant: Variant) -> None:
    spec = session.spec
    assert spec.signature == sources["per row"][0].signature
    assert spec.precision == variant.precision
    assert spec.device == variant.device
    assert spec.layout in Layout


def test_warms_up(session: Session) -> None:
    session.warm([Shape(1, 8), Shape(3, FULL), Shape(2, 10 * FULL)])


def test_outputs_are_the_callers_to_keep(session: Session) -> None:
    first = session.run(batch_of([8, 4], seed=1))["logits"]
    kept = first.copy()
    session.run(batch_of([8, 4], seed=2))
    np.testing.assert_array_equal(first, kept)


def test_input_is_left_alone(session: Session) -> None:
    batch = batch_of(AWKWARD["ragged"])
    before = {name: column.copy() for name, column in batch.values.items()}
    session.run(batch)
    assert all((batch.values[name] == column).all() for name, column in before.items())


def test_closes_more_than_once(variant: Variant, sources: Any, tmp_path: Path) -> None:
    session = open_artifact(make(variant, sources, "per row", tmp_path))
    with session as entered:
        assert entered is session
    session.close()


def test_a_batch_the_runtime_refuses_is_a_stage_error(session: Session) -> None:
    with pytest.raises(StageError):
        session.run(batch_of([FULL + 1]))


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty", "missing"])
def test_a_broken_file_is_a_stage_error(variant: Variant, sources: Any, tmp_path: Path, damage: str) -> None:
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


def test_a_broken_source_is_a_stage_error(variant: Variant, sources: Any, tmp_path: Path) -> None:
    if BACKENDS.get(variant.backend).dialect is Dialect.MODULE:
        pytest.skip("made from a module in memory, not from a file")
    skip_unless_it_runs(variant)
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"not a graph")
    source = Source(sources["per row"][0].signature, {"model": graph})
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError):
        BACKENDS.get(variant.backend).make(source, variant, tmp_path / "out")


def test_makes_no_precision_but_the_one_asked_for(sources: Any, tmp_path: Path) -> None:
    """A graph of fp32 weights under an int8 label would be believed by everyone after."""
    source = source_for(Variant("onnxruntime", Precision.FP32), *sources["per row"])
    with pytest.raises(StageError, match="fp32"):
        BACKENDS.get("onnxruntime").make(source, Variant("onnxruntime", Precision.INT8), tmp_path)


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize(("precision", "device"), [("fp32", "abacus:7"), ("fp8", "cpu")])
def test_probe_refuses_the_impossible_with_a_reason(name: str, precision: str, device: str) -> None:
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
def test_a_missing_package_is_answered_with_the_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS.get(name)
    monkeypatch.setattr("hasten.backends.find_spec", lambda _: None)
    # A machine without a compiler has another reason to refuse, but the package comes first; and nobody is told to
    # install what is for a GPU that is not there.
    monkeypatch.setattr("shutil.which", lambda _: None)
    machine = replace(this_machine(), gpus=(Gpu("NVIDIA H200", 2**37, "9.0", "580"),))
    for asked in (None, Variant(name, Precision.FP32)):
        support = backend.probe(machine, asked)
        assert not support.ok
        assert backend.requires[0] in support.reason
        assert support.hint.startswith("pip install")
