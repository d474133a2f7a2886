"""Encoders of the GPU benchmark: models with random weights, their shapes and batches, and reference logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from hasten.backends import BACKENDS, MODEL, Dialect, Source, dialect_of
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources.export_wrapper import Exportable
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Shape, Signature, TensorSpec, pad
from hasten.core.variant import Precision, Variant
from hasten.quantize.methods.fp16 import convert_to_fp16

INPUTS = ("input_ids", "attention_mask")
_BERT = {"vocab_size": 30522, "type_vocab_size": 2}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# Calibration rows of 8-bit variants; they differ from those that are timed.
_CALIBRATION_ROWS, _CALIBRATION_TOKENS = 32, 384
# Lengths in tokens of 512 sentences of SST-2 and 512 reviews of IMDB of at least 200 characters, counted with MiniLM's
# tokenizer and truncated at 512.
_MIXED_LENGTHS = Path(__file__).with_name("mixed_lengths.json")


@dataclass(frozen=True, slots=True)
class Study:
    """A model and its shapes with targets: device time of the fused backend in ms, in fp16 and in fp8."""

    family: str
    config: dict[str, int]
    shapes: dict[Shape, float | None]
    fp8_targets_ms: dict[Shape, float] = field(default_factory=dict)
    # Lengths of texts in tokens, timed as one workload.
    mixed_lengths: tuple[int, ...] = ()
    calibration_lengths: tuple[int, ...] = tuple(
        np.random.default_rng(1).integers(4, _CALIBRATION_TOKENS, _CALIBRATION_ROWS).tolist()
    )


STUDIES = {
    "MiniLM-L6": Study("Bert", _BERT | _MINI, {Shape(1, 16): 0.085, Shape(1, 128): 0.13, Shape(16, 384): 0.55}),
    "RoBERTa-base": Study(
        "Roberta",
        _ROBERTA,
        {Shape(1, 16): 0.22, Shape(16, 384): 2.5, Shape(32, 256): 3.2},
        {Shape(16, 384): 1.9, Shape(32, 256): 2.3},
        mixed_lengths=tuple(json.loads(_MIXED_LENGTHS.read_text())),
    ),
    "BERT-base": Study("Bert", _BERT, {Shape(32, 384): None}),
    # The configuration's defaults are those of ModernBERT-base.
    "ModernBERT-base": Study("ModernBert", {}, {Shape(1, 16): 0.35, Shape(16, 512): 3.5, Shape(1, 8192): 8.0}),
    "RoBERTa-large": Study("Roberta", _ROBERTA | _LARGE, {Shape(16, 384): 8.3}, {Shape(16, 384): 5.4}),
}
DRY_RUN = Study(
    "Bert",
    _BERT | _TINY,
    {Shape(1, 4): None, Shape(2, 12): None},
    mixed_lengths=(3, 9, 1, 5),
    calibration_lengths=(5, 9),
)


def _signature() -> Signature:
    inputs = tuple(TensorSpec(name, DType.INT32, (BATCH, SEQUENCE), int(name == "input_ids")) for name in INPUTS)
    return Signature(inputs, (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),), max_length=8192)


# For all models: no shape is longer than its model's own limit.
SIGNATURE = _signature()


class Encoder:
    """A model with random weights, and the graphs that are exported from it into a folder when a variant needs them."""

    def __init__(self, study: Study, folder: Path) -> None:
        torch.manual_seed(0)
        self.study, self._folder = study, folder
        self.config = getattr(transformers, f"{study.family}Config")(**study.config, num_labels=2)
        self.model = getattr(transformers, f"{study.family}ForSequenceClassification")(self.config).eval()
        self._module = Exportable(self.model, INPUTS, ["logits"])

    def source(self, variant: Variant) -> Source:
        """Return what a variant is made from."""
        if BACKENDS.get(variant.backend).dialect is Dialect.MODULE:
            return Source(SIGNATURE, {}, self._module, calibration=random_batch(self.study.calibration_lengths, seed=1))
        # Engines are tuned for the largest shape.
        rows, tokens = ([getattr(shape, size) for shape in self.study.shapes] for size in ("batch", "sequence"))
        ranges = (Range(min(sizes), max(sizes), max(sizes)) for sizes in (rows, tokens))
        return Source(SIGNATURE, {MODEL: self._graph(variant)}, shapes=Shapes(*ranges))

    def expected_logits(self, batch: Batch) -> Any:
        """Return the logits of PyTorch in fp32."""
        with torch.inference_mode():
            return self.model.to(device())(**padded_feeds(batch)).logits.float().cpu().numpy()

    def _graph(self, variant: Variant) -> Path:
        """Return the graph before last-layer pruning, with fused operators for ONNX Runtime."""
        work = self._folder / "graphs"
        finished = work / "finished"
        if not finished.exists():
            work.mkdir(parents=True)
            loaded: Any = SimpleNamespace(
                module=self._module, signature=SIGNATURE, tokenizer=SimpleNamespace(pad_id=1), config=self.config
            )
            self.model.cpu()
            export(loaded, work / "model.onnx")
            apply_passes(work / "model.onnx", work, self.config)
            (work / "fp16").mkdir()
            fp16 = convert_to_fp16({MODEL: work / "whole" / "model.onnx"}, work / "fp16", {})[MODEL]
            # Written last: it tells that no export was interrupted.
            finished.write_text(fp16.name)
        if dialect_of(variant) is Dialect.ONNX:
            return work / "folded" / "model.onnx"
        if variant.precision is Precision.FP16:
            return work / "fp16" / finished.read_text()
        return work / "whole" / "model.onnx"


def device() -> str:
    """Return the device of the reference model."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_batch(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Return random token ids of these lengths."""
    ids = np.random.default_rng(seed).integers(5, 30000, sum(lengths)).astype(np.int32)
    return Batch({"input_ids": ids}, np.array(lengths, np.int32))


def batch_of(shape: Shape) -> Batch:
    """Return random token ids of a shape."""
    return random_batch([shape.sequence] * shape.batch)


def padded_feeds(batch: Batch) -> dict[str, Any]:
    """Return the padded tensors of a batch on the device."""
    return {key: torch.from_numpy(value).to(device()) for key, value in pad(batch, SIGNATURE).items()}
