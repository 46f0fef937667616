from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from titan.observability.logging import logger


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, as a run without a launcher has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What titan logs, from INFO up."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="titan")
    return caplog
