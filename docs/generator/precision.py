"""Generates the reference page of reduced precisions from `precision.json` and `precision_arm64.json`."""

from __future__ import annotations

from typing import Any

from generator.results import GENERATED, interval, load, machine_line, table

FILES = ("precision", "precision_arm64")
MODELS = {
    "sst2": "SST-2 classifier",
    "wnut17": "WNUT-17 tagger",
    "qa": "question answering (XQuAD)",
    "minilm": "MiniLM embeddings (STS-B)",
}
PEERS = {
    "plain_onnxruntime-fp32": "stock ONNX Runtime fp32",
    "plain_onnxruntime-int8+documented": "ONNX Runtime `quantize_dynamic`, as documented",
    "plain_onnxruntime-int8+optimum+arm64": "Optimum, arm64 preset",
    "plain_onnxruntime-int8+optimum+avx512vnni": "Optimum, avx512_vnni preset",
    "plain_openvino-int8+nncf": "NNCF, defaults",
    "plain_torch-int8": "PyTorch dynamic int8",
}


def page() -> str:
    """Return one table per model and machine: speed-up, metric and label flips of every variant."""
    lines = [
        GENERATED,
        "# Speed and accuracy of reduced precision",
        "",
        "- Columns such as 8×128 (batch × tokens): speed-up over stock ONNX Runtime fp32, the median over alternating "
        "rounds with its confidence interval.",
        "- metric, drop and flips: task metric, its drop in points against PyTorch fp32 and the number of changed "
        "labels, each at the worst batch size.",
        "- ★ is the variant that `hasten build` chose. ✗ marks variants that the accuracy gate rejected.",
    ]
    for file in FILES:
        results = load(file)
        for name, title in MODELS.items():
            if name in results:
                lines += _study(f"{title}, {results[name]['machine']['architecture']}", results[name])
    lines += [
        "",
        "Command: `python benchmarks/quantization/precision.py --models DIR --data DIR`. Result files: "
        + ", ".join(f"[{file}.json](../../benchmarks/results/{file}.json)" for file in FILES)
        + ".",
    ]
    return "\n".join(lines) + "\n"


def accuracy_cells(verdict: dict[str, Any]) -> list[str]:
    """Return metric, drop in points and label flips (or the cosine) of a verdict."""
    metric, reference, agreement = verdict["metric"], verdict["reference_metric"], verdict["agreement"]
    flips = "" if agreement["flips"] is None else f"{agreement['flips']} of {agreement['rows']}"
    if agreement["measure"] == "mean cosine":
        flips = f"cosine {agreement['cosine_mean']:.4f}"
    if metric is None or reference is None:
        return ["", "", flips]
    bounds = verdict["drop_interval"]
    confidence = f" ({bounds['low']:.2f} to {bounds['high']:.2f})" if bounds else ""
    return [f"{metric['value']:.4f}", f"{100 * (reference['value'] - metric['value']):.2f}{confidence}", flips]


def _study(title: str, results: dict[str, Any]) -> list[str]:
    shapes = [row["shape"] for row in results["speed"]]
    rows = []
    for name, verdict in results["answers"].items():
        speedups = [interval(row["over_plain"][name], "×") for row in results["speed"]]
        star = " ★" if name == results["chosen"] else ""
        size = f"{results['size_bytes'][name] / 1e6:.0f} MB"
        rows.append([f"{_label(name)}{star}", *speedups, *accuracy_cells(verdict), size])
    for name, reason in results.get("failed", {}).items():
        rows.append([_label(name), *("" for _ in shapes), f"not supported here: {reason}", "", "", ""])
    for candidate in results["candidates"]:
        if candidate["status"] == "inaccurate":
            cells = accuracy_cells(candidate["verdict"])
            rows.append([f"{_label(candidate['variant'])} ✗", *("" for _ in shapes), *cells, ""])
    search_s = next(stage["seconds"] for stage in results["stages"] if stage["name"] == "search")
    return [
        *("", f"## {title}", ""),
        *table(["variant", *shapes, "metric", "drop in points", "flips", "size"], rows),
        "",
        f"Build time {results['build_s']:.0f} s, of which the search took {search_s:.0f} s. "
        f"Machine: {machine_line(results)}.",
    ]


def _label(name: str) -> str:
    return PEERS.get(name, f"`{name}`")
