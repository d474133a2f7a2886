"""What quantizing by rewriting costs and gains: two real models, after calibration alone and after short training.

    python benchmarks/qdq.py accuracy --models DIR --data DIR --work DIR [--only sst2 wnut17] [--training-rows N]
    python benchmarks/qdq.py calibration --models DIR --data DIR --work DIR [--only sst2 wnut17]
    python benchmarks/qdq.py speed --work DIR [--only sst2 wnut17]
    python benchmarks/qdq.py speed --bundle DIR --only sst2

DIR with assemble.py, DIR with the labelled rows, DIR for the graphs that `accuracy` leaves to `speed`, as exported; or
a bundle, whose graphs went through the passes of a build. Ranges, the search and the training see calibration rows
alone; figures are of the others. Nothing else may run during `speed`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions
from hasten.backends.torch import ModuleSession
from hasten.builder.export import export
from hasten.builder.load import LoadedModel, load_model
from hasten.builder.quantized import as_given
from hasten.builder.source import find_model
from hasten.builder.tokenizer import save_tokenizer
from hasten.bundle import open_bundle
from hasten.core.plan import Plan
from hasten.core.progress import Silent
from hasten.core.statistics import median_ratio, paired_drop
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.graph import read_graph, write_graph
from hasten.measure.data import read_rows
from hasten.measure.verify import Expectation, expect
from hasten.predictor import Predictor
from hasten.quantize import qdq
from hasten.quantize.qdq.calibrate import observe, set_ranges
from hasten.quantize.qdq.fold import fold
from origin import origin

RESULTS = Path(__file__).parent / "results" / "qdq.json"
CALIBRATION_ROWS, SEARCH_ROWS, BATCH = 256, 64, 16
LEARNING_RATE = 1e-5
SHAPES = [(1, 16), (1, 128), (8, 128)]
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Study:
    data: str
    calibration: str
    # A row of the calibration file as the model trains on it.
    labelled: Callable[[Any, dict[str, Any], dict[str, int]], dict[str, Any]]


def text_labelled(tokenizer: Any, row: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    return {**tokenizer(row["text"], truncation=True, max_length=128), "labels": labels[row["label"]]}


def words_labelled(tokenizer: Any, row: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    encoded = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=128)
    places = encoded.word_ids()
    # A word is judged by its first piece.
    marks = [
        -100 if word is None or word == before else labels[row["tags"][word]]
        for before, word in zip([None, *places], places, strict=False)
    ]
    return {**encoded, "labels": marks}


STUDIES = {
    "sst2": Study("sst2_validation.jsonl", "sst2_calibration.jsonl", text_labelled),
    "wnut17": Study("wnut17_test.jsonl", "wnut17_calibration.jsonl", words_labelled),
}


@dataclass
class Trial:
    """One model, quantized, held against itself in float."""

    study: Study
    loaded: LoadedModel
    tokenizer: Tokenizer
    data: Path
    work: Path
    training_rows: int | None
    # Calibrated in each way, and no further.
    is_brief: bool
    save: Callable[[dict[str, Any]], None]

    @property
    def model(self) -> Any:
        return self.loaded.module.model

    def run(self) -> None:
        rows = read_rows(self.data / self.study.data, spec=self.loaded.task)
        expected = self._answers(rows)
        assert expected.metric is not None
        result: dict[str, Any] = {"metric": expected.metric.name, "fp32": expected.metric.value, "rows": len(rows)}
        export(self.loaded, self.work / "fp32.onnx")
        seen = observe(self.model, self._batches(CALIBRATION_ROWS))
        result["calibration_rows"] = CALIBRATION_ROWS
        for method, sums in (
            (("max", None), ()),
            (("mse", None), ()),
            (("percentile", 99.99), ("*.hidden_states_quantizer", "*.input_tensor_quantizer")),
            (("percentile", 99.99), ()),
        ):
            set_ranges(self.model, seen, method)
            if sums:
                qdq.enable(self.model, *sums)
            name = " ".join(str(part) for part in ("ptq", *method, "with residuals" if sums else None) if part)
            result[name] = self._judged(expected, rows)
            if sums:
                qdq.disable(self.model, *sums)
            self.save(result)

        if self.is_brief:
            return
        float_outputs = self._outputs(off=True)

        def closeness(_: Any) -> float:
            return -relative_error(self._outputs(), float_outputs)

        found = qdq.sensitivity(self.model, closeness, qdq.groups(self.model))
        before = closeness(self.model)
        off = qdq.relax(self.model, closeness, found, max_drop=-before / 2)
        result["search"] = {
            "off": off,
            "of": len(qdq.quantizers(self.model)),
            "relative_error_before": -before,
            "relative_error_after": -closeness(self.model),
            "costliest": [asdict(each) for each in found.costs[:8]],
        }
        result["after the search"] = self._judged(expected, rows)
        self.save(result)
        result["training"] = self._train()
        result["after training"] = self._judged(expected, rows)
        self.save(result)
        result["onnxruntime"] = self._exported(expected, rows)
        self.save(result)

    def _answers(self, rows: list[Any]) -> Expectation:
        artifact = Artifact(self.loaded.baseline, self.loaded.signature, self.work, {})
        session = ModuleSession(self.loaded.module, artifact, RunOptions())
        return expect(Predictor(self.loaded.task, self.tokenizer, session), rows, Silent())

    def _judged(self, expected: Expectation, rows: list[Any]) -> dict[str, Any]:
        return drop(self.loaded, expected, self._answers(rows))

    def _rows(self) -> list[dict[str, Any]]:
        lines = (self.data / self.study.calibration).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _trainable(self) -> list[dict[str, Any]]:
        tokenizer, labels = self.loaded.original_tokenizer, self.model.config.label2id
        return [self.study.labelled(tokenizer, row, labels) for row in self._rows()]

    def _batches(self, count: int) -> Iterator[dict[str, torch.Tensor]]:
        collate = transformers.DataCollatorForTokenClassification(self.loaded.original_tokenizer)
        rows = [{name: value for name, value in row.items() if name != "labels"} for row in self._trainable()[:count]]
        rows.sort(key=lambda row: len(row["input_ids"]))
        for begin in range(0, len(rows), BATCH):
            yield collate.tokenizer.pad(rows[begin : begin + BATCH], return_tensors="pt")

    def _outputs(self, *, off: bool = False) -> np.ndarray:
        """Logits of real tokens, for a few calibration rows."""
        before = {part: part.is_enabled for part in qdq.quantizers(self.model).values()}
        if off:
            qdq.disable(self.model)
        found = []
        with torch.inference_mode():
            for feeds in self._batches(SEARCH_ROWS):
                logits = self.model(**feeds).logits
                found.append((logits[feeds["attention_mask"].bool()] if logits.dim() == 3 else logits).numpy())
        for part, is_enabled in before.items():
            part.is_enabled = is_enabled
        return np.concatenate(found)

    def _train(self) -> dict[str, Any]:
        """One pass over the calibration rows, by transformers' own Trainer."""
        rows, begin = self._trainable()[: self.training_rows], time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=BATCH,
                learning_rate=LEARNING_RATE,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                seed=0,
            )
            is_text = self.study.labelled is text_labelled
            collator = (
                transformers.DataCollatorWithPadding if is_text else transformers.DataCollatorForTokenClassification
            )
            trainer = transformers.Trainer(
                model=self.model,
                args=arguments,
                train_dataset=rows,
                data_collator=collator(self.loaded.original_tokenizer),
            )
            loss = trainer.train().training_loss
        self.model.eval()
        seconds = time.perf_counter() - begin
        return {"rows": len(rows), "epochs": 1, "learning_rate": LEARNING_RATE, "loss": loss, "seconds": seconds}

    def _exported(self, expected: Expectation, rows: list[Any]) -> dict[str, Any]:
        export(self.loaded, self.work / "traced.onnx")
        graph = read_graph(self.work / "traced.onnx")
        fold(graph)
        write_graph(graph, self.work / "qdq.onnx", external_data=False)
        (self.work / "traced.onnx").unlink()
        variant = Variant("onnxruntime", Precision.INT8)
        artifact = Artifact(variant, self.loaded.signature, self.work, {MODEL: "qdq.onnx"})
        with BACKENDS.get("onnxruntime").open(artifact, RunOptions()) as session:
            answers = expect(Predictor(self.loaded.task, self.tokenizer, session), rows, Silent())
        module = self._answers(rows)
        name = next(iter(answers.outputs))
        return {
            **drop(self.loaded, expected, answers),
            "relative_error_to_module": relative_error(answers.outputs[name], module.outputs[name]),
            "fp32_bytes": (self.work / "fp32.onnx").stat().st_size,
            "qdq_bytes": (self.work / "qdq.onnx").stat().st_size,
        }


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def drop(loaded: LoadedModel, expected: Expectation, answers: Expectation) -> dict[str, Any]:
    from hasten.tasks import TASKS

    task, spec = TASKS.get(loaded.task.name), loaded.task
    assert expected.marks is not None
    assert answers.marks is not None
    assert answers.metric is not None
    found = paired_drop(lambda marks: task.metric(marks, spec).value, expected.marks, answers.marks)
    return {"value": answers.metric.value, "drop_points": asdict(found)}


