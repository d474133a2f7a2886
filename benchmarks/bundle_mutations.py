"""Mutate bundles as damage and attackers would, reproducibly from a seed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 7, 2**31, 2**62, -(2**63), 0.5, 1e308, "", "\x00", "a" * 3000, "é𝒳\u200b", "\x1b]0;x\x07",
    "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "model.onnx", "%s{}", [], {}, [[]], {"": ""}, [None], ["a"],
    "torch", "inductor", "graph", "onnxruntime", "openvino", "fused", "tensorrt", "torch-fp32", "onnxruntime-int8",
    "token-classification", "question-answering", "fill-mask", "text-generation", "sentence-similarity",
    "multiple-choice", "text-ranking", "zero-shot-classification", "feature-extraction", "int8", "fp16", "cuda",
    "int64", "batch", "sequence", "masks", "input_ids", "logits", "mean", "{% for a in range(9) %}{{ a }}{% endfor %}",
    "{{ ''.__class__ }}", "(a+)+$",
)  # fmt: skip
# Operators that allocate, loop, call or read what their attributes say.
_OPERATORS = (
    "ConstantOfShape",
    "Expand",
    "Tile",
    "Range",
    "Loop",
    "If",
    "Scan",
    "Gather",
    "Reshape",
    "EPContext",
    "Nope",
)


class BundleMutator:
    """Writes one mutated copy of a bundle per number; the same for the same seed."""

    def __init__(self, bundle: Path, seed: int) -> None:
        self._bundle, self._seed = bundle, seed
        self._names = sorted(file.relative_to(bundle).as_posix() for file in bundle.rglob("*") if file.is_file())

    def write(self, number: int, target: Path) -> tuple[str, bool]:
        """Write the mutated bundle, and return the kind of the mutation and whether the bundle is sealed again."""
        choose = random.Random(f"{self._seed}/{number}")
        shutil.copytree(self._bundle, target)
        kind, mutate = choose.choice(_KINDS)
        names = [name for name in self._names if _FILES.get(kind, re.compile("")).search(name)]
        for _ in range(choose.choice([1, 1, 1, 2, 4])):
            # Not every mutation applies to every file, and an earlier one may have emptied or removed it.
            with suppress(_NotApplicableError, OSError, ValueError, IndexError, RecursionError):
                mutate(target, choose.choice(names), choose)
        is_sealed = choose.random() < 0.8
        if is_sealed:
            seal(target)
        return kind, is_sealed


class _NotApplicableError(Exception):
    """The file has nothing that the mutation could change."""


def seal(bundle: Path) -> None:
    """Compute all hashes and the digest again, as an attacker would; nothing if the manifest is beyond that."""
    file = bundle / "manifest.json"
    if file.is_symlink() or not file.is_file():
        return
    with suppress(Exception):
        manifest = json.loads(file.read_text())
        for name in manifest["files"]:
            with suppress(OSError):
                path = bundle / name
                if path.is_file() and path.stat().st_size < 2**24:
                    manifest["files"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
        content = {name: value for name, value in manifest.items() if name != "digest"}
        manifest["digest"] = hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()
        file.write_text(json.dumps(manifest, indent=1))


def _flip_bits(bundle: Path, name: str, choose: random.Random) -> None:
    data = bytearray((bundle / name).read_bytes())
    for _ in range(choose.choice([1, 1, 8, 64])):
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    (bundle / name).write_bytes(data)


def _truncate(bundle: Path, name: str, choose: random.Random) -> None:
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[: choose.choice([0, len(data) // 2, choose.randrange(len(data)), len(data) - 1])])


def _splice(bundle: Path, name: str, choose: random.Random) -> None:
    data = (bundle / name).read_bytes()
    start, end, position = (choose.randrange(len(data) + 1) for _ in range(3))
    (bundle / name).write_bytes(data[:position] + data[min(start, end) : max(start, end)][:4096] + data[position:])


def _swap(bundle: Path, name: str, choose: random.Random) -> None:
    others = sorted(file for file in bundle.rglob("*") if file.is_file())
    other = choose.choice(others)
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(other.read_bytes())
    other.write_bytes(content)


def _replace_by_link(bundle: Path, name: str, choose: random.Random) -> None:
    file = bundle / name
    action = choose.randrange(7)
    file.unlink(missing_ok=True)
    if action == 0:
        file.mkdir()
    elif action == 1:
        os.mkfifo(file)
    elif action > 2:
        targets = ("/etc/passwd", "/dev/zero", "../../../etc/passwd", file.name, ".", "manifest.json", "/proc/self/mem")
        file.symlink_to(choose.choice(targets))


def _add_file(bundle: Path, name: str, choose: random.Random) -> None:
    file = (bundle / name).with_name(
        choose.choice(["model.onnx.data", "model.bin", "tuning.json", "x.so", "__init__.py"])
    )
    file.write_bytes(choose.randbytes(64))


def _mutate_json(bundle: Path, name: str, choose: random.Random) -> None:
    try:
        content = json.loads((bundle / name).read_text())
    except ValueError as error:
        raise _NotApplicableError from error
    for _ in range(choose.choice([1, 1, 2, 3])):
        # The hashes are most of the manifest and all alike.
        slots = [(holder, key) for holder, key in _slots(content) if not _is_hash(holder[key])] or [([content], 0)]
        holder, key = choose.choice(slots)
        action = choose.random()
        if action < 0.5:
            holder[key] = choose.choice(ODD_VALUES)
        elif action < 0.65:
            other, other_key = choose.choice(slots)
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif action < 0.8:
            del holder[key]
        elif action < 0.9 and isinstance(holder, list):
            holder.extend([holder[key]] * choose.choice([1, 3, 100]))
        elif isinstance(holder[key], int):
            holder[key] += choose.choice([-1, 1, 2**16])
        elif isinstance(holder, dict):
            holder[str(choose.choice(ODD_VALUES))] = holder.pop(key)
    text = json.dumps(content)
    if choose.random() < 0.02:
        text = text.replace("null", "[" * 100_000, 1)
    (bundle / name).write_text(text)


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _slots(inner)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _mutate_numbers(bundle: Path, name: str, choose: random.Random) -> None:
    """Change numbers and names of a text file, such as the offsets, sizes and types in OpenVINO's XML."""
    text = (bundle / name).read_text(errors="replace")
    quoted = list(re.finditer(r'"([^"<>&]{1,80})"', text))
    if not quoted:
        raise _NotApplicableError
    match = choose.choice(quoted)
    values = ["0", "-1", "1", str(2**31), str(2**63), "f64", "", "../../etc/passwd", choose.choice(quoted)[1]]
    (bundle / name).write_text(text[: match.start(1)] + choose.choice(values) + text[match.end(1) :])


