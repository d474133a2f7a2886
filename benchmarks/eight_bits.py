"""GPU: every road of every product of eight bits, at the shapes of `gpu.py`'s studies, beside the best in fp16.

    python benchmarks/eight_bits.py [--only RoBERTa-base …] [-o FILE]
    TRITON_INTERPRET=1 python benchmarks/eight_bits.py --dry-run    # on the CPU: the script runs, nothing is timed

Correctness first: a road is compared with sums in fp64 of the same eight bits, and one that errs is named, not timed.
Milliseconds are the device's, of one product with all that stands behind it (GELU, eight bits again). `sums fast` are
the library's products added up in fewer bits than fp32, as `+fast` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpu import HERE, STUDIES
from hasten.core.errors import StageError
from hasten.kernels.activation import EXACT, TANH
from hasten.kernels.multiply import reference
from hasten.kernels.products import Product, Products
from hasten.kernels.roads import LIBRARY, TORCH, Roads
from hasten.kernels.tuning import seconds
from origin import origin

NARROW = ("float8_e4m3fn", "int8")
# Relative to the whole: fp16's rounding; and where that is rounded to eight bits again, the numbers that lie between
# two, which may go to either.
LARGEST_ERROR, LARGEST_ERROR_AGAIN = 5e-3, 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["RoBERTa-base", "RoBERTa-large"], choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "eight_bits.json")
    parser.add_argument("--dry-run", action="store_true", help="our own kernel at small shapes, on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        for what in products(24, 32, 64):
            print(what, studied(what, EXACT, None, None))
        return
    results: dict[str, Any] = {
        **origin(),
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "rows": [],
    }
    library, fast = Products(torch.float16), Products(torch.float16, sums_fast=True)
    for name in args.only:
        config = STUDIES[name].config
        width, inner = config.get("hidden_size", 768), config.get("intermediate_size", 3072)
        for shape in STUDIES[name].shapes:
            tokens = shape.batch * shape.sequence
            for what in products(tokens, width, inner):
                kinds = (EXACT, TANH) if what.has_gelu else (EXACT,)
                for kind in kinds:
                    row = {"model": name, "shape": str(shape), "product": what, "gelu": kind if what.has_gelu else ""}
                    row |= studied(what, kind, library, fast)
                    results["rows"].append(row)
                    print(msgspec.json.encode(row).decode(), flush=True)
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def products(tokens: int, width: int, inner: int) -> Iterator[Product]:
    for narrow in NARROW:
        yield Product(tokens, 3 * width, width, has_bias=True, takes=narrow)
        yield Product(tokens, width, width, takes=narrow)
        yield Product(tokens, inner, width, has_bias=True, has_gelu=True, takes=narrow, gives=narrow)
        yield Product(tokens, width, inner, takes=narrow)


def studied(what: Product, kind: str, library: Products | None, fast: Products | None) -> dict[str, Any]:
    """The fastest of each kind of road, and what could not be taken or was wrong."""
    dtype = torch.float16 if library is not None else torch.float32
    roads = Roads(kind, dtype, library)
    best: dict[str, float] = {}
    wrong: dict[str, str] = {}
    device = "cuda" if library is not None else "cpu"
    given = roads.drawn(what, device)
    expected = reference(*given[:4], kind if what.has_gelu else None, given[4])
    of_torch = [TORCH] if library is not None and what.takes == NARROW[0] else []
    for road in dict.fromkeys([*roads.known(what), *of_torch]):
        try:
            error = difference(roads.go(road, what, *given), expected)
        except (StageError, RuntimeError) as reason:
            wrong[road] = str(reason).splitlines()[0]
            continue
        if not error <= (LARGEST_ERROR_AGAIN if what.gives else LARGEST_ERROR):
            wrong[road] = f"relative error {error:.1e}"
        elif library is not None:
            taken = seconds(partial(roads.go, road, what, *given), library) * 1e3
            best[road.split()[0]] = min(taken, best.get(road.split()[0], float("inf")))
    if fast is not None and what.takes == NARROW[0]:
        hurried = Roads(kind, dtype, fast)
        known = [road for road in hurried.known(what) if road.startswith(LIBRARY)]
        times = [seconds(partial(hurried.go, road, what, *given), fast) * 1e3 for road in known]
        best |= {"library, sums fast": min(times, default=float("inf"))}
    if library is not None:
        # Beside it: cuBLASLt's fastest in fp16, without what stands behind.
        half = Product(what.rows, what.columns, what.depth, what.has_bias)
        algorithm = library.fastest(half, partial(seconds, products=library))
        library.choose({half: algorithm})
        x, weight = (torch.randn(rows, what.depth, device=device).half() for rows in (what.rows, what.columns))
        bias = torch.randn(what.columns, device=device).half() if what.has_bias else None
        best["fp16 product alone"] = seconds(lambda: library(x, weight, bias), library) * 1e3
    return {"ms": best, "wrong": wrong}


def difference(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


if __name__ == "__main__":
    main()
