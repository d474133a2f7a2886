"""Presets for summarization and translation with encoder-decoders, as in transformers' pipelines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.bundle import Bundle

SUMMARIZATION, TRANSLATION = "summarization", "translation"
TASK_PRESETS = (SUMMARIZATION, TRANSLATION)
_LANGUAGE_PAIR = re.compile(rf"{TRANSLATION}_[a-z]+_to_[a-z]+")
# Options that a model's configuration may set for a task.
_OPTIONS = ("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TaskPreset:
    """The prompt prefix and default options of a task, and the key of its answers."""

    key: str = "generated_text"
    prefix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


# Plain generation.
GENERATE = TaskPreset()


def is_task_preset(task: str) -> bool:
    """Return whether a task is `summarization`, `translation`, or a language pair such as `translation_en_to_de`."""
    return task in TASK_PRESETS or _LANGUAGE_PAIR.fullmatch(task) is not None


def task_preset_for(task: str, bundle: Bundle) -> TaskPreset:
    """Return the preset of a task from the model's configuration, which for T5 has the prefix of the prompt."""
    if not is_task_preset(task):
        return GENERATE
    file = bundle.configuration("config.json")
    config = json.loads(file.read_bytes()) if file is not None else {}
    params = (config.get("task_specific_params") or {}).get(task) or {}
    spec = bundle.manifest.generation
    start_tokens = len(spec.decoder_start_token_ids) if spec is not None else 0
    options = {name: params[name] for name in _OPTIONS if name in params}
    # transformers counts the start tokens of an answer as part of it.
    if params.get("max_length"):
        options["max_tokens"] = max(1, params["max_length"] - start_tokens)
    if params.get("min_length"):
        options["min_tokens"] = max(0, params["min_length"] - start_tokens)
    key = "summary_text" if task == SUMMARIZATION else "translation_text"
    return TaskPreset(key, params.get("prefix") or "", options)
