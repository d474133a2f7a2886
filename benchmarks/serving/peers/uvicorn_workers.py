"""Run a FastAPI peer in uvicorn's workers."""

from __future__ import annotations

import uvicorn
from options import Options, parse_arguments


def run(factory: str, description: str | None) -> None:
    """Serve the application that `factory` ("module:function") creates, with the options of the command line."""
    arguments = parse_arguments(description)
    uvicorn.run(
        factory,
        factory=True,
        port=int(arguments.port),
        workers=Options.of(arguments).instances,
        # While they import, workers answer their supervisor late, and it would replace them.
        timeout_worker_healthcheck=60,
        log_level="warning",
    )
