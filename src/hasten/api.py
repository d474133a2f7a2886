"""`hasten.build`, `hasten.load`, `hasten.pipeline`: the keyword arguments people type, made a plan or a predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hasten.backends import RunOptions
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import PlanError
from hasten.core.generation import TEXT2TEXT_GENERATION, WRITING
from hasten.core.hardware import this_machine
from hasten.core.plan import Gate, Keep, Plan, Range, Shapes
from hasten.core.progress import Progress
from hasten.core.registry import did_you_mean
from hasten.generation.generator import Generator, open_generator
from hasten.generation.purpose import PURPOSES, is_purpose
from hasten.predictor import Predictor, open_predictor
from hasten.tasks import TASKS

# What transformers calls them too.
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
    budget_s: float = 300.0,
    bench_budget_s: float = 30.0,
    threads: int | None = None,
    keep: Literal["best", "all"] = "best",
    target: str | None = None,
    force: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Make the model fast, prove that it still answers the same, and write the bundle.

    `model` is a hub id, a directory, or an object: a model of transformers or peft together with its `tokenizer`, a
    SentenceTransformer or a CrossEncoder; the object is left as it was. One with quantizers (`hasten.quantize.qdq`) is
    compared with itself in float, and they make a variant of their own, onnxruntime-int8+qdq. `file_name` names an ONNX
    graph of the model to build from. Instead of `variants`, `level` and `preset` name them as Optimum's optimizer and
    quantizer do: how far to optimize, and the processor to quantize for. `device` says whose variants are tried, cpu or
    cuda; without it a GPU's if one can be used. `precision` (fp16, fp8, int8 …) leaves all others out of the search,
    which tries what there is by itself. Without `output` the bundle goes to the cache (`HASTEN_CACHE`) and replaces the
    one of the same name there.
    """
    from hasten.builder.build import build as run
    from hasten.builder.memory import name_of, saved

    if keep not in list(Keep):
        raise PlanError(f"keep is '{keep}'", hint=f"one of {', '.join(Keep)}")
    if level is not None or preset is not None:
        from hasten.builder.levels import of_level

        if variants or recipe is not None or target is not None:
            raise PlanError("level and preset name variants and target themselves", hint="leave one or the other out")
        variants, target = of_level(level, preset, this_machine(), device), preset
    plan = Plan(
        model=name_of(model),
        revision=revision,
        task=task,
        pooling=pooling,
        file_name=file_name,
        shapes=Shapes(
            Range.of("batch_size", _numbers(batch_size)),
            Range.of("seq_len", _numbers(seq_len)),
        ),
        variants=(variants,) if isinstance(variants, str) else tuple(variants),
        device=device,
        precision=precision,
        data=str(data) if data is not None else None,
        calibration=str(calibration) if calibration is not None else None,
        columns=dict(columns or {}),
        gate=Gate(min_agreement, max_drop, metric),
        recipe=str(recipe) if recipe is not None else None,
        budget_s=budget_s,
        bench_budget_s=bench_budget_s,
        threads=threads,
        keep=Keep(keep),
        target=target,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    place = Path(output).expanduser() if output is not None else None
    with saved(model, tokenizer) as (directory, quantized):
        return run(plan, place, force=force, progress=progress, directory=directory, quantized=quantized)


def load(
    path: str | Path, variant: str | None = None, *, threads: int | None = None, strict: bool = False
) -> Predictor | Generator:
    """Open a bundle. Without a choice, the fastest of its variants that runs on this machine.

    Strict: the fastest that proves here, on the bundle's reference answers, that it answers like the original.
    """
    bundle, options = open_bundle(path), RunOptions(threads)
    if strict:
        from hasten.measure.strict import open_proven

        return open_proven(bundle, variant, options)
    if bundle.manifest.generation is not None:
        return open_generator(bundle, variant, options)
    return open_predictor(bundle, variant, options)


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
    """transformers' pipeline without transformers or PyTorch, and with the tasks that it lost: question answering,
    summarization, translation (also as "translation_en_to_de", where a model translates between several languages).

    The model is a hub id, a directory or a bundle. What is not a bundle is built once, which does take PyTorch, and
    kept in the cache (`HASTEN_CACHE`): in fp32 unless another `precision` is named, the fastest that passes the gate
    with "best".
    """
    from hasten.core.variant import VariantChoice
    from hasten.on_demand import Wish, bundle_of, variant_of

    name, known = _ALIASES.get(task, task), (*TASKS.names(), *WRITING)
    if is_purpose(task):
        name = TEXT2TEXT_GENERATION
    if name not in known:
        every = (*known, *_ALIASES, *PURPOSES)
        raise PlanError(f"there is no task '{task}'{did_you_mean(task, every)}", hint=f"one of {', '.join(every)}")
    choice = VariantChoice(backend, precision, device)
    wish = Wish(
        task=name,
        choice=choice,
        revision=revision,
        file_name=file_name,
        pooling=pooling,
        data=str(data) if data is not None else None,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    bundle = bundle_of(model, wish, progress)
    own = bundle.manifest.task.name
    if own != name:
        raise PlanError(f"{model} is a bundle for {own}, not for {name}", hint=f"hasten.pipeline('{own}', …)")
    if bundle.manifest.generation is not None:
        return open_generator(bundle, variant_of(bundle, choice), RunOptions(threads), task=task)
    return open_predictor(bundle, variant_of(bundle, choice), RunOptions(threads))


def _numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
