"""What unit tests share: a word tokenizer, a session that answers from a function, a bundle of tiny files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import settings
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors

from hasten.backends import MODEL, Artifact
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.core.hardware import Machine
from hasten.core.plan import Gate, Plan
from hasten.core.report import Agreement, Bench, Report
from hasten.core.tensors import (
    ATTENTION_MASK,
    BATCH,
    SEQUENCE,
    Batch,
    DType,
    Layout,
    Outputs,
    SessionSpec,
    Shape,
    Signature,
    TensorSpec,
)
from hasten.core.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.variant import Variant
from hasten.predictor import Predictor
from hasten.tasks import Encoded, TaskSpec
from sites import Site

# Shared machines stall: a deadline would measure them, and random examples would fail somewhere else first.
settings.register_profile("unit", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("unit")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (*SPECIAL, *"abcdefghijklmnopqrstuvwxyz")
LABELS = ("bad", "fair", "good")

# Token ids of one row to the values the model gives for it.
Answer = Callable[[np.ndarray], Sequence[float]]


class RowSession:
    """Answers each row from its ids alone, so that any mix-up of rows shows."""

    def __init__(self, signature: Signature, answer: Answer, precision: str = "fp32") -> None:
        self.spec = SessionSpec(signature, Layout.PACKED, "cpu", precision)
        self.answer = answer
        self.batches: list[Batch] = []
        self.is_closed = False

    def run(self, batch: Batch) -> Outputs:
        self.batches.append(batch)
        rows = np.split(batch.values["input_ids"], np.cumsum(batch.lengths)[:-1])
        return {self.spec.signature.outputs[0].name: np.array([self.answer(row) for row in rows], np.float32)}

    def warm(self, shapes: Sequence[Shape]) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def answer_by_ids(row: np.ndarray) -> list[float]:
    """Three values that no two different short rows share by accident."""
    places = np.arange(1, len(row) + 1)
    return [float((row * places).sum() % 13) / 2, float((row * row).sum() % 11) / 2, float(len(row)) / 4]


def signature_for(output: str, width: int = 3) -> Signature:
    inputs = tuple(
        TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in ("input_ids", "token_type_ids", ATTENTION_MASK)
    )
    return Signature(inputs, (TensorSpec(output, DType.FLOAT32, (BATCH, width)),), max_length=16)


@pytest.fixture
def fast_tokenizer() -> FastTokenizer:
    """One letter, one token; pairs through a template, as BERT has them."""
    tokenizer = FastTokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")],
    )
    return tokenizer


@pytest.fixture
def spelled() -> Callable[[Batch], list[str]]:
    """The tokens of each row."""

    def spell(batch: Batch) -> list[str]:
        rows = np.split(batch.values["input_ids"], np.cumsum(batch.lengths)[:-1])
        return [" ".join(WORDS[token] for token in row) for row in rows]

    return spell


@pytest.fixture
def tokenizer_file(tmp_path: Path, fast_tokenizer: FastTokenizer) -> Path:
    file = tmp_path / "tokenizer.json"
    fast_tokenizer.save(str(file))
    return file


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.open(tokenizer_file, TokenizerSpec(("input_ids", "token_type_ids"), max_length=16))


@pytest.fixture
def encoded() -> Callable[..., Encoded]:
    """`encoded(4)`: four items of one row; `encoded(owners=[0, 0, 1])`: a pair and a text."""

    def make(count: int = 0, owners: Sequence[int] | None = None) -> Encoded:
        of_row = np.arange(count) if owners is None else np.asarray(owners)
        batch = Batch.from_rows({"input_ids": [[1]] * len(of_row)})
        return Encoded(batch, of_row, len(set(of_row.tolist())), (), ())

    return make


@pytest.fixture
def classifier() -> TaskSpec:
    return TaskSpec("text-classification", LABELS)


@pytest.fixture
def embedder() -> TaskSpec:
    return TaskSpec("sentence-similarity", prompts={"query": "q ", "passage": "p "})


@pytest.fixture
def make_predictor(tokenizer: Tokenizer) -> Callable[..., Predictor]:
    def make(spec: TaskSpec, answer: Answer = answer_by_ids, precision: str = "fp32") -> Predictor:
        output = "logits" if spec.name == "text-classification" else "embedding"
        return Predictor(spec, tokenizer, RowSession(signature_for(output), answer, precision))

    return make


@pytest.fixture
def expected_answer() -> Answer:
    return answer_by_ids


@pytest.fixture
def machine() -> Machine:
    return Machine("Linux 6", "x86_64", "Some CPU", ("avx2",), 2, 2**33, (), "3.11.9", {"numpy": "2.4.0"})


@pytest.fixture
def report(machine: Machine) -> Report:
    return Report(
        Plan("acme/model"),
        "2026-01-02T03:04:05+00:00",
        machine,
        (),
        (),
        Bench("torch-fp32", (), ()),
        "onnxruntime-int8",
    )


@pytest.fixture
def make_manifest(classifier: TaskSpec, machine: Machine) -> Callable[..., Manifest]:
    """Variants by name, the fastest first; any other field may be replaced."""

    def make(*variants: str, **changes: object) -> Manifest:
        entries = []
        for variant in map(Variant.parse, variants or ("onnxruntime-int8", "onnxruntime-fp32")):
            agreement = Agreement("same label", 0.9975, 400, 0.25, 0.01, 8.5, flips=1, worst=(3, 1, 4))
            graphs = {MODEL: "model.onnx"}
            entries.append(
                VariantEntry(variant.name, variant.backend, variant.precision, variant.device, (), graphs, agreement)
            )
        manifest = Manifest(
            schema=SCHEMA,
            hasten="0.1.0",
            created="2026-01-02T03:04:05+00:00",
            model=ModelOrigin("acme/model", "main", "AcmeForSequenceClassification"),
            task=classifier,
            tokenizer=TokenizerSpec(("input_ids", "token_type_ids"), max_length=16),
            signature=signature_for("logits"),
            graphs={MODEL: "graph/model.onnx"},
            variants=tuple(entries),
            gate=Gate(min_agreement=0.995),
            machine=machine,
            files={},
        )
        return replace(manifest, **changes)

    return make


@pytest.fixture
def reference_rows() -> list[dict[str, object]]:
    return [{"text": "a b", "label": "good"}, {"text": "line\nbreak", "text_pair": "para\u2029graph \u2028 end\r"}]


@pytest.fixture
def write_bundle(
    tmp_path: Path,
    tokenizer_file: Path,
    report: Report,
    make_manifest: Callable[..., Manifest],
    reference_rows: list[dict[str, object]],
) -> Callable[..., Bundle]:
    """A bundle whose graphs are a few bytes: paths and hashes are what matters here."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.onnx").write_bytes(b"graph")
    (made / "model.onnx.data").write_bytes(b"weights")

    def write(target: Path, manifest: Manifest | None = None, *, measured: Report = report) -> Bundle:
        manifest = manifest or make_manifest()
        with BundleWriter(target, force=True) as writer:
            writer.add_graph(made / "model.onnx")
            for entry in manifest.variants:
                writer.add_variant(Artifact(entry.variant, manifest.signature, made, entry.graphs))
            writer.add_tokenizer(tokenizer_file)
            writer.add_reference(reference_rows, {"logits": np.arange(6, dtype=np.float32).reshape(2, 3)})
            writer.add_report(measured)
            return writer.commit(manifest)

    return write


@pytest.fixture
def bundle(tmp_path: Path, write_bundle: Callable[..., Bundle]) -> Bundle:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def reseal() -> Callable[..., None]:
    """What an attacker can do: change the manifest and compute its digest anew."""

    def write(bundle: Bundle, **changes: object) -> None:
        (bundle.path / "manifest.json").write_bytes(replace(bundle.manifest, **changes).sealed().to_json())

    return write


@pytest.fixture
def sites() -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**limits: Any) -> Site:
        made.append(Site(**limits))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(sites: Callable[..., Site]) -> Site:
    return sites()
