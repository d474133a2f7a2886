"""The benchmark studies of models: first answer, latency on GPUs, accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from generator.precision import FILES, MODELS, accuracy_cells
from generator.results import duration, gpu_name, interval, link, load, machine_line, table
from gpu_sources import ENCODER_SOURCES, changed

# The columns of the GPU table: the fastest of each one's variants.
GPU_COLUMNS = {
    "PyTorch": ("torch-fp16@cuda", "torch-bf16@cuda"),
    "torch.compile": ("inductor-fp16@cuda",),
    "torch.compile, static shapes": ("inductor_static-fp16@cuda",),
    "ONNX Runtime, CUDA graphs": ("onnxruntime-fp16@cuda",),
    "hasten": ("fused-fp16@cuda",),
    "hasten, tanh GELU": ("fused-fp16+tanhgelu@cuda",),
    "hasten fp8": ("fused-fp8@cuda",),
    "hasten fp8, tanh GELU": ("fused-fp8+tanhgelu@cuda",),
    "hasten fp8, tanh GELU, fast accumulation": ("fused-fp8+tanhgelu+fastaccum@cuda",),
}

# Rounds whose medians differ by more than this factor are shown with their range.
_WIDE_SPREAD = 4 / 3


@dataclass(frozen=True, slots=True)
class Study:
    """A question, its answer as tables, and how to repeat it."""

    title: str
    question: str
    answer: list[str]
    method: tuple[str, ...]
    machines: tuple[str, ...]
    command: str
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the section of the benchmarks page."""
        return [
            *("", f"## {self.title}", "", f"**{self.question}**", ""),
            *self.answer,
            *("", "Method:", "", *(f"- {line}" for line in self.method), ""),
            *(f"Machine: {machine}.\n" for machine in self.machines),
            f"Command: `{self.command}`. "
            f"Result file{'s' if len(self.files) > 1 else ''}: {', '.join(map(link, self.files))}.",
        ]


def first_answer() -> Study:
    """Return the study of start-up time and memory."""
    results = load("cpu")
    rows = [
        [
            name.replace("_", "-"),
            f"{row['seconds']:.1f} s",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            " and ".join(row["loaded"]) or "neither torch nor transformers",
        ]
        for name, row in results["first_answer"].items()
    ]
    return Study(
        title="First answer",
        question="How long does a fresh process need until its first embedding?",
        answer=table(["library", "time", "peak memory", "imports"], rows),
        method=(
            "One fresh process per measurement opens MiniLM-L6 and embeds one text; the median of repeated starts.",
            "Time runs from the start of the process to the answer. Files are in the page cache.",
        ),
        machines=(machine_line(results),),
        command="python benchmarks/cpu.py --fastembed PYTHON",
        files=("cpu",),
    )


def gpu() -> Study:
    """Return the study of encoder latency on a GPU."""
    results, served = load("gpu"), load("serving_gpu")
    latency = {f"{row['model']} {row['shape']}": row["call_ms"] for row in results["rows"]}
    device = {f"{row['model']} {row['shape']}": row["device_ms"] for row in results["rows"]}
    stream = results["stream"]
    texts = {
        "boost clocks": stream["ms"],
        "sustained": {name: {"p50": run["ms"]} for name, run in stream["sustained"].items()},
    }
    lone = [
        [row["contender"], f"{row['tokens']}", duration(row["p50_ms"]), duration(row["p99_ms"])]
        for row in served["alone"]
    ]
    mixed = [
        [run["texts"], f"{run['per_second']:,.0f}", duration(run["p50_ms"]), duration(run["p99_ms"])]
        for run in served["mixed"]
    ]
    return Study(
        title="GPU",
        question=f"How fast are encoders on one {gpu_name(results)}?",
        answer=[
            *_gpu_table("End-to-end latency", latency),
            "",
            *_gpu_remarks(results),
            f"Throughput: {stream['model']} on {stream['texts']:,} texts of mixed length "
            f"({stream['tokens']:,} tokens), total time:",
            "",
            *_gpu_table("Clocks", texts),
            "",
            "The part of it that hasten spends on the device, kernels and copies, by the device's clock:",
            "",
            *_gpu_table("Device time", device),
            "",
            f"Served over HTTP: one client, a classifier of MiniLM-L6's size as `{served['variant']}`, text in, label "
            "out:",
            "",
            *table(["interface", "tokens", "p50", "p99"], lone),
            "",
            f"{served['mixed'][0]['clients']} clients with texts of mixed length:",
            "",
            *table(["texts", "requests/s", "p50", "p99"], mixed),
        ],
        method=(
            "fp16 unless the column says otherwise, with random weights: the table is about speed only. Whether fp8 "
            "is accurate enough for a trained model is decided by the accuracy gate in every build.",
            "End-to-end latency is the median wall time from token ids in host memory to scores in host memory, over "
            "alternating rounds. All contenders get the same weights and batches. The table is of one run, on one day "
            "and commit. Where the medians of the rounds differ by more than a third, their range follows.",
            "Before it is timed, each contender is compared with PyTorch fp32. It is left out if its logits differ by "
            "more than 0.01 (bf16: 0.05, int8: 0.1, fp8: 0.25).",
            "A GPU that draws its maximum power lowers its clocks after a few tenths of a second. Every round "
            "therefore starts after a pause, so that no contender inherits the clocks of the one before (*boost "
            "clocks*). *Sustained* runs follow each other without pauses.",
            "The mixed-length texts are SST-2 sentences and IMDB reviews, half each, truncated to 512 tokens. "
            "Contenders that pad get them sorted by length, in batches of 32.",
            "PyTorch is the faster of fp16 and bf16. It waits for the host to launch kernels, about 0.5 ms per layer "
            "here, so that small models and batches take as long as the host needs, and vary with it.",
            "torch.compile runs in mode `reduce-overhead`, which captures CUDA graphs: with dynamic shapes, "
            "and with a compilation per shape (`dynamic=False`), which does not suit texts of mixed length. Mode "
            "`max-autotune`, which takes minutes per model, is not compared.",
            "TensorRT is not compared: its builder cannot be installed from PyPI, and the runtime of TensorRT for RTX, "
            "which can, does not support this GPU.",
            "Over HTTP the client repeats one text, whose words the tokenizer's cache knows; *unseen word* changes one "
            "word in every request; *unseen text* has no word that was sent before, each of two pieces or more.",
            "hasten's last-layer pruning is off. ONNX Runtime replays one CUDA graph per shape; its library was "
            "installed without the kernels for other GPUs.",
            "torch.compile may recompile 64 times: with its default limit of 8 it would give up and run uncompiled. "
            "– means that the contender does not run the workload, or that its answers differed too much.",
        ),
        machines=(machine_line(results), f"{machine_line(served)} (served over HTTP)"),
        command="python benchmarks/gpu.py; python benchmarks/serving/gpu.py",
        files=("gpu", "serving_gpu"),
    )


