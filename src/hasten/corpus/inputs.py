"""Find the input files of a job, and check that they belong together."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path

from hasten.core.errors import InputError
from hasten.corpus.arrow_sources import ArrowSource, DatasetSource, ParquetSource
from hasten.corpus.sources import Source
from hasten.corpus.text_source import SUFFIXES as TEXT_SUFFIXES
from hasten.corpus.text_source import TextSource, unify_types
from hasten.measure.arrow import DATASETS

_KINDS: dict[str, Callable[[str], Source]] = {
    ".parquet": ParquetSource,
    ".arrow": ArrowSource,
    ".feather": ArrowSource,
    **dict.fromkeys(TEXT_SUFFIXES, TextSource),
}


def open_sources(pattern: str) -> list[Source]:
    """Open all inputs: a file, the data files of a directory, the matches of a glob, or `datasets:NAME:SPLIT`.

    They are in the order of their names. Raise InputError if one cannot be read or differs in its columns.
    """
    if pattern.startswith(DATASETS):
        return [DatasetSource(pattern)]
    paths = _paths(pattern)
    sources = []
    for path in paths:
        try:
            suffix = Path(path).suffix.lower()
            if suffix not in _KINDS:
                raise InputError(f"{path} has an unknown file type: {suffix}", hint=f"known: {', '.join(_KINDS)}")
            sources.append(_KINDS[suffix](path))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
    unify_types([source for source in sources if isinstance(source, TextSource)])
    check_equal_schemas(sources)
    return sources


def _paths(pattern: str) -> list[str]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        # As other readers do: names that begin with . or _ are not data.
        found = [
            file
            for file in path.rglob("*")
            if file.suffix.lower() in _KINDS and not any(part[0] in "._" for part in file.relative_to(path).parts)
        ]
        if not found:
            raise InputError(f"{pattern} has no data files", hint=f"known: {', '.join(_KINDS)}")
        return sorted(str(file) for file in found if file.is_file())
    matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())  # noqa: PTH207
    if not matches:
        hint = f"a file, a directory, a glob in quotes, or {DATASETS}NAME:SPLIT"
        raise InputError(f"no input at {pattern or 'all: its name is empty'}", hint=hint)
    return matches


def check_equal_schemas(sources: Sequence[Source]) -> None:
    """Raise InputError if files differ in the names or types of their columns; the order may differ."""
    first = sources[0]
    for source in sources:
        names = source.schema.names
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise InputError(f"{source.name} has two columns named '{duplicates[0]}'")
        for field_ in source.schema:
            index = first.schema.get_field_index(field_.name)
            if index >= 0 and field_.type != (expected := first.schema.field(index).type):
                raise InputError(
                    f"column '{field_.name}' is {field_.type} in {source.name} and {expected} in {first.name}",
                    hint="inputs of one job have the same columns: run the others as a job of their own",
                )
        for one, other in ((first, source), (source, first)):
            if missing := [name for name in one.schema.names if name not in other.schema.names]:
                raise InputError(
                    f"{other.name} has no column '{missing[0]}', which {one.name} has",
                    hint="inputs of one job have the same columns: run the others as a job of their own",
                )
