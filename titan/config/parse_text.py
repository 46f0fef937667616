"""A value that was typed on the command line, as TOML would have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, get_origin


class Mismatch(Exception):
    """Not of the type; the caller knows the words. It may hold the item of a list, and its type, that doesn't fit."""


def parse(text: str, hint: Any) -> object:
    """The text as a value of the kind that a field of this type has in a file.

    Raises:
        Mismatch: it can't be one.
    """
    if get_origin(hint) is list:
        return _parse_list(text)
    parser = PARSERS.get(hint)
    return parser(text.strip()) if parser else text


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise Mismatch
    return text.lower() == "true"


def _parse_int(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise Mismatch from None
    # The exponent is looked at first: 1e999999999 would be an int that fills the memory.
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise Mismatch
    return int(number)


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Mismatch from None


def _parse_list(text: str) -> object:
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    try:
        return json.loads(text)
    except ValueError:
        raise Mismatch from None


PARSERS: dict[Any, Callable[[str], object]] = {bool: _parse_bool, int: _parse_int, float: _parse_float}
