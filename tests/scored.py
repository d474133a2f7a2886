"""The metric of outputs, the way verification takes it: marks first."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.core.report import Metric
from hasten.core.tensors import Outputs
from hasten.tasks import AnyTask, Encoded, TaskSpec


def scored(task: AnyTask, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> Metric:
    """Also holds the names against those that the task promises for such labels before anything runs."""
    metric = task.metric(task.marks(outputs, encoded, gold, spec), spec)
    assert {metric.name, *metric.also} <= {*task.metrics(gold, spec)}
    return metric
