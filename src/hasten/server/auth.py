"""Check API keys, which come from a file and the environment."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hasten.core.errors import PlanError, UnauthorizedError


class ApiKeys:
    """The accepted API keys. Without any, every request is accepted."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
        """Read keys from a file, one per line, and from HASTEN_API_KEYS.

        Either of them without a key is an error: setting it means to restrict access.
        """
        variable = environment.get("HASTEN_API_KEYS", "")
        keys = [key for word in variable.replace(",", "\n").splitlines() if (key := word.strip())]
        if variable and not keys:
            raise PlanError("HASTEN_API_KEYS contains no key")
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                hint = "--api-key-file takes a file with one key per line"
                raise PlanError(f"cannot read API keys from {file}: {reason}", hint=hint) from error
            file_keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
            if not file_keys:
                raise PlanError(f"{file} contains no key")
            keys += file_keys
        if not all(key.isascii() for key in keys):
            raise PlanError("an API key contains characters that a header cannot carry", hint="use ASCII only")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, authorization: str) -> None:
        """Raise unless the header `Authorization: Bearer KEY` carries a known key. Takes the same time for any key."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        # All keys are compared: `any` would end at the first that matches.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise UnauthorizedError("the API key is missing or unknown", hint="send Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
