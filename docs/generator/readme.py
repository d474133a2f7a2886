"""Fills the README's markers: chart, build output and serving table."""

from __future__ import annotations

import re

from generator.chart import Bar, Panel
from generator.cpu_study import paired_p50_ms
from generator.results import ROOT, cpu_name, day, duration, gpu_name, load, table
from generator.serving_studies import FASTAPI_FP32, FASTAPI_SAME_GRAPH, HASTEN, HASTEN_FP32, over_rounds
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
    """Return the output of the build that the chart was measured with, with fewer rejected variants."""
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
    results, first_answer = load("serving_throughput"), load("cpu")["first_answer"]
    precision = results["bundle"]["chosen"].partition("-")[2].partition("+")[0]
    servers = {
        HASTEN: ("hasten", precision),
        FASTAPI_SAME_GRAPH: ("FastAPI + the same ONNX graph", precision),
        HASTEN_FP32: ("hasten", "fp32"),
        FASTAPI_FP32: ("FastAPI + ONNX Runtime", "fp32"),
    }
    rows = []
    for name, (server, model) in servers.items():
        contender = results["contenders"][name]
        p99_ms = duration(over_rounds(contender, "p99_ms"))
        rows.append([server, model, f"{over_rounds(contender, 'per_second'):.0f}", p99_ms])
    ours, torch, fastembed = (
        f"{first_answer[name]['seconds']:.1f} s and {first_answer[name]['peak_bytes'] / 1e6:.0f} MB"
        for name in ("hasten", "sentence_transformers", "fastembed")
    )
    lines = [
        *table(["server", "precision", "requests/s", "p99"], rows),
        "",
        f"SST-2 classifier, {results['clients']} clients, {results['share_of_long_texts']:.0%} long reviews among "
        f"sentences; {cpu_name(results)}, {day(results)}. A fresh process needs {ours} to its first MiniLM "
        f"embedding, sentence-transformers {torch}, fastembed {fastembed}. [More peers]"
        "(docs/benchmarks.md#serving-throughput).",
        "",
    ]
    return "\n".join(lines)
