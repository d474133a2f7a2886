"""Run a peer's predictions without a server: read a count per line from stdin, print the seconds of each prediction.

in_process.py pipeline|classifier MODEL GRAPH TEXT THREADS
"""

from __future__ import annotations

import json
import sys
import time


def main(kind: str, model: str, graph: str, text: str, threads: str) -> None:
    """Serve predictions of one text on stdin."""
    if kind == "pipeline":
        import torch
        from transformers import pipeline

        torch.set_num_threads(int(threads))
        predict = pipeline("text-classification", model=model, device="cpu")
    else:
        from classifier import Classifier
        from options import Options

        predict = Classifier(model, graph, Options(instances=1, threads=int(threads)))
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
