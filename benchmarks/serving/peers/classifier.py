"""Text classification with tokenizers and one ONNX Runtime session, shared by all ONNX Runtime peers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers
from options import Options, length_buckets

_TYPES = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}


class Classifier:
    """A text classifier."""

    def __init__(self, model: str, graph: str, options: Options) -> None:
        config = json.loads(Path(model, "config.json").read_text())
        # transformers leaves out the names of two labels if they are its own.
        names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        self.labels = [names[str(index)] for index in range(len(names))]
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(model, "tokenizer.json")))
        self.tokenizer.enable_truncation(min(512, config["max_position_embeddings"]))
        self.tokenizer.no_padding()
        self.padding_id = config.get("pad_token_id") or 0
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = options.threads
        self.session = onnxruntime.InferenceSession(graph, session_options, providers=["CPUExecutionProvider"])
        self.inputs = {entry.name: _TYPES[entry.type] for entry in self.session.get_inputs()}
        self.has_buckets = options.has_buckets

    def scores(self, texts: list[str]) -> np.ndarray:
        """Return the softmax scores of a batch, which is run in parts of similar length if there are buckets."""
        encoded = self.tokenizer.encode_batch(texts)
        if not self.has_buckets:
            return self._run(encoded)
        buckets = length_buckets([len(encoding) for encoding in encoded])
        scores = np.concatenate([self._run([encoded[index] for index in bucket]) for bucket in buckets])
        return scores[np.argsort(np.concatenate(buckets))]

    def _run(self, encoded: list[tokenizers.Encoding]) -> np.ndarray:
        longest = max(map(len, encoded))
        for encoding in encoded:
            encoding.pad(longest, pad_id=self.padding_id)
        columns = {
            "input_ids": [encoding.ids for encoding in encoded],
            "attention_mask": [encoding.attention_mask for encoding in encoded],
            "token_type_ids": [encoding.type_ids for encoding in encoded],
        }
        feeds = {name: np.array(columns[name], kind) for name, kind in self.inputs.items()}
        logits = self.session.run(None, feeds)[0]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def __call__(self, texts: list[str]) -> list[dict[str, object]]:
        scores = self.scores(texts)
        return [
            {"label": self.labels[best], "score": float(row[best])}
            for row, best in zip(scores, scores.argmax(axis=1), strict=True)
        ]
