"""Imported by runs under test (experimental.custom_import): something goes wrong on one rank, in a step of choice.

The variable FAULT has rank, step and kind, as in "1 3 raise"; when it happens is written to the file FAULT_TIME. SLOW
makes each step take so many seconds longer. After a restart by torchrun all goes well.
"""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import tests.distributed.tiny_models  # noqa: F401  (registers what the run's other arguments name)
from titan.training.step import TrainStep

_run = TrainStep.run
_rank, _step, _kind = os.environ.get("FAULT", "1 3 raise").split()


def fail() -> None:
    raise ValueError("a fault on purpose")


def go_wrong(kind: str) -> None:
    match kind:
        case "raise":
            fail()
        case "thread":
            threading.Thread(target=fail).start()
            time.sleep(30)
        case "sleep":
            time.sleep(6)
        case "hold":  # the interpreter's lock, so that no other thread of Python runs
            ctypes.PyDLL(None).sleep(300)
        case "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)


def _failing_run(self, step, *arguments, **keywords):  # type: ignore[no-untyped-def]
    if step == 1 and _kind == "sleep":  # a first step has a limit of its own
        time.sleep(6)
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_start and step == int(_step) and os.environ.get("RANK", "0") == _rank:
        if "FAULT_TIME" in os.environ:
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
        go_wrong(_kind)
    time.sleep(float(os.environ.get("SLOW", "0")))
    return _run(self, step, *arguments, **keywords)


TrainStep.run = _failing_run  # type: ignore[method-assign]
