"""A value as somebody gave it, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.convert import BARE
from titan.config.toml_text import shown

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Given:
    """One value of one source.

    Attributes:
        key: `section.field`; on the command line `-` is made `_`.
        value: what TOML's reader made of it; the text of a command line's value, or BARE.
        origin: the file's name, or COMMAND_LINE.
        option: the command line's option as it was typed.
    """

    key: str
    value: object
    origin: str
    option: str = ""

    @property
    def from_text(self) -> bool:
        return self.origin == COMMAND_LINE

    @property
    def name(self) -> str:
        """`train.toml: training.steps`, or `command line: --training.steps`."""
        return f"{self.origin}: {self.option or self.key}"

    def __str__(self) -> str:
        """The name with the value, as it was given."""
        if not self.from_text:
            return f"{self.name} = {shown(self.value)}"
        return self.name if self.value is BARE else f"{self.name} {self.value}"
