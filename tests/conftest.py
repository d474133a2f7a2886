"""Markers by folder, an offline environment, and the models tests share: tiny ones, made here, and real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import requiring
import tiny
from untimed import untimed

# Read by these libraries when they are imported, so set before any test can.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

HERE = Path(__file__).parent
FOLDERS = ("unit", "contract", "kernels", "e2e")
ClassifierFactory = Callable[..., Path]
EmbedderFactory = Callable[..., Path]
TaggerFactory = Callable[[str], Path]
QuickBuild = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes a minute (torch.compile)")
    parser.addoption(
        "--require", action="append", default=[], metavar="NAME", help="fail what is skipped for want of it: gpu"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes a minute; runs with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder in FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes a minute: run with --slow"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return requiring.judged((yield), item.config.getoption("--require"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return requiring.judged((yield), collector.config.getoption("--require"))


@pytest.fixture(scope="session", autouse=True)
def _core_of_its_own() -> None:
    """Whoever counts the cores counts one then, and threads of two processes do not spin for the same two."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def hasten_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test writes into the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HASTEN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus() -> tuple[str, ...]:
    return tiny.CORPUS


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFactory:
    """A model directory for an architecture, made once a session: `tiny_classifier("bert", labels=("a", "b"))`."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        architecture: str = "bert", *, labels: tuple[str, ...] = ("bad", "fair", "good"), problem: str | None = None
    ) -> Path:
        key = (architecture, labels, problem)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("models") / f"{architecture}-{problem or 'labels'}-{len(labels)}"
            about = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
            # The tokenizer knows no limit, as so many published ones: the model's real one must be found elsewhere.
            tiny.save(
                architecture,
                "ForSequenceClassification",
                made[key],
                tokenizer_max_length=None,
                problem_type=problem,
                **about,
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Any head on any architecture, made once a session: `tiny_model("roberta", "ForMaskedLM")`.

    More keywords go to its configuration. The tokenizer knows the model's limit, so that pipelines cut where we cut.
    """
    made: dict[tuple[str, ...], Path] = {}

    def make(architecture: str, head: str, **about: Any) -> Path:
        key = (architecture, head, repr(sorted(about.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("models") / f"{architecture}-{head}"
            tiny.save(architecture, head, made[key], **about)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_tagger(tmp_path_factory: pytest.TempPathFactory) -> TaggerFactory:
    """A model that finds entities of two types, made once a session: `tiny_tagger("bert")`."""
    made: dict[str, Path] = {}
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

    def make(architecture: str = "bert") -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("models") / f"{architecture}-tagger"
            about = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
            # The pipeline cuts a text where the tokenizer says, so here the tokenizer knows the model's limit.
            tiny.save(architecture, "ForTokenClassification", made[architecture], **about)
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_embedder(tmp_path_factory: pytest.TempPathFactory) -> EmbedderFactory:
    """A BertModel in the layout of sentence-transformers, written by hand: the format itself is what is under test."""

    def make(
        *,
        pooling: str | list[str] | dict[str, bool] = "mean",
        modules: tuple[str, ...] = ("Normalize",),
        dense: dict[str, object] | None = None,
        max_seq_length: int | None = 32,
        do_lower_case: bool = False,
        cased: bool = False,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        tokenizer_max_length: int = tiny.POSITIONS,
    ) -> Path:
        folder = tmp_path_factory.mktemp("models") / "embedder"
        tiny.save("bert", "Model", folder, cased=cased, tokenizer_max_length=tokenizer_max_length)
        chain = [("", "sentence_transformers.models.Transformer")]
        for place, kind in enumerate(("Pooling", *modules), 1):
            path = f"{place}_{kind}"
            chain.append((path, f"sentence_transformers.models.{kind}"))
            (folder / path).mkdir()
            if kind == "Pooling":
                how = pooling if isinstance(pooling, dict) else {"pooling_mode": pooling}
                _write(folder / path / "config.json", {"word_embedding_dimension": 32} | how)
            elif kind == "Dense":
                _save_dense(folder / path, dense or {})
        listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(chain)]
        _write(folder / "modules.json", listed)
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": do_lower_case})
        _write(
            folder / "config_sentence_transformers.json",
            {"prompts": prompts or {}, "default_prompt_name": default_prompt_name, "similarity_fn_name": "cosine"},
        )
        return folder

    return make


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[str, ...]) -> Path:
    """A handful of texts and pairs: the built-in sample has 400, which fifty builds do not need."""
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": text} for text in corpus] + [{"text": corpus[0], "text_pair": corpus[3]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def quick_build(tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> QuickBuild:
    """`hasten.build`, its benchmark answered at once; `speeds` says what each variant would have taken, in ms.

    A real benchmark starts a PyTorch process, ten seconds here. test_build.py runs it where it is the subject.
    """

    def build(model: Path | str, output: Path | None = None, *, speeds: dict[str, float] | None = None, **options: Any):
        import hasten

        with untimed(speeds):
            target = output or tmp_path_factory.mktemp("bundles") / "bundle"
            # One thread: handing work this small to a second one takes longer than doing it.
            return hasten.build(model, target, **({"data": texts_file, "threads": 1} | options))

    return build


@pytest.fixture(scope="session")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Fine-tuned models by name ("sst2"), assembled once a session from HASTEN_REAL_MODELS."""
    source = _outside("HASTEN_REAL_MODELS", "a directory with assemble.py")
    target = tmp_path_factory.mktemp("real")

    def assemble(name: str) -> Path:
        if not (target / name).exists():
            subprocess.run([sys.executable, source / "assemble.py", name, target / name], check=True)
        return target / name

    return assemble


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The directory with sst2_validation.jsonl and its like."""
    return _outside("HASTEN_REAL_DATA", "a directory with sst2_validation.jsonl")


def _outside(variable: str, what: str) -> Path:
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} is not set: it names {what}")
    return Path(given)


def _save_dense(folder: Path, about: dict[str, object]) -> None:
    import torch
    from safetensors.torch import save_file

    config = {
        "in_features": 32,
        "out_features": 12,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    } | about
    torch.manual_seed(11)
    weights = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) * 0.3}
    if config["bias"]:
        weights["linear.bias"] = torch.randn(config["out_features"])
    save_file(weights, folder / "model.safetensors")
    _write(folder / "config.json", config)


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
