"""Errors that the user can mend: shown as text, never as a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake of the user's. The message names the thing, its value, what was expected and the nearest fix."""


def of_source(section: str, error: UserError) -> str:
    """What an error says that names keys of [training], when they are those of a table of [[training.sources]]."""
    text = str(error).replace("training.dataset", "dataset").replace("training.text_", "text_")
    return f"{section}: {text}"


class ConfigError(UserError):
    """All mistakes of one config.

    Attributes:
        mistakes: one text each, without a trailing newline.
    """

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{count} in the config:\n" + "\n".join(f"  - {mistake}" for mistake in mistakes))


@contextmanager
def refused_by_system(setting: str) -> Iterator[None]:
    """Make an OSError inside the block a UserError that begins with the setting and its value."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting}: {error.strerror}") from error