def _mutate_graph(bundle: Path, name: str, choose: random.Random) -> None:
    import onnx

    file = bundle / name
    try:
        model = onnx.load(file, load_external_data=False)
    except Exception as error:  # an earlier mutation has broken it
        raise _NotApplicableError from error
    graph = model.graph
    if not graph.node or not graph.initializer:
        raise _NotApplicableError
    node, tensor = choose.choice(graph.node), choose.choice(graph.initializer)
    action = choose.randrange(12)
    if action == 0:
        node.op_type = choose.choice([*_OPERATORS, choose.choice(graph.node).op_type])
    elif action == 1:
        node.domain = choose.choice(["", "com.microsoft", "ai.onnx.ml", "evil"])
    elif action == 2 and node.input:
        names = [entry for other in graph.node for entry in (*other.input, *other.output)]
        node.input[choose.randrange(len(node.input))] = choose.choice([*names, "", "nope"])
    elif action == 3 and tensor.dims:
        tensor.dims[choose.randrange(len(tensor.dims))] = choose.choice([0, -1, 1, 3, 2**31, 2**62])
    elif action == 4:
        tensor.data_type = choose.randrange(25)
    elif action == 5:
        tensor.raw_data = choose.randbytes(choose.choice([0, 1, 8, len(tensor.raw_data)]))
    elif action == 6:
        tensor.ClearField("raw_data")
        tensor.data_location = tensor.EXTERNAL
        location = choose.choice(
            ["/etc/passwd", "../../../../etc/passwd", "/dev/zero", "x", f"{file.name}.data", "", "."]
        )
        values = {"location": location, "offset": choose.choice(["0", "-8", str(2**62)]), "length": str(2**40)}
        del tensor.external_data[:]
        for key, value in values.items():
            tensor.external_data.add(key=key, value=value)
    elif action == 7 and node.attribute:
        attribute = choose.choice(node.attribute)
        attribute.i, attribute.type = choose.choice([0, -1, 2**31, 2**62]), choose.choice([attribute.type, 2, 7, 8])
    elif action == 8:
        del graph.node[choose.randrange(len(graph.node))]
    elif action == 9:
        entry = choose.choice([*graph.input, *graph.output])
        dims = entry.type.tensor_type.shape.dim
        entry.name = choose.choice([entry.name, "nope", "logits", "input_ids"])
        if dims:
            choose.choice(dims).dim_value = choose.choice([0, 1, 7, 2**31, 2**50])
    elif action == 10:
        model.opset_import[0].version = choose.choice([0, -1, 1, 7, 99, 2**40])
        model.ir_version = choose.choice([0, 3, 99, model.ir_version])
    else:
        node.output[0] = choose.choice([*graph.node]).output[0]
    file.write_bytes(model.SerializeToString())


Mutation = Callable[[Path, str, random.Random], None]
_KINDS: tuple[tuple[str, Mutation], ...] = (
    ("bits", _flip_bits), ("truncation", _truncate), ("splice", _splice), ("swap", _swap), ("link", _replace_by_link),
    ("extra file", _add_file), ("manifest", _mutate_json), ("manifest", _mutate_json), ("manifest", _mutate_json),
    ("json", _mutate_json), ("json", _mutate_json), ("graph", _mutate_graph), ("graph", _mutate_graph),
    ("xml", _mutate_numbers),
)  # fmt: skip
# The files that a kind of mutation understands; others take any file.
_FILES = {
    "manifest": re.compile(r"^manifest\.json$"),
    "json": re.compile(r"(?<!manifest)\.jsonl?$"),
    "graph": re.compile(r"\.onnx$"),
    "xml": re.compile(r"\.(xml|json)$"),
}
