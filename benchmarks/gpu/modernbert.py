"""Kernels of ModernBERT on a GPU: check them, and time every choice of GEMM and attention tiles, then whole batches.

    python benchmarks/gpu/modernbert.py -o RESULT.json [--peers]
    TRITON_INTERPRET=1 python benchmarks/gpu/modernbert.py --dry-run    # on the CPU: tests the script

Weights are random, in the geometry of ModernBERT-base. Outputs are compared with PyTorch in fp32 before anything is
timed. Times of kernels are device times of one of several launches in a CUDA graph; times of batches are device times
of the captured graph, with the copies to and from the host. Kernels are compiled in parallel processes first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "src"))

from hasten.core.tensors import Batch
from hasten.kernels import weights as weight_reading
from hasten.kernels.architectures import encoder_class
from hasten.kernels.cuda.packed_buckets import Bucket
from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmShape
from hasten.kernels.gemm.fused_linear import GLU, RESIDUAL, ROTARY, SEPARATE, FusedLinears
from hasten.kernels.ops import attention as attention_op
from hasten.kernels.ops import fused_linear, glu, rms_norm, rotary
from hasten.kernels.ops.attention import AttentionTileConfig
from hasten.kernels.ops.fused_linear import LinearTileConfig, Norm, Rotation
from hasten.kernels.packing import pack, unpack

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
BASE: dict[str, Any] = {} if IS_GPU else {
    "vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 200, "local_attention": 64,
    "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
LAYERS, WIDTH, HEADS, INNER, WINDOW = (22, 768, 12, 1152, 64) if IS_GPU else (3, 64, 4, 96, 32)
TOKENS = 8192 if IS_GPU else 48
# Rows × tokens: target in ms of the H200.
SHAPES = {(16, 512): 3.5, (1, 8192): 8.0, (1, 16): 0.35, (1, 128): None, (1, 512): None} if IS_GPU else {(2, 20): None}
RAGGED = [1, 16, 64, 65, 66, 128, 129, 200, 513, 1100] if IS_GPU else [1, 5, 20]
GEMMS = {
    "qkv": (ROTARY, 3 * WIDTH, WIDTH),
    "out": (RESIDUAL, WIDTH, WIDTH),
    "up": (GLU, 2 * INNER, WIDTH),
    "down": (RESIDUAL, WIDTH, INNER),
}
LINEARS = (
    tuple(
        LinearTileConfig(*sizes, *options)
        for options in ((True,), (True, 1), (False,))
        for sizes in (
            (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
            (256, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 256, 64, 4, 4), (128, 128, 128, 8, 2),
        )
    )
    if IS_GPU
    else (LinearTileConfig(16, 32, 32, 4, 2), LinearTileConfig(32, 32, 32, 4, 2, True, 1))
)  # fmt: skip
GLOBAL_TILES = (
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3),
    (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 3), (64, 32, 4, 4),
) if IS_GPU else ((16, 16, 4, 2),)  # fmt: skip
LOCAL_TILES = (
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 8, 3), (32, 64, 4, 3),
    (32, 32, 4, 3), (32, 32, 2, 3), (16, 64, 2, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2),
) if IS_GPU else ((16, 16, 4, 2),)  # fmt: skip
PROCESSES = 12
_BEGIN = time.perf_counter()


def log(message: str) -> None:
    """Print a message with the seconds since the start."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {message}", flush=True)


def device_us(launch: Callable[[], Any], launches: int = 10) -> float:
    """Return the microseconds of one launch within a CUDA graph; infinity if it fails, zero on the CPU."""
    try:
        if not IS_GPU:
            launch()
            return 0.0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(launches):
                    launch()
            times = []
            for _ in range(7):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / launches)
        return median(times)
    except Exception as error:  # a configuration that needs too much of the GPU is left out
        if IS_GPU:
            torch.cuda.synchronize()
        log(f"  failed: {type(error).__name__}: {str(error)[:120]}")
        return float("inf")


