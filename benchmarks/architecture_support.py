"""Test every task with every architecture on every backend, for docs/reference/support.md.

    python benchmarks/architecture_support.py                   # all; writes results/support.json in ten minutes
    python benchmarks/architecture_support.py bert xlnet        # these only; prints the results

Models are tiny and have random weights. The study tests whether a model loads, exports, is fused and answers like
PyTorch. Whether a reduced precision is accurate enough depends on trained weights; here its outputs must be close.
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

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Session, Source
from hasten.builder.check_export import answer_awkward_batches, check_graph, check_tokenizer
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources.detect import EMBEDDING, MULTI_VECTOR, RANKING
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import LoadedModel, load_model
from hasten.builder.sources.quiet import quiet_libraries
from hasten.builder.sources.tokenizer import save_tokenizer
from hasten.core.errors import HastenError, StageError
from hasten.core.plan import Gate, Plan
from hasten.core.progress import SilentProgress
from hasten.core.report import Pass
from hasten.core.system.cpu_targets import target_of
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Signature
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.measure.data import sample_texts
from hasten.measure.encoder_gate import Expectation, expect, verify
from hasten.onnx_graph import operators
from hasten.predictor import Predictor
from hasten.quantize.methods.dynamic import quantize_dynamic
from hasten.quantize.recipe import Method, Recipe
from hasten.tasks import TASKS, AnyTask, Row
from provenance import provenance
from support.models import tiny_encoders

FILE = Path(__file__).parent / "results" / "support.json"
YES = "yes"
ORT_FP32 = Variant("onnxruntime", Precision.FP32)
# Zero-shot classification needs an entailment label, so all classifiers here have one.
LABELS = {0: "contradiction", 1: "neutral", 2: "entailment"}
CONFIGS: dict[str, dict[str, Any]] = {RANKING: {"id2label": {0: "relevant"}}}
ROWS = 16
MAX_TEXT_CHARS = 150
# The norm of the error over the norm of the output. Rounding stays below these; a defect (a lost mask, wrong position
# offsets) makes it about a half.
MAX_RELATIVE_ERROR = {Precision.FP16: 0.05, Precision.BF16: 0.15, Precision.INT8: 0.2}
# With larger weights, as in tests, random models amplify every rounding error.
INITIALIZER_RANGE = 0.2
# Enough for a question and its context, with a token per letter.
POSITIONS = 192
MAX_REASON_CHARS = 120


@dataclass
class Entry:
    """The results of one task with one architecture: per variant "yes" or the reason for a failure."""

    model: str
    results: dict[str, str]
    attention_fused: int = 0
    layers: int = 0
    # The reason why attention was not fused.
    unfused: str = ""


@dataclass
class BuiltModel:
    """The open sessions of a model; tasks with the same graph share them."""

    reference: Session
    fusion: Pass
    # The operators of the graph that ONNX Runtime runs on CPUs.
    operators: dict[str, int]
    sessions: dict[Variant, Session | HastenError] = field(default_factory=dict)


def main() -> None:
    """Test the architectures; write the result file if all were tested, or replace the rows of some in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="default: all of tests/support/models/tiny_encoders.py")
    parser.add_argument("--replace", action="store_true", help="replace the rows of these architectures in the file")
    parser.add_argument("--task", action="append", choices=TASKS.names(), help="test and replace only these tasks")
    parser.add_argument("--variant", action="append", metavar="NAME", help="test and replace only these variants")
    args = parser.parse_args()
    names, studied = args.architectures or list(tiny_encoders.ARCHITECTURES), args.task or TASKS.names()
    is_partial = bool(args.architectures or args.task or args.variant)
    variants = [variant for variant in automatic_variants() if variant.name in (args.variant or [variant.name])]
    tasks: dict[str, dict[str, Entry]] = {name: {} for name in studied}
    for architecture, entries in study_all(names, variants, studied):
        for task, entry in entries.items():
            tasks[task][architecture] = entry
            failed = {reason for reason in entry.results.values() if reason != YES}
            print(f"{architecture:22}{task:26}{'; '.join(failed) or YES}", flush=True)
    if is_partial and args.replace:
        results = msgspec.json.decode(FILE.read_bytes())
        for task, entries in tasks.items():
            rows = results["tasks"].setdefault(task, {})
            for architecture, entry in entries.items():
                if args.variant and architecture in rows:
                    entry.results = rows[architecture]["results"] | entry.results
                add_untested(entry, results["variants"])
            rows |= entries
        results["tasks"] = dict(sorted(results["tasks"].items()))
        tested = {"architectures": names, "tasks": studied, "variants": [variant.name for variant in variants]}
        replaced = {**tested, **provenance()}
        results["replaced"] = [*results.get("replaced", []), replaced]
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    if is_partial:
        return
    results = {
        **provenance(),
        "variants": [variant.name for variant in variants],
        "tasks": tasks,
    }
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def add_untested(entry: Entry, variants: Sequence[str]) -> None:
    """Add the variants of the table that this machine does not run; a model that no variant runs fails for them too."""
    reasons = set(entry.results.values())
    shared = next(iter(reasons)) if len(reasons) == 1 and YES not in reasons else ""
    entry.results = {name: entry.results.get(name, shared or f"{name} was not tested") for name in variants}


