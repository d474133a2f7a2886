"""Compile what the GPU benchmark needs, in parallel processes: kernels, torch.compile's modules and ONNX graphs.

As a program, this prepares variants of one model:

    preparation.py MODEL FOLDER VARIANT …
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from contenders import is_static, make_and_open, untimed_tuning
from encoders import DRY_RUN, STUDIES, Encoder, batch_of, random_batch
from measure import mixed_runs

from hasten.backends import BACKENDS, Dialect
from hasten.core.variant import Variant

# The choice between compiled kernels is left to the timed run: beside other processes it would be a wrong one.
_ENVIRONMENT = {
    "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "OMP_NUM_THREADS": "2",
}


def prepare(
    models: Sequence[str], variants: Sequence[Variant], folder: Path, processes: int, log: Callable[[str], None]
) -> None:
    """Prepare all variants of all models, the largest models first; failures are reported, and left to the timed run.

    Compiled code goes to the caches of Triton and PyTorch, graphs to the folder.
    """
    graph_variants = [each.name for each in variants if BACKENDS.get(each.backend).dialect is not Dialect.MODULE]
    # Variants that share an exported graph are made in one process. PyTorch itself needs no preparation.
    groups = [
        *([graph_variants] if graph_variants else []),
        *([each.name] for each in variants if each.name not in graph_variants and each.backend != "torch"),
    ]

    def run(model: str, group: list[str]) -> None:
        begin = time.perf_counter()
        command = [sys.executable, __file__, model, str(folder), *group]
        environment = os.environ | _ENVIRONMENT
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        outcome = "prepared" if process.returncode == 0 else f"NOT prepared: {process.stdout[-600:].strip()}\n"
        log(f"{model} {' '.join(group)}: {outcome} in {time.perf_counter() - begin:.0f} s")

    with ThreadPoolExecutor(processes) as pool:
        for job in [pool.submit(run, model, group) for model in reversed(models) for group in groups]:
            job.result()


def main(model: str, folder: str, *names: str) -> None:
    """Make, tune without timing, open and run the variants of one model."""
    torch.set_num_threads(2)
    study = STUDIES.get(model, DRY_RUN)
    encoder = Encoder(study, Path(folder, model))
    with tempfile.TemporaryDirectory(prefix="hasten-") as work, untimed_tuning():
        for name in names:
            with make_and_open(encoder, Variant.parse(name), Path(work, name)) as session:
                for shape in study.shapes:
                    session.run(batch_of(shape))
                if study.mixed_lengths and not is_static(name):
                    mixed_runs(random_batch(study.mixed_lengths), {name: session})[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])
