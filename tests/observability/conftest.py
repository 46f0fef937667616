"""Shared by the tests of what people see: a log that starts fresh, a terminal, a CPU device."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from titan.observability.device import Device
from titan.observability.logging import _detach, logger


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test the log as it is at import, and leave it so."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    _detach()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal. Not a fixture: between set-up and test pytest puts its own stderr back."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def cpu() -> Device:
    return Device("cpu", torch.device("cpu"), "gloo", "a CPU")
