"""hasten run BUNDLE TEXT …: answer texts, fields or the rows of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli import generation

if TYPE_CHECKING:
    from hasten.core.text.tokenizer import Tokenizer

# Rows processed at a time, so that memory does not grow with the file.
_CHUNK = 512
# Terms of a sparse embedding that are printed.
_SHOWN_TERMS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    parser.add_argument("text", nargs="*", help="input texts")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of an item, for tasks that take more than a text: --field question=… --field context=…;"
        " lists are JSON",
    )
    parser.add_argument(
        "--input", metavar="FILE", help="file of input rows: jsonl ('-' for stdin), json, csv, tsv, parquet, …"
    )
    parser.add_argument("--columns", metavar="NAME=COLUMN,…", help="column names of the file: text=sentence")
    parser.add_argument("--variant", metavar="NAME", help="variant to run (default: the fastest that runs here)")
    parser.add_argument(
        "--strict", action="store_true", help="verify the variant against the reference on this machine first"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument(
        "-O", "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the task: -O top_k=3"
    )
    generation.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.api import load
    from hasten.cli import console
    from hasten.core.errors import InputError
    from hasten.core.plan import parse_columns
    from hasten.generation.generator import Generator
    from hasten.measure.data import check_columns

    if [bool(args.text), bool(args.field), bool(args.input)].count(True) != 1:
        raise InputError("pass either texts, --field, or a file with --input", hint='hasten run BUNDLE "some text"')
    if args.columns is not None and not args.input:
        raise InputError("--columns needs a file", hint="pass --input FILE")
    columns = parse_columns(args.columns) if args.columns is not None else {}
    console.display(args.quiet)
    options = dict(_parse_option(text) for text in args.option)
    payload = args.text or [_parse_fields(args.field)]
    with load(args.bundle, args.variant, threads=args.threads, strict=args.strict) as predictor:
        if isinstance(predictor, Generator):
            return generation.run(predictor, args, options, _chunks(args.input, columns) if args.input else ())
        if generation.has_options(args):
            raise InputError(
                f"the bundle holds a model for {predictor.spec.name}, which does not generate text",
                hint="leave out --max-tokens, --temperature, --seed, --stop and --chat",
            )
        if not args.input:
            answers = predictor(payload, **options)
            if args.json:
                console.print_json(answers)
            else:
                _print_answers(payload, answers, predictor.tokenizer)
            return 0
        check_columns(columns, predictor.task)
        for rows in _chunks(args.input, columns):
            for answer in predictor(rows, **options):
                sys.stdout.write(json.dumps(_plain(answer), ensure_ascii=False) + "\n")
    return 0


def _parse_option(text: str) -> tuple[str, object]:
    name, value = _split_pair(text, "-O top_k=3")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _parse_fields(fields: list[str]) -> dict[str, object]:
    from hasten.core.errors import PlanError

    item: dict[str, object] = {}
    for field in fields:
        name, value = _split_pair(field, '--field question="Who?"')
        if name in item:
            raise PlanError(
                f"the field '{name}' was passed twice", hint=f"for a list use JSON: --field {name}='[…, …]'"
            )
        item[name] = _parse_value(value)
    return item


def _parse_value(text: str) -> object:
    """Parse lists and objects as JSON; everything else is text, numbers too."""
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _split_pair(text: str, example: str) -> tuple[str, str]:
    from hasten.core.errors import PlanError

    name, separator, value = text.partition("=")
    if not separator:
        raise PlanError(f"'{text}' is not NAME=VALUE", hint=example)
    return name, value


def _chunks(source: str, columns: Mapping[str, str]) -> Iterator[list[object]]:
    from hasten.measure.data import stream

    rows = stream(source, columns)
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk


def _print_answers(payload: list[Any], answers: Any, tokenizer: Tokenizer) -> None:
    texts = [" · ".join(map(str, item.values())) if isinstance(item, dict) else item for item in payload]
    if getattr(answers, "ndim", 0) == 2:
        _print_vectors(texts, answers)
        return
    for text, answer in zip(texts, answers, strict=True):
        is_sparse = isinstance(answer, Mapping) and {"indices", "values"} <= answer.keys()
        _print_line(_format_terms(answer, tokenizer) if is_sparse else _format(answer), text)


def _plain(answer: Any) -> Any:
    """Return an answer with lists instead of arrays."""
    if isinstance(answer, Mapping):
        return {key: _plain(value) for key, value in answer.items()}
    return answer.tolist() if hasattr(answer, "tolist") else answer


def _format(answer: Any) -> str:
    """Format an answer of any task in a few words: label and score."""
    from rich.markup import escape

    if getattr(answer, "ndim", 0):
        return _format_vector(answer)
    if isinstance(answer, list):
        # Nested lists hold the answers of several masks.
        between = "  |  " if any(isinstance(entry, list) for entry in answer) else "  "
        return between.join(map(_format, answer)) or "–"
    if isinstance(answer, Mapping) and "score" in answer and (name := _label(answer)) is not None:
        word = f"{escape(answer['word'])} " if "word" in answer else ""
        return f"{word}[bold]{escape(name)}[/] {answer['score']:.4f}"
    if isinstance(answer, Mapping) and {"labels", "scores"} <= answer.keys():
        pairs = zip(answer["labels"], answer["scores"], strict=True)
        return "  ".join(f"[bold]{escape(label)}[/] {score:.4f}" for label, score in pairs)
    plain = _plain(answer)
    return f"{plain:.4f}" if isinstance(plain, float) else escape(json.dumps(plain, ensure_ascii=False))


def _format_terms(answer: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Format the strongest terms of a sparse embedding as tokens with their weights."""
    from rich.markup import escape

    order = (-answer["values"]).argsort(kind="stable")
    shown = [(int(answer["indices"][index]), float(answer["values"][index])) for index in order[:_SHOWN_TERMS]]
    terms = "  ".join(f"[bold]{escape(tokenizer.token(term))}[/] {weight:.2f}" for term, weight in shown)
    rest = f" …  [dim]({len(order)} terms, --json for all)[/]" if len(order) > _SHOWN_TERMS else ""
    return (terms or "–") + rest


def _label(entry: Mapping[str, Any]) -> str | None:
    """Return the label of an answer: a class, a token, the answer to a question, the number of a document."""
    if "corpus_id" in entry:
        return f"#{entry['corpus_id']}"
    keys = ("label", "entity_group", "entity", "token_str", "answer")
    return next((entry[key] or "–" for key in keys if key in entry), None)


def _format_vector(vectors: Any) -> str:
    tokens = f"{vectors.shape[-2]} tokens × " if vectors.ndim > 1 else ""
    start = " ".join(f"{value:.4f}" for value in vectors.reshape(-1)[:6])
    return f"{tokens}{vectors.shape[-1]} numbers: {start} …  [dim](--json for all)[/]"


def _print_vectors(texts: list[str], vectors: Any) -> None:
    import numpy as np

    if len(texts) == 1:
        _print_line(_format_vector(vectors[0]))
        return
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, (text, similarities) in enumerate(zip(texts, unit @ unit.T, strict=True), 1):
        cosines = " ".join(f"{value:5.2f}" for value in similarities)
        _print_line(f"{row:>3}  {cosines} ", text)


def _print_line(answer: str, text: str = "") -> None:
    """Print an answer and its text on one line, whatever the text contains."""
    from rich.markup import escape

    from hasten.cli import console

    line = f"{answer} [dim]{escape(text)}[/]" if text else answer
    console.out.print(line.replace("\n", " "), emoji=False, soft_wrap=True)
