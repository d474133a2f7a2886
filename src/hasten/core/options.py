"""Declare the options of a command as annotated dataclass fields: flags, help texts and parsing follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from hasten.core.errors import HastenError, PlanError

if TYPE_CHECKING:
    import argparse

    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Option:
    """The parser and the help text of an option."""

    # Parses the text of the option or, for one with several values, the list of their texts.
    read: Callable[[Any], Any]
    # Empty for a boolean flag.
    metavar: str
    description: str
    group: str = ""
    # Flags that do not follow from the name of the field.
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    has_many: bool = False

    @property
    def is_flag(self) -> bool:
        """Return whether the option is a boolean flag."""
        return not self.metavar

    def help(self, default: object) -> str:
        """Return the text for `--help`, with the default."""
        if default is None or self.is_flag or (isinstance(default, str | tuple | dict) and not default):
            return self.description
        return f"{self.description} (default: {_shown(default, self.metavar)})"


@dataclass(frozen=True, slots=True)
class _Declared:
    path: str
    option: Option
    default: object

    @property
    def flags(self) -> tuple[str, ...]:
        return self.option.flags or (flag(self.path.rpartition(".")[2]),)


T = TypeVar("T", bound="DataclassInstance")


def flag(name: str) -> str:
    """Return the flag of a field: `--bench-budget` for `bench_budget_s`."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def add_options(parser: argparse.ArgumentParser, kind: type[DataclassInstance]) -> None:
    """Add the options of a dataclass, and of dataclasses inside it, to a parser."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for declared in _declared(kind):
        option = declared.option
        if option.group and option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        target = groups.get(option.group, parser)
        text = option.help(declared.default)
        if option.is_flag:
            target.add_argument(*declared.flags, dest=declared.path, action="store_true", help=text)
        else:
            metavar = None if option.choices else option.metavar
            count = "+" if option.has_many else None
            target.add_argument(
                *declared.flags, dest=declared.path, nargs=count, choices=option.choices, metavar=metavar, help=text
            )


def read_options(kind: type[T], values: Mapping[str, Any], path: str = "", **others: object) -> T:
    """Make a dataclass from the values of its options; options that were not set keep their defaults."""
    arguments = dict(others)
    hints = get_type_hints(kind)
    for declared in _declared(kind, path):
        name, _, rest = declared.path.removeprefix(path).partition(".")
        if rest:
            arguments.setdefault(name, read_options(hints[name], values, f"{path}{name}."))
        elif (value := values.get(declared.path)) is not None:
            try:
                arguments[name] = declared.option.read(value)
            except HastenError as error:
                raise PlanError(f"{declared.flags[-1]}: {error.message}", hint=error.hint) from error
    return kind(**arguments)


def changed_options(value: DataclassInstance) -> list[str]:
    """Return the command-line arguments that make this dataclass again: the options that differ from their defaults."""
    arguments: list[str] = []
    for declared in _declared(type(value)):
        setting = attrgetter(declared.path)(value)
        if setting == declared.default or setting in (None, {}, ()):
            continue
        arguments.append(declared.flags[-1])
        if declared.option.is_flag:
            continue
        if isinstance(setting, Mapping):
            arguments.append(",".join(f"{name}={text}" for name, text in setting.items()))
        elif isinstance(setting, tuple | list):
            arguments += map(str, setting)
        else:
            arguments += str(setting).split() if declared.option.has_many else [_to_text(setting)]
    return arguments


def _to_text(setting: object) -> str:
    """Return a number without an exponent, which durations do not have."""
    if not isinstance(setting, float):
        return str(setting)
    text = format(Decimal(repr(setting)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_whole(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"'{text}' is not a whole number") from None


def parse_number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"'{text}' is not a number") from None


def _declared(kind: type[DataclassInstance], path: str = "") -> Iterator[_Declared]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            default = None if field.default is MISSING else field.default
            yield _Declared(f"{path}{field.name}", hint.__metadata__[0], default)
        elif isinstance(hint, type) and is_dataclass(hint):
            yield from _declared(hint, f"{path}{field.name}.")


def _shown(value: object, metavar: str) -> object:
    """Return a default value as a user would write it."""
    if metavar == "SIZE" and isinstance(value, int):
        return f"{value // 2**20}MB"
    if metavar == "TIME" and isinstance(value, float):
        if value < 1:
            return f"{value * 1e3:g}ms"
        return f"{value / 60:g}m" if value > 60 and value % 60 == 0 else f"{value:g}s"
    return value