def accuracy(name: str, asked: argparse.Namespace, work: Path, save: Callable[[dict[str, Any]], None]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, asked.models / "assemble.py", name, work / "model"], check=True)
    plan = Plan(model=str(work / "model"))
    loaded = load_model(find_model(plan), plan)
    with qdq.patched():
        model = type(loaded.module.model).from_pretrained(work / "model", attn_implementation="eager")
    loaded = replace(loaded, module=as_given(loaded, model))
    save_tokenizer(loaded, work / "tokenizer.json")
    tokenizer = Tokenizer.open(work / "tokenizer.json", loaded.tokenizer)
    is_brief = asked.what == "calibration"
    Trial(STUDIES[name], loaded, tokenizer, asked.data, work, asked.training_rows, is_brief, save).run()


def graphs_of(bundle: Path) -> dict[str, Path]:
    found = open_bundle(bundle)
    names = {"fp32": "onnxruntime-fp32", "qdq": "onnxruntime-int8+qdq"}
    return {name: found.artifact(found.entry(variant)).path() for name, variant in names.items()}


def speed(graphs: dict[str, Path]) -> dict[str, Any]:
    """Turns alternate; a figure is the median of the ratios of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        sessions = {
            "fp32": onnxruntime.InferenceSession(str(graphs["fp32"])),
            "qdq": onnxruntime.InferenceSession(str(graphs["qdq"]), options),
        }
        kinds = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    found: dict[str, Any] = {
        "operators": {kind: count for kind, count in kinds.items() if "Mat" in kind or "Q" in kind},
        "bytes": {name: graph.stat().st_size for name, graph in graphs.items()},
    }
    for rows, length in SHAPES:
        ids = np.random.default_rng(0).integers(1000, 20000, (rows, length)).astype(np.int32)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for turn in range(ROUNDS + 2):
            for name, session in sessions.items():
                wanted = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
                begin, count = time.perf_counter(), 0
                while count == 0 or time.perf_counter() - begin < 0.3:
                    session.run(None, wanted)
                    count += 1
                if turn >= 2:
                    times[name].append((time.perf_counter() - begin) / count * 1e3)
        ratio = median_ratio(np.array(times["fp32"]), np.array(times["qdq"]))
        medians = {f"{name}_ms": float(np.median(values)) for name, values in times.items()}
        found[f"{rows}x{length}"] = {**medians, "times_faster": asdict(ratio)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "calibration", "speed"])
    parser.add_argument("--models", type=Path, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, help="directory with the labelled rows")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--work", type=Path)
    where.add_argument("--bundle", type=Path, help="with onnxruntime-fp32 and onnxruntime-int8+qdq, for speed")
    parser.add_argument("--training-rows", type=int, help="of the calibration rows, where there is little time")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    asked = parser.parse_args()
    transformers.logging.disable_progress_bar()
    for name in asked.only:
        save = partial(write, name, asked.what if asked.bundle is None else f"{asked.what}, as built")
        if asked.what != "speed":
            accuracy(name, asked, asked.work / name, save)
        elif asked.bundle is not None:
            save(speed(graphs_of(asked.bundle)))
        else:
            save(speed({graph: asked.work / name / f"{graph}.onnx" for graph in ("fp32", "qdq")}))


def write(name: str, what: str, found: dict[str, Any]) -> None:
    """Stage by stage: a study takes long."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(name, {})[what] = {
        **origin(),
        **found,
    }
    RESULTS.write_text(json.dumps(results, indent=1, default=str) + "\n")
    print(name, what, list(found)[-1], found[list(found)[-1]], flush=True)


if __name__ == "__main__":
    main()
