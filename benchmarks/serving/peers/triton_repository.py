"""tritonserver from PyPI on a model repository: pytriton's wheel carries the genuine binary; this becomes it.

triton_repository.py REPOSITORY PORT GRPC_PORT FOLDER
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def become(repository: str, port: str, grpc_port: str, folder: str) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = find_spec("pytriton")
    assert found is not None, "pip install --no-deps nvidia-pytriton"
    triton = Path(next(iter(found.submodule_search_locations or ()))) / "tritonserver"
    backend = folder / Path("backends/python")
    backend.mkdir(parents=True)
    # Links: a copy loses the libraries that it finds beside itself.
    for file in (
        triton / "backends/python/libtriton_python.so",
        triton / "backends/python/triton_python_backend_utils.py",
        triton / f"python_backend_stubs/{python}/triton_python_backend_stub",
    ):
        (backend / file.name).symlink_to(file)
    libraries = [sysconfig.get_config_var("LIBDIR"), str(triton / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The stub takes its packages from the first python3 there.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = [
        str(triton / "bin/tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={folder}/backends",
        f"--backend-config=python,shm-region-prefix-name=hasten{os.getpid()}",
        f"--http-port={port}",
        "--http-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
        # Clients that are still connected hold it up.
        "--exit-timeout-secs=5",
        "--log-info=false",
        "--log-warning=false",
    ]
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    become(*sys.argv[1:])
