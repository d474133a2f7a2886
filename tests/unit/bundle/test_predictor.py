from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.api import load
from hasten.backends import RunOptions
from hasten.bundle import Bundle, Manifest
from hasten.core.errors import BundleError, InputError, PlanError, UnsupportedError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Outputs, SessionSpec, TensorSpec
from hasten.core.text.tokenizer import Tokenizer
from hasten.predictor import Predictor, first_runnable_variant, open_predictor
from hasten.tasks import TASKS, Encoded, TaskSpec

MakePredictor = Callable[..., Predictor]
Answer = Callable[[np.ndarray], Sequence[float]]

# Lengths from one to twelve words, shuffled: enough rows for several batches.
TEXTS = [" ".join("abcdefghijklmnop"[index % 5 :][: (index * 7) % 12 + 1]) for index in range(150)]


# --- answering


def test_answers_come_in_the_order_of_the_texts(
    make_predictor: MakePredictor, embedder: TaskSpec, expected_answer: Answer, tokenizer: Tokenizer
) -> None:
    predictor = make_predictor(embedder)
    expected = [
        expected_answer(np.asarray(encoding.ids)) for encoding in tokenizer.encode(TEXTS, is_traced=True).encodings
    ]
    assert np.allclose(predictor(TEXTS), expected)  # type: ignore[arg-type]
    batches = predictor.session.batches  # type: ignore[attr-defined]
    assert len(batches) > 1
    assert sum(map(len, batches)) == len(TEXTS)
    # Rows of similar length run together: within a batch none is twice as long as another and four more.
    assert all(batch.lengths.max() <= 2 * batch.lengths.min() + 4 for batch in batches)


def test_rows_run_in_the_groups_of_the_caller(make_predictor: MakePredictor, embedder: TaskSpec) -> None:
    predictor = make_predictor(embedder)
    encoded = predictor.encode(TEXTS[:5])
    groups = [np.array([3, 0]), np.array([4]), np.array([1, 2])]
    seen: list[int] = []
    grouped = predictor.outputs(encoded, groups=groups, on_batch=seen.append)
    assert seen == [2, 1, 2]
    assert np.array_equal(grouped["embedding"], predictor.outputs(encoded)["embedding"])


def test_options_reach_the_task(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    predictor = make_predictor(classifier, lambda _: [1.0, 3.0, 2.0])
    assert predictor("a", top_k=2, function_to_apply="none") == [
        {"label": "fair", "score": 3.0},
        {"label": "good", "score": 2.0},
    ]
    assert [label["label"] for label in predictor("a")] == ["fair"]  # type: ignore[attr-defined]
    assert predictor({"text": "a", "text_pair": "b"})["label"] == "fair"  # type: ignore[index]


def test_options_affect_the_encoding(make_predictor: MakePredictor, embedder: TaskSpec) -> None:
    predictor = make_predictor(embedder)
    assert np.array_equal(predictor("a", prompt_name="query"), predictor("q a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "options", "message"),
    [(["a", ""], {}, "text 2 is empty"), ("a", {"topk": 1}, "did you mean 'top_k'"), ("a", {"top_k": 0}, "top_k is 0")],
)
def test_bad_request_does_not_reach_the_session(
    make_predictor: MakePredictor, classifier: TaskSpec, payload: object, options: dict[str, object], message: str
) -> None:
    predictor = make_predictor(classifier)
    with pytest.raises(InputError, match=message):
        predictor(payload, **options)
    assert predictor.session.batches == []  # type: ignore[attr-defined]


LONG = " ".join("abcdefghijklmnopqrst")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (["a", LONG, "b"], "text 2 was truncated to the model's limit of 16 tokens"),
        (["a", LONG, LONG], "2 texts (first: 2) were truncated to the model's limit of 16 tokens"),
        # Both halves of one pair are one item.
        ({"text": LONG, "text_pair": LONG}, "text 1 was truncated to the model's limit of 16 tokens"),
    ],
)
def test_truncation_is_logged(
    make_predictor: MakePredictor, embedder: TaskSpec, caplog: pytest.LogCaptureFixture, payload: object, message: str
) -> None:
    make_predictor(embedder)(payload)
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("hasten", logging.WARNING, message)
    ]


def test_fitting_texts_are_not_logged(
    make_predictor: MakePredictor, embedder: TaskSpec, caplog: pytest.LogCaptureFixture
) -> None:
    make_predictor(embedder)(["a b c", "d"])
    assert caplog.records == []


