"""Fixtures of unit tests: a word tokenizer, a session that computes from token ids, a bundle of tiny files."""

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
from hasten.core.plan import Gate, Plan
from hasten.core.report import Agreement, Bench, Report
from hasten.core.system.hardware import Machine
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
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.variant import Variant
from hasten.predictor import Predictor
from hasten.tasks import Encoded, TaskSpec
from support.http_server import ControlledServer

# No deadline, because shared machines stall; no random examples, because failures must be reproducible.
settings.register_profile("unit", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("unit")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (*SPECIAL, *"abcdefghijklmnopqrstuvwxyz")
LABELS = ("bad", "fair", "good")

# Maps the token ids of a row to the output of the model.
Answer = Callable[[np.ndarray], Sequence[float]]


class RowSession:
    """Computes each output row from its token ids alone, so that any mix-up of rows shows."""

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
    """Return three values that differ between short rows."""
    positions = np.arange(1, len(row) + 1)
    return [float((row * positions).sum() % 13) / 2, float((row * row).sum() % 11) / 2, float(len(row)) / 4]


def signature_for(output: str, width: int = 3) -> Signature:
    inputs = tuple(
        TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in ("input_ids", "token_type_ids", ATTENTION_MASK)
    )
    return Signature(inputs, (TensorSpec(output, DType.FLOAT32, (BATCH, width)),), max_length=16)


@pytest.fixture
def fast_tokenizer() -> FastTokenizer:
    """A tokenizer with one token per letter and BERT's template for pairs."""
    tokenizer = FastTokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")],
    )
    return tokenizer


@pytest.fixture
def spelled() -> Callable[[Batch], list[str]]:
    """Return a function that spells out the tokens of each row."""

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
    """Return items without texts: `encoded(4)` has four rows; `encoded(owners=[0, 0, 1])` a pair and a text."""

    def make(count: int = 0, owners: Sequence[int] | None = None) -> Encoded:
        item_of_row = np.arange(count) if owners is None else np.asarray(owners)
        batch = Batch.from_rows({"input_ids": [[1]] * len(item_of_row)})
        return Encoded(batch, item_of_row, len(set(item_of_row.tolist())), (), ())

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
    """Return a manifest with these variants, fastest first; keywords replace other fields."""

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
    """Write a bundle whose graphs are a few bytes: only paths and hashes matter here."""
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    (graphs / "model.onnx").write_bytes(b"graph")
    (graphs / "model.onnx.data").write_bytes(b"weights")

    def write(target: Path, manifest: Manifest | None = None, *, measured: Report = report) -> Bundle:
        manifest = manifest or make_manifest()
        with BundleWriter(target, force=True) as writer:
            writer.add_graph(graphs / "model.onnx")
            for entry in manifest.variants:
                writer.add_variant(Artifact(entry.variant, manifest.signature, graphs, entry.graphs))
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
    """Change the manifest and recompute its digest, as an attacker could."""

    def write(bundle: Bundle, **changes: object) -> None:
        (bundle.path / "manifest.json").write_bytes(replace(bundle.manifest, **changes).sealed().to_json())

    return write


@pytest.fixture
def http_servers() -> Iterator[Callable[..., ControlledServer]]:
    servers: list[ControlledServer] = []

    def make(**limits: Any) -> ControlledServer:
        servers.append(ControlledServer(**limits))
        return servers[-1]

    yield make
    for http_server in servers:
        http_server.close()


@pytest.fixture
def http_server(http_servers: Callable[..., ControlledServer]) -> ControlledServer:
    return http_servers()
