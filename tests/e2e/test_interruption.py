"""Builds under Ctrl-C, with a full disk and with a model above 2 GiB, in real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def build_command(model: str, output: Path, data: Path, *arguments: str) -> list[str]:
    """Return a build of one variant that is verified on a few texts."""
    options = ["-o", str(output), "--variants", "onnxruntime-fp32", "--data", str(data), "-b", "1", "-s", "16"]
    return [sys.executable, "-m", "hasten", "build", model, *options, *arguments]


@pytest.mark.parametrize(
    ("after", "number"), [("load", signal.SIGINT), ("search", signal.SIGINT), ("export", signal.SIGTERM)]
)
def test_interrupted_build_leaves_no_files(
    tiny_classifier: Any, tmp_path: Path, texts_file: Path, after: str, number: signal.Signals
) -> None:
    """A tiny model suffices: the signal arrives before the benchmark has started its processes."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "out").mkdir()
    with subprocess.Popen(
        build_command(str(tiny_classifier("bert")), tmp_path / "out" / "bundle", texts_file),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"✓ {after}"):
                break
        process.send_signal(number)
        rest = process.stderr.read()
        code = process.wait(timeout=60)
    assert code == (130 if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert "Traceback" not in rest
    assert list((tmp_path / "out").iterdir()) == []
    assert [entry.name for entry in (tmp_path / "tmp").iterdir() if entry.name.startswith("hasten")] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system of limited size")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("full_folder", ["output", "temporary"])
def test_full_disk_is_reported_without_a_traceback(
    minilm: str, small_disk: Path, tmp_path: Path, texts_file: Path, full_folder: str
) -> None:
    output = (small_disk if full_folder == "output" else tmp_path) / "bundle"
    environment = dict(os.environ) if full_folder == "output" else {**os.environ, "TMPDIR": str(small_disk)}
    command = build_command(minilm, output, texts_file, "--bench-budget", "1s")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 4, done.stderr
    assert "disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
    # torch leaves an empty cache folder there.
    assert [entry.name for entry in small_disk.iterdir() if "torchinductor" not in entry.name] == []


def test_model_above_two_gibibytes_is_built(tmp_path: Path, quick_build: Any) -> None:
    """Its weights are one huge embedding table, so that it is large but fast."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    import hasten

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if shutil.disk_usage(tmp_path).free < 20e9 or memory < 16e9:
        pytest.skip("needs 20 GB of disk and 16 GB of memory")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "i", "am", "late", "and", "love", "it"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    # The same few rows are repeated: half a billion random numbers would take half a minute.
    config.vocab_size = 8_400_000
    rows = model.bert.embeddings.word_embeddings.weight.detach().repeat(config.vocab_size // len(vocabulary), 1)
    model.bert.embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=0)
    source = tmp_path / "model"
    model.save_pretrained(source, max_shard_size="1GB")
    tokenizer.save_pretrained(source)
    bundle = quick_build(source, tmp_path / "bundle", variants=["onnxruntime-fp32"])
    assert (bundle.path / "graph" / "model.onnx.data").stat().st_size > 2**31
    with hasten.load(bundle.path) as classify:
        assert classify("i am late")[0]["label"] in ("LABEL_0", "LABEL_1")
