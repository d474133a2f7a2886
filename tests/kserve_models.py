"""Run by the Python that has KServe's client: documents as JSON on stdin, what is wrong with each on stdout.

The models' own tables say which fields there are and of which kind; their constructors say which must be there.
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

# Quantities and the like are texts or numbers.
PLAIN: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": (str, int),
    "ResourceQuantity": (str, int),
    "IntOrString": (str, int),
    "V1beta1MetricQuantity": (str, int),
}


def models() -> types.ModuleType:
    """Without the package's own __init__, which imports a whole server."""
    spec = importlib.util.find_spec("kserve")
    assert spec is not None
    assert spec.origin is not None
    package = types.ModuleType("kserve")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["kserve"] = package
    return importlib.import_module("kserve.models")


def wrong(value: Any, kind: str, where: str, found: Any) -> Iterator[str]:
    if listed := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{where} is no list"
            return
        for place, entry in enumerate(value):
            yield from wrong(entry, listed[1], f"{where}[{place}]", found)
    elif mapped := re.fullmatch(r"dict\(str, (.+)\)|Dict\[str, (.+)\]", kind):
        if not isinstance(value, dict):
            yield f"{where} is no object"
            return
        for name, entry in value.items():
            yield from wrong(entry, mapped[1] or mapped[2], f"{where}.{name}", found)
    elif kind in PLAIN:
        # A bool is an int for Python, and for nobody else.
        if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{where} is no {kind}"
    else:
        yield from wrong_model(value, found(kind), where, found)


def wrong_model(value: Any, model: Any, where: str, found: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is no object"
        return
    fields = {key: name for name, key in model.attribute_map.items()}
    for key in value:
        if key not in fields:
            yield f"{where} has no field {key}"
    known = {fields[key]: entry for key, entry in value.items() if key in fields}
    for name, entry in known.items():
        yield from wrong(entry, model.openapi_types[name], f"{where}.{model.attribute_map[name]}", found)
    try:
        model(**known)
    except ValueError as error:
        yield f"{where}: {error}"


def main() -> None:
    from kubernetes import client

    ours = models()

    def found(kind: str) -> Any:
        return getattr(ours, kind, None) or getattr(client, kind)

    documents = json.load(sys.stdin)
    answers = []
    for document in documents:
        version = document["apiVersion"].rsplit("/", 1)[1]
        name = f"V{version[1:]}{document['kind']}"
        answers.append(list(wrong_model(document, found(name), document["kind"], found)))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
