"""Data files that are Arrow: parquet, and what the `datasets` library loads from a folder or from the hub."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from hasten.core.errors import InputError, StageError, missing_package
from hasten.measure.files import Placed, Source

DATASETS = "datasets:"
_EXTRA = "data"
_HINT = "datasets:NAME:SPLIT, or datasets:NAME:CONFIG:SPLIT"
# The configuration can only stand between name and split: a lone word after the name is the split.
_ADDRESS = re.compile(r"([^:]+)(?:(?::([^:\[\]]+))?:([^:\[\]]+(?:\[[^\]]*\])?))?")
# Rows made into Python objects together.
_BATCH = 1024
# Where a test split keeps its labels to itself, `datasets` has this.
NO_CLASS = -1


def parquet(path: str) -> Source:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise missing_package("pyarrow", f"reading {path}", _EXTRA) from error
    try:
        file = ParquetFile(Path(path).expanduser())
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a parquet file: {_one_line(error)}") from error
    schema = file.schema_arrow
    return Source(_rows(path, file.iter_batches(_BATCH)), tuple(schema.names), _classes(schema.metadata))


def dataset(address: str) -> Source:
    """`NAME:SPLIT` or `NAME:CONFIG:SPLIT`, where NAME is a folder or a dataset on the hub."""
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise InputError(f"'{DATASETS}{address}' is not the address of a dataset", hint=_HINT)
    return _opened(*match.groups())


def folder(path: str) -> Source:
    """A dataset saved to disk, or a folder of data files, of the one split it has."""
    return _opened(path, None, None)


def _opened(name: str, config: str | None, split: str | None) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", f"loading {name}", _EXTRA) from error
    place = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not place.is_dir():
        raise InputError(f"no folder with a dataset at {name}")
    with _translated(name), _hub_is_quiet():
        if not place.is_dir():
            split = split or _only(name, datasets.get_dataset_split_names(name, config))
            found = datasets.load_dataset(name, config, split=split)
        elif any((place / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(place)
        else:
            # Streamed: otherwise the library writes the whole folder once more, into its cache.
            found = datasets.load_dataset(str(place), config, streaming=True)
    if isinstance(found, dict):
        split = split or _only(name, list(found))
        if split not in found:
            raise InputError(f"{name} has no split '{split}'", hint=f"its splits: {', '.join(found)}")
        found = found[split]
    elif place.is_dir() and split is not None:
        raise InputError(f"{name} is one dataset without splits", hint=f"--data {name}")
    features = found.features
    columns = None if features is None else tuple(features)
    classes = {} if features is None else _classes(features.arrow_schema.metadata)
    return Source(_rows(name, found.with_format("arrow").iter(_BATCH)), columns, classes)


def _only(name: str, splits: list[str]) -> str:
    if len(splits) != 1:
        raise InputError(
            f"{name} has the splits {', '.join(splits)}, and none was chosen", hint=f"{DATASETS}{name}:{splits[-1]}"
        )
    return splits[0]


def _rows(name: str, batches: Iterable[Any]) -> Iterator[Placed]:
    number = 0
    with _translated(name):
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{name}, row {number}", {key: _plain(value) for key, value in row.items() if value is not None}


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """One line for whatever these libraries raise."""
    try:
        yield
    except InputError:
        raise
    except ConnectionError as error:
        raise StageError(
            f"no dataset '{name}' here, and the hub cannot be reached",
            hint="check the network, or give a file or a folder",
        ) from error
    except Exception as error:
        raise InputError(f"{name} cannot be read: {_one_line(error)}") from error


@contextmanager
def _hub_is_quiet() -> Iterator[None]:
    """Without the lines about every attempt to reach the hub: the error says it once."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _classes(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """The names in columns of class numbers, which `datasets` writes beside the schema, in parquet files too."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    found = {column: _class_names(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names}


def _class_names(feature: object) -> tuple[str, ...]:
    """Of a class, or of a list of them."""
    if isinstance(feature, list) and feature:
        return _class_names(feature[0])
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == "ClassLabel":
        return tuple(feature.get("names") or ())
    return _class_names(feature.get("feature"))


def _plain(value: object) -> object:
    """As JSON would have it: rows are stored in bundles."""
    match value:
        case list():
            return [_plain(entry) for entry in value]
        case dict():
            return {str(key): _plain(entry) for key, entry in value.items()}
        case Decimal():
            return float(value)
        case bytes():
            return value.decode(errors="replace")
        case date() | datetime() | time():
            return value.isoformat()
        case str() | int() | float() | None:
            return value
    return str(value)
