"""What a build would do, and all that can be refused before the weights are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.backends import BACKENDS
from hasten.backends.onnxruntime import stored_precision
from hasten.builder.choose import GRAPH, MODULE, check_not_again, contenders, device_of
from hasten.builder.detect import detect_task, find_writing, foresee
from hasten.builder.search import lacking, ladder
from hasten.builder.source import ModelDirectory, find_model
from hasten.bundle.write import check_target
from hasten.core.cache import cache_directory
from hasten.core.errors import PlanError, StageError, UnsupportedError, missing_package
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan
from hasten.core.report import Candidate, Status
from hasten.core.variant import CPU, CUDA, Precision, Variant
from hasten.measure.data import Data, check_columns, read_data
from hasten.measure.rows import check_calibration, check_rows, naming, set_aside
from hasten.measure.writing import check_gate
from hasten.quantize.recipe import Method, Recipe, read_recipe
from hasten.quantize.ways import (
    ENGINE_OF_QUANTIZERS,
    FUSED_OF_QUANTIZERS,
    OF_QUANTIZERS,
    is_of_given_quantizers,
    is_of_quantized_graph,
    is_of_quantizers,
    needs_calibration,
)
from hasten.tasks import AnyTask


@dataclass(frozen=True, slots=True)
class Outline:
    """What a build would do, before it does it."""

    model: str
    task: str
    target: Path
    # The backend that runs the original.
    baseline: str
    # Whose variants contend, unless they were named.
    device: str
    contenders: tuple[str, ...]
    # What is tried after them while there is time.
    further: tuple[str, ...]
    unavailable: tuple[Candidate, ...]
    # What a person should know about the data.
    notes: tuple[str, ...] = ()


def outline(plan: Plan, output: Path | None = None, *, force: bool = False) -> Outline:
    """All that can be refused or resolved without the weights: `--dry-run`, and the first step of every build."""
    return look(plan, output, force=force, directory=None)[0]


@dataclass(frozen=True, slots=True)
class Given:
    """What the user brings beside the model, read once: a pipe cannot be read again."""

    data: Data | None
    calibration: Data | None
    recipe: Recipe | None
    # Where the model comes with quantizers in it, which know their ranges: what they round to.
    rounded: Precision | None = None

    def calibrates(self, variant: Variant) -> bool:
        """Whether making a variant takes rows: a recipe carries all that was found, but for NNCF's."""
        is_found = self.recipe is not None and self.recipe.method is not Method.NNCF
        is_known = self.rounded is not None and is_of_quantizers(variant)
        return not is_found and not is_known and needs_calibration(variant)


def look(
    plan: Plan, output: Path | None, *, force: bool, directory: Path | None, rounded: Precision | None = None
) -> tuple[Outline, Given]:
    """The outline, and the rows that were read for it."""
    if output is not None:
        check_target(output, force=force)
    given = Given(
        read_data(plan.data, plan.columns) if plan.data is not None else None,
        # It needs no labels, so those of the columns may be missing.
        read_data(plan.calibration, plan.columns, may_lack_columns=True) if plan.calibration is not None else None,
        read_recipe(Path(plan.recipe)) if plan.recipe is not None else None,
        rounded,
    )
    model = find_model(plan, with_weights=False, directory=directory)
    if (writing := find_writing(model, plan)) is not None:
        if rounded is not None:
            raise UnsupportedError(
                f"{model.id} has quantizers, and of a model that writes they make nothing yet",
                hint="qdq.disable(model) builds it as a float model",
            )
        target = output or cache_directory() / "bundles" / _cache_name(model, directory)
        check_target(target, force=force or output is None)
        return outline_writing(model, plan, writing, target), given
    baseline = MODULE if model.graph is None else GRAPH
    device = device_of(plan, this_machine(), baseline)
    wanted, unavailable = contenders(plan, this_machine(), baseline, device, given.recipe)
    for variant in filter(is_of_given_quantizers, wanted):
        if rounded is None:
            raise PlanError(
                f"{variant} is made by quantizers in the module, and {model.id} has none that is on",
                hint="hasten.build(model, tokenizer=…) with a model that was made inside qdq.patched(); "
                "qdq.enable(model) where all are off",
            )
        if variant.precision is not rounded:
            raise PlanError(f"{variant} cannot be made by quantizers that round to {rounded}, as those of {model.id}")
    if baseline == GRAPH and ENGINE_OF_QUANTIZERS in wanted:
        raise UnsupportedError(
            f"{ENGINE_OF_QUANTIZERS} is made by quantizers in a PyTorch module, and {model.id} comes as an ONNX graph",
            hint=("leave --file-name out, or " if plan.file_name else "") + "give the model the graph was made from",
        )
    if baseline == MODULE and (lacks := next(filter(is_of_quantized_graph, wanted), None)) is not None:
        raise UnsupportedError(
            f"{lacks} is made from an ONNX graph that comes quantized, and {model.id} is none",
            hint=f"--variants {ENGINE_OF_QUANTIZERS} quantizes by itself",
        )
    task = detect_task(model, plan)
    notes = _check_given(given, plan, model, task)
    if baseline == MODULE:  # a graph may come quantized
        for variant in wanted:
            if (package := lacking(variant)) is not None:
                raise missing_package(package, f"making {variant}", package)
    came_in = _came_in(model)
    for variant in wanted:
        check_not_again(variant, came_in, given.recipe)
    if asked := _not_calibrated(wanted, given, came_in):
        raise PlanError(f"{asked[0]} is calibrated: {_too_few(given)}", hint="--calibration with other rows")
    target = output or cache_directory() / "bundles" / _cache_name(model, directory)
    if output is None:
        check_target(target, force=True)
    further: list[Variant] = []
    if not plan.variants and given.recipe is None:
        if rounded is not None:
            wanted += _of_given_quantizers(model, rounded, device)
        further, others = _further(wanted, given, came_in, baseline)
        unavailable += others
        wanted, further = (_of_precision(variants, plan) for variants in (wanted, further))
        if not wanted and not further:
            raise UnsupportedError(
                f"nothing that is tried on the {device} here computes in {plan.precision}",
                hint="--dry-run without --precision lists what is",
            )
    if rounded is not None and not any(map(is_of_quantizers, (*wanted, *further))):
        made = OF_QUANTIZERS if (device, rounded) == (CPU, Precision.INT8) else FUSED_OF_QUANTIZERS[rounded]
        notes += (f"the quantizers of {model.id} are not used: {made} is not among what is tried",)
    if given.calibration is not None and not _calibrated((*wanted, *further), given, came_in):
        notes += ("--calibration is not used: nothing that is tried is calibrated",)
    names, later = (tuple(variant.name for variant in variants) for variants in (wanted, further))
    return Outline(model.id, task.name, target, baseline, device, names, later, tuple(unavailable), notes), given


