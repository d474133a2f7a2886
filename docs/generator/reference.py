"""Generates the reference pages that describe the code: command line, settings, Python API and extension points."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, fields

import hasten
from generator.results import GENERATED, table
from hasten import cli
from hasten.backends import BACKENDS
from hasten.cli import convert_model
from hasten.core import errors
from hasten.server.settings import OPTIONS, Settings
from hasten.tasks import TASKS

_EXITING = (
    "PlanError",
    "InputError",
    "UnsupportedError",
    "StageError",
    "AccuracyError",
    "BundleError",
    "ServeError",
)
_API = {
    "Build and load": ("build", "load", "map", "pipeline", "Bundle", "Predictor", "Generator", "SentenceEncoder"),
    "PyTorch models on a GPU": ("accelerate", "restore"),
    "Errors": ("HastenError", *(name for name in hasten.__all__ if name.endswith("Error") and name != "HastenError")),
}


def command_line_page() -> str:
    """Return the page of all commands, as tables: argparse's own help differs between Python versions."""
    lines = [GENERATED, "# Command line"]
    parsers = [
        (f"hasten {name}", summary, cli.parser_for(name, cli.module_of(name))) for name, summary in cli.COMMANDS.items()
    ]
    parsers.append(("convert_model", "transformer-deploy's command line", convert_model.parser()))
    for name, summary, parser in parsers:
        positionals = [action for action in parser._actions if not action.option_strings]
        options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        usage = " ".join(f"[{each.dest.upper()} …]" if each.nargs == "*" else each.dest.upper() for each in positionals)
        lines += ["", f"## {name} {usage}".rstrip(), "", f"{summary[0].upper()}{summary[1:]}.", ""]
        lines += table(["option", "meaning"], map(_option_row, options))
    exit_codes = [["0", "", "success"], *_error_rows(), ["130", "", "interrupted (Ctrl-C)"]]
    lines += ["", "## Exit codes", "", *table(["code", "error", "meaning"], exit_codes)]
    return "\n".join(lines) + "\n"


def _option_row(action: argparse.Action) -> list[str]:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    value = value if isinstance(value, str) else " ".join(value)
    value = "\\|".join(action.choices) if action.choices else value
    repeated = " …" if action.nargs in ("+", "*") else ""
    flags = ", ".join(f"`{name}`" for name in action.option_strings)
    meaning = (action.help or "").replace("%(default)s", str(action.default))
    default = " ".join(map(str, action.default)) if isinstance(action.default, list) else ""
    if default not in meaning:
        meaning += f" default: {default}"
    return [f"{flags} {value}{repeated}".rstrip(), meaning.strip()]


def _error_rows() -> list[list[str]]:
    tree = (errors.__doc__ or "").splitlines()
    rows = []
    for name in _EXITING:
        meaning = next(line.split("   ")[-1].strip() for line in tree if name in line)
        rows.append([str(getattr(errors, name).exit_code), f"`{name}`", meaning])
    return rows


def settings_page() -> str:
    """Return the page of server settings: flag, environment variable, TOML key, default and meaning."""
    parser = cli.parser_for("serve", cli.module_of("serve"))
    lines = [
        GENERATED,
        "# Server settings",
        "",
        "`hasten serve` reads each setting from a flag, an environment variable or a TOML file; the first one that is "
        "set wins, in this order. `--config FILE` or `HASTEN_CONFIG` names the file. The bundles to serve are "
        'positional arguments, `HASTEN_BUNDLES="sst2 embedder"`, or `bundles = ["sst2", "embedder"]`.',
    ]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest in OPTIONS]
        if actions:
            title = str(group.title)
            header = ["flag", "environment variable", "TOML key", "default", "meaning"]
            lines += ["", f"## {title[0].upper()}{title[1:]}", "", *table(header, map(_setting_row, actions))]
    return "\n".join(lines) + "\n"


def _setting_row(action: argparse.Action) -> list[str]:
    name = action.dest
    meaning, _, default = (action.help or "").partition(" (default: ")
    default = default.removesuffix(")") or _field_default(name)
    value = f" {action.metavar}" if isinstance(action.metavar, str) and action.metavar else ""
    flags = ", ".join(f"`{each}`" for each in action.option_strings)
    return [f"{flags}{value}", f"`HASTEN_{name.upper()}`", f"`{name}`", default, re.sub(r"\|", r"\\|", meaning)]


def _field_default(name: str) -> str:
    default = next(field.default for field in fields(Settings) if field.name == name)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default is None or default is MISSING else str(default)


def api_page() -> str:
    """Return the page of the public Python names; mkdocstrings fills in their docstrings from the source."""
    lines = [GENERATED, "# Python API", "", "All names are importable from `hasten`. `import hasten` loads no library."]
    listed = {name for names in _API.values() for name in names}
    if missing := set(hasten.__all__) - listed - {"__version__"}:
        raise SystemExit(f"docs/generator/reference.py does not list {', '.join(sorted(missing))}")
    for title, names in _API.items():
        lines += ["", f"## {title}", "", *(f"::: hasten.{name}\n" for name in names)]
    return "\n".join(lines).rstrip() + "\n"


def extensions_page() -> str:
    """Return the tables of registered backends and tasks."""
    backends = [
        [f"`{backend.name}`", ", ".join(backend.requires), "yes" if backend.is_stored else "no, for comparison only"]
        for backend in BACKENDS.all()
    ]
    without_heads = {
        "sentence-similarity": "sentence-transformers layout, or `--pooling`",
        "feature-extraction": "`…Model`",
        "multi-vector-embedding": "layouts of sentence-transformers, PyLate and Stanford's ColBERT",
    }
    tasks = []
    for task in TASKS.all():
        heads = ", ".join(f"`…{head}`" for head in task.heads) or without_heads.get(task.name, "any")
        tasks.append([f"`{task.name}`", heads, f"≥ {task.min_agreement:g}"])
    lines = [
        GENERATED,
        "# Backends and tasks",
        "",
        *table(["backend", "packages", "stored in bundles"], backends),
        "",
        *table(["task", "model classes", "accuracy gate for reduced precision"], tasks),
    ]
    return "\n".join(lines) + "\n"
