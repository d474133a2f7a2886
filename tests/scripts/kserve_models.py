"""Check manifests with KServe's client: documents as JSON on stdin, the errors of each on stdout.

Runs in the environment that has the client. Its model classes list the fields and their types; their constructors
check which fields are required.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Quantities are strings or numbers.
PLAIN_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": (str, int),
    "ResourceQuantity": (str, int),
    "IntOrString": (str, int),
    "V1beta1MetricQuantity": (str, int),
}


def import_models() -> types.ModuleType:
    """Import kserve.models without the package's __init__, which imports a whole server."""
    spec = importlib.util.find_spec("kserve")
    assert spec is not None
    assert spec.origin is not None
    package = types.ModuleType("kserve")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["kserve"] = package
    return importlib.import_module("kserve.models")


def errors_of_value(value: Any, kind: str, path: str, find_model: Any) -> Iterator[str]:
    """Yield the errors of a value that should have this type."""
    if listed := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{path} is not a list"
            return
        for index, entry in enumerate(value):
            yield from errors_of_value(entry, listed[1], f"{path}[{index}]", find_model)
    elif mapped := re.fullmatch(r"dict\(str, (.+)\)|Dict\[str, (.+)\]", kind):
        if not isinstance(value, dict):
            yield f"{path} is not an object"
            return
        for name, entry in value.items():
            yield from errors_of_value(entry, mapped[1] or mapped[2], f"{path}.{name}", find_model)
    elif kind in PLAIN_TYPES:
        # In Python a bool is also an int.
        if not isinstance(value, PLAIN_TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{path} is not of type {kind}"
    else:
        yield from errors_of_model(value, find_model(kind), path, find_model)


def errors_of_model(value: Any, model: Any, path: str, find_model: Any) -> Iterator[str]:
    """Yield the errors of an object that should fit this model class."""
    if not isinstance(value, dict):
        yield f"{path} is not an object"
        return
    fields = {key: name for name, key in model.attribute_map.items()}
    for key in value:
        if key not in fields:
            yield f"{path} has no field {key}"
    known = {fields[key]: entry for key, entry in value.items() if key in fields}
    for name, entry in known.items():
        yield from errors_of_value(entry, model.openapi_types[name], f"{path}.{model.attribute_map[name]}", find_model)
    try:
        model(**known)
    except ValueError as error:
        yield f"{path}: {error}"


def main() -> None:
    """Check the documents."""
    from kubernetes import client

    kserve_models = import_models()

    def find_model(kind: str) -> Any:
        return getattr(kserve_models, kind, None) or getattr(client, kind)

    documents = json.load(sys.stdin)
    answers = []
    for document in documents:
        version = document["apiVersion"].rsplit("/", 1)[1]
        name = f"V{version[1:]}{document['kind']}"
        answers.append(list(errors_of_model(document, find_model(name), document["kind"], find_model)))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
