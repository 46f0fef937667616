"""The command line cut into options and values. What they mean is decided by the rules that files have too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan.config.convert import BARE
from titan.config.given import COMMAND_LINE, Given


def wants_help(argv: Sequence[str]) -> bool:
    """`--help` or `-h` is among the arguments."""
    return "--help" in argv or "-h" in argv


def read_command_line(argv: Sequence[str]) -> tuple[list[Given], list[str]]:
    """All options of a command line in their order, and the mistakes in its form.

    `--section.field value`, `--section.field=value` and a bare `--section.flag` are understood, with `-` for `_`.
    Whatever follows an option and doesn't start with `--` is its value, so that negative numbers are values.
    """
    options: list[Given] = []
    mistakes: list[str] = []
    for option, value in _pairs(argv):
        if option is None:
            mistakes.append(f"{COMMAND_LINE}: {value}: not an option; options are written --section.field value")
        else:
            key = option.removeprefix("--").replace("-", "_")
            options.append(Given(key, value, COMMAND_LINE, option))
    return options, mistakes


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str | None, object]]:
    """(option, its value or BARE), or (None, an argument that belongs to no option)."""
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if not argument.startswith("--"):
            yield None, argument
        elif "=" in argument:
            option, _, text = argument.partition("=")
            yield option, text
        elif position < len(argv) and not argv[position].startswith("--"):
            yield argument, argv[position]
            position += 1
        else:
            yield argument, BARE
