"""Fills the README's markers: chart, build output and serving table."""

from __future__ import annotations

import re

from generator.chart import Bar, Panel
from generator.cpu_study import paired_p50_ms
from generator.results import ROOT, cpu_name, day, duration, gpu_name, load, table
from generator.serving_throughput import (
    HASTEN,
    HASTEN_CHOSEN,
    HASTEN_FP32,
    SAME_GRAPH,
    STOCK_GRAPH,
    faster_servers,
    over_rounds,
    server_label,
)
from generator.studies import GPU_COLUMNS, fastest

README = ROOT / "README.md"
_CPU_SHAPE, _GPU_MODEL, _GPU_SHAPE = "8×128", "RoBERTa-base", "16×384"
# Each bar is the fastest of these contenders.
_CPU_BARS = {
    "PyTorch fp32": ("torch-fp32",),
    "ONNX Runtime fp32": ("plain_onnxruntime-fp32", "optimized_onnxruntime-fp32"),
    "PyTorch bf16": ("cast_torch-bf16", "autocast_torch-bf16"),
    "OpenVINO bf16": ("plain_openvino-bf16",),
}
_GPU_BARS = {
    "PyTorch": GPU_COLUMNS["PyTorch"],
    "torch.compile": GPU_COLUMNS["torch.compile"] + GPU_COLUMNS["torch.compile, static shapes"],
    "ORT, CUDA graphs": GPU_COLUMNS["ONNX Runtime, CUDA graphs"],
    "hasten fp16": GPU_COLUMNS["hasten"],
    "hasten fp8": GPU_COLUMNS["hasten fp8"],
}
_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
# The README shows fewer rejected variants than the command prints.
_REJECTED_ROWS = 1
# The README shows the fastest peers of each precision.
_PEERS = 1
_BUILD_COMMAND = f"$ hasten build {_HUB_ID} -o minilm/"


