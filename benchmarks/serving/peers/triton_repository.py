"""Run tritonserver from PyPI (the binary in pytriton's wheel) on a model repository.

triton_repository.py REPOSITORY PORT GRPC_PORT FOLDER
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def exec_tritonserver(repository: str, port: str, grpc_port: str, folder: str) -> None:
    """Replace this process by tritonserver."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    spec = find_spec("pytriton")
    assert spec is not None, "pip install --no-deps nvidia-pytriton"
    triton = Path(next(iter(spec.submodule_search_locations or ()))) / "tritonserver"
    backend = folder / Path("backends/python")
    backend.mkdir(parents=True)
    # Links instead of copies: the libraries load others from their own directory.
    for file in (
        triton / "backends/python/libtriton_python.so",
        triton / "backends/python/triton_python_backend_utils.py",
        triton / f"python_backend_stubs/{python}/triton_python_backend_stub",
    ):
        (backend / file.name).symlink_to(file)
    libraries = [sysconfig.get_config_var("LIBDIR"), str(triton / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The stub uses the packages of the first python3 on the path.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [
        str(triton / "bin/tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={folder}/backends",
        f"--backend-config=python,shm-region-prefix-name=hasten{os.getpid()}",
        f"--http-port={port}",
        "--http-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
        # Open client connections delay the exit.
        "--exit-timeout-secs=5",
        "--log-info=false",
        "--log-warning=false",
    ]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    exec_tritonserver(*sys.argv[1:])
