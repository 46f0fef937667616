from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from titan.observability import signals
from titan.observability.signals import STOP_SIGNALS, StopSignals, clear_requeue, mark_requeue


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopSignals(True) as stop:
        assert not stop.received
        os.kill(os.getpid(), number)
        assert soon(lambda: stop.received)
        os.kill(os.getpid(), number)  # passed on by a launcher: the same request
        time.sleep(0.1)
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_and_none_at_all_ask_for_nothing() -> None:
    with pytest.MonkeyPatch.context(), StopSignals(True) as stop:
        before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.1)
        signal.signal(signal.SIGUSR2, before)
        assert not stop.received


def test_disabled_leaves_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(False) as stop:
        assert signal.getsignal(signal.SIGTERM) is before
    assert not stop.received


def test_a_second_signal_ends_at_once_while_the_main_thread_is_in_c() -> None:
    """The main thread sleeps in C with the interpreter's lock free, as in a collective: no handler of Python runs."""
    code = (
        "import ctypes, titan.observability.signals as s; s._SAME_REQUEST_SECONDS = 0.5\n"
        "with s.StopSignals(True):\n"
        "    print('ready', flush=True); ctypes.CDLL(None).pause(); [ctypes.CDLL(None).sleep(60) for _ in range(9)]"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(signals.__file__).parents[2]
    )
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    process.stdout.close()


def test_a_forked_child_is_not_the_run() -> None:
    with StopSignals(True) as stop:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not stop.received


def test_the_mark_of_a_run_to_go_on_with(tmp_path: Path) -> None:
    mark_requeue(tmp_path / "new", 7)
    assert "7" in (tmp_path / "new" / "requeue").read_text()
    clear_requeue(tmp_path / "new")
    clear_requeue(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
