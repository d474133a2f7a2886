"""Which task a model is for: the one that was asked for, if it fits, or the one its files name."""

from __future__ import annotations

from hasten.builder.cross_encoder import is_cross_encoder
from hasten.builder.source import ModelDirectory
from hasten.core.errors import PlanError
from hasten.core.generation import TEXT2TEXT_GENERATION, TEXT_GENERATION, WRITING
from hasten.core.plan import Plan
from hasten.core.tensors import MASKS
from hasten.tasks import TASKS, AnyTask, TaskSpec

EMBEDDING = "sentence-similarity"
RANKING = "text-ranking"
_BARE = "feature-extraction"
# How the names of classes end that write.
_WRITERS = {
    TEXT_GENERATION: ("ForCausalLM", "LMHeadModel"),
    TEXT2TEXT_GENERATION: ("ForConditionalGeneration", "MTModel"),
}


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


def find_writing(model: ModelDirectory, plan: Plan) -> str | None:
    """The task of a model that writes, asked for or found; None for every other."""
    fitting = next((task for task, heads in _WRITERS.items() if model.architecture.endswith(heads)), None)
    if plan.task is None:
        return fitting if _find(model) is None else None
    if plan.task not in WRITING:
        return None
    if model.architecture and fitting != plan.task:
        fits = f"; it fits {fitting or _find(model)}" if fitting or _find(model) else ""
        raise PlanError(f"{model.id} is a {model.architecture}, which has no head for {plan.task}{fits}")
    return plan.task


def foresee(model: ModelDirectory, task: AnyTask, plan: Plan) -> TaskSpec | None:
    """What rows are read by, as far as the files beside the weights tell; None where only loading does."""
    if task.auto_class.endswith("Classification"):
        labels = _labels(model, plan)
        problem = model.config.get("problem_type") or ""
        return None if labels is None else TaskSpec(task.name, labels=labels, problem=problem)
    if MASKS in task.axes:
        token = _mask_token(model)
        return None if token is None else TaskSpec(task.name, mask_token=token)
    return TaskSpec(task.name)


def _labels(model: ModelDirectory, plan: Plan) -> tuple[str, ...] | None:
    named = model.config.get("id2label")
    if model.base is not None:
        return None  # the head, and how many labels it has, may be the adapter's own
    if isinstance(named, dict):
        found = [named.get(str(index)) for index in range(len(named))]
        return None if None in found else tuple(map(str, found))
    # Where a configuration names none, its class does.
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=plan.trust_remote_code)
    except Exception:  # loading the model says what is wrong with it
        return None
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def _mask_token(model: ModelDirectory) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        about = model.json(file)
        token = about.get("mask_token") if isinstance(about, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None


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
    # BertModel, but not GPT2LMHeadModel, nor MarianMTModel.
    heads = ("HeadModel", "HeadsModel", "MTModel")
    is_bare = model.architecture.endswith("Model") and not model.architecture.endswith(heads)
    return _BARE if is_bare else None
