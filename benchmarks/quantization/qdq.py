"""Measure quantization by rewriting (hasten.quantize.qdq) on two models: calibrated only, and after a short training.

    python benchmarks/quantization/qdq.py accuracy --models DIR --data DIR --work DIR [--only sst2] [--training-rows N]
    python benchmarks/quantization/qdq.py calibration --models DIR --data DIR --work DIR [--only sst2 wnut17]
    python benchmarks/quantization/qdq.py speed --work DIR [--only sst2 wnut17]
    python benchmarks/quantization/qdq.py speed --bundle DIR --only sst2

--models: directory with assemble.py; --data: directory with the labelled rows; --work: directory for the exported
graphs that `accuracy` writes and `speed` reads. With --bundle, `speed` times graphs that went through the
passes of a build. Ranges, search and training use calibration rows only; results are of the others. Nothing else may
run during `speed`.
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

sys.path.append(str(Path(__file__).parents[1]))

from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions
from hasten.backends.torch import ModuleSession
from hasten.builder.export.encoder import export
from hasten.builder.search.qdq_module import in_float
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import LoadedModel, load_model
from hasten.builder.sources.tokenizer import save_tokenizer
from hasten.bundle import open_bundle
from hasten.core.plan import Plan
from hasten.core.progress import SilentProgress
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.measure.encoder_gate import Expectation, expect
from hasten.metrics.statistics import median_ratio, paired_drop
from hasten.onnx_graph import read_graph, write_graph
from hasten.predictor import Predictor
from hasten.quantize import qdq
from hasten.quantize.qdq.calibrate import observe, set_ranges
from hasten.quantize.qdq.fold import fold
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "qdq.json"
CALIBRATION_ROWS, SEARCH_ROWS, BATCH = 256, 64, 16
LEARNING_RATE = 1e-5
SHAPES = [(1, 16), (1, 128), (8, 128)]
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Study:
    """Data files of a model, and how its rows become training examples."""

    data: str
    calibration: str
    to_example: Callable[[Any, dict[str, Any], dict[str, int]], dict[str, Any]]


def text_example(tokenizer: Any, row: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    """Return a training example for text classification."""
    return {**tokenizer(row["text"], truncation=True, max_length=128), "labels": labels[row["label"]]}


def words_example(tokenizer: Any, row: dict[str, Any], labels: dict[str, int]) -> dict[str, Any]:
    """Return a training example for token classification; only the first token of a word has a label."""
    encoded = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=128)
    word_ids = encoded.word_ids()
    label_ids = [
        -100 if word is None or word == previous else labels[row["tags"][word]]
        for previous, word in zip([None, *word_ids], word_ids, strict=False)
    ]
    return {**encoded, "labels": label_ids}


STUDIES = {
    "sst2": Study("sst2_validation.jsonl", "sst2_calibration.jsonl", text_example),
    "wnut17": Study("wnut17_test.jsonl", "wnut17_calibration.jsonl", words_example),
}


@dataclass
class AccuracyStudy:
    """Accuracy of one quantized model, compared with the same model in fp32."""

    study: Study
    loaded: LoadedModel
    tokenizer: Tokenizer
    data: Path
    work: Path
    training_rows: int | None
    calibration_only: bool
    save: Callable[[dict[str, Any]], None]

    @property
    def model(self) -> Any:
        """Return the module with quantizers."""
        return self.loaded.module.model

    def run(self) -> None:
        """Measure each calibration method, then the search, the training and the exported graph."""
        rows = read_rows(self.data / self.study.data, spec=self.loaded.task)
        expected = self._answers(rows)
        assert expected.metric is not None
        result: dict[str, Any] = {"metric": expected.metric.name, "fp32": expected.metric.value, "rows": len(rows)}
        export(self.loaded, self.work / "fp32.onnx")
        observations = observe(self.model, self._batches(CALIBRATION_ROWS))
        result["calibration_rows"] = CALIBRATION_ROWS
        for method, residuals in (
            (("max", None), ()),
            (("mse", None), ()),
            (("percentile", 99.99), ("*.hidden_states_quantizer", "*.input_tensor_quantizer")),
            (("percentile", 99.99), ()),
        ):
            set_ranges(self.model, observations, method)
            if residuals:
                qdq.enable(self.model, *residuals)
            name = " ".join(str(part) for part in ("ptq", *method, "with residuals" if residuals else None) if part)
            result[name] = self._drop(expected, rows)
            if residuals:
                qdq.disable(self.model, *residuals)
            self.save(result)

        if self.calibration_only:
            return
        float_outputs = self._outputs(quantized=False)

        def closeness(_: Any) -> float:
            return -relative_error(self._outputs(), float_outputs)

        sensitivity = qdq.sensitivity(self.model, closeness, qdq.groups(self.model))
        before = closeness(self.model)
        disabled = qdq.relax(self.model, closeness, sensitivity, max_drop=-before / 2)
        result["search"] = {
            "off": disabled,
            "of": len(qdq.quantizers(self.model)),
            "relative_error_before": -before,
            "relative_error_after": -closeness(self.model),
            "costliest": [asdict(each) for each in sensitivity.costs[:8]],
        }
        result["after the search"] = self._drop(expected, rows)
        self.save(result)
        result["training"] = self._train()
        result["after training"] = self._drop(expected, rows)
        self.save(result)
        result["onnxruntime"] = self._export(expected, rows)
        self.save(result)

    def _answers(self, rows: list[Any]) -> Expectation:
        artifact = Artifact(self.loaded.baseline, self.loaded.signature, self.work, {})
        session = ModuleSession(self.loaded.module, artifact, RunOptions())
        return expect(Predictor(self.loaded.task, self.tokenizer, session), rows, SilentProgress())

    def _drop(self, expected: Expectation, rows: list[Any]) -> dict[str, Any]:
        return metric_drop(self.loaded, expected, self._answers(rows))

    def _rows(self) -> list[dict[str, Any]]:
        lines = (self.data / self.study.calibration).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def _examples(self) -> list[dict[str, Any]]:
        tokenizer, labels = self.loaded.original_tokenizer, self.model.config.label2id
        return [self.study.to_example(tokenizer, row, labels) for row in self._rows()]

    def _batches(self, count: int) -> Iterator[dict[str, torch.Tensor]]:
        collate = transformers.DataCollatorForTokenClassification(self.loaded.original_tokenizer)
        rows = [{name: value for name, value in row.items() if name != "labels"} for row in self._examples()[:count]]
        rows.sort(key=lambda row: len(row["input_ids"]))
        for begin in range(0, len(rows), BATCH):
            yield collate.tokenizer.pad(rows[begin : begin + BATCH], return_tensors="pt")

    def _outputs(self, *, quantized: bool = True) -> np.ndarray:
        """Return the logits of some calibration rows, without padding."""
        states = {part: part.is_enabled for part in qdq.quantizers(self.model).values()}
        if not quantized:
            qdq.disable(self.model)
        outputs = []
        with torch.inference_mode():
            for feeds in self._batches(SEARCH_ROWS):
                logits = self.model(**feeds).logits
                outputs.append((logits[feeds["attention_mask"].bool()] if logits.dim() == 3 else logits).numpy())
        for part, is_enabled in states.items():
            part.is_enabled = is_enabled
        return np.concatenate(outputs)

    def _train(self) -> dict[str, Any]:
        """Train for one epoch on the calibration rows with transformers' Trainer."""
        rows, begin = self._examples()[: self.training_rows], time.perf_counter()
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
            is_text = self.study.to_example is text_example
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

    def _export(self, expected: Expectation, rows: list[Any]) -> dict[str, Any]:
        export(self.loaded, self.work / "traced.onnx")
        graph = read_graph(self.work / "traced.onnx")
        fold(graph)
        write_graph(graph, self.work / "qdq.onnx", external_data=False)
        (self.work / "traced.onnx").unlink()
        variant = Variant("onnxruntime", Precision.INT8)
        artifact = Artifact(variant, self.loaded.signature, self.work, {MODEL: "qdq.onnx"})
        with BACKENDS.get("onnxruntime").open(artifact, RunOptions()) as session:
            answers = expect(Predictor(self.loaded.task, self.tokenizer, session), rows, SilentProgress())
        module = self._answers(rows)
        name = next(iter(answers.outputs))
        return {
            **metric_drop(self.loaded, expected, answers),
            "relative_error_to_module": relative_error(answers.outputs[name], module.outputs[name]),
            "fp32_bytes": (self.work / "fp32.onnx").stat().st_size,
            "qdq_bytes": (self.work / "qdq.onnx").stat().st_size,
        }


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the norm of the difference over the norm of the reference."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def metric_drop(loaded: LoadedModel, expected: Expectation, answers: Expectation) -> dict[str, Any]:
    """Return the metric and its drop in points with a confidence interval."""
    from hasten.tasks import TASKS

    task, spec = TASKS.get(loaded.task.name), loaded.task
    assert expected.item_scores is not None
    assert answers.item_scores is not None
    assert answers.metric is not None
    drop = paired_drop(
        lambda item_scores: task.metric(item_scores, spec).value, expected.item_scores, answers.item_scores
    )
    return {"value": answers.metric.value, "drop_points": asdict(drop)}


