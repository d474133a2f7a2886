"""Which task works with which architecture on which backend: backs docs/reference/support.md.

    python benchmarks/support.py                   # all, writes results/support.json; about ten minutes
    python benchmarks/support.py bert xlnet        # these alone, only printed

Models are tiny and random: what is tried is whether a model loads, exports, is fused and answers like PyTorch. Whether
a reduced precision is accurate enough, only a trained model can tell; here its outputs must be near.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import tiny
from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Session, Source
from hasten.builder.check import check_graph, check_tokenizer
from hasten.builder.detect import EMBEDDING, RANKING
from hasten.builder.export import export
from hasten.builder.libraries import quiet_libraries
from hasten.builder.load import LoadedModel, load_model
from hasten.builder.passes import apply_passes
from hasten.builder.source import find_model
from hasten.builder.tokenizer import save_tokenizer
from hasten.core.errors import HastenError, StageError
from hasten.core.hardware import this_machine
from hasten.core.plan import Gate, Plan
from hasten.core.progress import Silent
from hasten.core.report import Pass
from hasten.core.targets import target_of
from hasten.core.tensors import Signature
from hasten.core.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.measure.data import sample_texts
from hasten.measure.verify import Expectation, expect, verify
from hasten.predictor import Predictor
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.recipe import Method, Recipe
from hasten.tasks import TASKS, AnyTask, Row
from origin import origin

FILE = Path(__file__).parent / "results" / "support.json"
YES = "yes"
ORT_FP32 = Variant("onnxruntime", Precision.FP32)
# Models that tell entailment from contradiction are classifiers like any other, so all classifiers here do.
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
ABOUT: dict[str, dict[str, Any]] = {RANKING: {"id2label": {0: "relevant"}}}
ROWS = 16
SHORT = 150
# The norm of the error over the norm of the output. Rounding stays below these; a fault (a lost mask, positions that
# start elsewhere) makes half of it an error.
NEAR = {Precision.FP16: 0.05, Precision.BF16: 0.15, Precision.INT8: 0.2}
# Wider weights, as tests have them, make random models multiply every rounding.
CALM = 0.2
# Room for a question beside its context, letter by letter.
POSITIONS = 192
LONGEST_REASON = 120


@dataclass
class Entry:
    """One task with one architecture: for each variant "yes", or the reason why not."""

    model: str
    results: dict[str, str]
    attention_fused: int = 0
    layers: int = 0
    # Why attention stayed in parts, where it did.
    unfused: str = ""


@dataclass
class Made:
    """A model on its way through a build, its sessions open; shared by all tasks that take the same graph."""

    original: Session
    fusion: Pass
    sessions: dict[Variant, Session | HastenError] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="all of tests/tiny.py if left out")
    asked = parser.parse_args().architectures
    variants = offered()
    tasks: dict[str, dict[str, Entry]] = {name: {} for name in TASKS.names()}
    for architecture, entries in study_all(asked or list(tiny.ARCHITECTURES), variants):
        for task, entry in entries.items():
            tasks[task][architecture] = entry
            failed = {reason for reason in entry.results.values() if reason != YES}
            print(f"{architecture:22}{task:26}{'; '.join(failed) or YES}", flush=True)
    if asked:
        return
    results = {
        **origin(),
        "variants": [variant.name for variant in variants],
        "tasks": tasks,
    }
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def offered() -> list[Variant]:
    """What a build tries by itself here, and PyTorch: torch.compile takes a minute a model, so it is not among them."""
    machine = this_machine()
    return [v for backend in BACKENDS.all() if backend.probe(machine).ok for v in backend.variants(machine)]


def study_all(architectures: Sequence[str], variants: Sequence[Variant]) -> Iterator[tuple[str, dict[str, Entry]]]:
    """In a process of its own, so that one that crashes is a reason and not the end."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    for architecture in architectures:
        try:
            yield architecture, pool.submit(study, architecture, variants).result()
        except BrokenProcessPool:
            pool = ProcessPoolExecutor(1, get_context("spawn"))
            crashed = dict.fromkeys((variant.name for variant in variants), "the process crashed")
            yield architecture, {name: Entry("", crashed) for name in TASKS.names()}
    pool.shutdown()


def study(architecture: str, variants: Sequence[Variant]) -> dict[str, Entry]:
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack, quiet_libraries():
        attempt = Attempt(architecture, variants, Path(work), stack)
        return {task.name: attempt.entry(task) for task in TASKS.all()}


