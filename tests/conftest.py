"""Markers by folder, an offline environment, and the models that tests share: tiny ones and real ones."""

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

from plugins import require
from support.fake_bench import fake_benchmark
from support.models import tiny_encoders

# The libraries read these on import, so they are set before any test imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

HERE = Path(__file__).parent
FOLDERS = ("unit", "contract", "kernels", "e2e")
ClassifierFactory = Callable[..., Path]
EmbedderFactory = Callable[..., Path]
TaggerFactory = Callable[[str], Path]
QuickBuild = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take a minute (torch.compile)")
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="fail tests that would be skipped because NAME is missing, as in gpu",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Background jobs of a shell ignore SIGINT, and so would the processes that tests interrupt.
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
    return require.judged((yield), item.config.getoption("--require"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return require.judged((yield), collector.config.getoption("--require"))


@pytest.fixture(scope="session", autouse=True)
def _pin_worker_to_core() -> None:
    """Pin each xdist worker to one core, so that the thread pools of two workers do not compete."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session", autouse=True)
def hasten_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests out of the user's cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HASTEN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus() -> tuple[str, ...]:
    return tiny_encoders.CORPUS


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFactory:
    """Return a model directory per architecture, saved once: `tiny_classifier("bert", labels=("a", "b"))`."""
    saved: dict[tuple[object, ...], Path] = {}

    def make(
        architecture: str = "bert", *, labels: tuple[str, ...] = ("bad", "fair", "good"), problem: str | None = None
    ) -> Path:
        key = (architecture, labels, problem)
        if key not in saved:
            saved[key] = tmp_path_factory.mktemp("models") / f"{architecture}-{problem or 'labels'}-{len(labels)}"
            config_values = {
                "id2label": dict(enumerate(labels)),
                "label2id": {name: i for i, name in enumerate(labels)},
            }
            # The tokenizer has no limit, like many published ones: the model's limit must be found elsewhere.
            tiny_encoders.save(
                architecture,
                "ForSequenceClassification",
                saved[key],
                tokenizer_max_length=None,
                problem_type=problem,
                **config_values,
            )
        return saved[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a model directory per architecture and head, saved once: `tiny_model("roberta", "ForMaskedLM")`.

    Keywords go to its configuration. The tokenizer has the model's limit, so that pipelines truncate as we do.
    """
    saved: dict[tuple[str, ...], Path] = {}

    def make(architecture: str, head: str, **config_values: Any) -> Path:
        key = (architecture, head, repr(sorted(config_values.items())))
        if key not in saved:
            saved[key] = tmp_path_factory.mktemp("models") / f"{architecture}-{head}"
            tiny_encoders.save(architecture, head, saved[key], **config_values)
        return saved[key]

    return make


@pytest.fixture(scope="session")
def tiny_tagger(tmp_path_factory: pytest.TempPathFactory) -> TaggerFactory:
    """Return a model directory that tags entities of two types, saved once: `tiny_tagger("bert")`."""
    saved: dict[str, Path] = {}
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

    def make(architecture: str = "bert") -> Path:
        if architecture not in saved:
            saved[architecture] = tmp_path_factory.mktemp("models") / f"{architecture}-tagger"
            config_values = {
                "id2label": dict(enumerate(labels)),
                "label2id": {name: i for i, name in enumerate(labels)},
            }
            # The pipeline truncates at the tokenizer's limit, so here it equals the model's.
            tiny_encoders.save(architecture, "ForTokenClassification", saved[architecture], **config_values)
        return saved[architecture]

    return make


@pytest.fixture(scope="session")
def tiny_embedder(tmp_path_factory: pytest.TempPathFactory) -> EmbedderFactory:
    """Write a BertModel in sentence-transformers' layout; manually, because the format is under test."""

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
        tokenizer_max_length: int = tiny_encoders.POSITIONS,
    ) -> Path:
        folder = tmp_path_factory.mktemp("models") / "embedder"
        tiny_encoders.save("bert", "Model", folder, cased=cased, tokenizer_max_length=tokenizer_max_length)
        chain = [("", "sentence_transformers.models.Transformer")]
        for position, kind in enumerate(("Pooling", *modules), 1):
            path = f"{position}_{kind}"
            chain.append((path, f"sentence_transformers.models.{kind}"))
            (folder / path).mkdir()
            if kind == "Pooling":
                pooling_config = pooling if isinstance(pooling, dict) else {"pooling_mode": pooling}
                _write(folder / path / "config.json", {"word_embedding_dimension": 32} | pooling_config)
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
    """Write a few texts and a pair: the built-in sample has 400, too many for fifty builds."""
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [{"text": text} for text in corpus] + [{"text": corpus[0], "text_pair": corpus[3]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def quick_build(tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> QuickBuild:
    """`hasten.build` with a fake benchmark; `speeds` are the latencies of variants in ms.

    A real benchmark starts a PyTorch process, which takes ten seconds. test_build.py tests it.
    """

    def build(model: Path | str, output: Path | None = None, *, speeds: dict[str, float] | None = None, **options: Any):
        import hasten

        with fake_benchmark(speeds):
            target = output or tmp_path_factory.mktemp("bundles") / "bundle"
            # One thread: work this small is slower on two.
            return hasten.build(model, target, **({"data": texts_file, "threads": 1} | options))

    return build


@pytest.fixture(scope="session")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return fine-tuned models by name ("sst2"), assembled once from HASTEN_REAL_MODELS."""
    source = _directory_from("HASTEN_REAL_MODELS", "a directory with assemble.py")
    target = tmp_path_factory.mktemp("real")

    def assemble(name: str) -> Path:
        if not (target / name).exists():
            subprocess.run([sys.executable, source / "assemble.py", name, target / name], check=True)
        return target / name

    return assemble


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the directory of labelled data, such as sst2_validation.jsonl."""
    return _directory_from("HASTEN_REAL_DATA", "a directory with sst2_validation.jsonl")


def _directory_from(variable: str, content: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: it names {content}")
    return Path(value)


def _save_dense(folder: Path, config_values: dict[str, object]) -> None:
    import torch
    from safetensors.torch import save_file

    config = {
        "in_features": 32,
        "out_features": 12,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    } | config_values
    torch.manual_seed(11)
    weights = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) * 0.3}
    if config["bias"]:
        weights["linear.bias"] = torch.randn(config["out_features"])
    save_file(weights, folder / "model.safetensors")
    _write(folder / "config.json", config)


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