def accuracy(name: str, args: argparse.Namespace, work: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Run the accuracy study of one model."""
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, args.models / "assemble.py", name, work / "model"], check=True)
    plan = Plan(model=str(work / "model"))
    loaded = load_model(find_model(plan), plan)
    with qdq.patched():
        model = type(loaded.module.model).from_pretrained(work / "model", attn_implementation="eager")
    loaded = replace(loaded, module=in_float(loaded, model))
    save_tokenizer(loaded.original_tokenizer, work / "tokenizer.json")
    tokenizer = Tokenizer.open(work / "tokenizer.json", loaded.tokenizer)
    calibration_only = args.part == "calibration"
    AccuracyStudy(STUDIES[name], loaded, tokenizer, args.data, work, args.training_rows, calibration_only, save).run()


def graphs_of(path: Path) -> dict[str, Path]:
    """Return the fp32 and the quantized graph of a bundle."""
    bundle = open_bundle(path)
    names = {"fp32": "onnxruntime-fp32", "qdq": "onnxruntime-int8+qdq"}
    return {name: bundle.artifact(bundle.entry(variant)).path() for name, variant in names.items()}


def speed(graphs: dict[str, Path]) -> dict[str, Any]:
    """Time both graphs in alternating rounds; a speed-up is the median of the ratios of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        sessions = {
            "fp32": onnxruntime.InferenceSession(str(graphs["fp32"])),
            "qdq": onnxruntime.InferenceSession(str(graphs["qdq"]), options),
        }
        kinds = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    results: dict[str, Any] = {
        "operators": {kind: count for kind, count in kinds.items() if "Mat" in kind or "Q" in kind},
        "bytes": {name: graph.stat().st_size for name, graph in graphs.items()},
    }
    for rows, length in SHAPES:
        ids = np.random.default_rng(0).integers(1000, 20000, (rows, length)).astype(np.int32)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for turn in range(ROUNDS + 2):
            for name, session in sessions.items():
                session_feeds = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
                begin, count = time.perf_counter(), 0
                while count == 0 or time.perf_counter() - begin < 0.3:
                    session.run(None, session_feeds)
                    count += 1
                if turn >= 2:
                    times[name].append((time.perf_counter() - begin) / count * 1e3)
        ratio = median_ratio(np.array(times["fp32"]), np.array(times["qdq"]))
        medians = {f"{name}_ms": float(np.median(values)) for name, values in times.items()}
        results[f"{rows}x{length}"] = {**medians, "times_faster": asdict(ratio)}
    return results


def main() -> None:
    """Run one part of the study and write it into the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "calibration", "speed"])
    parser.add_argument("--models", type=Path, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, help="directory with the labelled rows")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--work", type=Path, help="directory for exported graphs")
    source.add_argument("--bundle", type=Path, help="bundle with onnxruntime-fp32 and onnxruntime-int8+qdq, for speed")
    parser.add_argument("--training-rows", type=int, help="train on the first N calibration rows only")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    for name in args.only:
        save = partial(write, name, args.part if args.bundle is None else f"{args.part}, as built")
        if args.part != "speed":
            accuracy(name, args, args.work / name, save)
        elif args.bundle is not None:
            save(speed(graphs_of(args.bundle)))
        else:
            save(speed({graph: args.work / name / f"{graph}.onnx" for graph in ("fp32", "qdq")}))


def write(name: str, part: str, measured: dict[str, Any]) -> None:
    """Write the measurements so far; called after each stage, since a study takes long."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(name, {})[part] = {**provenance(), **measured}
    RESULTS.write_text(json.dumps(results, indent=1, default=str) + "\n")
    print(name, part, list(measured)[-1], measured[list(measured)[-1]], flush=True)


if __name__ == "__main__":
    main()