def automatic_variants() -> list[Variant]:
    """Return the variants that a build tries on this machine, without torch.compile (a minute per model)."""
    machine = this_machine()
    return [v for backend in BACKENDS.all() if backend.probe(machine).ok for v in backend.variants(machine)]


def study_all(
    architectures: Sequence[str], variants: Sequence[Variant], tasks: Sequence[str]
) -> Iterator[tuple[str, dict[str, Entry]]]:
    """Run the study of each architecture in a worker process, so that a crash is a result and does not end the run."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    for architecture in architectures:
        try:
            yield architecture, pool.submit(study, architecture, variants, tasks).result()
        except BrokenProcessPool:
            pool = ProcessPoolExecutor(1, get_context("spawn"))
            crashed = dict.fromkeys((variant.name for variant in variants), "the process crashed")
            yield architecture, {name: Entry("", crashed) for name in tasks}
    pool.shutdown()


def study(architecture: str, variants: Sequence[Variant], tasks: Sequence[str] = ()) -> dict[str, Entry]:
    """Return the entries of one architecture by task, by default of all tasks."""
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack, quiet_libraries():
        trial = ArchitectureTrial(architecture, variants, Path(work), stack)
        return {name: trial.entry(TASKS.get(name)) for name in tasks or TASKS.names()}


def write_multi_vector_layout(model: Path) -> None:
    """Write a layout without a projection; queries are expanded unless padding is on the left or attention is local.

    The windows of tiny models are shorter than queries: tokens that fill them would attend to nothing.
    """
    import transformers

    kinds = ["Transformer", "MultiVectorMask", "Normalize"]
    modules = [{"path": "" if index == 0 else f"{index}_{kind}", "type": kind} for index, kind in enumerate(kinds)]
    (model / "modules.json").write_bytes(msgspec.json.encode(modules))
    (model / "config_sentence_transformers.json").write_bytes(msgspec.json.encode({"model_type": "MultiVectorEncoder"}))
    pads_left = transformers.AutoTokenizer.from_pretrained(model).padding_side == "left"
    is_local = "local_attention" in msgspec.json.decode((model / "config.json").read_bytes())
    expansion = None if pads_left or is_local else {"strategy": "fixed", "length": 32}
    (model / "sentence_bert_config.json").write_bytes(msgspec.json.encode({"query_expansion": expansion}))


@dataclass
class ArchitectureTrial:
    """All tasks with one architecture."""

    architecture: str
    variants: Sequence[Variant]
    work: Path
    stack: ExitStack
    built: dict[object, BuiltModel | HastenError] = field(default_factory=dict)
    tokenizers: dict[TokenizerSpec, Tokenizer] = field(default_factory=dict)

    def entry(self, task: AnyTask) -> Entry:
        """Return the results of a task."""
        import transformers

        family = tiny_encoders.ARCHITECTURES[self.architecture]
        prefix, base = family.prefix, family.base
        names = [prefix + head for head in task.heads or (base,)]
        name = next((name for name in names if hasattr(transformers, name)), None)
        if name is None:
            return self._all(names[-1], f"transformers has no {names[-1]}")
        try:
            return self._entry(task, name, name.removeprefix(prefix))
        except HastenError as error:
            return self._all(name, describe(error))

    def _entry(self, task: AnyTask, name: str, head: str) -> Entry:
        config = CONFIGS.get(task.name, {"id2label": LABELS} if head.endswith("Classification") else {})
        layout = task.name if task.name == MULTI_VECTOR else ""
        model = self.work / f"{name}-{len(config.get('id2label', ()))}{layout}"
        if not model.exists():
            sizes = {"positions": POSITIONS, "tokenizer_max_length": POSITIONS, "initializer_range": INITIALIZER_RANGE}
            tiny_encoders.save(self.architecture, head, model, **config, **sizes)
            if layout:
                write_multi_vector_layout(model)
        plan = Plan(str(model), task=task.name, pooling="mean" if task.name == EMBEDDING else None)
        loaded = load_model(find_model(plan), plan)
        tokenizer = self._tokenizer(loaded)
        # Tasks with the same model and signature share one graph.
        key = (model, loaded.signature)
        if key not in self.built:
            self.built[key] = self._build(loaded, tokenizer, task)
        built = self.built[key]
        if isinstance(built, HastenError):
            raise built
        expected = expect(
            Predictor(loaded.task, tokenizer, built.reference), sample_rows(task, loaded), SilentProgress()
        )
        results = {
            variant.name: self._verdict(variant, session, loaded, tokenizer, expected)
            for variant, session in built.sessions.items()
        }
        fused = sum(built.operators.get(kind, 0) for kind in ("Attention", "MultiHeadAttention"))
        reasons = {left.reason for left in built.fusion.unfused if left.pattern == "attention"}
        layers = int(getattr(loaded.config, "num_hidden_layers", 0))
        unfused = "; ".join(sorted(reasons)) or "it has no softmax"
        return Entry(name, results, fused, layers, unfused if fused < layers else "")

    def _all(self, name: str, reason: str) -> Entry:
        return Entry(name, dict.fromkeys((variant.name for variant in self.variants), reason))

    def _tokenizer(self, loaded: LoadedModel) -> Tokenizer:
        spec = loaded.tokenizer
        if spec not in self.tokenizers:
            file = self.work / f"tokenizer-{len(self.tokenizers)}.json"
            save_tokenizer(loaded.original_tokenizer, file)
            self.tokenizers[spec] = Tokenizer.open(file, spec)
            check_tokenizer(self.tokenizers[spec], loaded.original_tokenizer)
        return self.tokenizers[spec]

    def _build(self, loaded: LoadedModel, tokenizer: Tokenizer, task: AnyTask) -> BuiltModel | HastenError:
        """Run the steps of a build; an error in one variant does not affect the others."""
        folder = self.work / str(len(self.built))
        folder.mkdir()
        signature = loaded.signature
        try:
            reference = self._open(loaded.baseline, loaded.source, folder)
            batch = Predictor(loaded.task, tokenizer, reference).encode(sample_rows(task, loaded)).batch
            exported = folder / "model.onnx"
            export(loaded, exported)
            checks = answer_awkward_batches(reference, batch)
            with open_graph(exported, signature) as session:
                check_graph(session, checks, is_brief=True)
            graphs = apply_passes(exported, folder, loaded.config, pads_left=signature.pads_left)
            with open_graph(graphs.plain, signature) as session:
                check_graph(session, checks)
        except HastenError as error:
            return error
        fusion = next(step for step in graphs.passes if step.name == "fuse")
        built = BuiltModel(reference, fusion, operators(graphs.fused))
        for variant in self.variants:
            try:
                source = variant_source(variant, loaded, graphs.by_dialect())
                built.sessions[variant] = self._open(variant, source, folder)
            except HastenError as error:
                built.sessions[variant] = error
        return built

    def _open(self, variant: Variant, source: Source, folder: Path) -> Session:
        backend = BACKENDS.get(variant.backend)
        target = folder / variant.name
        target.mkdir(exist_ok=True)
        return self.stack.enter_context(backend.open(backend.make(source, variant, target), RunOptions(1)))

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
                raise StageError(f"it computes in {session.spec.precision} instead")
            verdict = verify(
                Predictor(loaded.task, tokenizer, session), variant.name, expected, Gate(), SilentProgress()
            )
        except HastenError as error:
            return describe(error)
        agreement = verdict.agreement
        is_close = agreement.is_finite and agreement.relative_error <= MAX_RELATIVE_ERROR.get(variant.precision, 0.0)
        return YES if verdict.passed or is_close else verdict.reason


def open_graph(graph: Path, signature: Signature) -> Session:
    """Open a graph with ONNX Runtime in fp32."""
    artifact = Artifact(ORT_FP32, signature, graph.parent, {MODEL: graph.name})
    return BACKENDS.get(ORT_FP32.backend).open(artifact, RunOptions(1))


def variant_source(variant: Variant, loaded: LoadedModel, graphs: Mapping[Dialect, Path]) -> Source:
    """Return the module or graph that a variant is made of."""
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


def sample_rows(task: AnyTask, loaded: LoadedModel) -> list[Row]:
    """Return every nth row of the task's sample, which is sorted by kind, so that all kinds are among them."""
    rows = task.sample([text for text in sample_texts() if len(text) < MAX_TEXT_CHARS], loaded.task)
    return rows[:: max(1, len(rows) // ROWS)]


def describe(error: HastenError) -> str:
    """Return the error in one line that is the same in every run, without paths and numbers."""
    line = error.message.splitlines()[0]
    for word in line.split():
        if word.startswith(tempfile.gettempdir()):
            line = line.replace(word, "the model")
    line = re.sub(r"(the graph is wrong at [^,:]+).*", r"\1: this architecture does not export soundly", line)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…"


if __name__ == "__main__":
    main()
