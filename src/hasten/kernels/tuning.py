"""What was found by measuring on one GPU: how each product is computed, and up to how many tokens few are few.

A bundle brings what its build has found; on another GPU, or with other libraries, the cache may hold what was found
there. Where neither does, the libraries' own choice is taken: nothing is measured when a model is loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from hasten.core.cache import cache_directory
from hasten.core.errors import StageError
from hasten.core.recording import recording
from hasten.core.tensors import Batch
from hasten.core.version import __version__
from hasten.kernels.counters import recorded
from hasten.kernels.encoder import Encoder
from hasten.kernels.instances import Instance
from hasten.kernels.packing import MOST_TOKENS, Bucket, pack, round_up, unpack
from hasten.kernels.products import ALGORITHM_BYTES, Product, Products, library_version
from hasten.kernels.replay import garbage_kept
from hasten.kernels.roads import NAME

FILE = "tuning.json"
_ALGORITHM = re.compile(f"[0-9a-f]{{{2 * ALGORITHM_BYTES}}}")
_LAUNCHES, _REPLAYS = 8, 5


@dataclass(frozen=True, slots=True)
class Tuning:
    found_on: str
    few_tokens: int
    # Algorithms as the library writes them, in hexadecimal digits; of products of eight bits the road (`roads.py`).
    products: tuple[tuple[Product, str], ...]

    def apply(self, encoder: Encoder, products: Products) -> None:
        encoder.few_tokens = min(encoder.few_tokens, self.few_tokens)
        _choose(encoder, products, dict(self.products))

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(self))


def find(encoder: Encoder, products: Products, folder: Path) -> Tuning | None:
    """What holds here, from beside the weights or from the cache."""
    here = circumstances(products)
    for file in (folder / FILE, cached(encoder, products)):
        tuning = _read(file)
        if tuning is not None and tuning.found_on == here:
            return tuning
    return None


def circumstances(products: Products) -> str:
    """What a finding holds for."""
    # Kernels of another version may be faster or slower.
    libraries = (
        f"hasten {__version__}, cuBLASLt {library_version()}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    )
    sums = ", sums fast" if products.sums_fast else ""
    return f"{torch.cuda.get_device_name()}, {libraries}, {products.dtype}{sums}"


def cached(encoder: Encoder, products: Products) -> Path:
    about = f"{circumstances(products)} {asdict(encoder.geometry)}"
    # Which products are of eight bits; without any it is what it was before there were any.
    about += "".join(f" {what}" for what in encoder.shapes(1) if what.takes)
    return cache_directory() / "fused" / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


def tune(encoder: Encoder, products: Products, most_tokens: int = MOST_TOKENS) -> Tuning:
    """Some seconds of measuring."""
    timed = partial(seconds, products=products)
    with torch.inference_mode():
        shapes = [shape for tokens in sizes(most_tokens) for shape in encoder.shapes(tokens)]
        found = {
            shape: encoder.roads.fastest(shape, timed) if shape.takes else products.fastest(shape, timed).hex()
            for shape in shapes
        }
        # Against which few are few.
        _choose(encoder, products, found)
        few = _few_tokens(encoder, timed)
    return Tuning(circumstances(products), few, tuple(found.items()))


def _choose(encoder: Encoder, products: Products, found: Mapping[Product, str]) -> None:
    products.choose({shape: bytes.fromhex(algorithm) for shape, algorithm in found.items() if not shape.takes})
    encoder.roads.choose({shape: road for shape, road in found.items() if shape.takes})


def sizes(most_tokens: int) -> list[int]:
    """Of all buckets that hold up to so many tokens."""
    return list(dict.fromkeys(map(round_up, range(16, most_tokens + 1))))


def seconds(launch: Callable[[], Any], products: Products | None = None) -> float:
    """Of the device, for one of several in a row, some of it by `products`; infinite for what cannot run."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            launch()
        stream.synchronize()
        with recording.alone(), garbage_kept():
            with recorded(stream, products) as graph:
                for _ in range(_LAUNCHES):
                    launch()
            instance = Instance(graph)
    except (StageError, RuntimeError, OutOfResources):
        # PyTorch says of what it cannot multiply a RuntimeError, Triton of a cut that is too large its own.
        torch.cuda.synchronize()
        return float("inf")
    return median(instance.took(stream) for _ in range(_REPLAYS)) / _LAUNCHES


def _few_tokens(encoder: Encoder, timed: Callable[[Callable[[], Any]], float]) -> int:
    """The largest size up to which, one after the other, the kernels for few tokens win."""
    best = 0
    for tokens in sizes(encoder.most_few):
        lone = Batch({"input_ids": np.zeros(tokens, np.int32)}, np.array([tokens], np.int32))
        bucket = Bucket.of(tokens, 1)
        packed = np.zeros(sum(bucket.sizes), np.int32)
        pack(packed, lone, bucket, encoder.geometry.first_place)
        batch = unpack(torch.from_numpy(packed).cuda(), bucket)
        few, many = partial(encoder.few, batch), partial(encoder.many, batch)
        if timed(few) > timed(many):
            break
        best = tokens
    return best


def _read(file: Path) -> Tuning | None:
    try:
        tuning = msgspec.json.decode(file.read_bytes(), type=Tuning)
    except (OSError, ValueError):  # msgspec's own errors are ValueErrors too
        return None
    # The library reads as many bytes, whatever there are.
    is_whole = all((NAME if what.takes else _ALGORITHM).fullmatch(how) for what, how in tuning.products)
    return tuning if is_whole else None
