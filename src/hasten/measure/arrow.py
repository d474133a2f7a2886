"""Read Arrow data: parquet files, and datasets that the `datasets` library loads from a folder or the hub."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from hasten.core.errors import InputError, StageError, missing_package
from hasten.measure.text_files import DataSource, LocatedRow

DATASETS = "datasets:"
_EXTRA = "data"
_HINT = "datasets:NAME:SPLIT, or datasets:NAME:CONFIG:SPLIT"
# A configuration is only possible between name and split: a single word after the name is the split.
_ADDRESS = re.compile(r"([^:]+)(?:(?::([^:\[\]]+))?:([^:\[\]]+(?:\[[^\]]*\])?))?")
# Rows converted to Python objects at a time.
_BATCH_ROWS = 1024
# The class number of `datasets` for hidden labels of a test split.
NO_CLASS = -1


def parquet(path: str) -> DataSource:
    """Open a parquet file."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise missing_package("pyarrow", f"reading {path}", _EXTRA) from error
    try:
        file = ParquetFile(Path(path).expanduser())
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a parquet file: {one_line_reason(error)}") from error
    schema = file.schema_arrow
    return DataSource(_rows(path, file.iter_batches(_BATCH_ROWS)), tuple(schema.names), _classes(schema.metadata))


def dataset(address: str) -> DataSource:
    """Open `NAME:SPLIT` or `NAME:CONFIG:SPLIT`, where NAME is a folder or a dataset on the hub."""
    return _open(*parse_address(address))


def parse_address(address: str) -> tuple[str, str | None, str | None]:
    """Return the name, the configuration and the split of `NAME:CONFIG:SPLIT`."""
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise InputError(f"'{DATASETS}{address}' is not the address of a dataset", hint=_HINT)
    return match[1], match[2], match[3]


def folder(path: str) -> DataSource:
    """Open the only split of a dataset saved to disk, or of a folder of data files."""
    return _open(path, None, None)


def _open(name: str, config: str | None, split: str | None) -> DataSource:
    loaded = load_dataset(name, config, split)
    features = loaded.features
    columns = None if features is None else tuple(features)
    classes = {} if features is None else _classes(features.arrow_schema.metadata)
    return DataSource(_rows(name, loaded.with_format("arrow").iter(_BATCH_ROWS)), columns, classes)


def load_dataset(name: str, config: str | None, split: str | None) -> Any:
    """Load one split with the `datasets` library; a folder of data files is streamed."""
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", f"loading {name}", _EXTRA) from error
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.is_dir():
        raise InputError(f"no folder with a dataset at {name}")
    with translate_read_errors(name), _quiet_hub():
        if not path.is_dir():
            split = split or _only_split(name, datasets.get_dataset_split_names(name, config))
            loaded = datasets.load_dataset(name, config, split=split)
        elif any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
        else:
            # Streamed: otherwise the library copies the whole folder into its cache.
            loaded = datasets.load_dataset(str(path), config, streaming=True)
    if isinstance(loaded, dict):
        split = split or _only_split(name, list(loaded))
        if split not in loaded:
            raise InputError(f"{name} has no split '{split}'", hint=f"its splits: {', '.join(loaded)}")
        loaded = loaded[split]
    elif path.is_dir() and split is not None:
        raise InputError(f"{name} is a dataset without splits", hint=f"--data {name}")
    return loaded


def _only_split(name: str, splits: list[str]) -> str:
    if len(splits) != 1:
        raise InputError(
            f"{name} has the splits {', '.join(splits)}, and none was chosen", hint=f"{DATASETS}{name}:{splits[-1]}"
        )
    return splits[0]


def _rows(name: str, batches: Iterable[Any]) -> Iterator[LocatedRow]:
    number = 0
    with translate_read_errors(name):
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{name}, row {number}", {key: _plain(value) for key, value in row.items() if value is not None}


@contextmanager
def translate_read_errors(name: str) -> Iterator[None]:
    """Translate the exceptions of these libraries into one-line errors."""
    try:
        yield
    except InputError:
        raise
    except ConnectionError as error:
        raise StageError(
            f"no dataset '{name}' here, and the hub cannot be reached",
            hint="check the network, or pass a file or a folder",
        ) from error
    except Exception as error:
        raise InputError(f"{name} cannot be read: {one_line_reason(error)}") from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Suppress the log lines about each attempt to reach the hub: the error reports it once."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def one_line_reason(error: Exception) -> str:
    """Return the message of a library's exception as one short line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _classes(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return the class names of columns, which `datasets` stores in the schema, in parquet files too."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    classes = {column: _class_names(feature) for column, feature in features.items()}
    return {column: names for column, names in classes.items() if names}


def _class_names(feature: object) -> tuple[str, ...]:
    """Return the names of a class feature, or of a list of such."""
    if isinstance(feature, list) and feature:
        return _class_names(feature[0])
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == "ClassLabel":
        return tuple(feature.get("names") or ())
    return _class_names(feature.get("feature"))


def _plain(value: object) -> object:
    """Convert to JSON types: rows are stored in bundles."""
    match value:
        case list():
            return [_plain(entry) for entry in value]
        case dict():
            return {str(key): _plain(entry) for key, entry in value.items()}
        case Decimal():
            return float(value)
        case bytes():
            return value.decode(errors="replace")
        case date() | time():
            return value.isoformat()
        case str() | int() | float() | None:
            return value
    return str(value)
