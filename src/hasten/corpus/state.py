"""The state of a job beside its output: what the job is, and which output files are complete.

OUTPUT/part-000-00000-00003.parquet   rows of one shard: run, input file, shard of the file
OUTPUT/_rejected.parquet              rejected rows of all shards, written at the end
OUTPUT/_hasten.json                   the report, written at the end
OUTPUT/_state/job.json                identity of the job, and the inputs of each run
OUTPUT/_state/done-0-of-1.jsonl       a line per complete shard, from each process
OUTPUT/_state/rejected/…              rejected rows by shard
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import IO, Any

import msgspec

from hasten.core.errors import PlanError, StageError
from hasten.corpus.job_records import DoneShard, FileEnd, InputFile, Job, Run, RunProgress
from hasten.corpus.settings import FileFormat, JobShard
from hasten.corpus.windows import ShardKey

REPORT, REJECTED, STATE = "_hasten.json", "_rejected.parquet", "_state"
_ELSEWHERE = "choose another directory with -o, or repeat the options of the first run"
_VERSION = 1


class JobState:
    """The state of a job in its output directory. One process per share of the work holds it open."""

    def __init__(self, output: Path, share: JobShard, file_format: FileFormat) -> None:
        self.output = output
        self.folder = output / STATE
        self.rejected = self.folder / "rejected"
        name = f"{share.index}-of-{share.count}"
        self.temporary = self.folder / f"temporary-{name}"
        self._done_file = self.folder / f"done-{name}.jsonl"
        self._suffix = file_format.value
        self._lock = Lock()
        self._lines: IO[bytes] | None = None
        self._check_output()
        self.rejected.mkdir(parents=True, exist_ok=True)
        self._process_lock = self._open_lock(f"share-{name}.lock")
        try:
            fcntl.flock(self._process_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._process_lock.close()
            hint = "wait for it, or give each process its share: --shard 0/2 and --shard 1/2"
            raise PlanError(f"another process is writing to {output}", hint=hint) from None
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    def close(self) -> None:
        """Release the lock; what is not complete is removed."""
        if self._lines is not None:
            self._lines.close()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._process_lock.close()

    def begin(
        self, identity: Mapping[str, Any], inputs: Sequence[InputFile], skip_existing: str | None
    ) -> tuple[int, list[InputFile]]:
        """Return the number and the inputs of the run to continue, which may be a new one; refuse another job.

        A run that adds to a finished output leaves out the files that an earlier run has read.
        """
        plain = msgspec.json.decode(msgspec.json.encode(identity))
        with self._job_lock():
            job = self.read()
            if job is None:
                self._write(Job(_VERSION, plain, [Run(list(inputs), skip_existing)]))
                return 0, list(inputs)
            self._check_identity(job, plain)
            number, last = len(job.runs) - 1, job.runs[-1]
            if skip_existing is not None and last.is_complete and (new := _unread(inputs, job.runs)):
                self._write(replace(job, runs=[*job.runs, Run(new, skip_existing)]))
                return number + 1, new
            if last.is_complete and skip_existing is not None:
                return number, []
            if skip_existing != last.skip_existing:
                options = f"--skip-existing was {last.skip_existing}, is {skip_existing}"
                raise PlanError(f"{self.output} holds the output of another job: {options}", hint=_ELSEWHERE)
            current = _unread(inputs, job.runs[:-1])
            self._check_inputs(last, current, number)
            if current != last.inputs:
                self._write(replace(job, runs=[*job.runs[:-1], replace(last, inputs=current)]))
            return number, current

    def read(self) -> Job | None:
        """Return the content of job.json, or None if there is none."""
        file = self.folder / "job.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=Job)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise PlanError(f"{file} is damaged: {error}", hint="choose another directory with -o") from error

    def change(self, **changes: Any) -> None:
        """Change fields of job.json."""
        with self._job_lock():
            job = self.read()
            assert job is not None
            self._write(replace(job, **changes))

    def finish_run(self, number: int) -> None:
        """Record that a run is complete."""
        with self._job_lock():
            job = self.read()
            assert job is not None
            runs = [replace(run, is_complete=True) if index == number else run for index, run in enumerate(job.runs)]
            self._write(replace(job, runs=runs))

    def progress(self, number: int) -> RunProgress:
        """Return what is complete, by the lines of all processes; a shard whose file has gone is not."""
        progress = RunProgress()
        for file in sorted(self.folder.glob("done-*.jsonl")):
            for line in file.read_bytes().split(b"\n")[:-1]:  # a last line without its end is not complete
                entry = self._parse(line, file)
                if entry.run != number:
                    continue
                if isinstance(entry, FileEnd):
                    progress.input_rows[entry.file] = entry.input_rows
                elif self._size(self.part(number, entry.key)) == entry.bytes:
                    progress.done[entry.key] = entry
        return progress

    def part(self, number: int, key: ShardKey) -> Path:
        """Return the output file of a shard."""
        return self.output / f"part-{number:03}-{key.file:05}-{key.index:05}.{self._suffix}"

    def rejected_part(self, number: int, key: ShardKey) -> Path:
        """Return the file of rejected rows of a shard."""
        return self.rejected / f"rejected-{self.part(number, key).stem}.parquet"

    def parts(self, runs: int) -> list[Path]:
        """Return the complete output files of the first runs, in order."""
        return [
            self.part(number, key)
            for number in range(runs)
            for key in sorted(self.progress(number).done, key=lambda key: (key.file, key.index))
        ]

    def add(self, line: DoneShard | FileEnd) -> None:
        """Append a line durably. Thread-safe."""
        with self._lock:
            if self._lines is None:
                self._lines = self._open_lines()
            self._lines.write(json.dumps(asdict(line)).encode() + b"\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())

    def _open_lines(self) -> IO[bytes]:
        """Open the file of lines to append to it, without the beginning of a line that was never finished."""
        stream = self._done_file.open("a+b")
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        fsync_directory(self.folder)
        return stream

    def _parse(self, line: bytes, file: Path) -> DoneShard | FileEnd:
        try:
            if b'"input_rows"' in line:
                return msgspec.json.decode(line, type=FileEnd)
            return msgspec.json.decode(line, type=DoneShard)
        except msgspec.DecodeError as error:
            raise StageError(f"{file} is damaged: {error}", hint="choose another directory with -o") from error

    def _check_output(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise PlanError(f"{self.output} is a file", hint="choose a directory with -o")
        if (
            self.output.is_dir()
            and any(file.name != STATE for file in self.output.iterdir())
            and not self.folder.exists()
        ):
            raise PlanError(
                f"{self.output} is not empty and holds no job of hasten map", hint="choose another directory with -o"
            )

    def _check_identity(self, job: Job, identity: dict[str, Any]) -> None:
        if job.version != _VERSION:
            raise PlanError(f"{self.output} was written by another version of hasten", hint=_ELSEWHERE)
        differences = [
            f"{name} was {_shown(job.identity.get(name))}, is {_shown(identity.get(name))}"
            for name in {**job.identity, **identity}
            if job.identity.get(name) != identity.get(name)
        ]
        if differences:
            raise PlanError(f"{self.output} holds the output of another job: {'; '.join(differences)}", hint=_ELSEWHERE)

    def _check_inputs(self, run: Run, inputs: Sequence[InputFile], number: int) -> None:
        """Refuse other inputs; a file of which nothing was answered yet may change."""
        before, now = [file.name for file in run.inputs], [file.name for file in inputs]
        hint = "--skip-existing KEY adds the rows of new files to a finished output" if run.is_complete else _ELSEWHERE
        for names, others, problem in ((before, now, "is missing"), (now, before, "is new")):
            if different := [name for name in names if name not in others]:
                raise PlanError(f"the inputs of {self.output} have changed: {different[0]} {problem}", hint=hint)
        progress = self.progress(number)
        begun = {key.file for key in progress.done} | set(progress.input_rows)
        for index, (file, current) in enumerate(zip(run.inputs, inputs, strict=True)):
            if file.fingerprint != current.fingerprint and index in begun:
                raise PlanError(f"the inputs of {self.output} have changed: {file.name} is not the same", hint=hint)

    @contextmanager
    def _job_lock(self) -> Iterator[None]:
        with self._open_lock("job.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _open_lock(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("ab")

    def _write(self, job: Job) -> None:
        write_durably(self.folder / "job.json", msgspec.json.format(msgspec.json.encode(job), indent=1))

    @staticmethod
    def _size(file: Path) -> int | None:
        try:
            return file.stat().st_size
        except FileNotFoundError:
            return None


def write_durably(file: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(file)
    fsync_directory(file.parent)


def fsync_directory(folder: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]


def _unread(inputs: Sequence[InputFile], runs: Sequence[Run]) -> list[InputFile]:
    """Return the files that no run has read."""
    read = [file for run in runs for file in run.inputs]
    return [file for file in inputs if file not in read]
