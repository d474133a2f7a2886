"""Generates the benchmarks page: one section per study."""

from __future__ import annotations

from generator import (
    cpu_study,
    engine_builds,
    generation_study,
    serving_resilience,
    serving_studies,
    serving_throughput,
    studies,
)
from generator.results import GENERATED

_STUDIES = (
    cpu_study.cpu,
    cpu_study.in_process,
    studies.first_answer,
    serving_studies.latency,
    serving_throughput.throughput,
    serving_resilience.endurance,
    serving_resilience.attack,
    serving_resilience.long_prompts,
    serving_resilience.memory,
    generation_study.generation,
    studies.gpu,
    engine_builds.tensorrt_rtx,
    studies.accuracy,
    serving_studies.pods,
)


def page() -> str:
    """Return the page of all studies."""
    lines = [
        GENERATED,
        "# Benchmarks",
        "",
        "Every number on this page comes from a file in `benchmarks/results`, which also holds the spread, the commit "
        "and the machine. Answers are compared before anything is timed. Contenders run in their own processes and "
        "alternate; nothing else runs on the machine. Latencies are medians unless stated otherwise. "
        "Times on other machines differ: repeat them with the command of each section.",
    ]
    for study in _STUDIES:
        lines += study().lines()
    return "\n".join(lines) + "\n"
