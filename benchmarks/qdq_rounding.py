"""How near a quantized module is to its graph in ONNX Runtime, by how it rounds.

    python benchmarks/qdq_rounding.py --model DIR --calibration rows.jsonl --data rows.jsonl

QuantizeLinear divides by the scale; torch's fake_quantize multiplies by its inverse. Both are tried in the same module,
with the same ranges. Beside it, how far the module is from itself in float64: what the order of sums alone can do.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
import transformers

from hasten.core.variant import Precision
from hasten.quantize import qdq
from hasten.quantize.qdq import quantizer
from origin import origin

RESULTS = Path(__file__).parent / "results" / "qdq_rounding.json"
CALIBRATION_ROWS, ROWS, BATCH = 256, 256, 16
ROUNDED = "hasten.quantize.qdq.quantizer.rounded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with a text classifier")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    asked = parser.parse_args()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
    with qdq.patched(), qdq.calibration("percentile", 99.99) as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(asked.model).eval()
        calibrate(model, batches(tokenizer, asked.calibration, CALIBRATION_ROWS))
    rows = batches(tokenizer, asked.data, ROWS)
    divided, in_float = logits(model, rows), logits(off(model), rows)
    with patch(ROUNDED, multiplied):
        inverse = logits(model, rows)
    with patch(ROUNDED, in_full):
        exact = logits(copy.deepcopy(model).double(), rows)
    with tempfile.TemporaryDirectory() as folder:
        graph = in_runtime(qdq.export(model, tokenizer, folder), rows)
    result = {
        **origin(),
        "model": json.loads((asked.model / "config.json").read_text()).get("_name_or_path", ""),
        "rows": ROWS,
        "calibration_rows": CALIBRATION_ROWS,
        "largest_logit": float(np.abs(in_float).max()),
        "module and graph, divided": apart(divided, graph),
        "module and graph, multiplied by the inverse": apart(inverse, graph),
        "module in fp32 and in float64, divided": apart(divided, exact),
        "module and float": apart(divided, in_float),
    }
    RESULTS.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(json.dumps({name: value for name, value in result.items() if isinstance(value, dict)}, indent=1, default=str))


def batches(tokenizer: Any, file: Path, count: int) -> list[Any]:
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    texts.sort(key=len)
    groups = (texts[begin : begin + BATCH] for begin in range(0, len(texts), BATCH))
    return [tokenizer(group, padding=True, truncation=True, max_length=128, return_tensors="pt") for group in groups]


def logits(model: Any, rows: list[Any]) -> np.ndarray:
    with torch.inference_mode():
        return np.concatenate([model(**feeds).logits.double().numpy() for feeds in rows])


def off(model: Any) -> Any:
    plain = copy.deepcopy(model)
    qdq.disable(plain)
    return plain


def multiplied(values: torch.Tensor, scale: torch.Tensor, _: Precision) -> torch.Tensor:
    """As torch does it."""
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if scale.dim():
        return torch.fake_quantize_per_channel_affine(values, scale, zero_point, 0, -128, 127)
    return torch.fake_quantize_per_tensor_affine(values, scale, zero_point, -128, 127)


def in_full(values: torch.Tensor, scale: torch.Tensor, _: Precision) -> torch.Tensor:
    spread = quantizer._spread(scale.float().double(), values)
    return (values / spread).round_().clamp_(-128, 127).mul_(spread)


def in_runtime(file: Path, rows: list[Any]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    found = [session.run(None, {name: feeds[name].numpy().astype(np.int32) for name in names})[0] for feeds in rows]
    return np.concatenate(found).astype(np.float64)


def apart(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Of each row, the largest difference of a logit."""
    rows = np.abs(ours - theirs).max(axis=1)
    found = {name: float(np.quantile(rows, part)) for name, part in (("p50", 0.5), ("p90", 0.9), ("max", 1.0))}
    return {"relative": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)), **found}


if __name__ == "__main__":
    main()
