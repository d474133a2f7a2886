"""Detect the task of a model: the plan's task if the model fits it, else the task that its files name."""

from __future__ import annotations

from hasten.builder.sources.cross_encoder import is_cross_encoder, read_scoring_layout, score_labels
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.late_layout import is_multi_vector_encoder
from hasten.builder.sources.sparse_layout import is_sparse_encoder
from hasten.core.errors import PlanError
from hasten.core.plan import Plan
from hasten.core.tensors import MASKS
from hasten.families import FAMILIES, all_tasks, family_of
from hasten.tasks import AnyTask, TaskSpec

EMBEDDING = "sentence-similarity"
RANKING = "text-ranking"
SPARSE = "sparse-embedding"
MULTI_VECTOR = "multi-vector-embedding"
_NO_HEAD = "feature-extraction"


def detect_task(model: ModelDirectory, plan: Plan) -> str:
    """Return the task to build the model for. Raise if it cannot be determined or the model lacks its head."""
    detected = _detect(model)
    name = plan.task or (EMBEDDING if detected in (None, _NO_HEAD) and plan.pooling is not None else detected)
    if plan.pooling is not None and name != EMBEDDING:
        raise PlanError(f"--pooling is for {EMBEDDING}, and {model.id} is for {name}")
    if name is None:
        raise PlanError(
            f"cannot determine the task of {model.id} from its architecture '{model.architecture or 'unknown'}'",
            hint=f"--task with one of: {', '.join(all_tasks())}",
        )
    heads = family_of(name).heads(name)
    # Without a class in the configuration, trust the plan's task: loading detects a missing head.
    is_scored_by_modules = name == RANKING and read_scoring_layout(model) is not None
    if heads and model.architecture and not model.architecture.endswith(heads) and not is_scored_by_modules:
        fits = f"; it fits {detected}" if detected and detected != name else ""
        raise PlanError(f"{model.id} is a {model.architecture}, which has no head for {name}{fits}")
    return name


def predict_task(model: ModelDirectory, task: AnyTask, plan: Plan) -> TaskSpec | None:
    """Return the task's settings as far as the configuration files show them; None if only loading does."""
    if task.auto_class.endswith("Classification"):
        layout = read_scoring_layout(model) if task.name == RANKING else None
        labels = _labels(model, plan) if layout is None else score_labels(layout)
        problem = model.config.get("problem_type") or ""
        return None if labels is None else TaskSpec(task.name, labels=labels, problem=problem)
    if MASKS in task.axes:
        token = _mask_token(model)
        return None if token is None else TaskSpec(task.name, mask_token=token)
    return TaskSpec(task.name)


def _labels(model: ModelDirectory, plan: Plan) -> tuple[str, ...] | None:
    id2label = model.config.get("id2label")
    if model.base is not None:
        return None  # the adapter may have its own head, with another number of labels
    if isinstance(id2label, dict):
        labels = [id2label.get(str(index)) for index in range(len(id2label))]
        return None if None in labels else tuple(map(str, labels))
    # Without labels in the file, the configuration class has defaults.
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=plan.trust_remote_code)
    except Exception:  # loading the model reports the error
        return None
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def _mask_token(model: ModelDirectory) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        content = model.json(file)
        token = content.get("mask_token") if isinstance(content, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None


def _detect(model: ModelDirectory) -> str | None:
    """Detect the task from the model's files; those of sentence-transformers are more specific than the class name."""
    if is_cross_encoder(model):
        return RANKING
    if is_sparse_encoder(model):
        return SPARSE
    if is_multi_vector_encoder(model):
        return MULTI_VECTOR
    heads = [item for family in FAMILIES.all() for item in family.detected_heads.items()]
    by_class = next((task for task, suffixes in heads if model.architecture.endswith(suffixes)), None)
    has_adapter_head = model.base is not None and model.architecture != model.base.architecture and by_class is not None
    # Many name the class they were pretrained as: all-mpnet-base-v2 lists MPNetForMaskedLM.
    if model.find("modules.json") is not None and not has_adapter_head:
        return EMBEDDING
    if by_class is not None:
        return by_class
    # BertModel has no head; GPT2DoubleHeadsModel has two.
    has_no_head = model.architecture.endswith("Model") and not model.architecture.endswith(("HeadModel", "HeadsModel"))
    return _NO_HEAD if has_no_head else None
