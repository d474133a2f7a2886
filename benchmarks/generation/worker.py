"""Serve one engine as a worker process: requests on stdin, token ids and seconds on stdout, one line of JSON each."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Prompts as token ids, the number of new tokens, and the end-of-text ids to suppress; returns the new token ids.
Generate = Callable[[list[list[int]], int, list[int]], list[list[int]]]
THREADS = 2
BATCH_SIZE = 8
# Every prompt and its answer fit into this many tokens.
MAX_CONTEXT = 1024


def serve(load: Callable[[], Generate]) -> None:
    """Load the engine, then answer the requests on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines may print on stdout
    generate = load()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        time.sleep(0.01)  # until the threads of the previous contender stop spinning
        begin = time.perf_counter()
        generated = generate(request["prompts"], request["tokens"], request["eos_ids"])
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "generated": generated, "peak_bytes": peak_bytes()}
        print(json.dumps(answer), file=answers, flush=True)


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