@dataclass
class Attempt:
    architecture: str
    variants: Sequence[Variant]
    work: Path
    stack: ExitStack
    made: dict[object, Made | HastenError] = field(default_factory=dict)
    tokenizers: dict[TokenizerSpec, Tokenizer] = field(default_factory=dict)

    def entry(self, task: AnyTask) -> Entry:
        import transformers

        prefix = tiny.ARCHITECTURES[self.architecture].prefix
        names = [prefix + head for head in task.heads or ("Model",)]
        name = next((name for name in names if hasattr(transformers, name)), None)
        if name is None:
            return self._all(names[-1], f"transformers has no {names[-1]}")
        try:
            return self._entry(task, name, name.removeprefix(prefix))
        except HastenError as error:
            return self._all(name, shown(error))

    def _entry(self, task: AnyTask, name: str, head: str) -> Entry:
        about = ABOUT.get(task.name, {"id2label": LABELS} if head.endswith("Classification") else {})
        model = self.work / f"{name}-{len(about.get('id2label', ()))}"
        if not model.exists():
            sizes = {"positions": POSITIONS, "tokenizer_max_length": POSITIONS, "initializer_range": CALM}
            tiny.save(self.architecture, head, model, **about, **sizes)
        plan = Plan(str(model), task=task.name, pooling="mean" if task.name == EMBEDDING else None)
        loaded = load_model(find_model(plan), plan)
        tokenizer = self._tokenizer(loaded)
        # The same model that takes and gives the same is the same graph, whichever task asks.
        key = (model, loaded.signature)
        if key not in self.made:
            self.made[key] = self._make(loaded, tokenizer, task)
        made = self.made[key]
        if isinstance(made, HastenError):
            raise made
        expected = expect(Predictor(loaded.task, tokenizer, made.original), rows(task, loaded), Silent())
        results = {
            variant.name: self._verdict(variant, session, loaded, tokenizer, expected)
            for variant, session in made.sessions.items()
        }
        fused = sum(made.fusion.operators_after.get(kind, 0) for kind in ("Attention", "MultiHeadAttention"))
        reasons = {left.reason for left in made.fusion.left if left.what == "attention"}
        layers = int(getattr(loaded.config, "num_hidden_layers", 0))
        why = "; ".join(sorted(reasons)) or "it has no softmax"
        return Entry(name, results, fused, layers, why if fused < layers else "")

    def _all(self, name: str, reason: str) -> Entry:
        return Entry(name, dict.fromkeys((variant.name for variant in self.variants), reason))

    def _tokenizer(self, loaded: LoadedModel) -> Tokenizer:
        spec = loaded.tokenizer
        if spec not in self.tokenizers:
            file = self.work / f"tokenizer-{len(self.tokenizers)}.json"
            save_tokenizer(loaded, file)
            self.tokenizers[spec] = Tokenizer.open(file, spec)
            check_tokenizer(self.tokenizers[spec], loaded.original_tokenizer)
        return self.tokenizers[spec]

    def _make(self, loaded: LoadedModel, tokenizer: Tokenizer, task: AnyTask) -> Made | HastenError:
        """As a build does it, each variant's failure kept to itself."""
        folder = self.work / str(len(self.made))
        folder.mkdir()
        signature = loaded.signature
        try:
            original = self._open(loaded.baseline, loaded.source, folder)
            batch = Predictor(loaded.task, tokenizer, original).encode(rows(task, loaded)).batch
            exported = folder / "model.onnx"
            export(loaded, exported)
            with opened(exported, signature) as session:
                check_graph(session, original, batch, is_brief=True)
            graphs = apply_passes(exported, folder, loaded.config, external_data=False, pads_left=signature.pads_left)
            with opened(graphs.plain, signature) as session:
                check_graph(session, original, batch)
        except HastenError as error:
            return error
        made = Made(original, next(done for done in graphs.passes if done.name == "fuse"))
        for variant in self.variants:
            try:
                source = prepared(variant, loaded, graphs.by_dialect())
                made.sessions[variant] = self._open(variant, source, folder)
            except HastenError as error:
                made.sessions[variant] = error
        return made

    def _open(self, variant: Variant, source: Source, folder: Path) -> Session:
        backend = BACKENDS.get(variant.backend)
        place = folder / variant.name
        place.mkdir(exist_ok=True)
        return self.stack.enter_context(backend.open(backend.make(source, variant, place), RunOptions(1)))

    def _verdict(
        self,
        variant: Variant,
        session: Session | HastenError,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        expected: Expectation,
    ) -> str:
        try:
            if isinstance(session, HastenError):
                raise session
            if session.spec.precision != variant.precision:
                raise StageError(f"it really computes in {session.spec.precision}")
            verdict = verify(Predictor(loaded.task, tokenizer, session), variant.name, expected, Gate(), Silent())
        except HastenError as error:
            return shown(error)
        found = verdict.agreement
        is_near = found.is_finite and found.relative_error <= NEAR.get(variant.precision, 0.0)
        return YES if verdict.passed or is_near else verdict.reason


def opened(graph: Path, signature: Signature) -> Session:
    artifact = Artifact(ORT_FP32, signature, graph.parent, {MODEL: graph.name})
    return BACKENDS.get(ORT_FP32.backend).open(artifact, RunOptions(1))


def prepared(variant: Variant, loaded: LoadedModel, graphs: Mapping[Dialect, Path]) -> Source:
    dialect = BACKENDS.get(variant.backend).dialect
    if dialect is Dialect.MODULE:
        return loaded.source
    graph = graphs[dialect]
    if dialect is Dialect.ORT and variant.precision is Precision.INT8:
        graph = graph.with_name("int8.onnx")
        target = target_of(this_machine())
        recipe = Recipe(variant=variant.name, method=Method.DYNAMIC, target=target.name, attention=True)
        quantize_dynamic(graphs[dialect], graph, recipe, external_data=False)
    return Source(loaded.signature, {MODEL: graph})


def rows(task: AnyTask, loaded: LoadedModel) -> list[Row]:
    """A few of the task's own sample, from beginning to end: kinds of rows come one after the other."""
    found = task.sample([text for text in sample_texts() if len(text) < SHORT], loaded.task)
    return found[:: max(1, len(found) // ROWS)]


def shown(error: HastenError) -> str:
    """In one line that is the same in every run: what is wrong with a graph, not by how much."""
    line = error.message.splitlines()[0]
    for word in line.split():
        if word.startswith(tempfile.gettempdir()):
            line = line.replace(word, "the model")
    line = re.sub(r"(the graph is wrong at [^,:]+).*", r"\1: this architecture does not export soundly", line)
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}…"


if __name__ == "__main__":
    main()
