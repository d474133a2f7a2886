"""Open a model in a fresh process, answer one text, then report peak memory and imported libraries.

Imports nothing of hasten but what it measures, so that it also runs in the environment of a peer.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

TEXT = "How do I reset my password?"


def hasten(path: str) -> Any:
    """Return the embedding of hasten."""
    import hasten

    return hasten.load(path)(TEXT)


def sentence_transformers(path: str) -> Any:
    """Return the embedding of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(path, device="cpu").encode(TEXT, show_progress_bar=False)


def fastembed(path: str) -> Any:
    """Return the embedding of fastembed."""
    from fastembed import TextEmbedding

    name = "sentence-transformers/all-MiniLM-L6-v2"
    return next(iter(TextEmbedding(name, specific_model_path=path).embed([TEXT])))


def main() -> None:
    """Print `answered` as soon as there is an answer, then the measurements as JSON."""
    answer = globals()[sys.argv[1]](sys.argv[2])
    print("answered", flush=True)
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    vector = [round(float(value), 6) for value in answer]
    print(json.dumps({"peak_bytes": int(peak[1]) * 1024 if peak else 0, "loaded": loaded, "vector": vector}))


if __name__ == "__main__":
    main()