def test_predictor_closes_its_session(make_predictor: MakePredictor, classifier: TaskSpec) -> None:
    with make_predictor(classifier) as predictor:
        assert not predictor.session.is_closed  # type: ignore[attr-defined]
    assert predictor.session.is_closed  # type: ignore[attr-defined]


def test_unknown_task_is_rejected(make_predictor: MakePredictor) -> None:
    with pytest.raises(PlanError, match="unknown task 'text-clasification': did you mean 'text-classification'"):
        make_predictor(TaskSpec("text-clasification"))


# --- many texts


class PipelinedSession:
    """Takes a batch ahead of the one whose outputs it yields, as a GPU session does."""

    def __init__(self, session: Any) -> None:
        self.session, self.spec = session, session.spec

    def run(self, batch: Batch) -> Outputs:
        return self.session.run(batch)

    def run_many(self, batches: Iterable[Batch]) -> Generator[Outputs, None, None]:
        taken: deque[Batch] = deque()
        for batch in batches:
            taken.append(batch)
            if len(taken) == 3:
                yield self.session.run(taken.popleft())
        while taken:
            yield self.session.run(taken.popleft())

    def close(self) -> None:
        self.session.close()


@pytest.fixture(params=["one by one", "pipelined"])
def chunked(
    request: pytest.FixtureRequest, make_predictor: MakePredictor, monkeypatch: pytest.MonkeyPatch
) -> MakePredictor:
    """Make predictors whose chunks are small: 40 items, for pipelined sessions 10 to 40."""
    monkeypatch.setattr("hasten.predictor._CHUNK_ITEMS", 40)
    monkeypatch.setattr("hasten.predictor._FIRST_PIPELINED_ITEMS", 10)
    monkeypatch.setattr("hasten.predictor._PIPELINED_ITEMS", 40)

    def make(*args: Any) -> Predictor:
        predictor = make_predictor(*args)
        if request.param == "pipelined":
            predictor.session = PipelinedSession(predictor.session)  # type: ignore[assignment]
        return predictor

    return make


@pytest.mark.parametrize("count", [1, 9, 40, 41, 150])
def test_texts_in_chunks_are_answered_in_order(
    chunked: MakePredictor, make_predictor: MakePredictor, embedder: TaskSpec, count: int
) -> None:
    answers = chunked(embedder)(TEXTS[:count])
    # One text at a time.
    assert np.array_equal(answers, np.stack([make_predictor(embedder)(text) for text in TEXTS[:count]]))  # type: ignore[arg-type]


