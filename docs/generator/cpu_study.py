"""The benchmark study of encoder latency on CPUs, grouped by precision."""

from __future__ import annotations

from typing import Any

from generator.results import day, duration, interval, load, machine_line, table
from generator.studies import Study

CPU_PEERS = {
    "torch-fp32": "PyTorch",
    "compiled_torch-fp32": "torch.compile",
    "plain_onnxruntime-fp32": "ONNX Runtime",
    "optimized_onnxruntime-fp32": "ONNX Runtime with its transformers optimizer",
    "plain_openvino-fp32": "OpenVINO",
    "cast_torch-bf16": "PyTorch with bf16 weights",
    "autocast_torch-bf16": "PyTorch with autocast",
    "compiled_autocast_torch-bf16": "torch.compile with autocast",
    "plain_openvino-bf16": "OpenVINO",
    "plain_openvino-fp16": "OpenVINO",
    "plain_onnxruntime-int8+documented": "ONNX Runtime with `quantize_dynamic`",
}
BASELINE = "torch-fp32"
_PRECISIONS = ("fp32", "fp16", "bf16", "int8")


def paired_p50_ms(row: dict[str, Any]) -> dict[str, float]:
    """Return the latency of each contender from its ratio to the baseline within rounds, as `hasten build` does."""
    return {name: row["p50_ms"][BASELINE] / ratio["value"] for name, ratio in row["speedup"].items()}


def cpu() -> Study:
    """Return the study of CPU latency against PyTorch and stock runtimes, grouped by precision."""
    results = load("cpu")
    speed, build = results["speed"], results["build"]
    ours = {name: precision for precision, name in speed["hasten"].items()}
    labels = CPU_PEERS | {name: f"**hasten** `{name}`" for name in ours}
    shapes = speed["shapes"]
    rows = []
    for precision in _PRECISIONS:
        names = [name for name in labels if speed["contenders"].get(name, {}).get("precision") == precision]
        rows += [
            [precision, labels[name], _cosine_cell(speed, name), *(_speed_cell(row, name) for row in shapes)]
            for name in names
        ]
        if names and precision not in speed["hasten"]:
            rows.append([precision, "**hasten**: every variant was rejected", *["–"] * (1 + len(shapes))])
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in build["stages"].items())
    rounds = ", ".join(f"{row['rounds']} rounds at {row['shape']}" for row in shapes)
    bundle = speed.get("bundle")
    other_build = (
        f" They are of a build at {bundle['commit']}, not of the one above: how many int8 variants a search tries in "
        "its time budget varies."
        if bundle
        else ""
    )
    return Study(
        title="CPU",
        question="How fast is MiniLM-L6 on a CPU, at equal precision?",
        answer=[
            *table(["precision", "contender", "mean cosine", *(row["shape"] for row in shapes)], rows),
            "",
            "Speed-up over PyTorch fp32 with its 95 % interval, then the median latency; columns are batch × tokens. "
            "✗: below the bound of the accuracy gate.",
            "",
            "hasten against the fastest peer of the same precision, with the ratio of their speeds; *as fast as* means "
            "that its 95 % interval contains 1:",
            "",
            *(
                f"- {precision}: {_against_peers(speed, precision)}"
                for precision in _PRECISIONS
                if precision in ours.values()
            ),
            "",
            f"`hasten build` of {day(build)} chose `{build['chosen']}`. It took {build['seconds']:.0f} s ({stages}).",
        ],
        method=(
            "Latency from token ids to embeddings. Every contender runs in its own process; contenders alternate in "
            f"rounds, in {speed['runs']} runs with fresh processes "
            f"({rounds}). The speed-up is the median of the ratios within each round; the latency beside it is "
            "PyTorch's median divided by this ratio.",
            "Mean cosine: to PyTorch fp32 on the sample rows that `hasten build` judges variants on. Answers in int8 "
            "depend on the other rows of a batch; the worst of batches of 1, 8 and 32 counts.",
            "PyTorch runs with SDPA attention; torch.compile compiles for each shape. ONNX Runtime gets a plain "
            "export, and one with eager attention after `onnxruntime.transformers.optimizer`, which fuses no attention "
            "of SDPA exports. OpenVINO gets the plain export and `INFERENCE_PRECISION_HINT`; without the hint it "
            "computes in bf16 on CPUs that support it.",
            "hasten's variant is the one of its precision that was fastest at 8×128 in the build; it passed the "
            "accuracy gate before it was timed. `openvino` variants run in the same OpenVINO, on the graph after "
            f"hasten's passes.{other_build}",
            "Arm has not been measured with this method; [Accuracy](#accuracy) has speed-ups over stock ONNX Runtime "
            "on an Arm CPU.",
        ),
        machines=(machine_line(results),),
        command="make bench",
        files=("cpu",),
    )


