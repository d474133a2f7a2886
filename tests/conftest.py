"""Markers by folder, an offline environment, and the models tests share: tiny ones, made here, and real ones."""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Read by these libraries when they are imported, so set before any test can.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

HERE = Path(__file__).parent
FOLDERS = ("unit", "contract", "kernels", "e2e")
POSITIONS = 64

# What the tiny tokenizers know the words of, and what tests are free to ask about.
CORPUS = (
    "the cat sat on the mat and looked at the rain",
    "a dog ran across the green field after the red ball",
    "what a wonderful film, I would watch it again tomorrow",
    "the plot is dull and the acting is worse",
    "prices rose by three percent in the second quarter",
    "Please send the invoice to the office before Friday",
    "she reads old books about ships and the sea",
    "is this the right answer to the question?",
)

ClassifierFactory = Callable[..., Path]
EmbedderFactory = Callable[..., Path]
TaggerFactory = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes a minute (torch.compile)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a minute; runs with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder in FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes a minute: run with --slow"))


@pytest.fixture(scope="session", autouse=True)
def hasten_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test writes into the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HASTEN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def corpus() -> tuple[str, ...]:
    return CORPUS


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
            _save(
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
            _save(architecture, head, made[key], **about)
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
            _save(architecture, "ForTokenClassification", made[architecture], **about)
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
        tokenizer_max_length: int = POSITIONS,
    ) -> Path:
        folder = tmp_path_factory.mktemp("models") / "embedder"
        _save("bert", "Model", folder, cased=cased, tokenizer_max_length=tokenizer_max_length)
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


def _save(
    architecture: str,
    head: str,
    folder: Path,
    *,
    cased: bool = False,
    tokenizer_max_length: int | None = POSITIONS,
    **about: object,
) -> None:
    """A seeded random model and a tokenizer trained on the corpus, as save_pretrained writes them."""
    import torch
    import transformers

    tokenizer = _tokenizer(architecture, cased=cased, max_length=tokenizer_max_length)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
    }
    if architecture == "distilbert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": POSITIONS}
    elif architecture == "roberta":
        sizes |= {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}
    elif architecture == "electra":
        sizes |= {"embedding_size": 16}  # narrower than the model, as in the published ones
    prefix = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "electra": "Electra"}[architecture]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        # Wide, so that different texts get clearly different answers.
        initializer_range=0.5,
        **sizes,
        **about,
    )
    torch.manual_seed(7)
    getattr(transformers, f"{prefix}{head}")(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(architecture: str, *, cased: bool, max_length: int | None) -> Any:
    import tokenizers
    import transformers

    if architecture == "roberta":
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
        byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        byte_level.train_from_iterator(CORPUS, trainer)
        learned = json.loads(byte_level.to_str())["model"]
        merges = [tuple(merge) for merge in learned["merges"]]
        return transformers.RobertaTokenizer(vocab=learned["vocab"], merges=merges, model_max_length=max_length)
    kinds = {"bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "electra": "ElectraTokenizer"}
    kind = getattr(transformers, kinds[architecture])
    return kind(vocab=_word_pieces(), do_lower_case=not cased, model_max_length=max_length)


def _word_pieces() -> dict[str, int]:
    """Letters and the words of the corpus. Not trained: WordPieceTrainer breaks ties differently in each run."""
    letters = sorted({*string.ascii_letters, *string.digits, *".,?!:"})
    words = sorted({word for line in CORPUS for word in re.findall(r"\w\w+", line.lower())})
    pieces = [*letters, *(f"##{letter}" for letter in string.ascii_letters), *words]
    return {piece: place for place, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces])}


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