def test_pairs_and_texts_in_chunks_are_answered_in_order(
    chunked: MakePredictor, make_predictor: MakePredictor, embedder: TaskSpec
) -> None:
    items = [{"text": text, "text_pair": TEXTS[index // 2]} if index % 3 else text for index, text in enumerate(TEXTS)]
    answers = chunked(embedder)(items)
    assert len(answers) == len(items)
    assert all(
        np.array_equal(answer, make_predictor(embedder)(item)) for answer, item in zip(answers, items, strict=True)
    )


def test_chunks_report_truncation_once(
    chunked: MakePredictor, embedder: TaskSpec, caplog: pytest.LogCaptureFixture
) -> None:
    texts = list(TEXTS)
    texts[70] = texts[120] = LONG
    chunked(embedder)(texts)
    assert [record.getMessage() for record in caplog.records] == [
        "2 texts (first: 71) were truncated to the model's limit of 16 tokens"
    ]


class TokenIdSession:
    """Outputs the id of each token as its vector."""

    def __init__(self, spec: SessionSpec) -> None:
        outputs = (TensorSpec("last_hidden_state", DType.FLOAT32, (BATCH, SEQUENCE, 1)),)
        self.spec = replace(spec, signature=replace(spec.signature, outputs=outputs))

    def run(self, batch: Batch) -> Outputs:
        return {"last_hidden_state": batch.values["input_ids"][:, None].astype(np.float32)}


def test_error_in_a_later_chunk_names_the_position_among_all_items(
    chunked: MakePredictor, embedder: TaskSpec, tokenizer: Tokenizer
) -> None:
    session: Any = chunked(embedder).session
    is_pipelined = isinstance(session, PipelinedSession)
    session = TokenIdSession(session.spec)
    predictor = Predictor(
        TaskSpec("feature-extraction"), tokenizer, PipelinedSession(session) if is_pipelined else session
    )
    texts = list(TEXTS)
    texts[120] = LONG
    with pytest.raises(InputError, match="text 121 is longer than"):
        predictor(texts, truncation=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hasten-ahead")]
    # The session is free again.
    assert [vectors.shape[1] for vectors in predictor(["a b", "c"])] == [4, 3]


def test_error_of_the_session_in_a_later_chunk_ends_the_threads(chunked: MakePredictor, embedder: TaskSpec) -> None:
    rows = iter(range(100))
    predictor = chunked(embedder, lambda _: [float(next(rows))])
    with pytest.raises((BundleError, RuntimeError), match="StopIteration"):
        predictor(TEXTS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hasten-ahead")]


def test_progress_counts_each_row_once(chunked: MakePredictor, embedder: TaskSpec) -> None:
    predictor, seen = chunked(embedder), []
    chunks = predictor.chunks(len(TEXTS))
    assert [len(chunk) for chunk in chunks][:2] in ([40, 40], [10, 20])
    results = predictor.run_in_chunks(
        chunks, lambda chunk: predictor.encode(TEXTS[chunk.start : chunk.stop]), on_batch=seen.append
    )
    assert sum(len(encoded.batch) for encoded, _ in results) == sum(seen) == len(TEXTS)


def test_chunks_without_rows_have_no_outputs(chunked: MakePredictor, embedder: TaskSpec) -> None:
    predictor = chunked(embedder)
    empty = Encoded(Batch({}, np.zeros(0, np.int32)), np.zeros(0, np.int64), 0, (), ())
    sizes = [0, 3, 0, 0, 2, 4, 1, 0]
    results = predictor.run_in_chunks(sizes, lambda size: predictor.encode(list(TEXTS[:size])) if size else empty)
    found = [(encoded.items, {name: len(output) for name, output in outputs.items()}) for encoded, outputs in results]
    assert found == [(size, {"embedding": size} if size else {}) for size in sizes]
    assert [encoded.items for encoded, _ in predictor.run_in_chunks([0, 0], lambda _: empty)] == [0, 0]


# --- threads


def test_predictor_runs_one_thread_at_a_time(make_predictor: MakePredictor, embedder: TaskSpec) -> None:
    predictor = make_predictor(embedder)
    session = predictor.session
    run, meeting, met = session.run, threading.Barrier(2), []

    def run_and_meet(batch: Batch) -> Outputs:
        """Wait at a barrier: two threads inside at once would pass the barrier; a single one breaks it."""
        try:
            meeting.wait(timeout=0.2)
            met.append(True)
        except threading.BrokenBarrierError:
            pass
        return run(batch)

    session.run = run_and_meet  # type: ignore[method-assign]
    alone = {text: make_predictor(embedder)([text]) for text in ("a b", "c")}
    answers: dict[str, object] = {}
    threads = [threading.Thread(target=lambda text=text: answers.update({text: predictor([text])})) for text in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met
    assert all(np.array_equal(answers[text], alone[text]) for text in alone)  # type: ignore[arg-type]


def test_error_in_one_thread_releases_the_lock(
    make_predictor: MakePredictor, embedder: TaskSpec, expected_answer: Answer
) -> None:
    predictor = make_predictor(embedder, lambda _: 1 / 0)
    with pytest.raises(BundleError, match="does not fit its task, sentence-similarity: ZeroDivisionError"):
        predictor("a")
    predictor.session.answer = expected_answer  # type: ignore[attr-defined]
    assert predictor("a") is not None


# --- opening a bundle

TOY = """
import numpy as np

from hasten.backends import Dialect, PaddedSession
from hasten.core.errors import StageError
from hasten.core.tensors import Layout, SessionSpec
from hasten.core.variant import Support


class ToySession(PaddedSession):
    def __init__(self, artifact, options):
        self.spec = SessionSpec(artifact.signature, Layout.PACKED, "cpu", artifact.variant.precision)
        self.threads = options.thread_count
        self.graph = artifact.path().read_bytes()

    def run(self, batch):
        return {"logits": np.eye(3, dtype=np.float32)[batch.lengths % 3]}


class Toy:
    name = "hastentoy"
    requires = ()
    extra = None
    dialect = Dialect.ONNX
    is_stored = True

    def probe(self, machine, variant=None):
        if variant is not None and variant.device != "cpu":
            return Support.no("it has no toys for '" + variant.device + "'", "buy some")
        return Support.yes()

    def variants(self, machine):
        return ()

    def make(self, source, variant, directory):
        raise StageError("toys are not made here")

    def open(self, artifact, options):
        return ToySession(artifact, options)


BACKEND = Toy()
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a third-party backend as pip would; it needs no runtime to open a bundle."""
    info = tmp_path / "site" / "hasten_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hasten-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hasten.backends]\nhastentoy = hasten_toy_backend:BACKEND\n")
    (info.parent / "hasten_toy_backend.py").write_text(TOY)
    monkeypatch.syspath_prepend(info.parent)
    yield "hastentoy"
    sys.modules.pop("hasten_toy_backend", None)


@pytest.fixture
def bundle_of(tmp_path: Path, write_bundle: Callable[..., Bundle], make_manifest: Callable[..., Manifest]):
    return lambda *variants: write_bundle(tmp_path / "of", make_manifest(*variants))


def test_load_needs_only_the_bundle(toy: str, bundle_of: Callable[..., Bundle]) -> None:
    bundle = bundle_of(f"{toy}-int8", f"{toy}-fp32")
    with load(bundle.path, threads=3) as predictor:
        assert predictor.session.spec.precision == "int8"
        assert predictor.session.threads == 3  # type: ignore[attr-defined]
        assert predictor.session.graph == b"graph"  # type: ignore[attr-defined]
        assert predictor.spec == bundle.manifest.task
        assert predictor.task is TASKS.get("text-classification")
        assert [answer["label"] for answer in predictor(["a", "a b", "a b c"])] == ["bad", "fair", "good"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("toy")
def test_plugin_must_declare_that_bundles_may_store_its_variants(
    tmp_path: Path, bundle_of: Callable[..., Bundle]
) -> None:
    """A plug-in that says nothing may read its files by unpickling."""
    plugin = tmp_path / "site" / "hasten_toy_backend.py"
    plugin.write_text(TOY.replace("    is_stored = True\n", "").replace("hastentoy", "silent"))
    entry_points = tmp_path / "site" / "hasten_toy-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[hasten.backends]\nsilent = hasten_toy_backend:BACKEND\n")
    with pytest.raises(BundleError, match="of the backend 'silent', which a bundle cannot store"):
        load(bundle_of("silent-fp32").path)


def test_load_opens_a_variant_by_name(toy: str, bundle_of: Callable[..., Bundle]) -> None:
    path = str(bundle_of(f"{toy}-int8", f"{toy}-fp32").path)
    assert load(path, f"{toy}-fp32").session.spec.precision == "fp32"


def test_unknown_variant_error_suggests_a_known_one(bundle: Bundle) -> None:
    with pytest.raises(PlanError, match="has no variant 'onnxruntime-in8': did you mean 'onnxruntime-int8'"):
        load(bundle.path, "onnxruntime-in8")


def test_named_variant_that_does_not_run_is_an_error(toy: str, bundle_of: Callable[..., Bundle]) -> None:
    bundle = bundle_of(f"{toy}-fp32@moon", f"{toy}-fp32")
    with pytest.raises(UnsupportedError, match="fp32@moon does not run here: it has no toys for 'moon'") as caught:
        open_predictor(bundle, f"{toy}-fp32@moon", RunOptions())
    assert caught.value.hint == "buy some"


def test_skipped_variant_is_logged(
    toy: str, bundle_of: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = bundle_of(f"{toy}-fp16@moon", f"{toy}-int8@mars", f"{toy}-fp32")
    assert first_runnable_variant(bundle).variant.name == f"{toy}-fp32"
    moon, mars = [record.getMessage() for record in caplog.records]
    assert f"skipping {toy}-fp16@moon, which does not run here" in moon
    assert f"{toy}-int8@mars" in mars


def test_variant_of_unknown_backend_is_skipped(
    toy: str, bundle_of: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    """The bundle was built with a plugin that is not installed: the next variant still runs."""
    bundle = bundle_of("pluginelsewhere-fp32", f"{toy}-fp32")
    assert first_runnable_variant(bundle).variant.name == f"{toy}-fp32"
    assert "pluginelsewhere" in caplog.text


def test_graph_runs_if_no_variant_does(
    toy: str, bundle_of: Callable[..., Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    """The base installation has ONNX Runtime, so every bundle runs, if slowly, and the slow path is logged."""
    bundle = bundle_of(f"{toy}-fp16@moon", f"{toy}-int8@mars")
    assert first_runnable_variant(bundle) == bundle.graph()
    moon, mars, graph = [record.getMessage() for record in caplog.records]
    assert "'moon'" in moon
    assert "'mars'" in mars
    assert "fp32 graph" in graph
