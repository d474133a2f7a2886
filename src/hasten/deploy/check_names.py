"""Check names that a cluster would reject, before anything is written."""

from __future__ import annotations

import re

from hasten.core.errors import PlanError

# The name of a Service must begin with a letter (RFC 1035), and most resources are named like their Service.
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
# The parts of an image's name: a registry differs from a folder by its dot or its port.
_WORD = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = rf"({_WORD}(\.{_WORD})+(:[0-9]+)?|{_WORD}:[0-9]+|localhost)/"
_FOLDER = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_TAG, _DIGEST = r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", r"@sha256:[0-9a-f]{64}"
_IMAGE = re.compile(rf"({_REGISTRY})?{_FOLDER}(/{_FOLDER})*({_TAG})?({_DIGEST})?")
_MAX_NAME_CHARS = 63


def check_name(flag: str, text: str, max_chars: int = _MAX_NAME_CHARS) -> None:
    """Raise a PlanError unless the text is a valid name of a new resource."""
    if not _LABEL.fullmatch(text) or len(text) > max_chars:
        raise PlanError(
            f"{flag} '{text}' is not a valid name in Kubernetes",
            hint=f"use a letter, then letters, digits and dashes, in lower case, at most {max_chars} characters",
        )


def check_object(flag: str, text: str) -> None:
    """Raise a PlanError unless the text is a valid name of an existing resource, which may have dots."""
    if not _SUBDOMAIN.fullmatch(text) or len(text) > 253:
        raise PlanError(
            f"{flag} '{text}' is not a valid name in Kubernetes", hint="use lower case, digits, dashes and dots"
        )


def check_image(text: str) -> None:
    """Raise a PlanError unless the text is a valid name of an image."""
    if not _IMAGE.fullmatch(text):
        raise PlanError(f"'{text}' is not a valid name of an image", hint="use REGISTRY/NAME:TAG, or NAME:TAG")