def in_process() -> Study:
    """Return the study of what a call in process adds to thirty lines of Python."""
    results = load("in_process")
    rows = [
        [
            row["model"],
            str(row["tokens"]),
            row["texts"],
            *(f"{row[name] / 1e3:.2f} ms" for name in ("hasten_us", "thirty_lines_us")),
            "{value:+.0f} µs ({low:+.0f} to {high:+.0f})".format_map(row["difference_us"]),
        ]
        for row in results["rows"]
    ]
    sooner = [f"{row['texts']} ({row['model']}, {row['tokens']})" for row in results["rows"] if _is_later(row)]
    return Study(
        title="In process",
        question="What does `hasten.load(bundle)(text)` add to thirty lines of tokenizers and ONNX Runtime?",
        answer=[
            *table(["model", "tokens", "texts", "hasten", "thirty lines", "difference"], rows),
            "",
            f"The thirty lines answer sooner for: {'; '.join(sooner)}." if sooner else "hasten answers as soon.",
        ],
        method=(
            "One text per call, from text to label and score, with the same ONNX Runtime session of "
            f"`{results['variant']}`; calls alternate. The thirty lines are `benchmarks/serving/peers/classifier.py`.",
            f"Medians over {results['rounds']} rounds in each of {results['runs']} processes; the difference is the "
            "median over rounds with its bootstrap interval of 95 %.",
            "*Repeated* is one text again and again, *new* are new texts of known words, *all words new* are words "
            "that the word cache of hasten's tokenizer has never seen. The model of one layer shows Python's share.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/cpu/in_process.py MODEL",
        files=("in_process",),
    )


def _is_later(row: dict[str, Any]) -> bool:
    return float(row["difference_us"]["low"]) > 0


def _speed_cell(row: dict[str, Any], name: str) -> str:
    speedup = "1×" if name == BASELINE else interval(row["speedup"][name], "×")
    return f"{speedup}, {duration(paired_p50_ms(row)[name])}"


def _cosine_cell(speed: dict[str, Any], name: str) -> str:
    agreement = speed["contenders"][name]["agreement"]
    if agreement is None:
        return "reference"
    return f"{agreement['cosine_mean']:.5f}{'' if _is_accurate(speed, name) else ' ✗'}"


def _is_accurate(speed: dict[str, Any], name: str) -> bool:
    agreement = speed["contenders"][name]["agreement"]
    return agreement is None or bool(agreement["cosine_mean"] >= speed["min_agreement"])


def _against_peers(speed: dict[str, Any], precision: str) -> str:
    """Return in words where hasten is faster than, as fast as or slower than the fastest peer of a precision."""
    parts = []
    for row in speed["shapes"]:
        comparison = row["equal_precision"].get(precision)
        if comparison is None:
            return "no peer was measured."
        ratio, peer = comparison["speedup"], comparison["best_peer"]
        verdict = "faster than" if ratio["low"] > 1 else "slower than" if ratio["high"] < 1 else "as fast as"
        note = "" if _is_accurate(speed, peer) else " (fails the accuracy gate)"
        parts.append(f"{verdict} {CPU_PEERS[peer]}{note} at {row['shape']}: {interval(ratio, '×')}")
    return f"{'; '.join(parts)}."