def _of_given_quantizers(model: ModelDirectory, rounded: Precision, device: str) -> list[Variant]:
    """What the quantizers that a model brings make there."""
    if device == CUDA:
        fused = FUSED_OF_QUANTIZERS[rounded]
        return [fused] if BACKENDS.get(fused.backend).probe(this_machine(), fused).ok else []
    if rounded is not OF_QUANTIZERS.precision:
        raise UnsupportedError(
            f"the quantizers of {model.id} round to {rounded}, and nothing computes in it on the {device}",
            hint="qdq.patched('int8'); or on a GPU, of Ada, Hopper or newer; or qdq.export for the graph alone",
        )
    return [OF_QUANTIZERS]


def _of_precision(variants: Sequence[Variant], plan: Plan) -> list[Variant]:
    return [variant for variant in variants if plan.precision in (None, variant.precision)]


def _check_given(given: Given, plan: Plan, model: ModelDirectory, task: AnyTask) -> tuple[str, ...]:
    """Refuse what no build could judge by, and say what it will not show."""
    check_columns(plan.columns, task)
    notes: tuple[str, ...] = ()
    if given.data is not None:
        spec = foresee(model, task, plan)
        rows = given.data.rows_for(spec, is_quiet=True) if spec is not None else given.data.rows
        with naming(given.data.name, task, rows):
            notes += check_rows(task, spec, rows, plan.gate, plan.gate.needing_labels)
    if given.calibration is not None:
        notes += check_calibration(task, given.data, given.calibration)
    return notes


def _came_in(model: ModelDirectory) -> Precision:
    """What a model is stored in: fp32, to which halves are widened, unless it is a graph that was quantized before.

    A graph on the hub is not there yet, and one that cannot be read is for whoever loads it to refuse.
    """
    graph = model.path / model.graph if model.graph is not None else None
    if graph is None or not graph.is_file():
        return Precision.FP32
    try:
        found = stored_precision(graph)
    except ImportError as error:
        raise missing_package("onnx", "building", "build") from error
    except StageError:
        return Precision.FP32
    return found if found in (Precision.INT8, Precision.INT4) else Precision.FP32


def _further(
    wanted: Sequence[Variant], given: Given, came_in: Precision, baseline: str
) -> tuple[list[Variant], list[Candidate]]:
    """What is tried beyond what backends offer, and what is not, with the reason."""
    further, others = ladder(wanted, this_machine())
    # In a graph quantizers have no module to stand in; and those that a module brings are the ones that are used.
    if baseline == GRAPH or given.rounded not in (None, ENGINE_OF_QUANTIZERS.precision):
        further = [variant for variant in further if not is_of_quantizers(variant)]
    refused, reason = _not_calibrated(further, given, came_in), _too_few(given)
    if came_in is not Precision.FP32:
        refused, reason = further, f"the graph that was given is in {came_in} already"
    others += [Candidate(variant.name, Status.SKIPPED, f"not tried: {reason}") for variant in refused]
    return [variant for variant in further if variant not in refused], others


