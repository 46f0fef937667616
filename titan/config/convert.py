"""One value, from a TOML file or from the command line, made into the type that its field asks for."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Union, get_args, get_origin

from titan.config.fields import Setting
from titan.config.nearest import nearest

LARGEST_INT = 2**63 - 1  # of int64, which torch keeps numbers in


class WrongValue(ValueError):
    """The value doesn't fit; the text says what was expected."""


class Bare:
    """Stands for the missing value of an option given without one, such as `--metrics.enable_tensorboard`."""


BARE = Bare()


def convert(value: object, setting: Setting, *, from_text: bool) -> Any:
    """The value as the setting's type, within its bounds.

    Args:
        value: what TOML's reader made of it, or the command line's text (or BARE).
        from_text: it is from the command line.

    Raises:
        WrongValue: it has another type, isn't one of the choices, or is out of bounds.
    """
    optional, hint = _unwrap(setting.hint)
    if optional and value == "":
        return None
    if value is BARE:
        if hint is not bool:
            raise WrongValue(f"needs a value: expected {expected(setting)}")
        return True
    try:
        result = _typed(_parse(value, hint) if from_text and isinstance(value, str) else value, hint)
    except _Mismatch:
        raise WrongValue(f"expected {expected(setting)}{_fix(value, hint, from_text)}") from None
    if isinstance(result, (int, float)) and not isinstance(result, bool) and not _within(result, setting):
        raise WrongValue(f"expected {expected(setting)}")
    return result


def expected(setting: Setting) -> str:
    """The setting's type and bounds in words, such as `a whole number of at least 1, or -1`."""
    _, hint = _unwrap(setting.hint)
    bounds = [
        f"{word} {_number(bound)}"
        for word, bound in (("at least", setting.minimum), ("at most", setting.maximum))
        if bound is not None
    ]
    text = _type_in_words(hint) + (f" of {' and '.join(bounds)}" if bounds else "")
    return text + "".join(f", or {value}" for value in setting.also)


def type_name(hint: Any) -> str:
    """A short type for `--help`, such as INT or fused|foreach."""
    _, hint = _unwrap(hint)
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if _is_choices(hint):
        return f"LIST OF {type_name(get_args(hint)[0])}"
    return {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT", list[str]: "LIST"}.get(hint, "LIST OF LISTS")


class _Mismatch(Exception):
    """Not of the type; the caller knows the words."""


def _unwrap(hint: Any) -> tuple[bool, Any]:
    """(may be unset, the type without None)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        return True, inner
    return False, hint


def _is_choices(hint: Any) -> bool:
    return get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal


def _parse(text: str, hint: Any) -> object:
    """The command line's text as a value of TOML's kind."""
    if get_origin(hint) is list:
        return _parse_list(text)
    parser = _PARSERS.get(hint)
    return parser(text.strip()) if parser else text


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _Mismatch
    return text.lower() == "true"


def _parse_int(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise _Mismatch from None
    # The exponent is looked at first: 1e999999999 would be an int that fills the memory.
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise _Mismatch
    return int(number)


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Mismatch from None


def _parse_list(text: str) -> object:
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    try:
        return json.loads(text)
    except ValueError:
        raise _Mismatch from None


_PARSERS: dict[Any, Callable[[str], object]] = {bool: _parse_bool, int: _parse_int, float: _parse_float}


def _typed(value: object, hint: Any) -> Any:
    """The value checked against the type; an int is widened to a float, nothing else changes its type."""
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise _Mismatch
        return [_typed(item, get_args(hint)[0]) for item in value]
    if get_origin(hint) is Literal:
        if value not in get_args(hint) or not isinstance(value, str):
            raise _Mismatch
        return value
    if hint is float and type(value) is int and abs(value) <= LARGEST_INT:
        return float(value)
    if type(value) is not hint or not _representable(value):
        raise _Mismatch
    return value


def _representable(value: object) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)  # no TOML file could hold these
    if isinstance(value, int):
        return abs(value) <= LARGEST_INT
    return not isinstance(value, float) or math.isfinite(value)


def _within(number: float, setting: Setting) -> bool:
    if number in setting.also:
        return True
    above = setting.minimum is None or number >= setting.minimum
    return above and (setting.maximum is None or number <= setting.maximum)


def _type_in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if _is_choices(hint):
        return "a list with any of " + ", ".join(f'"{choice}"' for choice in get_args(get_args(hint)[0]))
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        list[str]: "a list of texts",
    }
    return words.get(hint, "a list of lists of texts")


def _fix(value: object, hint: Any, from_text: bool) -> str:
    """The nearest thing that would have worked, as the end of a sentence."""
    if get_origin(hint) is Literal:
        found = nearest(str(value), get_args(hint))
        return f'; did you mean "{found}"?' if found else ""
    if isinstance(value, str) and not from_text and hint in _PARSERS:
        try:
            _typed(_parse(value, hint), hint)
        except _Mismatch:
            return ""
        return f"; write {value} without quotes"
    return ""


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
