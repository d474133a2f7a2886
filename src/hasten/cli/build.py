"""hasten build MODEL -o DIR"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.bundle import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a hub id or a local directory")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where the bundle goes (default: the cache)")
    parser.add_argument("--task", help="default: what the model's configuration says")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--file-name", metavar="ONNX", help="build from this graph of the model: onnx/model.onnx")
    parser.add_argument("--pooling", help="for embeddings: mean, cls, … (default: what the model says)")
    sizes = parser.add_argument_group("sizes the model will see", "one number, or three: min opt max")
    sizes.add_argument("-b", "--batch-size", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    sizes.add_argument("-s", "--seq-len", type=int, nargs="+", default=[16, 128, 256], metavar="N")
    gate = parser.add_argument_group("accuracy")
    gate.add_argument(
        "--data",
        metavar="FILE",
        help="jsonl, json, csv, tsv, parquet, a folder, datasets:NAME:SPLIT to judge on (default: a built-in sample)",
    )
    gate.add_argument(
        "--calibration", metavar="FILE", help="rows to quantize by, as --data but without labels (default: some of it)"
    )
    gate.add_argument("--columns", metavar="NAME=COLUMN,…", help="what the data calls them: text=sentence,label=stars")
    gate.add_argument("--min-agreement", type=float, metavar="SHARE", help="same labels, or mean cosine, at least")
    gate.add_argument("--max-drop", type=float, metavar="POINTS", help="largest loss of the metric; needs labels")
    gate.add_argument("--metric", metavar="NAME", help="the one --max-drop goes by: macro-f1, … (default: the task's)")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="try these only: onnxruntime-fp32 …")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where it will run (default: the GPU where one can be used)"
    )
    parser.add_argument("--keep", choices=("best", "all"), default="best", help="store the best two variants, or all")
    parser.add_argument("--recipe", metavar="TOML", help="make the variant of this recipe again, instead of searching")
    parser.add_argument("--budget", default="5m", metavar="TIME", help="time for the search (default: 5m)")
    parser.add_argument(
        "--target", metavar="CPU", help="amx, avx512_vnni, avx512, avx2 or arm64 (default: this machine)"
    )
    parser.add_argument("--bench-budget", default="30s", metavar="TIME", help="time for the benchmark (default: 30s)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--force", action="store_true", help="replace the bundle at the output")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights, which can run any code")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def main(args: argparse.Namespace) -> int:
    from hasten.core.plan import Gate, Keep, Plan, Range, Shapes, parse_columns, parse_duration

    plan = Plan(
        model=args.model,
        revision=args.revision,
        task=args.task,
        pooling=args.pooling,
        file_name=args.file_name,
        shapes=Shapes(
            Range.of("--batch-size", tuple(args.batch_size)),
            Range.of("--seq-len", tuple(args.seq_len)),
        ),
        variants=tuple(args.variants),
        device=args.device,
        data=args.data,
        calibration=args.calibration,
        columns=parse_columns(args.columns) if args.columns is not None else {},
        gate=Gate(args.min_agreement, args.max_drop, args.metric),
        recipe=args.recipe,
        budget_s=parse_duration(args.budget),
        bench_budget_s=parse_duration(args.bench_budget),
        threads=args.threads,
        keep=Keep(args.keep),
        target=args.target,
        allow_pickle=args.allow_pickle,
        trust_remote_code=args.trust_remote_code,
    )
    from rich.markup import escape

    from hasten.builder.build import build
    from hasten.builder.outline import outline
    from hasten.cli import console

    if args.dry_run:
        about = outline(plan, args.output, force=args.force)
        if args.json:
            console.print_json({"plan": plan, "outline": about})
        else:
            console.out.print(f"model   {escape(about.model)} ({about.task})")
            console.out.print(f"try     {', '.join(about.contenders)}")
            if about.further:
                console.out.print(f"then    {', '.join(about.further)}, as far as {args.budget} go")
            console.out.print(f"against {about.baseline} on the {'CPU' if about.device == 'cpu' else 'GPU'}")
            for candidate in about.unavailable:
                console.out.print(f"        [dim]not {candidate.variant}: {escape(candidate.reason)}[/]")
            console.out.print(f"write   {escape(str(about.target))}", highlight=False)
            for note in about.notes:
                console.out.print(f"[yellow]{escape(note)}[/]", highlight=False)
        return 0
    bundle = build(plan, args.output, force=args.force, progress=console.display(args.quiet))
    if args.json:
        console.print_json({"path": bundle.path, "report": bundle.report})
        return 0
    console.print_report(bundle.report)
    where = args.output or bundle.path
    console.out.print(f"\n[bold]{bundle.chosen.name}[/] is in [bold]{escape(str(where))}[/]", highlight=False)
    console.out.print(f"  hasten run {where} {_example(bundle)}", highlight=False, markup=False)
    return 0


def _example(bundle: Bundle) -> str:
    """What may follow in the command that answers from it."""
    from hasten.tasks import TASKS

    if bundle.manifest.generation is not None:
        return '"some text"'
    fields, spec = TASKS.get(bundle.manifest.task.name).fields, bundle.manifest.task
    if len(fields) == 1:
        return f'"some {spec.mask_token or "text"}"'
    lists = {"candidate_labels", "choices", "documents"}
    return " ".join(f"""--field {name}='{'["…", "…"]' if name in lists else "…"}'""" for name in fields)