class Cases:
    """The operands of all kernels, and their launches by name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.dtype = torch.float16 if IS_GPU else torch.float32
        self.cublaslt = CublasLtGemms(self.dtype) if IS_GPU else None
        self.tables = rotary.Rotary.of(160000.0, TOKENS, WIDTH // HEADS, DEVICE, self.dtype)
        self.positions = torch.arange(TOKENS, dtype=torch.int32, device=DEVICE) % 512
        self.qkv = self.draw(TOKENS, 3 * WIDTH)

    def draw(self, *shape: int) -> Any:
        """Return normally distributed values."""
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def gemms(self) -> dict[str, tuple[Any, ...]]:
        """Return the operands of each GEMM: input, weight, norm, residual and sums of squares."""
        operands = {}
        for name, (_, columns, depth) in GEMMS.items():
            x, weight = self.draw(TOKENS, depth), (self.draw(columns, depth).float() * depth**-0.5).to(self.dtype)
            norm = Norm(x.float().square().sum(1), 1e-5)
            residual = self.draw(TOKENS, WIDTH) if name in ("out", "down") else None
            operands[name] = (x, weight, norm, residual, torch.zeros(TOKENS, device=DEVICE))
        return operands

    def fused(self, name: str, operands: tuple[Any, ...], config: LinearTileConfig) -> Any:
        """Run a fused GEMM."""
        x, weight, norm, residual, square_sums = operands
        if name == "qkv":
            return fused_linear.norm_linear_rotary(x, weight, norm, Rotation(self.positions, self.tables), config)
        if name == "up":
            return fused_linear.norm_linear_glu(x, weight, norm, "gelu", config)
        return fused_linear.linear_residual(x, weight, residual, square_sums, config)

    def expected(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Compute it in plain PyTorch."""
        x, weight, norm, residual, _ = operands
        if name == "qkv":
            return fused_linear.reference(x, weight, norm, Rotation(self.positions, self.tables))
        if name == "up":
            return fused_linear.reference(x, weight, norm, glu_kind="gelu")
        return fused_linear.reference(x, weight) + residual.float()

    def attention(self, lengths: Sequence[int], window: int | None, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Return a launch of attention."""
        config = AttentionTileConfig(*sizes)
        tiles = torch.from_numpy(attention_op.query_tiles(np.array(lengths), config.rows)).to(DEVICE)
        return partial(attention_op.attention, self.qkv, tiles, HEADS, window=window, tile_config=config)


def compilations(cases: Cases) -> list[Callable[[], Any]]:
    """Return launches that compile everything."""
    operands = cases.gemms()
    launches: list[Callable[[], Any]] = [
        partial(cases.fused, name, values, config) for config in LINEARS for name, values in operands.items()
    ]
    lengths = [TOKENS // 16] * 16
    launches += [cases.attention(lengths, None, sizes) for sizes in GLOBAL_TILES]
    launches += [cases.attention(lengths, WINDOW, sizes) for sizes in LOCAL_TILES]
    return launches


def compile_in_parallel() -> None:
    """Compile in processes of their own, which fill Triton's cache."""
    commands = [[sys.executable, __file__, "--compile", str(index)] for index in range(PROCESSES)]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands]
    for process in processes:
        _, stderr = process.communicate()
        if process.returncode:
            log(f"compilation failed: {stderr.decode()[-500:]}")
    log("compiled")


