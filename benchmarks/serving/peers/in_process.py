"""Run a peer's predictions without a server: read a count per line from stdin, print the seconds of each prediction.

in_process.py pipeline|classifier MODEL GRAPH TEXT
"""

from __future__ import annotations

import json
import sys
import time


def main(kind: str, model: str, graph: str, text: str) -> None:
    """Serve predictions of one text on stdin."""
    if kind == "pipeline":
        from transformers import pipeline

        predict = pipeline("text-classification", model=model, device="cpu")
    else:
        from classifier import Classifier

        predict = Classifier(model, graph)
    predict([text])
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            predict([text])
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
