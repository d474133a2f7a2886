"""Who may ask: API keys from a file and the environment."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hasten.core.errors import PlanError, UnauthorizedError


class Keys:
    """Nobody is asked for a key where there are none."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        lines = environment.get("HASTEN_API_KEYS", "").replace(",", "\n").splitlines()
        if file is not None:
            try:
                lines += file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise PlanError(f"no keys at {file}: {error}") from error
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if file is not None and not keys:
            # Whoever names a file means to keep others out.
            raise PlanError(f"there is no key in {file}")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, authorization: str) -> None:
        """Of a header `Authorization: Bearer KEY`. How long it takes tells nothing about the keys."""
        if not self._keys:
            return
        given = authorization.removeprefix("Bearer ").strip().encode()
        is_known = False
        for key in self._keys:
            is_known |= hmac.compare_digest(given, key)
        if not is_known:
            raise UnauthorizedError("the API key is missing or unknown", hint="Authorization: Bearer KEY")
