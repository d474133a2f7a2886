"""Parse and apply simple row filters: comparisons of a column with a literal, joined by `and`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from hasten.core.errors import PlanError
from hasten.core.registry import did_you_mean
from hasten.corpus.arrow_library import arrow_errors

if TYPE_CHECKING:
    import pyarrow as pa

_OPERATORS = {
    "=": "equal",
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_COLUMN = r"(?:\"(?P<quoted>[^\"]+)\"|(?P<plain>[^\W\d]\w*))"
_LITERAL = r"(?:'(?P<text>(?:[^']|'')*)'|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|(?P<flag>true|false))"
_TERM = re.compile(
    rf"\s*{_COLUMN}\s*(?:(?P<null>is\s+(?P<not>not\s+)?null)|(?P<operator><=|>=|!=|==|<|>|=)\s*{_LITERAL})"
    r"\s*(?P<more>and\b|$)",
    re.IGNORECASE,
)
_HINT = '"lang = \'en\' and stars >= 3", "note is not null"; a column of several words goes in double quotes'


@dataclass(frozen=True, slots=True)
class _Term:
    column: str
    # None: the column is compared with null.
    operator: str | None
    value: object
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Comparisons that a row must pass, all of them. A comparison with a null value does not pass."""

    terms: tuple[_Term, ...]

    @classmethod
    def parse(cls, text: str) -> RowFilter:
        """Parse a filter; raise PlanError if it is not one."""
        terms: list[_Term] = []
        position, is_open = 0, True
        while is_open:
            match = _TERM.match(text, position)
            if not match:
                raise PlanError(f"--where: '{text[position:].strip()[:60]}' is not a comparison", hint=_HINT)
            terms.append(_term(match))
            position, is_open = match.end(), bool(match["more"])
        return cls(tuple(terms))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are compared."""
        return tuple(term.column for term in self.terms)

    def check(self, schema: pa.Schema) -> None:
        """Raise PlanError if a column is missing, or of a type that cannot be compared with its value."""
        for term in self.terms:
            if term.column not in schema.names:
                raise PlanError(f"--where: there is no column '{term.column}'{did_you_mean(term.column, schema.names)}")
        self.mask(schema.empty_table())

    def mask(self, rows: pa.RecordBatch | pa.Table) -> Any:
        """Return a boolean array: true for rows that pass."""
        import pyarrow.compute as pc

        return reduce(pc.and_, [self._mask(term, rows.column(term.column)) for term in self.terms])

    def _mask(self, term: _Term, column: Any) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        if term.operator is None:
            return pc.is_valid(column) if term.is_negated else pc.is_null(column)
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        with arrow_errors(f"--where: '{term.column}' ({column.type}) cannot be compared with {term.value!r}"):
            # Tables of text, such as CSV, hold their numbers as text.
            if is_text and not isinstance(term.value, str):
                column = pc.cast(column, pa.float64() if not isinstance(term.value, bool) else pa.bool_())
            value = pa.scalar(term.value)
            if isinstance(term.value, str) and not is_text:
                value = value.cast(column.type)
            return pc.fill_null(getattr(pc, term.operator)(column, value), False)


def _term(match: re.Match[str]) -> _Term:
    column = match["quoted"] or match["plain"]
    if match["null"]:
        return _Term(column, None, None, bool(match["not"]))
    value: object
    if match["text"] is not None:
        value = match["text"].replace("''", "'")
    elif match["flag"]:
        value = match["flag"].lower() == "true"
    else:
        value = int(match["number"]) if re.fullmatch(r"-?\d{1,18}", match["number"]) else float(match["number"])
    return _Term(column, _OPERATORS[match["operator"]], value)
