"""Entities in rows of BIO tags, as seqeval and conlleval find them."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = "O"


def spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The entities in a row of tags, as (type, first, last): seqeval's default, which is conlleval's.

    An I- that continues nothing starts an entity all the same, and so does a change of type.
    """
    found = set()
    kind, first, before = "", 0, OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):
        mark, type_ = _mark(tag)
        continues = OUTSIDE not in (mark, before) and type_ == kind and mark not in "BS" and before not in "ES"
        if not continues:
            if before != OUTSIDE:
                found.add((kind, first, place - 1))
            kind, first = type_, place
        before = mark
    return found


def _mark(tag: str) -> tuple[str, str]:
    """B, I, E, S or O, and the type. A label without a mark, as of parts of speech, goes on while it is the same."""
    if tag in ("B", "I", "E", "S", OUTSIDE):
        return tag, ""
    return (tag[0], tag[2:]) if tag[1:2] == "-" else ("I", tag)
