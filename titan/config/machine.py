"""What rules may know of the machine that a run is for: this one, or another that a run is planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A rank's device.

    Attributes:
        name: the product's.
        accelerates: it isn't a CPU.
        multiplies_float8: its matrix products take float8 operands.
    """

    name: str
    accelerates: bool
    multiplies_float8: bool


_planned: ContextVar[Machine | None] = ContextVar("planned", default=None)


@contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """Within the block, configs are checked for another machine: its device counts, and files needn't be here."""
    token = _planned.set(machine)
    try:
        yield
    finally:
        _planned.reset(token)


def is_elsewhere() -> bool:
    """Whether configs are checked for another machine."""
    return _planned.get() is not None


def machine() -> Machine:
    """The machine that configs are checked for. Imports torch when that is this one."""
    if (planned := _planned.get()) is not None:
        return planned
    from titan.observability.device import find_device

    device = find_device()
    return Machine(device.name, accelerates=device.type != "cpu", multiplies_float8=device.multiplies_float8())
