"""The peers' work without a server: reads how many answers to time, a line each, and writes the seconds of each.

in_process.py pipeline|classifier MODEL GRAPH TEXT
"""

from __future__ import annotations

import json
import sys
import time


def main(kind: str, model: str, graph: str, text: str) -> None:
    if kind == "pipeline":
        from transformers import pipeline

        ask = pipeline("text-classification", model=model, device="cpu")
    else:
        from classifier import Classifier

        ask = Classifier(model, graph)
    ask([text])
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            ask([text])
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
