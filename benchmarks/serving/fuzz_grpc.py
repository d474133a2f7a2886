"""Fuzz the gRPC server: no message may cause an internal error, a hang, a crash or a traceback.

    python benchmarks/serving/fuzz_grpc.py --bundle BUNDLE --requests 20000 --seed 0

Messages are valid inference requests with other names, types, shapes and sizes, and with changed bytes; some calls are
cancelled. Every hundredth request is a connection that sends random bytes or damaged HTTP/2 frames.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
from environments import provenance_with_versions
from tritonclient.grpc import service_pb2

METHODS = ("ModelInfer", "ModelMetadata", "ModelReady", "ModelConfig", "RepositoryIndex", "ServerMetadata", "Nope")
# What the server may answer; UNKNOWN is an exception of Python, INTERNAL a fault of a handler.
FAULTS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TIMEOUT_S = 60.0


def message(choose: random.Random, model: str) -> bytes:
    """Return an inference request with changed fields, and sometimes with changed bytes."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for _ in range(choose.choice([1, 1, 1, 0, 3])):
        tensor = request.inputs.add(name=choose.choice(["text", "input_ids", "attention_mask", "", "x" * 5000]))
        tensor.datatype = choose.choice(["BYTES", "INT64", "FP32", "BOOL", "", "FP8"])
        tensor.shape.extend(choose.choice([[1], [2], [], [1, 3], [0], [-1], [2**62], [2**32, 2**32], [1] * 300]))
        if choose.random() < 0.5:
            tensor.contents.bytes_contents.extend([b"the cat"] * choose.choice([0, 1, 2, 5000]))
        if choose.random() < 0.2:
            tensor.contents.int64_contents.extend([choose.choice([0, -1, 2**62])] * choose.choice([1, 3]))
        if choose.random() < 0.5:
            size = choose.choice([0, 3, 2**31, 2**32 - 1])
            request.raw_input_contents.append(size.to_bytes(4, "little") + b"cat" * choose.choice([0, 1, 1000]))
    if choose.random() < 0.3:
        request.parameters[choose.choice(["timeout", "priority", ""])].int64_param = choose.choice([0, -1, 1, 2**62])
    data = bytearray(request.SerializeToString())
    for _ in range(choose.choice([0, 0, 1, 5])):
        position = choose.randrange(len(data) + 1)
        data[position : position + choose.randrange(2)] = choose.randbytes(choose.choice([0, 1, 4]))
    return bytes(data)


def send_frames(choose: random.Random, port: int) -> None:
    """Send random bytes, or random HTTP/2 frames behind the preface, and read until the server closes or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        try:
            if choose.random() < 0.8:
                connection.sendall(PREFACE)
            for _ in range(choose.choice([1, 3, 50])):
                payload = choose.randbytes(choose.choice([0, 6, 8, 200]))
                size = choose.choice([len(payload), 2**24 - 1, 0])
                kind, flags, stream = choose.randrange(12), choose.randrange(256), choose.choice([0, 1, 2**31 - 1])
                connection.sendall(size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):
                pass
        except OSError:
            pass  # The server may close at any byte; that it still answers others is checked by the next calls.


def fuzz(port: int, model: str, total: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send the requests and return the counts of status codes, and the faults."""
    choose, counts, faults = random.Random(seed), Counter[str](), list[str]()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = {name: channel.unary_unary(f"/inference.GRPCInferenceService/{name}") for name in METHODS}
        for number in range(total):
            if number % 100 == 99:
                send_frames(choose, port)
                counts["frames"] += 1
                continue
            method = choose.choice(["ModelInfer"] * 6 + list(METHODS))
            data = message(choose, model if choose.random() < 0.9 else choose.choice(["", "../x", "é" * 999]))
            call: Any = calls[method].future(data, timeout=TIMEOUT_S)
            if choose.random() < 0.1:
                call.cancel()
            try:
                status = call.code()
            except grpc.FutureCancelledError:
                status = grpc.StatusCode.CANCELLED
            counts[status.name] += 1
            # The server's own words differ from those of a client that waited in vain.
            hangs = status is grpc.StatusCode.DEADLINE_EXCEEDED and call.details() == "Deadline Exceeded"
            if status in FAULTS or hangs:
                faults.append(f"request {number}: {method} {status.name}: {call.details()!r:.200} for {data!r:.300}")
    return counts, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the bundle, fuzz the server, write the result file and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle of an encoder to serve")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    default = Path(__file__).parents[1] / "results" / "fuzz_grpc.json"
    parser.add_argument("-o", "--output", type=Path, default=default)
    args = parser.parse_args(arguments)
    results: dict[str, Any] = provenance_with_versions({"hasten": sys.executable})
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "hasten", "serve", str(args.bundle), "--port", "0", "--grpc-port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert server.stdout is not None
            text = server.stdout.readline() + server.stdout.readline()
            port = re.search(r"gRPC on \S+:(\d+)", text)
            if port is None:
                raise SystemExit(f"the server did not start: {text}")
            begin = time.monotonic()
            counts, faults = fuzz(int(port[1]), args.bundle.resolve().name, args.requests, args.seed)
            seconds = time.monotonic() - begin
            alive = server.poll() is None
            server.terminate()
            code = server.wait(60)
        finally:
            server.kill()
            server.wait()
        errors.seek(0)
        log = errors.read()
    if not alive or code != 0 or "Traceback" in log:
        faults.append(f"the server ended with code {code}: {log[-3000:]}")
    results |= {
        "seed": args.seed, "requests": args.requests, "seconds": round(seconds, 1),
        "statuses": dict(sorted(counts.items())), "exit_code": code, "faults": faults,
    }  # fmt: skip
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"{args.requests} requests in {seconds:.1f} s: {dict(counts)}; {len(faults)} faults", *faults[:20], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
