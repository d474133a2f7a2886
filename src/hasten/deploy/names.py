"""Names that a cluster takes, checked before anything is written that it would refuse."""

from __future__ import annotations

import re

from hasten.core.errors import PlanError

# Services must begin with a letter (RFC 1035), and most of what we write is called like one.
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
# Of an image: a registry is told from a folder by its dot or its port.
_WORD = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = rf"({_WORD}(\.{_WORD})+(:[0-9]+)?|{_WORD}:[0-9]+|localhost)/"
_FOLDER = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_TAG, _DIGEST = r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", r"@sha256:[0-9a-f]{64}"
_IMAGE = re.compile(rf"({_REGISTRY})?{_FOLDER}(/{_FOLDER})*({_TAG})?({_DIGEST})?")
_MOST_LETTERS = 63


def check_name(flag: str, text: str, most: int = _MOST_LETTERS) -> None:
    if not _LABEL.fullmatch(text) or len(text) > most:
        raise PlanError(
            f"{flag} '{text}' is not a name that Kubernetes takes",
            hint=f"a letter, then letters, digits and dashes, in lower case, at most {most}",
        )


def check_object(flag: str, text: str) -> None:
    """The name of something that is there already, which may have dots."""
    if not _SUBDOMAIN.fullmatch(text) or len(text) > 253:
        raise PlanError(f"{flag} '{text}' is not a name that Kubernetes takes", hint="lower case, digits, dashes, dots")


def check_image(text: str) -> None:
    if not _IMAGE.fullmatch(text):
        raise PlanError(f"'{text}' is not the name of an image", hint="write REGISTRY/NAME:TAG, or NAME:TAG")
