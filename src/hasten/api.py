"""The public functions `hasten.build`, `hasten.load`, `hasten.pipeline` and `hasten.map`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hasten.backends import RunOptions
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import PlanError
from hasten.core.generation_types import TEXT2TEXT_GENERATION
from hasten.core.plan import Gate, Keep, Plan, Range, Shapes
from hasten.core.progress import Progress
from hasten.core.registry import did_you_mean
from hasten.core.system.hardware import this_machine
from hasten.families import all_tasks, family_of_bundle
from hasten.generation.generator import Generator
from hasten.generation.task_presets import TASK_PRESETS, is_task_preset
from hasten.predictor import Predictor, choose_artifact

if TYPE_CHECKING:
    import pyarrow as pa

    from hasten.corpus.operator import Operator

# transformers' other names of tasks.
_ALIASES = {"ner": "token-classification", "sentiment-analysis": "text-classification"}


def build(
    model: str | Path | object,
    output: str | Path | None = None,
    *,
    tokenizer: object | None = None,
    task: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
    file_name: str | None = None,
    batch_size: int | Sequence[int] = (1, 8, 32),
    seq_len: int | Sequence[int] = (16, 128, 256),
    variants: str | Sequence[str] = (),
    level: Literal["O1", "O2", "O3", "O4"] | None = None,
    preset: Literal["amx", "avx512_vnni", "avx512", "avx2", "arm64"] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    precision: str | None = None,
    data: str | Path | None = None,
    calibration: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    min_agreement: float | None = None,
    max_drop: float | None = None,
    metric: str | None = None,
    recipe: str | Path | None = None,
    search_budget_s: float = 300.0,
    bench_budget_s: float = 30.0,
    threads: int | None = None,
    keep: Literal["best", "all"] = "best",
    target: str | None = None,
    force: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Build a bundle: make the model fast and prove that it still answers the same.

    `model` is a hub id, a directory, or an object, which is left unchanged: a model of transformers or peft together
    with its `tokenizer`, a SentenceTransformer or a CrossEncoder. A model with quantizers (`hasten.quantize.qdq`) is
    compared with itself in float, and its quantizers make an additional variant, onnxruntime-int8+qdq.

    `file_name` selects an ONNX graph of the model to build from. Instead of `variants`, `level` and `preset` name them
    as Optimum's optimizer and quantizer do: the optimization level, and the CPU to quantize for. `device` is cpu or
    cuda; the default is a usable GPU, else the CPU. `precision` (fp16, fp8, int8 …) restricts the search, which tries
    every precision by default. Without `output` the bundle is written to the cache (`HASTEN_CACHE`), where it replaces
    the bundle of the same name.
    """
    from hasten.builder.build import build as run
    from hasten.builder.sources.in_memory import get_model_name, saved_to_directory

    if keep not in list(Keep):
        raise PlanError(f"keep is '{keep}'", hint=f"one of {', '.join(Keep)}")
    if level is not None or preset is not None:
        from hasten.builder.search.presets import candidates_for_level

        if variants or recipe is not None or target is not None:
            raise PlanError("level and preset already name variants and target", hint="leave out one or the other")
        variants, target = candidates_for_level(level, preset, this_machine(), device), preset
    plan = Plan(
        model=get_model_name(model),
        revision=revision,
        task=task,
        pooling=pooling,
        file_name=file_name,
        shapes=Shapes(Range.of("batch_size", _numbers(batch_size)), Range.of("seq_len", _numbers(seq_len))),
        variants=(variants,) if isinstance(variants, str) else tuple(variants),
        device=device,
        precision=precision,
        data=str(data) if data is not None else None,
        calibration=str(calibration) if calibration is not None else None,
        columns=dict(columns or {}),
        gate=Gate(min_agreement, max_drop, metric),
        recipe=str(recipe) if recipe is not None else None,
        search_budget_s=search_budget_s,
        bench_budget_s=bench_budget_s,
        threads=threads,
        keep=Keep(keep),
        target=target,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    path = Path(output).expanduser() if output is not None else None
    with saved_to_directory(model, tokenizer) as (directory, qdq_module):
        return run(plan, path, force=force, progress=progress, directory=directory, qdq_module=qdq_module)


def load(
    path: str | Path,
    variant: str | None = None,
    *,
    threads: int | None = None,
    strict: bool = False,
    max_memory: int | None = None,
) -> Predictor | Generator:
    """Open a bundle with a variant; the default is the fastest one that runs on this machine.

    `max_memory` is the resident memory in bytes that this process may reach: batches that need more are split, and a
    text that needs more by itself is an error. It bounds sessions on CPUs.

    `strict` opens the fastest variant whose answers on this machine match the bundle's reference answers.
    """
    bundle, options = open_bundle(path), RunOptions(threads, max_memory)
    if strict:
        from hasten.measure.open_verified import open_verified

        return open_verified(bundle, variant, options)
    return _open(bundle, variant, options)


def pipeline(
    task: str,
    model: str | Path,
    *,
    backend: str | None = None,
    precision: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    file_name: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
    data: str | Path | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Predictor | Generator:
    """Open a model for a task, like transformers' pipeline but without transformers or PyTorch.

    The tasks include those that transformers removed: question answering, summarization and translation (also as
    "translation_en_to_de", for a model that translates between several languages).

    The model is a hub id, a directory or a bundle. A model that is not a bundle is built once, which does need PyTorch,
    and kept in the cache (`HASTEN_CACHE`): in fp32 or in the given `precision`; "best" is the fastest variant that
    passes the accuracy gate.
    """
    from hasten.auto_build import bundle_for, name_of_model, variant_of
    from hasten.core.variant import VariantChoice

    name, tasks = _ALIASES.get(task, task), all_tasks()
    if is_task_preset(task):
        name = TEXT2TEXT_GENERATION
    if name not in tasks:
        names = (*tasks, *_ALIASES, *TASK_PRESETS)
        raise PlanError(f"there is no task '{task}'{did_you_mean(task, names)}", hint=f"one of {', '.join(names)}")
    choice = VariantChoice(backend, precision, device)
    plan = Plan(
        model=name_of_model(model),
        task=name,
        revision=revision,
        file_name=file_name,
        pooling=pooling,
        data=str(data) if data is not None else None,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    bundle = bundle_for(plan, choice, progress)
    bundle_task = bundle.manifest.task.name
    if bundle_task != name:
        raise PlanError(
            f"{model} is a bundle for {bundle_task}, not for {name}", hint=f"hasten.pipeline('{bundle_task}', …)"
        )
    return _open(bundle, variant_of(bundle, choice), RunOptions(threads), task)


def map(  # noqa: A001 – hasten.map, after the built-in function
    bundle: str | Path,
    batches: Iterable[pa.RecordBatch | pa.Table],
    *,
    columns: Mapping[str, str] | None = None,
    select: Sequence[str] = (),
    drop: Sequence[str] = (),
    where: str | None = None,
    vectors: Literal["float32", "float16", "int8", "binary"] = "float32",
    dimensions: int | None = None,
    on_long: Literal["truncate", "error"] = "truncate",
    prefix: str = "",
    variant: str | None = None,
    threads: int | None = None,
    max_memory: int | None = None,
    strict: bool = False,
    **options: object,
) -> Iterator[pa.RecordBatch]:
    """Answer Arrow batches: yield each with the answers as further columns, in order.

    The batches are read as they are needed and have the same columns. `columns` maps the names of the task to those of
    the batches, as in `{"text": "body"}`; `where` is a filter such as "lang = 'en' and stars >= 3"; other arguments are
    options of the task. A row that cannot be answered is an InputError. Files, with resume: `hasten map`.
    """
    from hasten.corpus.arrow_library import require_arrow
    from hasten.corpus.settings import AnswerSettings, OnLong, VectorType
    from hasten.corpus.stream import answer_batches

    require_arrow("hasten.map")
    for name, value, kind in (("vectors", vectors, VectorType), ("on_long", on_long, OnLong)):
        if value not in list(kind):
            raise PlanError(f"{name} is {value!r}", hint=f"one of {', '.join(kind)}")
    settings = AnswerSettings(
        columns=dict(columns or {}),
        options=options,
        where=where,
        on_long=OnLong(on_long),
        vectors=VectorType(vectors),
        dimensions=dimensions,
        select=tuple(select),
        drop=tuple(drop),
        prefix=prefix,
    )
    opened = open_bundle(bundle)
    family = family_of_bundle(opened)

    def open_operator(schema: pa.Schema) -> Operator:
        model = load(bundle, variant, threads=threads, strict=strict, max_memory=max_memory)
        with ExitStack() as on_error:
            on_error.callback(model.close)
            operator = family.operator(model, opened, schema, settings)
            on_error.pop_all()
        return operator

    return answer_batches(open_operator, batches, settings)


def _open(bundle: Bundle, variant: str | None, options: RunOptions, task: str = "") -> Predictor | Generator:
    return family_of_bundle(bundle).open(bundle, choose_artifact(bundle, variant), options, task)


def _numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
