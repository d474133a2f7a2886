"""Compare two rounding rules by how close a quantized module is to its graph in ONNX Runtime.

    python benchmarks/quantization/qdq_rounding.py --model DIR --calibration rows.jsonl --data rows.jsonl

QuantizeLinear divides by the scale; torch's fake_quantize multiplies by its inverse. Both run in the same module with
the same ranges. The difference between the module and itself in float64 shows the effect of summation order alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1]))

from hasten.core.variant import Precision
from hasten.quantize import qdq
from hasten.quantize.qdq import quantizer
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "qdq_rounding.json"
CALIBRATION_ROWS, ROWS, BATCH = 256, 256, 16
FAKE_QUANTIZE = "hasten.quantize.qdq.quantizer.fake_quantize"


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with a text classifier")
    parser.add_argument("--calibration", type=Path, required=True, help="rows to calibrate with")
    parser.add_argument("--data", type=Path, required=True, help="rows to compare on")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    with qdq.patched(), qdq.calibration("percentile", 99.99) as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(args.model).eval()
        calibrate(model, read_batches(tokenizer, args.calibration, CALIBRATION_ROWS))
    batches = read_batches(tokenizer, args.data, ROWS)
    divided, in_float = logits(model, batches), logits(without_quantizers(model), batches)
    with patch(FAKE_QUANTIZE, fake_quantize_by_inverse):
        inverse = logits(model, batches)
    with patch(FAKE_QUANTIZE, fake_quantize_in_float64):
        exact = logits(copy.deepcopy(model).double(), batches)
    with tempfile.TemporaryDirectory() as folder:
        graph = onnxruntime_logits(qdq.export(model, tokenizer, folder), batches)
    result = {
        **provenance(),
        "model": json.loads((args.model / "config.json").read_text()).get("_name_or_path", ""),
        "rows": ROWS,
        "calibration_rows": CALIBRATION_ROWS,
        "largest_logit": float(np.abs(in_float).max()),
        "module and graph, divided": differences(divided, graph),
        "module and graph, multiplied by the inverse": differences(inverse, graph),
        "module in fp32 and in float64, divided": differences(divided, exact),
        "module and float": differences(divided, in_float),
    }
    RESULTS.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(json.dumps({name: value for name, value in result.items() if isinstance(value, dict)}, indent=1, default=str))


def read_batches(tokenizer: Any, file: Path, count: int) -> list[Any]:
    """Return the first rows of a file, sorted by length, as padded batches."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    texts.sort(key=len)
    groups = (texts[begin : begin + BATCH] for begin in range(0, len(texts), BATCH))
    return [tokenizer(group, padding=True, truncation=True, max_length=128, return_tensors="pt") for group in groups]


def logits(model: Any, batches: list[Any]) -> np.ndarray:
    """Return the logits of a module."""
    with torch.inference_mode():
        return np.concatenate([model(**feeds).logits.double().numpy() for feeds in batches])


def without_quantizers(model: Any) -> Any:
    """Return a copy of the model with its quantizers disabled."""
    unquantized = copy.deepcopy(model)
    qdq.disable(unquantized)
    return unquantized


def fake_quantize_by_inverse(values: torch.Tensor, scale: torch.Tensor, _: Precision) -> torch.Tensor:
    """Quantize and dequantize as torch does."""
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if scale.dim():
        return torch.fake_quantize_per_channel_affine(values, scale, zero_point, 0, -128, 127)
    return torch.fake_quantize_per_tensor_affine(values, scale, zero_point, -128, 127)


def fake_quantize_in_float64(values: torch.Tensor, scale: torch.Tensor, _: Precision) -> torch.Tensor:
    """Quantize and dequantize in float64, dividing by the scale."""
    broadcast_scale = quantizer._broadcast(scale.float().double(), values)
    return (values / broadcast_scale).round_().clamp_(-128, 127).mul_(broadcast_scale)


def onnxruntime_logits(file: Path, batches: list[Any]) -> np.ndarray:
    """Return the logits of a graph."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    outputs = [
        session.run(None, {name: feeds[name].numpy().astype(np.int32) for name in names})[0] for feeds in batches
    ]
    return np.concatenate(outputs).astype(np.float64)


def differences(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the relative error, and quantiles over rows of the largest difference of a logit."""
    rows = np.abs(ours - theirs).max(axis=1)
    quantiles = {name: float(np.quantile(rows, level)) for name, level in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))}
    return {"relative": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)), **quantiles}


if __name__ == "__main__":
    main()
