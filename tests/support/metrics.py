"""Compute the metric of outputs as verification does, from item scores."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.core.report import Metric
from hasten.core.tensors import Outputs
from hasten.tasks import AnyTask, Encoded, TaskSpec


def scored(task: AnyTask, outputs: Outputs, encoded: Encoded, gold: Sequence[object], spec: TaskSpec) -> Metric:
    """Return the metric; assert that its names are those the task announces for such labels."""
    metric = task.metric(task.item_scores(outputs, encoded, gold, spec), spec)
    assert {metric.name, *metric.other_metrics} <= {*task.metrics(gold, spec)}
    return metric
