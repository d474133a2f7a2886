"""Quantize RoBERTa on MNLI to int8: calibrate, search, train with quantizers, compare with float, and build a bundle.

    pip install 'hasten[build,data]' accelerate
    python examples/mnli_roberta.py --model MODEL --output DIR     # a RoBERTa fine-tuned on MNLI, with its three labels
    python examples/mnli_roberta.py --tiny --output DIR            # the same steps with a tiny model and synthetic rows

The steps are those with which transformer-deploy quantized RoBERTa for the GPU in 2021. Without `--tiny` the script
downloads the model and `nyu-mll/glue` from the hub; this was written without access to either and has never been run.
The tests run every step with `--tiny`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

import hasten
from hasten.quantize import qdq

LABELS = ("entailment", "neutral", "contradiction")
Rows = list[dict[str, Any]]


def main(args: argparse.Namespace) -> None:
    """Run all steps."""
    check(args)
    source, train, validation = tiny(args.output / "tiny") if args.tiny else published(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    calibrating, searching = train[:256], train[256:512] or train

    with qdq.patched(), qdq.calibration("percentile", 99.99) as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
        labels = {label.lower(): index for label, index in model.config.label2id.items()}
        names = {label.lower(): label for label in model.config.label2id}
        before = accuracy(model, tokenizer, validation, labels)
        calibrate(model, batches(tokenizer, calibrating))
    print(f"float {before:.4f}, calibrated {accuracy(model, tokenizer, validation, labels):.4f}")

    # Evaluate on rows that are neither used for calibration nor for the reported accuracy.
    def evaluate(candidate: Any) -> float:
        return accuracy(candidate, tokenizer, searching, labels)

    sensitivity = qdq.sensitivity(model, evaluate, qdq.groups(model))
    print(sensitivity)
    in_float = qdq.relax(model, evaluate, sensitivity, max_drop=0.004)
    print(f"left in float: {', '.join(in_float) or 'nothing'}")

    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(args.output / "training"),
            learning_rate=1e-5,
            per_device_train_batch_size=32,
            max_steps=args.steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=args.tiny,
            use_cpu=args.tiny,
        ),
        train_dataset=[
            {**tokenizer(row["premise"], row["hypothesis"], truncation=True), "labels": labels[row["label"]]}
            for row in train
        ],
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    print(f"trained {accuracy(model.eval(), tokenizer, validation, labels):.4f}")

    # The gate measures the cost of the quantizers: it compares the model in float with its int8 graph on all rows.
    data = args.output / "validation.jsonl"
    rows = [{"text": row["premise"], "text_pair": row["hypothesis"], "label": row["label"]} for row in validation]
    data.write_text("".join(json.dumps(row | {"label": names[row["label"]]}) + "\n" for row in rows))
    bundle = hasten.build(
        model,
        args.output / "bundle",
        tokenizer=tokenizer,
        variants=["onnxruntime-fp32", "onnxruntime-int8+qdq"],
        data=data,
        # With sixty rows, each one is worth more than a point.
        max_drop=0.4 if not args.tiny else 10.0,
        keep="all",
    )
    for candidate in bundle.report.candidates:
        print(f"{candidate.variant}: {candidate.reason}")


def check(args: argparse.Namespace) -> None:
    """Check the requirements of the last steps before the long ones run."""
    for package in ("accelerate",) if args.tiny else ("accelerate", "datasets"):
        if find_spec(package) is None:
            raise SystemExit(f"error: the package '{package}' is not installed: pip install {package}")
    if (args.output / "bundle").exists():
        raise SystemExit(f"error: {args.output / 'bundle'} already exists: pass another --output, or delete it")


def accuracy(model: Any, tokenizer: Any, rows: Rows, labels: dict[str, int]) -> float:
    """Return the share of rows that the model labels correctly."""
    correct = 0
    with torch.inference_mode():
        for index, feeds in enumerate(batches(tokenizer, rows)):
            gold = torch.tensor([labels[row["label"]] for row in rows[index * 32 : index * 32 + 32]])
            answers = model(**{name: value.to(model.device) for name, value in feeds.items()}).logits.argmax(dim=-1)
            correct += int((answers.cpu() == gold).sum())
    return correct / len(rows)


def batches(tokenizer: Any, rows: Rows) -> Iterator[Any]:
    """Yield batches of 32 tokenized pairs."""
    for start in range(0, len(rows), 32):
        batch = rows[start : start + 32]
        premises, hypotheses = [row["premise"] for row in batch], [row["hypothesis"] for row in batch]
        yield tokenizer(premises, hypotheses, padding=True, truncation=True, return_tensors="pt")


def published(model: str) -> tuple[str, Rows, Rows]:
    """Return the model and rows of MNLI from the hub; twenty thousand are enough for a short training."""
    import datasets

    def read(split: str) -> Rows:
        rows = datasets.load_dataset("nyu-mll/glue", "mnli", split=split)
        return [
            {"premise": row["premise"], "hypothesis": row["hypothesis"], "label": LABELS[row["label"]]} for row in rows
        ]

    try:
        return model, read("train[:20000]"), read("validation_matched")
    except OSError as error:
        raise SystemExit(f"error: nyu-mll/glue cannot be read from the hub ({error}); --tiny needs no hub") from error


def tiny(folder: Path) -> tuple[str, Rows, Rows]:
    """Save a RoBERTa of two layers, and return it with rows about whether two sentences name the same thing."""
    import tokenizers

    things = ("cat", "dog", "ship", "lamp")
    draw = random.Random(0)
    rows = []
    for _ in range(320):
        label = draw.choice(LABELS)
        first = draw.choice(things)
        second = first if label == "entailment" else draw.choice([thing for thing in things if thing != first])
        rows.append(
            {
                "premise": f"there is a {first}",
                "hypothesis": "perhaps not" if label == "neutral" else f"I see the {second}",
                "label": label,
            }
        )
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator([f"{row['premise']} {row['hypothesis']}" for row in rows], trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = transformers.RobertaTokenizer(vocab=learned["vocab"], merges=merges, model_max_length=64)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=66,
        type_vocab_size=1,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    torch.manual_seed(0)
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), rows[:256], rows[256:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory of a RoBERTa fine-tuned on MNLI")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and synthetic rows (takes a minute)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    parser.add_argument("--output", type=Path, required=True, help="directory for the bundle")
    args = parser.parse_args()
    if not args.tiny and args.model is None:
        parser.error("--model or --tiny is required")
    main(args)