def relative_error(actual: Any, expected: Any) -> float:
    """Return the norm of the error over the norm of the expected values."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def sweep_gemms(cases: Cases, results: dict[str, Any]) -> dict[str, str]:
    """Check and time every configuration of each GEMM; return the fastest choices."""
    best = {}
    linears = FusedLinears(cases.cublaslt, cases.dtype, "gelu", 1e-5, cases.tables)
    for name, operands in cases.gemms().items():
        epilogue, columns, depth = GEMMS[name]
        plain = GemmShape(TOKENS, columns, depth)
        flops, rows = 2 * TOKENS * columns * depth, {}
        if cases.cublaslt is not None:
            candidates = {
                number: device_us(partial(cases.cublaslt.run, plain, _operands(operands), number))
                for number in cases.cublaslt.candidates(plain)
            }
            chosen = min(candidates, key=candidates.__getitem__)
            cases.cublaslt._chosen[plain] = chosen
            rows[f"cublaslt {chosen}, GEMM alone"] = candidates[chosen]
        rows[SEPARATE] = device_us(linears.launches(GemmShape(TOKENS, columns, depth, epilogue=epilogue))[SEPARATE])
        expected = cases.expected(name, operands)
        for config in LINEARS:
            try:
                error = relative_error(cases.fused(name, operands, config), expected)
            except Exception as failure:
                log(f"  {name} {config} failed: {type(failure).__name__}: {str(failure)[:120]}")
                continue
            if error <= 2e-3:
                rows[str(config)] = device_us(partial(cases.fused, name, operands, config))
            else:
                log(f"WRONG: {name} {config}: error {error:.1e}")
        ordered = sorted(rows, key=rows.__getitem__)
        best[name] = min((row for row in rows if "alone" not in row), key=rows.__getitem__)
        results["gemms"][name] = rows
        log(f"{name} ({columns} x {depth}): " + ", ".join(
            f"{row} {rows[row]:.1f} us ({flops / max(rows[row], 1e-3) / 1e6:.0f} TFLOP/s)" for row in ordered[:9]
        ))  # fmt: skip
    return best


def _operands(operands: tuple[Any, ...]) -> Any:
    from hasten.kernels.gemm.cublaslt import GemmOperands

    return GemmOperands(operands[0], operands[1])


def sweep_attention(cases: Cases, results: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Check and time every configuration of attention; return the fastest ones."""
    best = {}
    for rows, length in ((16, TOKENS // 16), (1, TOKENS)):
        starts = torch.arange(rows + 1) * length
        for window, tiles in ((None, GLOBAL_TILES), (WINDOW, LOCAL_TILES)):
            label = f"{'global' if window is None else 'local'} {rows}x{length}"
            # The definition of a single head of the last sequence: of all it would take gigabytes.
            head = WIDTH // HEADS
            part = torch.cat([cases.qkv[-length:, index * WIDTH : index * WIDTH + head] for index in range(3)], 1)
            expected = attention_op.reference(part, starts[:2], 1, window=window)
            times = {}
            for sizes in tiles:
                launch = cases.attention([length] * rows, window, sizes)
                try:
                    error = relative_error(launch()[-length:, :head], expected)
                except Exception as failure:
                    log(f"  {label} {sizes} failed: {type(failure).__name__}: {str(failure)[:120]}")
                    continue
                if error <= 2e-3:
                    times["x".join(map(str, sizes))] = device_us(launch, 4 if length > 1000 else 10)
                else:
                    log(f"WRONG: {label} {sizes}: error {error:.1e}")
            ordered = sorted(times, key=times.__getitem__)
            flops = 4 * TOKENS * WIDTH * (length if window is None else 2 * WINDOW + 1)
            results["attention"][label] = times
            best[label] = tuple(map(int, ordered[0].split("x")))
            log(f"{label}: " + ", ".join(
                f"{sizes} {times[sizes]:.1f} us ({flops / max(times[sizes], 1e-3) / 1e6:.0f} TFLOP/s)"
                for sizes in ordered[:8]
            ))  # fmt: skip
        if IS_GPU:
            q, k, v = (cases.draw(rows, HEADS, length, WIDTH // HEADS) for _ in range(3))
            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                kind = getattr(torch.nn.attention.SDPBackend, backend)
                with torch.nn.attention.sdpa_kernel(kind):
                    us = device_us(partial(torch.nn.functional.scaled_dot_product_attention, q, k, v), 4)
                results["attention"][f"{backend} {rows}x{length}"] = us
                log(f"PyTorch {backend} {rows}x{length}: {us:.1f} us")
    return best


def time_passes(cases: Cases, results: dict[str, Any]) -> None:
    """Time the kernels between separate GEMMs."""
    x, residual, up = cases.draw(TOKENS, WIDTH), cases.draw(TOKENS, WIDTH), cases.draw(TOKENS, 2 * INNER)
    square_sums = torch.zeros(TOKENS, device=DEVICE)
    passes = {
        "rotate": lambda: rotary.rotate(cases.qkv, cases.positions, cases.tables),
        "gated activation": lambda: glu.gated_activation(up),
        "rms norm with residual": lambda: rms_norm.rms_norm(x, 1e-5, residual),
        "add and sum squares": lambda: rms_norm.add_and_sum_squares(x, residual, square_sums),
    }
    results["passes"] = {name: device_us(launch) for name, launch in passes.items()}
    log("passes: " + ", ".join(f"{name} {us:.1f} us" for name, us in results["passes"].items()))


class Model:
    """A ModernBERT with random weights, its fused encoder, and PyTorch's answers."""

    def __init__(self, dtype: Any) -> None:
        torch.manual_seed(0)
        config = transformers.ModernBertConfig(**BASE)
        with torch.device(DEVICE):
            self.module = transformers.ModernBertModel(config).eval()
        for name, parameter in self.module.named_parameters():
            # Published weights have norms that differ from one.
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
            elif "Wo" in name:
                parameter.data *= 4
        self.model = weight_reading.cast(weight_reading.read(self.module), dtype)
        self.vocabulary = config.vocab_size
        self.dtype = dtype

    def encoder(self, cublaslt: CublasLtGemms | None) -> Any:
        """Return a new encoder."""
        from hasten.kernels.ops.pdl import shared_bytes

        options = {"use_pdl": IS_GPU, "shared_bytes": shared_bytes(0) if IS_GPU else None}
        return encoder_class(self.model.geometry)(self.model.geometry, self.model.weights, cublaslt=cublaslt, **options)

    def batch(self, lengths: Sequence[int]) -> tuple[Batch, Bucket, Any]:
        """Return a batch of random tokens, its bucket, and the packed buffer."""
        ids = np.random.default_rng(1).integers(5, self.vocabulary, sum(lengths)).astype(np.int32)
        batch = Batch({"input_ids": ids}, np.array(lengths, np.int32))
        bucket = Bucket.of(batch.tokens, len(batch))
        buffer = np.zeros(sum(bucket.segment_sizes), np.int32)
        pack(buffer, batch, bucket)
        return batch, bucket, buffer

    def expected(self, batch: Batch) -> Any:
        """Return the states of PyTorch in fp32, row by row."""
        states, begin = [], 0
        with torch.inference_mode():
            for length in batch.lengths.tolist():
                ids = torch.from_numpy(batch.values["input_ids"][begin : begin + length]).long().to(DEVICE)[None]
                states.append(self.module(input_ids=ids).last_hidden_state[0])
                begin += length
        return torch.cat(states)


def check_model(
    dtype: Any, choices: Mapping[str, str], cublaslt: CublasLtGemms | None, results: dict[str, Any]
) -> None:
    """Compare the states of ragged, long and small batches with PyTorch in fp32."""
    model = Model(dtype)
    for lengths in (RAGGED, *([rows_length] * rows for rows, rows_length in SHAPES)):
        batch, bucket, buffer = model.batch(lengths)
        expected = model.expected(batch)
        for label in ("separate", "fused", "small"):
            encoder = model.encoder(cublaslt)
            if label == "fused":
                use(encoder, bucket.tokens, choices)
            if label == "small" and bucket.tokens > encoder.small_batch_limit:
                continue
            run = encoder.small_batch if label == "small" else encoder.large_batch
            with torch.inference_mode():
                actual = run(unpack(torch.from_numpy(buffer).to(DEVICE), bucket))[: batch.tokens]
            error = relative_error(actual, expected)
            name = f"{dtype} {len(lengths)}x{max(lengths)} {label}"
            results["errors"][name] = error
            log(f"{name}: error {error:.1e}{'' if error <= 5e-3 or dtype != torch.float16 else ' WRONG'}")


def use(encoder: Any, tokens: int, choices: Mapping[str, str]) -> None:
    """Make the encoder use these choices for the batches of so many tokens."""
    encoder.fused_linears.choose(
        {GemmShape(tokens, columns, depth, epilogue=epilogue): choices[name]
         for name, (epilogue, columns, depth) in GEMMS.items()}
    )  # fmt: skip


def time_batches(
    choices: Mapping[str, str], tiles: Mapping[str, tuple[int, ...]], cublaslt: CublasLtGemms, results: dict[str, Any]
) -> None:
    """Time whole batches: with separate kernels, with the fastest choices, and with the fastest attention tiles too."""
    from hasten.kernels.cuda.replay import GraphReplay
    from hasten.kernels.tuning import measure_seconds

    model = Model(torch.float16)
    long_config, very_long = attention_op.LONG_TILE_CONFIG, attention_op.VERY_LONG_TILE_CONFIG
    fused_only = {name: choice if choice != SEPARATE else str(LINEARS[0]) for name, choice in choices.items()}
    for (rows, length), target in SHAPES.items():
        _, bucket, _ = model.batch([length] * rows)
        variants: dict[str, Mapping[str, str]] = {"separate": dict.fromkeys(GEMMS, SEPARATE), "tuned": choices}
        if bucket.tokens < TOKENS:
            # Choices for this size.
            plain = [shape for shape in model.encoder(cublaslt).gemm_shapes(bucket.tokens) if not shape.epilogue]
            cublaslt._chosen |= {shape: cublaslt.fastest(shape, measure_seconds) for shape in plain}
            linears = model.encoder(cublaslt).fused_linears
            variants["tuned"] = {
                name: linears.fastest(GemmShape(bucket.tokens, columns, depth, epilogue=epilogue), measure_seconds)
                for name, (epilogue, columns, depth) in GEMMS.items()
            }
        else:
            variants |= {"all fused": fused_only, "tuned, attention too": choices}
        if bucket.tokens <= model.encoder(cublaslt).small_batch_limit:
            variants["small"] = choices
        for label, names in variants.items():
            if "attention" in label:
                config = AttentionTileConfig(*tiles[f"global {rows}x{length}"])
                attention_op.LONG_TILE_CONFIG = AttentionTileConfig(*tiles[f"local {rows}x{length}"])
                attention_op.VERY_LONG_TILE_CONFIG, attention_op.VERY_LONG_TOKENS = config, length - 1
                if config.rows % attention_op.LONG_TILE_CONFIG.rows:
                    attention_op.LONG_TILE_CONFIG = config
            encoder = model.encoder(cublaslt)
            use(encoder, bucket.tokens, names)
            run = encoder.small_batch if label == "small" else encoder.large_batch
            batch, bucket, _ = model.batch([length] * rows)
            replay = GraphReplay(lambda buffer, bucket, run=run: run(unpack(buffer, bucket))[:1], DEVICE)
            replay(bucket, partial(pack, batch=batch, bucket=bucket))
            times = []
            for _ in range(40):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with torch.cuda.stream(replay.stream):
                    torch.cuda._sleep(200_000)
                    begin.record()
                    replay.last.replay()
                    end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
                time.sleep(0.01)
            name = f"{rows}x{length} {label}"
            results["batches_ms"][name] = median(times)
            results["kernels"][name] = profile(replay.last.replay)
            log(f"{name}: {median(times):.3f} ms (target {target}) {names if label == 'tuned' else ''}")
            is_shown = label in ("small", "tuned, attention too") or (label == "separate" and rows == 16)
            for kernel, (launches, us) in list(results["kernels"][name].items())[: 9 * is_shown]:
                print(f"    {kernel[:70]:70} {launches:4} x {us:7.2f} us = {launches * us / 1e3:.3f} ms")
            attention_op.LONG_TILE_CONFIG, attention_op.VERY_LONG_TILE_CONFIG = long_config, very_long
            attention_op.VERY_LONG_TOKENS = 512
            replay.clear()


def profile(run: Callable[[], Any], runs: int = 5) -> dict[str, tuple[int, float]]:
    """Return launches and mean microseconds by kernel, the largest total first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        times.setdefault(event.name, []).append(event.device_time)
    rows = {name: (round(len(each) / runs), float(np.mean(each))) for name, each in times.items() if sum(each)}
    return dict(sorted(rows.items(), key=lambda row: -row[1][0] * row[1][1]))


def time_peers(results: dict[str, Any]) -> None:
    """Time PyTorch's SDPA in fp16, and torch.compile, between device tensors."""
    model = Model(torch.float16).module.half()
    shapes = [shape for shape in SHAPES if shape != (1, 128)]
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    for name, run in (("torch fp16", model), ("torch.compile fp16", compiled)):
        for rows, length in shapes:
            ids = torch.randint(5, 50000, (rows, length), device=DEVICE)
            feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            try:
                times = []
                for index in range(25):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    with torch.inference_mode():
                        torch.compiler.cudagraph_mark_step_begin()
                        run(**feeds)
                    torch.cuda.synchronize()
                    times += [(time.perf_counter() - begin) * 1e3] if index >= 5 else []
                results["peers_ms"][f"{name} {rows}x{length}"] = median(times)
                log(f"{name} {rows}x{length}: {median(times):.3f} ms")
            except Exception as error:
                log(f"{name} {rows}x{length} failed: {type(error).__name__}: {str(error)[:200]}")


def main() -> None:
    """Check, sweep, and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("modernbert.json"))
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", action="store_true", help="time PyTorch and torch.compile too")
    parser.add_argument("--dry-run", action="store_true", help="run everything that needs no GPU, on the CPU")
    args = parser.parse_args()
    cases = Cases()
    if args.compile is not None:
        for launch in compilations(cases)[args.compile :: PROCESSES]:
            try:
                launch()
            except Exception as error:
                print(error, file=sys.stderr)
        return
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if IS_GPU else "cpu", "torch": torch.__version__,
        "gemms": {}, "attention": {}, "errors": {}, "batches_ms": {}, "kernels": {}, "peers_ms": {},
    }  # fmt: skip
    if IS_GPU:
        compile_in_parallel()
    choices: dict[str, str] = dict.fromkeys(GEMMS, str(LINEARS[0]))
    tiles: dict[str, tuple[int, ...]] = {}
    stages: list[Callable[[], Any]] = [
        lambda: choices.update(sweep_gemms(cases, results)),
        lambda: tiles.update(sweep_attention(cases, results)),
        lambda: time_passes(cases, results),
        lambda: log(f"fastest: {choices}, {tiles}"),
        lambda: check_model(torch.float16 if IS_GPU else torch.float32, choices, cases.cublaslt, results),
    ]
    if IS_GPU:
        stages += [
            lambda: time_batches(choices, tiles, cases.cublaslt, results),
            lambda: check_model(torch.bfloat16, choices, CublasLtGemms(torch.bfloat16), results),
        ]
    if args.peers:
        stages.append(lambda: time_peers(results))
    for stage in stages:
        try:
            with torch.inference_mode():
                stage()
        except Exception:
            # The stages after it may still say something.
            log(f"FAILED: {traceback.format_exc()[-1500:]}")
        args.output.write_text(json.dumps({**results, "choices": choices, "tiles": tiles}, indent=1))
    for name, ms in {**results["batches_ms"], **results["peers_ms"]}.items():
        print(f"{name:45} {ms:8.3f} ms")
    print("largest error:", max(results["errors"].items(), key=lambda item: item[1], default=None))


if __name__ == "__main__":
    main()
