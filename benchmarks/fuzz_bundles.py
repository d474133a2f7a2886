"""Fuzz bundles: no mutated bundle may execute code, read other files, crash, hang or raise anything but a HastenError.

    python benchmarks/fuzz_bundles.py [--bundle BUNDLE …] --count 10000 --processes 2

Without --bundle, three tiny bundles are built (tiny_bundles.py) and mutated in turn. Each mutated bundle is opened,
run, checked, printed and verified in a worker process that is restarted when it dies. A bundle that was not sealed
again must fail or answer as before. An audit hook reports code that is executed and files outside the bundle. Seed and
number reproduce a bundle: `--first N --count 1 --keep DIR`; after a fix, `--retry` tries those with faults again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bundle_mutations import BundleMutator
from provenance import provenance
from tiny_bundles import build_tiny_bundles

TIMEOUT_S = 120.0
MEMORY_BYTES = 6 * 2**30
TEXTS = ["the cat sat on the mat", "a dog"]
# Events of Python's audit hooks that no bundle may cause.
_FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind",
    "pickle.find_class", "ctypes.dlopen", "os.remove", "os.rename", "os.chmod", "shutil.rmtree",
)  # fmt: skip
# Libraries read their own files and the system's description of the hardware.
_READABLE = (*{sys.prefix, sys.base_prefix, sys.exec_prefix}, str(Path(__file__).parents[1]), "/usr", "/proc", "/sys")


class Audit:
    """Records forbidden events of this process while a bundle is used."""

    def __init__(self) -> None:
        self.bundle: str | None = None
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, details: tuple[Any, ...]) -> None:
        if self.bundle is None:
            return
        if event in _FORBIDDEN or (event == "open" and self._leaves_bundle(details[0])):
            bundle, self.bundle = self.bundle, None
            self.events.append(f"{event} {str(details)[:200]}")
            self.bundle = bundle

    def _leaves_bundle(self, file: Any) -> bool:
        if not isinstance(file, str | bytes):
            return False
        bundle, self.bundle = self.bundle, None
        path = os.path.realpath(os.fsdecode(file))
        self.bundle = bundle
        return path == "/proc/self/mem" or not path.startswith((str(bundle), *_READABLE, "/dev/null"))


class Worker:
    """Uses mutated bundles, one after the other, and prints an outcome for each."""

    def __init__(self, bundles: Sequence[Path], seed: int, folder: Path) -> None:
        # Imported before the audit: it starts its telemetry.
        with suppress(ImportError):
            import openvino  # noqa: F401

        self._folder = folder
        self._mutators = [BundleMutator(bundle, seed) for bundle in bundles]
        self._answers = [_answers(bundle) for bundle in bundles]
        for bundle in bundles:
            for use in USES.values():
                use(bundle)
        self._audit = Audit()

    def run(self, numbers: Sequence[int], keep: Path | None = None) -> Iterator[dict[str, Any]]:
        """Yield the outcome of each number, before it with `started` only."""
        for number in numbers:
            yield {"started": number}
            target = self._folder / f"bundle-{number}"
            which = number % len(self._mutators)
            kind, is_sealed = self._mutators[which].write(number, target)
            if keep is not None:
                # Before it is used, which may end this process.
                shutil.copytree(target, keep / target.name, symlinks=True)
            outcomes, faults = self._use(number, target, None if is_sealed else self._answers[which])
            shutil.rmtree(target, ignore_errors=True)
            yield {"number": number, "kind": kind, "sealed": is_sealed, "outcomes": outcomes, "faults": faults}

    def _use(self, number: int, target: Path, expected: object) -> tuple[dict[str, str], list[str]]:
        from hasten.core.errors import HastenError

        outcomes, faults = {}, []
        for name in _uses(number):
            use = USES[name]
            self._audit.bundle = str(target.resolve())
            try:
                result = use(target)
                outcomes[name] = "answers"
                if name == "run" and expected is not None:
                    outcomes[name] = "equal answers"
                    if result != expected:
                        faults.append(f"{name}: other answers from a bundle that was not sealed again")
            except HastenError as error:
                outcomes[name] = type(error).__name__
                if not error.message.isprintable():
                    faults.append(f"{name}: the message is not one printable line: {error.message!r:.300}")
            except BaseException as error:  # a panic of a Rust library is no Exception
                faults.append(f"{name}: {type(error).__name__}: {error!s:.200} at {_location(error)}")
                outcomes[name] = "fault"
            finally:
                self._audit.bundle = None
        faults += [f"audit: {event}" for event in self._audit.events]
        self._audit.events.clear()
        return outcomes, faults


def _uses(number: int) -> tuple[str, ...]:
    """Return the names of the uses of a bundle: printing and verifying it takes longest."""
    others = ("check", "inspect", "verify", "check")[number // 2 % 4]
    return "run", others


def _location(error: BaseException) -> str:
    """Return the last frames of hasten."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "hasten" in code.co_filename and "benchmarks" not in code.co_filename:
            frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(frames[-3:])


