"""GPU benchmark: every contender on the same random weights and batches.

    python benchmarks/gpu.py [--prepare] [--only MiniLM-L6 …] [--variants fused-fp16@cuda …] [--append]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run    # on the CPU: tests the script; times mean nothing

In the environment of `make .venv/.dev`, or with the extras `build` and `fused` and the runtimes to compare with: for
ONNX Runtime `pip uninstall --yes onnxruntime`, then `pip install 'onnxruntime-gpu[cuda,cudnn]'`. Unavailable variants
are reported and left out.

- `--prepare` compiles everything in parallel processes and times nothing. The timed run then finds kernels and compiled
  modules in the caches of Triton and PyTorch, and graphs in the folder `--work`. Without it, it compiles them itself.
  What is chosen by time (GEMMs of the fused backend, kernels of torch.compile) is chosen in the timed run.
- Outputs are first compared with PyTorch fp32; a variant that differs by more than 1e-2 (bf16: 0.05, int8: 0.1, fp8:
  0.25) is not timed. Errors and GPU memory are recorded with the times.
- Times are medians over alternating rounds, with the lowest and highest median of a round. `call`: from token ids in
  host memory to scores in host memory. `alone`: from device tensors to device tensors, synchronized.
- For the fused backend also: device time by CUDA events with the copies to and from the host, and the time of each
  kernel. Pruning of its last layer is off.
- A GPU that draws its maximum power lowers its clocks after some tenths of a second. Every round starts after a pause,
  so that no variant inherits the clocks of the one before. Sustained times are of runs without pauses.
- Texts of mixed length run at boost clocks, then sustained, with the clocks and the power that the GPU settles at.
- A result file is of one run. `--append` continues the run of the file with further models, on the same day, commit and
  machine: a run can be split into several commands, and a model that was cut off can be repeated.

Nothing else may run on the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.append(str(Path(__file__).parent / "gpu"))

from contenders import CPU_VARIANTS, VARIANTS, make_and_open
from encoders import DRY_RUN, STUDIES, Encoder, Study
from measure import measure_mixed_lengths, measure_shape, show
from preparation import prepare
from timing import PAUSE_S, ROUNDS, RUNS, used_bytes

from gpu_sources import digests
from hasten.backends import BACKENDS, Session
from hasten.core.errors import HastenError
from hasten.core.system.hardware import this_machine
from hasten.core.variant import Variant
from hasten.kernels.ops.pdl import IS_INTERPRETED
from provenance import provenance, require_gpu, run_main

HERE = Path(__file__).parent
# What must be equal for a run to be continued; of `created` the day.
_IDENTITY = ("commit", "cuda", "triton", "onnxruntime", "sources", "rounds")
_MACHINE_IDENTITY = ("cpu", "cores", "gpus", "python", "libraries")
_BEGIN = time.perf_counter()


def main() -> None:
    """Run the studies; write the result file after each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="compile in parallel processes, and time nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes of --prepare")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="models")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--work", type=Path, help="folder for exported graphs (default: a temporary one)")
    parser.add_argument("--append", action="store_true", help="continue the run in the result file")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "gpu.json")
    parser.add_argument("--dry-run", action="store_true", help="run all contenders on a tiny model on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        if not IS_INTERPRETED:
            parser.error("--dry-run needs Triton's interpreter: TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run")
        dry_run()
        return
    require_gpu()
    results = new_results([Variant.parse(name) for name in args.variants])
    if args.append and args.output.exists():
        results = continued(results, msgspec.json.decode(args.output.read_bytes()))
    variants = [Variant.parse(name) for name in args.variants if name not in results["missing"]]
    if not variants:
        raise SystemExit("error: no variant is available")
    with tempfile.TemporaryDirectory(prefix="hasten-") as temporary:
        folder = args.work or Path(temporary)
        if args.prepare:
            prepare(args.only, variants, folder, args.processes, log)
            return
        for name in args.only:
            measure_model(name, STUDIES[name], variants, folder, results, args.output)


def log(message: str) -> None:
    """Print a message with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {message}", flush=True)


def new_results(variants: Sequence[Variant]) -> dict[str, Any]:
    """Return the provenance of a run without rows, and the variants that are missing on this machine."""
    supports = {each: BACKENDS.get(each.backend).probe(this_machine(), each) for each in variants}
    missing = {variant.name: support.reason for variant, support in supports.items() if not support.ok}
    for name, reason in missing.items():
        log(f"{name} is left out: {reason}")
    import onnxruntime
    import triton

    return {
        **provenance(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "onnxruntime": onnxruntime.__version__,
        "sources": digests(),
        "rounds": {"count": ROUNDS, "runs": RUNS, "pause_s": PAUSE_S},
        "missing": missing,
        # Models of the benchmark that this run has not measured.
        "unmeasured": list(STUDIES),
        "rows": [],
    }


def continued(results: dict[str, Any], previous: dict[str, Any]) -> dict[str, Any]:
    """Return the previous results, if they are of the same day, commit and machine."""
    current = msgspec.json.decode(msgspec.json.encode(results))
    differing = [name for name in _IDENTITY if previous.get(name) != current[name]]
    differing += [name for name in _MACHINE_IDENTITY if previous["machine"][name] != current["machine"][name]]
    differing += ["day"] if previous["created"][:10] != current["created"][:10] else []
    if differing:
        raise SystemExit(f"error: the result file is of another run: {', '.join(differing)} differ")
    return previous | {"missing": previous["missing"] | results["missing"]}


def measure_model(
    name: str, study: Study, variants: Sequence[Variant], folder: Path, results: dict[str, Any], output: Path
) -> None:
    """Measure all shapes of a model; write the result file after each."""
    # A model that was cut off is measured again.
    results["rows"] = [row for row in results["rows"] if row["model"] != name]
    encoder = Encoder(study, folder / name)
    log(f"{name}: model made")
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="hasten-") as work:
        sessions: dict[str, Session] = {}
        memory: dict[str, int] = {}
        for variant in variants:
            begin, before = time.perf_counter(), used_bytes()
            try:
                sessions[variant.name] = stack.enter_context(make_and_open(encoder, variant, Path(work, variant.name)))
            except HastenError as error:
                results["missing"][f"{name} {variant}"] = str(error)
                log(f"{name}: {variant} is left out: {error}")
                continue
            memory[variant.name] = used_bytes() - before
            log(f"{name}: {variant} made and opened in {time.perf_counter() - begin:.1f} s")
        for shape in study.shapes:
            row = {"model": name, **measure_shape(encoder, shape, sessions, memory, log)}
            results["rows"].append(row)
            write(results, output)
            print(show(row), flush=True)
        if study.mixed_lengths:
            stream = {"model": name, **measure_mixed_lengths(encoder, sessions, log)}
            results["stream"] = stream
            print({key: value for key, value in stream.items() if key != "kernels"}, flush=True)
        results["unmeasured"] = [model for model in results["unmeasured"] if model != name]
        write(results, output)
    torch.compiler.reset()
    log(f"{name}: finished")


def write(results: Mapping[str, Any], file: Path) -> None:
    """Write the result file."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def dry_run() -> None:
    """Prepare and measure a tiny model on the CPU, and continue the run: everything that needs no GPU."""
    variants = [Variant.parse(name) for name in CPU_VARIANTS]
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        folder, output = Path(work, "work"), Path(work, "gpu.json")
        prepare(["dry run"], variants, folder, 2, log)
        results = new_results([])
        measure_model("dry run", DRY_RUN, variants, folder, results, output)
        results = continued(new_results([]), msgspec.json.decode(output.read_bytes()))
        if results["missing"] or len(results["rows"]) != len(DRY_RUN.shapes):
            raise SystemExit(f"error: missing in the dry run: {results['missing']}")


if __name__ == "__main__":
    run_main(main)
