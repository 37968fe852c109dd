"""One option of a command: a dataclass field, its name on the command line, and its type in a reader's words."""

import dataclasses
import types
import typing
from argparse import SUPPRESS, BooleanOptionalAction
from pathlib import Path
from typing import Any, Literal

MANY = (list, tuple, set, frozenset)
WORDS: dict[Any, tuple[str, str]] = {
    int: ("INT", "an integer"),
    float: ("NUMBER", "a number"),
    bool: ("BOOL", "true or false"),
    str: ("TEXT", "text"),
    Path: ("PATH", "a path"),
    dict: ("MAPPING", "a mapping"),
}


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a `Config`; `default` is `dataclasses.MISSING` where the field has none."""

    name: str
    hint: Any
    default: Any
    positional: bool

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]", hint: Any, positional: bool) -> "Option":
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        return cls(field.name, hint, default, positional)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """A positional's name in the help: `inputs: list[str]` is INPUT, for the usage already shows dots."""
        name = self.name.upper().replace("_", "-")
        return name.removesuffix("S") if self.many else name

    @property
    def label(self) -> str:
        """What an error calls it."""
        return self.metavar if self.positional else self.flag

    @property
    def arms(self) -> tuple[Any, ...]:
        """The alternatives of a union, or the one type, without None."""
        is_union = typing.get_origin(self.hint) in (types.UnionType, typing.Union)
        return tuple(a for a in typing.get_args(self.hint) if a is not types.NoneType) if is_union else (self.hint,)

    @property
    def optional(self) -> bool:
        return types.NoneType in typing.get_args(self.hint)

    @property
    def many(self) -> bool:
        return any((typing.get_origin(arm) or arm) in MANY for arm in self.arms)

    @property
    def switch(self) -> bool:
        return self.arms == (bool,)

    @property
    def required(self) -> bool:
        """A positional with an empty default must be given too: a dataclass often forces a default upon it."""
        empty = self.default is dataclasses.MISSING or (self.positional and not self.default)
        return empty and not self.optional

    @property
    def expected(self) -> str:
        """What it takes, for an error."""
        return " or ".join(describe(arm)[1] for arm in self.arms)

    @property
    def choices(self) -> list[str]:
        return [str(value) for arm in self.arms if typing.get_origin(arm) is Literal for value in typing.get_args(arm)]

    def plain(self, value: Any) -> Any:
        """A value from words or YAML in the type's shape: one item becomes a list, 224 for a text becomes "224"."""
        if value is None:
            return None
        if self.many:
            lists = [arm for arm in self.arms if (typing.get_origin(arm) or arm) in MANY]
            items = list(value) if type(value) in MANY else [value]
            if len(items) == 1 and len(lists) < len(self.arms):
                return items[0]
            return [_text_of(item, typing.get_args(lists[0])) for item in items]
        return _text_of(value, self.arms)

    @property
    def _count(self) -> int | str | None:
        """How many values argparse shows: as many as a tuple of fixed length has, or one and more for a list."""
        arm = self.arms[0]
        fixed = typing.get_origin(arm) is tuple and Ellipsis not in typing.get_args(arm)
        return len(typing.get_args(arm)) if fixed else "+" if self.many else None

    def help_keywords(self, text: str) -> dict[str, Any]:
        """Keywords for `argparse.add_argument` that make it describe this option, except for its name."""
        blank = self.default is dataclasses.MISSING or self.default is None or self.default in ("", [], (), {})
        default = str(self.default).lower() if self.switch else str(self.default)
        if type(self.default) in MANY:
            default = " ".join(map(str, self.default))
        shown = text if blank else f"{text} (default: {default})".strip()
        keywords: dict[str, Any] = {"help": shown.replace("%", "%%"), "default": SUPPRESS}
        if self.switch:
            return {**keywords, "action": BooleanOptionalAction}
        placeholder = "|".join(dict.fromkeys(describe(arm)[0] for arm in self.arms))
        return {**keywords, "metavar": placeholder, "nargs": self._count}


def describe(arm: Any) -> tuple[str, str]:
    """A type's placeholder in the help, and the type in words."""
    origin, args = typing.get_origin(arm), typing.get_args(arm)
    if origin is Literal:
        names = [str(value) for value in args]
        return "{" + ",".join(names) + "}", "one of " + ", ".join(names) if len(names) > 1 else names[0]
    if origin is tuple and Ellipsis not in args:
        return describe(args[0])[0], f"{len(args)} values, each {describe(args[0])[1]}"
    if origin in MANY:
        placeholder, words = describe(args[0])
        return placeholder, f"a list, each {words}"
    return WORDS.get(origin or arm, (str(arm).upper(), str(arm)))


def _text_of(value: Any, arms: tuple[Any, ...]) -> Any:
    """YAML reads an unquoted 224 as a number; where only text is wanted it is the text that was written."""
    return str(value) if str in arms and type(value) in (int, float) and type(value) not in arms else value
