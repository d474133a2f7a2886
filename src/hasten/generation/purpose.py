"""What an encoder-decoder is asked to do with a text: summarize or translate it, as transformers' pipelines had it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.bundle import Bundle
from hasten.core.generation import Sampling
from hasten.generation.options import sampling_of

SUMMARIZATION, TRANSLATION = "summarization", "translation"
PURPOSES = (SUMMARIZATION, TRANSLATION)
_BETWEEN = re.compile(rf"{TRANSLATION}_[a-z]+_to_[a-z]+")
# Ours, of what a configuration may say for a task.
_OPTIONS = {
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a text is asked with, how it is answered where nobody says otherwise, and what the answer is called."""

    key: str = "generated_text"
    prefix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, defaults: Sampling) -> Sampling:
        return sampling_of(defaults, self.options)


# None but to go on, or to answer.
WRITE = Purpose()


def is_purpose(task: str) -> bool:
    """`summarization`, `translation`, and `translation_en_to_de` of models that know several."""
    return task in PURPOSES or _BETWEEN.fullmatch(task) is not None


def purpose_of(task: str, bundle: Bundle) -> Purpose:
    """With what the model's own configuration says for the task: T5's says what a text begins with."""
    if not is_purpose(task):
        return WRITE
    file = bundle.configuration("config.json")
    config = json.loads(file.read_bytes()) if file is not None else {}
    told = (config.get("task_specific_params") or {}).get(task) or {}
    spec = bundle.manifest.generation
    starts = len(spec.start_ids) if spec is not None else 0
    options = {ours: told[theirs] for theirs, ours in _OPTIONS.items() if theirs in told}
    # transformers counts what every answer begins with as part of it.
    if told.get("max_length"):
        options["max_tokens"] = max(1, told["max_length"] - starts)
    if told.get("min_length"):
        options["min_tokens"] = max(0, told["min_length"] - starts)
    key = "summary_text" if task == SUMMARIZATION else "translation_text"
    return Purpose(key, told.get("prefix") or "", options)