def _answers(bundle: Path) -> object:
    import hasten

    with hasten.load(bundle, threads=1) as model:
        if isinstance(model, hasten.Generator):
            texts = model(TEXTS[0], max_tokens=3)
            return texts, model([{"role": "user", "content": "hi"}], max_tokens=1)
        return model(TEXTS)


def _check(bundle: Path) -> None:
    from hasten.bundle import open_bundle

    opened = open_bundle(bundle)
    opened.check()
    opened.reference()


def _inspect(bundle: Path) -> None:
    from rich.console import Console

    from hasten.builder.inspect import inspect
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.cli.inspect import _print_inspection

    stdout, console.out = console.out, Console(file=io.StringIO(), width=100)
    try:
        opened = open_bundle(bundle)
        _print_inspection(inspect(opened))
        console.print_report(opened.report)
    finally:
        console.out = stdout


def _verify(bundle: Path) -> None:
    from hasten.bundle import open_bundle
    from hasten.core.plan import Gate
    from hasten.core.progress import SilentProgress
    from hasten.measure.verify_bundle import verify_bundle

    opened = open_bundle(bundle)
    verify_bundle(opened, None, Gate(), [opened.chosen.name], 1, SilentProgress())


USES: dict[str, Callable[[Path], object]] = {
    "run": _answers, "check": _check, "inspect": _inspect, "verify": _verify,
}  # fmt: skip


class WorkerProcess:
    """A worker process whose lines a thread reads, so that silence is noticed."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        command = [sys.executable, __file__, *arguments, "--worker", str(folder)]
        # stderr of native libraries is not of interest; a crash shows as a signal.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended or is silent for too long."""
        try:
            line = self._lines.get(timeout=TIMEOUT_S)
        except queue.Empty:
            return None
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def stop(self) -> int | None:
        """Kill it, and return the exit code that it had before, None if it was running."""
        code = self.process.poll() if self._lines.empty() else None
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def study(
    bundles: Sequence[Path], first: int, count: int, seed: int, *, keep: Path | None = None, max_s: float = float("inf")
) -> dict[str, Any]:
    """Try `count` bundles, fewer if the time is over, and return counts of outcomes, and all faults."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in USES}
    kinds: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    number, end, begin, restarts = first, first + count, time.monotonic(), 0
    while number < end:
        with tempfile.TemporaryDirectory(prefix="hasten-fuzz-") as folder:
            options = [word for bundle in bundles for word in ("--bundle", str(bundle))]
            options += ["--first", str(number), "--count", str(end - number), "--seed", str(seed)]
            worker = WorkerProcess([*options, *(["--keep", str(keep)] if keep else [])], Path(folder))
            started = -1
            while time.monotonic() - begin < max_s and (message := worker.next()) is not None:
                if "started" in message:
                    started = number = message["started"]
                    continue
                number = message["number"] + 1
                kinds[f"{message['kind']}, {'sealed' if message['sealed'] else 'not sealed'}"] += 1
                for use, outcome in message["outcomes"].items():
                    outcomes[use][outcome] += 1
                faults += [
                    {"number": message["number"], "kind": message["kind"], "fault": f} for f in message["faults"]
                ]
                if number % 500 == 0:
                    print(f"{number} in {time.monotonic() - begin:.0f} s, {len(faults)} faults", file=sys.stderr)
            code = worker.stop()
            if time.monotonic() - begin >= max_s:
                break
            if started < 0:
                raise SystemExit(f"the worker did not start: exit code {code}")
            if number < end:
                reason = "hangs" if code is None else f"ends the process with code {code}"
                faults.append({"number": number, "kind": "", "fault": f"the bundle {reason}"})
                number, restarts = number + 1, restarts + 1
    return {
        "bundles": sum(kinds.values()) + restarts, "seed": seed, "first": first,
        "seconds": round(time.monotonic() - begin, 1),
        "restarts": restarts, "mutations": dict(sorted(kinds.items())),
        "outcomes": {use: dict(counts.most_common()) for use, counts in outcomes.items()}, "faults": faults,
    }  # fmt: skip


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of ranges of numbers that were tried separately as those of one; seconds are summed."""
    merged = dict(parts[0])
    for part in parts[1:]:
        for name in ("bundles", "seconds", "restarts", "faults"):
            merged[name] += part[name]
        merged["mutations"] = _sum(merged["mutations"], part["mutations"])
        merged["outcomes"] = {use: _sum(merged["outcomes"][use], part["outcomes"][use]) for use in USES}
    return merged