def fastest(times: Mapping[str, float], variants: tuple[str, ...]) -> float | None:
    """Return the lowest time of these variants; None if none was measured."""
    return min((times[name] for name in variants if name in times), default=None)


def _gpu_table(title: str, rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return a table of times by contender, without contenders that have none."""
    columns = {
        label: variants
        for label, variants in GPU_COLUMNS.items()
        if any(name in times for times in rows.values() for name in variants)
    }
    body = [[label, *(_gpu_cell(times, variants) for variants in columns.values())] for label, times in rows.items()]
    return table([title, *columns], body)


def _gpu_cell(times: Mapping[str, Mapping[str, float]], variants: tuple[str, ...]) -> str:
    """Return the time of the fastest variant, and its range over the rounds if that is wide."""
    measured = [times[name] for name in variants if name in times]
    if not measured:
        return "–"
    best = min(measured, key=lambda each: each["p50"])
    low, high = best.get("low", best["p50"]), best.get("high", best["p50"])
    spread = f" ({duration(low)} to {duration(high)})" if high > _WIDE_SPREAD * low else ""
    return duration(best["p50"]) + spread


def _gpu_remarks(results: dict[str, Any]) -> list[str]:
    """Return what a reader of the GPU table must know about its run."""
    remarks = []
    if results["unmeasured"]:
        remarks += [f"This run has not measured {', '.join(results['unmeasured'])}.", ""]
    if "sources" in results and (files := changed(results["sources"], *ENCODER_SOURCES)):
        remarks += [f"Since this run, {len(files)} files of kernels and GPU backends have changed.", ""]
    return remarks


def accuracy() -> Study:
    """Return the study of what reduced precision costs in accuracy."""
    rows, machines = [], []
    for file in FILES:
        runs = {name: results for name, results in load(file).items() if name in MODELS}
        for name, results in runs.items():
            chosen = results["chosen"]
            speed = results["speed"][-1]
            rows.append(
                [
                    f"{MODELS[name]}, {results['machine']['architecture']}",
                    f"`{chosen}`",
                    f"{interval(speed['over_plain'][chosen], '×')} at {speed['shape']}",
                    *accuracy_cells(results["answers"][chosen]),
                ]
            )
        machines.append(machine_line(next(iter(runs.values()))))
    header = ["model", "chosen variant", "speed-up", "metric", "drop in points", "flips"]
    return Study(
        title="Accuracy",
        question="What does the chosen variant cost in accuracy on labelled data?",
        answer=[
            *table(header, rows),
            "",
            "[Every variant, including the rejected ones and those of other tools](reference/precision.md).",
        ],
        method=(
            "Speed-up: over stock ONNX Runtime in fp32, median over alternating rounds with its confidence interval.",
            "Drop: against PyTorch fp32 on the same rows, with its confidence interval. Flips: changed labels.",
            "Variants are judged on rows that they were not calibrated on.",
        ),
        machines=tuple(machines),
        command="python benchmarks/quantization/precision.py --models DIR --data DIR",
        files=FILES,
    )
