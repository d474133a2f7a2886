"""The work without a server: reads how many answers to time, a line each, and writes the seconds of each.

in_process.py BUNDLE VARIANT THREADS TEXT
"""

from __future__ import annotations

import json
import sys
import time

from hasten.backends import RunOptions
from hasten.bundle import open_bundle
from hasten.predictor import open_session
from hasten.tasks import TASKS


def main(path: str, variant: str, threads: str, text: str) -> None:
    bundle = open_bundle(path)
    spec, tokenizer = bundle.manifest.task, bundle.tokenizer()
    task = TASKS.get(spec.name)
    options = task.options(spec, {})
    session = open_session(bundle.artifact(bundle.entry(variant)), RunOptions(int(threads)))

    def ask() -> object:
        encoded = task.encode(task.parse(text), tokenizer, options)
        return task.decode(session.run(encoded.batch), encoded, options)

    ask()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
