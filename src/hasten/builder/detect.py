"""Which task a model is for: the one that was asked for, if it fits, or the one its files name."""

from __future__ import annotations

from hasten.builder.cross_encoder import is_cross_encoder
from hasten.builder.source import ModelDirectory
from hasten.core.errors import PlanError
from hasten.core.plan import Plan
from hasten.tasks import TASKS, AnyTask

EMBEDDING = "sentence-similarity"
RANKING = "text-ranking"
_BARE = "feature-extraction"


def detect_task(model: ModelDirectory, plan: Plan) -> AnyTask:
    found = _find(model)
    meant = plan.task or (EMBEDDING if found in (None, _BARE) and plan.pooling is not None else found)
    if plan.pooling is not None and meant != EMBEDDING:
        raise PlanError(f"--pooling is for {EMBEDDING}, and {model.id} is for {meant}")
    if meant is None:
        raise PlanError(
            f"cannot tell the task of {model.id} from its architecture '{model.architecture or 'unknown'}'",
            hint=f"--task with one of: {', '.join(TASKS.names())}",
        )
    task = TASKS.get(meant)
    # Where a configuration names no class, a task that was asked for is believed; a head that is missing shows later.
    if task.heads and model.architecture and not model.architecture.endswith(task.heads):
        fits = f"; it fits {found}" if found and found != task.name else ""
        raise PlanError(f"{model.id} is a {model.architecture}, which has no head for {task.name}{fits}")
    return task


def _find(model: ModelDirectory) -> str | None:
    """What the model's files say, sentence-transformers' first: they tell more than the name of a class."""
    if is_cross_encoder(model):
        return RANKING
    detected = [task for task in TASKS.all() if task.is_detected]
    by_class = next((task.name for task in detected if model.architecture.endswith(task.heads)), None)
    has_own_head = model.base is not None and model.architecture != model.base.architecture and by_class is not None
    # Many still name the class they were pretrained as: all-mpnet-base-v2 says MPNetForMaskedLM.
    if model.find("modules.json") is not None and not has_own_head:
        return EMBEDDING
    if by_class is not None:
        return by_class
    # BertModel, but not GPT2LMHeadModel.
    is_bare = model.architecture.endswith("Model") and not model.architecture.endswith(("HeadModel", "HeadsModel"))
    return _BARE if is_bare else None