def retry(file: Path, bundles: Sequence[Path]) -> int:
    """Try the bundles with faults of a result file again, and record there what they do now."""
    results = json.loads(file.read_text())
    numbers = sorted({fault["number"] for fault in results["faults"]})
    faults = [fault for number in numbers for fault in study(bundles, number, 1, results["seed"])["faults"]]
    origin = provenance()
    results["retried"] = {
        "created": origin["created"],
        "commit": origin["commit"],
        "numbers": numbers,
        "faults": faults,
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"{len(numbers)} bundles again: {len(faults)} faults")
    return 1 if faults else 0


def _sum(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(first) + Counter(second)).items()))


def describe(bundle: Path) -> dict[str, str]:
    """Return what a reader needs to know about a bundle that was mutated."""
    from hasten.bundle import open_bundle

    opened = open_bundle(bundle)
    return {"name": bundle.resolve().name, "task": opened.manifest.task.name, "variant": opened.chosen.name}


def main() -> int:
    """Run the study and write its result file, or be its worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, action="append", help="bundle to mutate; may be repeated")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="worker processes; each takes a range of the numbers")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--keep", type=Path, help="copy the mutated bundles to this directory")
    parser.add_argument(
        "--retry", action="store_true", help="try only the bundles with faults of the result file again"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    default = Path(__file__).parent / "results" / "fuzz_bundles.json"
    parser.add_argument("-o", "--output", type=Path, default=default)
    args = parser.parse_args()
    if args.worker is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        worker = Worker(args.bundle, args.seed, args.worker)
        for message in worker.run(range(args.first, args.first + args.count), args.keep):
            replies.write(json.dumps(message) + "\n")
        return 0
    origin = provenance()
    with tempfile.TemporaryDirectory(prefix="hasten-fuzz-") as folder:
        bundles = args.bundle or build_tiny_bundles(Path(folder))
        if args.retry:
            return retry(args.output, bundles)
        origin["mutated"] = [describe(bundle) for bundle in bundles]
        starts = [args.first + args.count * index // args.processes for index in range(args.processes + 1)]

        def part(index: int) -> dict[str, Any]:
            count = starts[index + 1] - starts[index]
            return study(bundles, starts[index], count, args.seed, keep=args.keep, max_s=args.max_seconds)

        with ThreadPoolExecutor(args.processes) as pool:
            measured = merge(list(pool.map(part, range(args.processes))))
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode({**origin, **measured}), indent=1) + b"\n")
    print(f"{measured['bundles']} bundles: {len(measured['faults'])} faults, {measured['outcomes']}")
    return 1 if measured["faults"] else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