def _calibrated(variants: Sequence[Variant], given: Given, came_in: Precision) -> list[Variant]:
    """Those that take rows to be made."""
    return [variant for variant in variants if came_in is Precision.FP32 and given.calibrates(variant)]


def _not_calibrated(variants: Sequence[Variant], given: Given, came_in: Precision) -> list[Variant]:
    """Those that take rows to be made, where there are none: not even some to set aside."""
    if given.data is None or given.calibration is not None or set_aside(len(given.data.rows)):
        return []
    return _calibrated(variants, given, came_in)


def _too_few(given: Given) -> str:
    count = len(given.data.rows) if given.data is not None else 0
    return f"of {count} row{'' if count == 1 else 's'} none can be set aside to calibrate on"


def _cache_name(model: ModelDirectory, directory: Path | None) -> str:
    """A hub id as it is, flattened; a local model by its folder, one that lies nowhere by its name."""
    if directory is not None:
        return re.sub(r"[^\w.-]+", "-", model.id).strip("-.")
    return model.id.replace("/", "--") if model.revision else Path(model.id).name or "model"


# Options that are about encoders alone, and what they are called.
_OF_ENCODERS = {"pooling": "--pooling", "recipe": "--recipe", "calibration": "--calibration"}
_WRITER = "onnxruntime"
_BLOCKS = (Precision.INT8, Precision.INT4)
# On a GPU its operator that attends, GroupQueryAttention, computes in halves alone.
_WRITTEN = {CPU: (Precision.FP32, *_BLOCKS), CUDA: (Precision.FP16, *_BLOCKS)}
_HALF = Variant(_WRITER, Precision.FP16, CUDA)
_NO_FP32 = "ONNX Runtime's GroupQueryAttention, by which models that write attend, does not compute in fp32 on a GPU"


def outline_writing(model: ModelDirectory, plan: Plan, task: str, target: Path) -> Outline:
    """Of a model that writes."""
    for option, flag in _OF_ENCODERS.items():
        if getattr(plan, option) is not None:
            raise PlanError(f"{flag} is not for {task}", hint="leave it out")
    check_gate(plan.gate, task)
    if model.graph is not None:
        raise UnsupportedError(
            f"{model.id} comes as an ONNX graph, and models that write are built from their weights",
            hint="give the model the graph was made from",
        )
    device = _device_of_writer(plan)
    wanted = _asked_to_write(plan) if plan.variants else _offered_to_write(plan, device)
    return Outline(model.id, task, target, MODULE, device, tuple(wanted), (), ())


def _asked_to_write(plan: Plan) -> list[str]:
    offered = [Variant(_WRITER, precision, device).name for device in _WRITTEN for precision in _WRITTEN[device]]
    for name in plan.variants:
        if Variant.parse(name) == Variant(_WRITER, Precision.FP32, CUDA):
            raise UnsupportedError(f"{name} does not write: {_NO_FP32}", hint=f"--variants {_HALF}")
        if name not in offered:
            raise UnsupportedError(f"{name} does not write", hint=f"--variants with any of: {', '.join(offered)}")
        support = BACKENDS.get(_WRITER).probe(this_machine(), Variant.parse(name))
        if not support.ok:
            raise UnsupportedError(f"{name} does not run here: {support.reason}", hint=support.hint or None)
    return list(dict.fromkeys(plan.variants))


def _offered_to_write(plan: Plan, device: str) -> list[str]:
    if plan.precision == Precision.FP32 and device == CUDA:
        raise UnsupportedError(_NO_FP32, hint="--precision fp16, or --device cpu")
    found = [precision for precision in _WRITTEN[device] if plan.precision in (None, precision)]
    if not found:
        raise UnsupportedError(
            f"models that write are not made in {plan.precision} for the {device}",
            hint=f"--precision with one of: {', '.join(_WRITTEN[device])}",
        )
    return [Variant(_WRITER, precision, device).name for precision in found]


def _device_of_writer(plan: Plan) -> str:
    """The plan's, or as for encoders a GPU that is there; but not for a precision that only processors have."""
    if plan.variants:
        return CUDA if CUDA in [Variant.parse(name).device for name in plan.variants] else CPU
    support = BACKENDS.get(_WRITER).probe(this_machine(), _HALF)
    if plan.device == CUDA and not support.ok:
        raise UnsupportedError(
            f"--device cuda needs a GPU that ONNX Runtime can use: {support.reason}",
            hint=support.hint or "--device cpu",
        )
    is_for_gpus = plan.precision in (None, *_WRITTEN[CUDA])
    return CUDA if plan.device == CUDA or (plan.device is None and is_for_gpus and support.ok) else CPU
