"""Run predictions without a server: read a count per line from stdin, print the seconds of each prediction.

A raw socket runs a prediction per byte received and sends the byte back: a lower bound of any server's overhead.

    in_process.py BUNDLE VARIANT THREADS TEXT
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

from hasten.backends import RunOptions
from hasten.bundle import open_bundle
from hasten.predictor import open_session
from hasten.tasks import TASKS


def main(path: str, variant: str, threads: str, text: str) -> None:
    """Serve predictions of one text on stdin and on a socket."""
    bundle = open_bundle(path)
    spec, tokenizer = bundle.manifest.task, bundle.tokenizer()
    task = TASKS.get(spec.name)
    options = task.options(spec, {})
    session = open_session(bundle.artifact(bundle.entry(variant)), RunOptions(int(threads)))

    def predict() -> object:
        encoded = task.encode(task.parse(text), tokenizer, options)
        return task.decode(session.run(encoded.batch), encoded, options)

    def serve(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(1):
                predict()
                connection.sendall(data)

    predict()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    print("ready", listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            predict()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
