"""Who may ask: API keys from a file and the environment."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hasten.core.errors import PlanError, UnauthorizedError


class Keys:
    """Nobody is asked for a key where there are none."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        given = environment.get("HASTEN_API_KEYS", "")
        keys = [key for word in given.replace(",", "\n").splitlines() if (key := word.strip())]
        # Whoever sets the variable, or names a file, means to keep others out.
        if given and not keys:
            raise PlanError("there is no key in HASTEN_API_KEYS")
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise PlanError(f"no keys at {file}: {why}", hint="--key-file names a file, one key a line") from error
            in_file = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
            if not in_file:
                raise PlanError(f"there is no key in {file}")
            keys += in_file
        if not all(key.isascii() for key in keys):
            raise PlanError("an API key has letters that a header cannot carry", hint="ASCII alone")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, authorization: str) -> None:
        """Of a header `Authorization: Bearer KEY`. How long it takes tells nothing about the keys."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(given, digest)
        if not is_known:
            raise UnauthorizedError("the API key is missing or unknown", hint="Authorization: Bearer KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
