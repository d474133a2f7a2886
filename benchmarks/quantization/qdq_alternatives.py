"""Test alternatives to rewriting a model's source for quantization: torch.fx, torch.export and a function mode.

python benchmarks/quantization/qdq_alternatives.py          # records what works; times nothing
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

from provenance import provenance
from support.models import tiny_encoders

RESULTS = Path(__file__).parents[1] / "results" / "qdq_alternatives.json"
FUNCTIONS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.nn.functional.linear,
    torch.Tensor.add,
    torch.Tensor.__add__,
)


class CallCounter(TorchFunctionMode):
    """Counts the calls that would be quantized; a function mode does not see which module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in FUNCTIONS:
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def outcome(action: Callable[[], object]) -> str:
    """Return "works" or the first line of the error."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "works"


def study(architecture: str) -> dict[str, Any]:
    """Return what each alternative does with a tiny model of this architecture."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_encoders.save(architecture, "ForSequenceClassification", Path(folder))
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, attn_implementation="eager").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    feeds = dict(tokenizer(list(tiny_encoders.CORPUS[:2]), padding=True, return_tensors="pt"))
    rows, length = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("length", min=2, max=60)
    shapes = {name: {0: rows, 1: length} for name in feeds}
    exported = torch.export.export(model, (), feeds, dynamic_shapes=shapes, strict=False)
    module = exported.module()
    mode = CallCounter()
    with mode, torch.inference_mode():
        model(**feeds)
    return {
        "fx.symbolic_trace": outcome(lambda: torch.fx.symbolic_trace(model)),
        "export": {
            "calls": sum(node.op == "call_function" for node in exported.graph.nodes),
            "dropouts": sum("dropout" in str(node.target) for node in exported.graph.nodes),
            "is_a_transformers_model": isinstance(module, transformers.PreTrainedModel),
            "has_config": hasattr(module, "config"),
            "train": outcome(module.train),
            "with_labels": outcome(lambda: module(**feeds, labels=torch.tensor([0, 1]))),
        },
        "function_mode": dict(mode.counts),
    }


def main() -> None:
    """Run the study and write its result file."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results: dict[str, Any] = provenance()
    for architecture in ("bert", "deberta-v2", "modernbert"):
        results[architecture] = study(architecture)
    RESULTS.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
