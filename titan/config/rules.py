"""What a rule that spans fields is, and how rules word what would be legal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from titan.config.job_config import JobConfig

Mistakes = Iterator[str]

# What the model is: a rule that asks for its sizes reads these.
MODEL_KEYS = ("experimental.custom_import", "model.name", "model.flavor")

# Where windows get their length from.
SEQUENCES = ("training.seq_len", "validation.enable", "validation.seq_len")

_MOST_LISTED = 10


class Rule(NamedTuple):
    """One rule that spans fields.

    Attributes:
        find: yields a text per mistake, for (config, world size).
        reads: keys whose values it needs; it is left out when one of them is reported already.
        spoils: keys that later rules can't rely on once this one found a mistake.
        local: it asks for this machine's files or system; left out where a run is planned for another.
    """

    find: Callable[[JobConfig, int], Mistakes]
    reads: tuple[str, ...]
    spoils: tuple[str, ...] = ()
    local: bool = False


def window_lengths(config: JobConfig) -> dict[str, int]:
    """Tokens per window, by the key that sets them."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len is not None:
        lengths["validation.seq_len"] = config.validation.seq_len
    return lengths


def listed(names: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def listed_near(numbers: Iterable[int], wanted: int) -> str:
    """Numbers as `listed`; of many, only the ones next to what was wanted."""
    ordered = sorted(numbers)
    if len(ordered) <= _MOST_LISTED:
        return listed(ordered)
    below, above = [n for n in ordered if n <= wanted][-1:], [n for n in ordered if n > wanted][:1]
    return f"{listed([*below, *above])} (nearest of {len(ordered)})"


def divisors(number: int) -> list[int]:
    """All divisors of a number of at least 1, in order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_multiples(number: int, unit: int, most: int | None = None) -> list[int]:
    """The multiples of `unit` next to a number that isn't one, from `unit` to `most`."""
    below = (number if most is None else min(number, most)) // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple and (most is None or multiple <= most)]
