"""Find entities in sequences of BIO tags, as seqeval and conlleval do."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = "O"


def spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the entities of a tag sequence as (type, first, last), by seqeval's default rules, which are conlleval's.

    An I- without a predecessor starts an entity, and so does a change of type.
    """
    entities = set()
    current_type, first, previous = "", 0, OUTSIDE
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, tag_type = _split_tag(tag)
        continues = (
            OUTSIDE not in (prefix, previous)
            and tag_type == current_type
            and prefix not in "BS"
            and previous not in "ES"
        )
        if not continues:
            if previous != OUTSIDE:
                entities.add((current_type, first, index - 1))
            current_type, first = tag_type, index
        previous = prefix
    return entities


def _split_tag(tag: str) -> tuple[str, str]:
    """Return the prefix (B, I, E, S or O) and the type. A tag without prefix, such as a part of speech, is an I-."""
    if tag in ("B", "I", "E", "S", OUTSIDE):
        return tag, ""
    return (tag[0], tag[2:]) if tag[1:2] == "-" else ("I", tag)
