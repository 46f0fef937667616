"""Imported by runs under test (experimental.custom_import): makes one rank fail in a step of choice."""

import os

import tests.distributed.tiny_models  # noqa: F401  (registers what the run's other arguments name)
from titan.training.step import TrainStep

_run = TrainStep.run


def _failing_run(self, step, microbatches, valid_tokens):  # type: ignore[no-untyped-def]
    if step == 3 and os.environ.get("RANK") == "1":
        raise ValueError("a fault on purpose")
    return _run(self, step, microbatches, valid_tokens)


TrainStep.run = _failing_run  # type: ignore[method-assign]
