"""What stands between a socket and the engine: our own HTTP against uvicorn, gRPC with threads against its asyncio.

    python benchmarks/serving/front.py --bundle minilm --uvicorn VENV/bin/python

One client, one request at a time, turns alternating; the same application behind all. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.hardware import this_machine

RESULT = Path(__file__).parent.parent / "results" / "serving_front.json"
TEXT = "the film is a delight from its first scene to the last"
HOST = "127.0.0.1"
TURNS, REQUESTS = 12, 150
START_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--uvicorn", default=sys.executable, help="a Python that has uvicorn and hasten[serve]")
    parser.add_argument("--aio", type=int, metavar="PORT", help="be the server with grpc.aio (what this script starts)")
    args = parser.parse_args()
    if args.aio is not None:
        asyncio.run(serve_aio(args.bundle, args.aio))
        return 0
    ours, grpc, uvicorn, aio = free_ports(4)
    bundle, environment = str(args.bundle), {**os.environ, "HASTEN_BUNDLES": str(args.bundle), "HASTEN_INSTANCES": "1"}
    commands = [
        [sys.executable, "-m", "hasten", "serve", bundle, "--port", str(ours), "--grpc-port", str(grpc)],
        [args.uvicorn, "-m", "uvicorn", "--factory", "hasten.server.asgi:from_environment", "--port", str(uvicorn),
         "--no-access-log", "--loop", "uvloop", "--http", "httptools"],
        [sys.executable, __file__, "--bundle", bundle, "--aio", str(aio)],
    ]  # fmt: skip
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for command in commands]
    try:
        for port in (ours, grpc, uvicorn, aio):
            wait_for(port)
        model = args.bundle.resolve().name
        times = measure(
            {
                "hasten HTTP": asking_http(ours),
                "uvicorn": asking_http(uvicorn),
                "hasten gRPC": asking_grpc(grpc, model),
                "grpc.aio": asking_grpc(aio, model),
            }
        )
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    write(times)
    return 0


def measure(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The median of each turn, in milliseconds."""
    for ask in contenders.values():
        for _ in range(REQUESTS):
            ask()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, ask in contenders.items():
            taken = []
            for _ in range(REQUESTS):
                begin = time.perf_counter()
                ask()
                taken.append(time.perf_counter() - begin)
            found[name].append(float(np.median(taken)) * 1e3)
    return found


def asking_http(port: int) -> Callable[[], object]:
    body = json.dumps({"inputs": TEXT}).encode()
    head = f"POST /predict HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask() -> bytes:
        connection.sendall(head + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        top, _, rest = received.partition(b"\r\n\r\n")
        if b" 200 " not in top[:20]:
            raise SystemExit(top.decode())
        length = int(top.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        return rest

    return ask


def asking_grpc(port: int, model: str) -> Callable[[], object]:
    import grpc

    from hasten.server.messages import SERVICE, message

    text = {"name": "text", "datatype": "BYTES", "shape": [1]}
    raw = len(TEXT).to_bytes(4, "little") + TEXT.encode()
    request = message("ModelInferRequest")(model_name=model, inputs=[text], raw_input_contents=[raw])
    prepared = request.SerializeToString()
    call = grpc.insecure_channel(f"{HOST}:{port}").unary_unary(f"/{SERVICE}/ModelInfer")
    return lambda: call(prepared)


async def serve_aio(bundle: Path, port: int) -> None:
    """The one call that is measured, as `grpc_v2.py` would have it with asyncio."""
    import grpc

    from hasten.core.errors import HastenError
    from hasten.server.grpc_calls import response_to, tensors_of
    from hasten.server.inference import Inference, infer
    from hasten.server.messages import SERVICE, message
    from hasten.server.run import load_models, make_app
    from hasten.server.settings import Settings

    settings = Settings.read({"bundles": [str(bundle)]})
    app = make_app(settings)
    load_models(app, settings)
    loop = asyncio.get_running_loop()

    async def answer(request: Any, _: Any) -> Any:
        found: asyncio.Future[Any] = loop.create_future()
        inference = Inference(tensors_of(request))
        infer(
            app.models.named(request.model_name),
            inference,
            lambda outputs, _: loop.call_soon_threadsafe(found.set_result, outputs) and None,
        )
        outputs = await found
        if isinstance(outputs, HastenError):
            raise outputs
        return response_to(request, outputs)

    handler = grpc.unary_unary_rpc_method_handler(
        answer, message("ModelInferRequest").FromString, message("ModelInferResponse").SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler})])
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with suppress(OSError):
            socket.create_connection((HOST, port)).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"nobody listens on port {port} after {START_S:.0f} s")


def write(times: dict[str, list[float]]) -> None:
    ratios = {
        f"{other} / {ours}": np.array(times[other]) / np.array(times[ours])
        for ours, other in (("hasten HTTP", "uvicorn"), ("hasten gRPC", "grpc.aio"))
    }
    for name, turns in times.items():
        print(f"{name:<14} p50 {np.median(turns):.3f} ms ({min(turns):.3f}–{max(turns):.3f})")
    for name, values in ratios.items():
        print(f"{name}: {np.median(values):.2f}× ({values.min():.2f}–{values.max():.2f})")
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "turns": TURNS,
        "requests_a_turn": REQUESTS,
        "p50_ms": times,
        "ratio": {name: float(np.median(values)) for name, values in ratios.items()},
    }
    import msgspec

    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
