"""Run a job: open the inputs and the bundle, answer what is not complete yet, and write the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.backends import RunOptions
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import InputError, PlanError, translate_os_errors
from hasten.core.progress import Progress, SilentProgress, step
from hasten.core.registry import did_you_mean
from hasten.core.system.hardware import usable_cores
from hasten.corpus.arrow_library import require_arrow
from hasten.corpus.existing import merge_rejected, read_keys
from hasten.corpus.filters import RowFilter
from hasten.corpus.inputs import open_sources
from hasten.corpus.job_records import DoneShard, FileEnd, InputFile, Placement
from hasten.corpus.operator import Operator, StageSeconds, stage_shares
from hasten.corpus.placement import measured_placement
from hasten.corpus.proof import proof_of
from hasten.corpus.report import MapReport, ProgressMeter
from hasten.corpus.sessions import answer_in_order
from hasten.corpus.settings import AnswerSettings, JobSettings
from hasten.corpus.shard_writer import ShardWriter
from hasten.corpus.sources import Source
from hasten.corpus.state import REPORT, JobState, write_durably
from hasten.corpus.windows import Cut, ShardKey, Window
from hasten.families import family_of_bundle
from hasten.measure.open_verified import open_with_verdict

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("hasten")


def run_job(
    bundle: str | Path, inputs: str, output: str | Path, settings: JobSettings, progress: Progress | None = None
) -> MapReport:
    """Answer all rows of the inputs; after an interruption the same call continues."""
    require_arrow("hasten map")
    target = Path(output).expanduser().absolute()
    if Path(inputs).expanduser().is_dir() and target.is_relative_to(Path(inputs).expanduser().absolute()):
        raise PlanError(f"the output {output} is inside the input {inputs}", hint="choose another directory with -o")
    sources = open_sources(inputs)
    with ExitStack() as opened:
        return _Job(open_bundle(bundle), sources, target, settings, opened).run(progress or SilentProgress())


class _Job:
    """A job with everything it has opened."""

    def __init__(
        self, bundle: Bundle, sources: Sequence[Source], output: Path, settings: JobSettings, opened: ExitStack
    ) -> None:
        self._bundle, self._settings, self._opened = bundle, settings, opened
        answers, schema = settings.answers, sources[0].schema
        row_filter = RowFilter.parse(answers.where) if answers.where is not None else None
        if row_filter is not None:
            row_filter.check(schema)
        column_names = kept_columns(schema, answers)
        if settings.skip_existing is not None and settings.skip_existing not in column_names:
            raise PlanError(
                f"--skip-existing names '{settings.skip_existing}', which is not a column of the output"
                f"{did_you_mean(settings.skip_existing, column_names)}"
            )
        options = RunOptions(settings.threads, settings.max_memory)
        verified = open_with_verdict(bundle, settings.variant, options)
        opened.callback(verified.opened.close)
        self._artifact = verified.artifact
        self._first = self._operator(verified.opened, schema)
        self._schema = output_schema(schema, column_names, self._first)
        rows_per_shard = settings.rows_per_file or self._first.default_rows_per_file
        self.proof = proof_of(bundle, verified)
        with translate_os_errors(f"creating {output}"):
            self._state = JobState(output, settings.shard, settings.file_format)
        opened.callback(self._state.close)
        identity = {
            "bundle": bundle.manifest.digest,
            "variant": self.proof["variant"],
            **asdict(answers),
            "format": settings.file_format,
            "rows-per-file": rows_per_shard,
            "output columns": {field.name: str(field.type) for field in self._schema},
        }
        files = [InputFile(source.name, source.fingerprint()) for source in sources]
        self._number, current = self._state.begin(identity, files, settings.skip_existing)
        by_name = {source.name: source for source in sources}
        self._sources = [by_name[file.name] for file in current]
        key = settings.skip_existing if self._number else None
        columns = [*column_names, *self._first.inputs.by_name.values(), *(row_filter.columns if row_filter else ())]
        self._cut = Cut(
            rows_per_shard,
            self._first.window_rows,
            tuple(dict.fromkeys(columns)),
            schema,
            row_filter,
            key,
            read_keys(self._state.parts(self._number), key) if key is not None else None,
        )
        self._found = self._state.progress(self._number)
        self._stages = StageSeconds()

    def run(self, progress: Progress) -> MapReport:
        operators = self._operators()
        covered = sum(done.covered for done in self._found.done.values())
        expected = max(0.0, self._expected_rows() - covered)
        begin = time.perf_counter()
        rejected = sum(shard.rejected for shard in self._found.done.values())
        stages = [self._stages, *(operator.stages for operator in operators)]
        with (
            step(progress, "map", total=round(expected)) as shown,
            closing(answer_in_order(operators, self._timed_windows())) as answers,
        ):
            done = self._write(answers, rejected, ProgressMeter(shown, expected, begin, stages))
        seconds = time.perf_counter() - begin
        return self._report(done, seconds, stage_shares(stages))

    def _write(self, answers: Iterator[Any], rejected: int, meter: ProgressMeter) -> list[DoneShard]:
        writer: ShardWriter | None = None
        done: list[DoneShard] = []
        try:
            for answered in answers:
                key = answered.window.shard
                with self._stages.timed("write"):
                    if writer is None:
                        writer = ShardWriter(self._state, self._number, key, self._schema, self._settings.file_format)
                    writer.write(answered)
                rejected += len(answered.rejected)
                if rejected > self._settings.max_bad:
                    last = answered.rejected[-1]
                    raise InputError(
                        f"{rejected} rows were rejected, more than --max-bad {self._settings.max_bad}; the last is row"
                        f" {last.position} of {self._sources[key.file].name}: {last.reason}",
                        hint="correct the input, or raise --max-bad and repeat the command, which then continues",
                    )
                if answered.window.is_last:
                    with self._stages.timed("write"):
                        done.append(writer.finish(self._sources[key.file].name, self.proof))
                    writer = None
                meter.advance(answered.window.covered, answered.tokens)
        finally:
            if writer is not None:
                writer.abandon()
        return done

    def _timed_windows(self) -> Iterator[Window]:
        windows = self._windows()
        while True:
            with self._stages.timed("read"):
                window = next(windows, None)
            if window is None:
                return
            yield window

    def _windows(self) -> Iterator[Window]:
        """Yield the windows of all shards of this process that are not complete."""
        found, share = self._found, self._settings.shard

        def is_needed(key: ShardKey) -> bool:
            return share.has(key.file + key.index) and key not in found.done

        def on_end(file: int, rows: int) -> None:
            if file not in found.input_rows:
                found.input_rows[file] = rows
                self._state.add(FileEnd(self._number, file, rows))

        for file, source in enumerate(self._sources):
            rows = found.input_rows.get(file)
            if rows is not None:
                count = max(1, -(-rows // self._cut.rows_per_shard))
                if not any(is_needed(ShardKey(file, index)) for index in range(count)):
                    continue
            yield from self._cut.windows(source, file, is_needed, partial(on_end, file))

    def _operator(self, opened: Any, schema: pa.Schema) -> Operator:
        return family_of_bundle(self._bundle).operator(opened, self._bundle, schema, self._settings.answers)

    def _open(self, threads: int | None) -> Operator:
        options = RunOptions(threads, self._settings.max_memory)
        opened = family_of_bundle(self._bundle).open(self._bundle, self._artifact, options)
        return self._operator(opened, self._cut.schema)

    def _operators(self) -> list[Operator]:
        """Open as many sessions as are fastest; a resumed job uses as many as before."""
        settings, cores = self._settings, usable_cores()
        job = self._state.read()
        placement = job.placement if job is not None else None
        if settings.sessions is not None or settings.threads is not None:
            sessions = settings.sessions or 1
            if sessions > 1 and not self._first.may_run_beside_others:
                raise PlanError(
                    f"--sessions {sessions} is for encoders on CPUs: a GPU and a decoder run batches of any size",
                    hint="for several GPUs start a process on each, with --shard",
                )
            placement = Placement(sessions, settings.threads or max(1, cores // sessions))
        elif not self._first.may_run_beside_others:
            placement = Placement(1, None)
        elif placement is None or placement.sessions * (placement.threads or 1) > cores:
            sample = next(islice(self._windows(), 1), None)
            placement = measured_placement(self._open, sample, self._expected_rows(), self._artifact.size_bytes)
        if job is not None and job.placement != placement:
            self._state.change(placement=placement)
        self._placement = placement
        if placement.sessions == 1 and placement.threads in (None, settings.threads or cores):
            return [self._first]
        self._first.close()
        operators = []
        for _ in range(placement.sessions):
            operators.append(self._open(placement.threads))
            self._opened.callback(operators[-1].close)
        return operators

    def _expected_rows(self) -> float:
        share = self._settings.shard.count
        return sum(source.estimated_rows for source in self._sources) / share

    def _report(self, done: Sequence[DoneShard], seconds: float, stages: dict[str, float]) -> MapReport:
        progress = self._state.progress(self._number)
        is_complete = progress.is_complete(len(self._sources), self._cut.rows_per_shard)
        before = [self._state.progress(number).done.values() for number in range(self._number)]
        shards = [*(shard for run in before for shard in run), *progress.done.values()]
        rows, tokens = sum(shard.rows for shard in done), sum(shard.tokens for shard in done)
        speed = rows / seconds if rows else 0.0
        price = self._settings.price_per_hour
        report = MapReport(
            output=str(self._state.output),
            is_complete=is_complete,
            rows=rows,
            seconds=round(seconds, 3),
            rows_per_s=round(speed, 1),
            tokens_per_s=round(tokens / seconds, 1),
            stages={stage: round(share, 4) for stage, share in stages.items()},
            cost_per_million_rows=round(price / 3600 / speed * 1e6, 4) if price is not None and speed else None,
            total_rows=sum(shard.rows for shard in shards),
            total_rejected=sum(shard.rejected for shard in shards),
            total_truncated=sum(shard.truncated for shard in shards),
            files=len(shards),
            placement=self._placement,
            proof=self.proof,
        )
        if is_complete:
            with translate_os_errors(f"writing {self._state.output}"):
                merge_rejected(self._state)
                self._write_report(report)
            self._state.finish_run(self._number)
        return report

    def _write_report(self, report: MapReport) -> None:
        """Write the report; a repeated command that had nothing to do leaves the times of the one that had."""
        file = self._state.output / REPORT
        if report.rows or not file.exists():
            write_durably(file, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def kept_columns(schema: pa.Schema, settings: AnswerSettings) -> list[str]:
    """Return the input columns of the output."""
    if settings.select and settings.drop:
        raise PlanError("--select and --drop exclude each other", hint="leave out one of them")
    for option, names in (("--select", settings.select), ("--drop", settings.drop)):
        for name in names:
            if name not in schema.names:
                raise PlanError(
                    f"{option} names '{name}', which the input does not have{did_you_mean(name, schema.names)}"
                )
    return list(settings.select) or [name for name in schema.names if name not in settings.drop]


def output_schema(schema: pa.Schema, column_names: Sequence[str], operator: Operator) -> pa.Schema:
    """Return the fields of the output: the selected ones of the input, and the answers."""
    import pyarrow as pa

    answers = operator.answer_schema()
    if clash := next((field.name for field in answers if field.name in column_names), None):
        raise PlanError(
            f"the input has a column '{clash}', and so have the answers", hint=f"--drop {clash}, or --prefix answer_"
        )
    return pa.schema([*(schema.field(name).with_nullable(True).remove_metadata() for name in column_names), *answers])