def page() -> str:
    """Return the README with the text between its markers generated from the result files."""
    text = README.read_text(encoding="utf-8")
    for name, content in {"chart": _chart(), "build": _build_output(), "serving": _serving()}.items():
        pattern = re.compile(f"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise SystemExit(f"README.md has no markers for '{name}'")
        text = f"{text[: match.start()]}{match[1]}{content}{match[2]}{text[match.end() :]}"
    return text


def panels() -> list[Panel]:
    """Return the two panels of the chart: one shape on a CPU and one on a GPU."""
    cpu, gpu = load("cpu"), load("gpu")
    p50_ms = paired_p50_ms(next(row for row in cpu["speed"]["shapes"] if row["shape"] == _CPU_SHAPE))
    chosen = cpu["speed"]["chosen"]
    bars = _CPU_BARS | {f"hasten {cpu['speed']['contenders'][chosen]['precision']}": (chosen,)}
    cpu_bars = [Bar(label, min(map(p50_ms.__getitem__, names)), chosen in names) for label, names in bars.items()]
    row = next(row for row in gpu["rows"] if (row["model"], row["shape"]) == (_GPU_MODEL, _GPU_SHAPE))
    times = {name: percentiles["p50"] for name, percentiles in row["call_ms"].items()}
    gpu_bars = [
        Bar(label, ms, label.startswith("hasten"))
        for label, variants in _GPU_BARS.items()
        if (ms := fastest(times, variants)) is not None
    ]
    return [
        Panel(f"CPU: MiniLM-L6, {_CPU_SHAPE}", f"{cpu_name(cpu)}; lower is better", tuple(cpu_bars)),
        Panel(f"GPU: {_GPU_MODEL}, {_GPU_SHAPE}", f"{gpu_name(gpu)}, fp16; lower is better", tuple(gpu_bars)),
    ]


def _chart() -> str:
    cpu, gpu = load("cpu"), load("gpu")
    agreement = cpu["speed"]["contenders"][cpu["speed"]["chosen"]]["agreement"]
    # The figure describes itself with all values.
    description = f"Median latency: {'; '.join(panel.title for panel in panels())}"
    lines = [
        "<picture>",
        '  <source media="(prefers-color-scheme: dark)" srcset="docs/assets/speed-dark.svg">',
        f'  <img alt="{description}" src="docs/assets/speed.svg">',
        "</picture>",
        "",
        f"Median latency of a batch (batch × tokens). CPU: {cpu_name(cpu)}, {day(cpu)}; hasten's variant passed the "
        f"accuracy gate ({agreement['measure']} {agreement['value']:.5f}). GPU: {gpu_name(gpu)}, {day(gpu)}; random "
        "weights, speed only. [Method, versions and raw data](docs/benchmarks.md).",
        "",
    ]
    return "\n".join(lines)


def _build_output() -> str:
    """Return the output of a build of the model of the chart, with fewer rejected variants."""
    build = load("cpu")["build"]
    title, *lines = build["printed"]
    # The model was built from the copy of the weights that a package ships.
    title = re.sub(r"^\S+", _HUB_ID, title)
    rejected = next(index for index, line in enumerate(lines) if line.split() == ["rejected", "reason"])
    end = next(index for index, line in enumerate(lines) if line.startswith("…"))
    rejected_rows = lines[rejected : min(rejected + 1 + _REJECTED_ROWS, end)]
    tables = [*_narrow_gaps(lines[:rejected]), *_narrow_gaps(rejected_rows)]
    omitted = max(0, end - rejected - 1 - _REJECTED_ROWS)
    ending = re.sub(r"\d+", lambda count: str(int(count[0]) + omitted), lines[end], count=1)
    command = " ".join([_BUILD_COMMAND, *build["options"]])
    return "\n".join(["```", command, title, *tables, ending, "```", ""])


def _narrow_gaps(lines: list[str]) -> list[str]:
    """Narrow the gaps between columns to two blanks, where these lines allow it."""
    width = max(map(len, lines))
    padded = [line.ljust(width) for line in lines]
    kept = [index for index in range(width) if index < 3 or any(line[index - 2 : index + 1].strip() for line in padded)]
    return ["".join(line[index] for index in kept).rstrip() for line in padded]


def _serving() -> str:
    results, cpu = load("serving_throughput"), load("cpu")
    first_answer = cpu["first_answer"]
    contenders, chosen = results["contenders"], results["bundle"]["chosen"]
    tuning = "peers in tuned configurations" if "tuning" in results else "peers not tuned"
    peers = sorted(contenders, key=lambda name: -over_rounds(contenders[name], "per_second"))
    with_hasten_graph, with_stock_graph = (
        [name for name in peers if name.endswith(graph)][:_PEERS] for graph in (SAME_GRAPH, STOCK_GRAPH)
    )
    precisions = {
        **({HASTEN_CHOSEN: _precision(chosen)} if HASTEN_CHOSEN in contenders else {}),
        **dict.fromkeys([HASTEN, *with_hasten_graph], _precision(results.get("graph", chosen))),
        **dict.fromkeys([HASTEN_FP32, *with_stock_graph], "fp32"),
    }
    rows = []
    for name, precision in precisions.items():
        p50_ms, p99_ms = (duration(over_rounds(contenders[name], key)) for key in ("p50_ms", "p99_ms"))
        server = server_label(name).removesuffix(", fp32").replace("Runtime fp32", "Runtime")
        rows.append([server, precision, f"{over_rounds(contenders[name], 'per_second'):.0f}", p50_ms, p99_ms])
    ours, torch, fastembed = (
        f"{first_answer[name]['seconds']:.1f} s and {first_answer[name]['peak_bytes'] / 1e6:.0f} MB"
        for name in ("hasten", "sentence_transformers", "fastembed")
    )
    lines = [
        *table(["server", "precision", "requests/s", "p50", "p99"], rows),
        "",
        f"SST-2 classifier, {results['clients']} clients, {results['share_of_long_texts']:.0%} long reviews; "
        f"{cpu_name(results)}, {day(results)}; {tuning}. {faster_servers(results)} "
        "[All peers](docs/benchmarks.md#serving-throughput). "
        f"First MiniLM embedding of a process: {ours}; sentence-transformers {torch}, fastembed {fastembed} "
        f"({cpu_name(cpu)}, {day(cpu)}).",
        "",
    ]
    return "\n".join(lines)


def _precision(variant: str) -> str:
    return variant.partition("-")[2].partition("+")[0]
