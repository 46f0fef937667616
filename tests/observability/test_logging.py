"""titan/observability/logging.py."""

import io
import logging
import re
import sys

import pytest

from tests.observability.conftest import use_terminal
from titan.observability.logging import color_allowed, init_logging, logger, paint, warn_once


def test_rank_0_logs_to_stderr_from_info_up(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=True)
    logger.debug("hidden")
    logger.info("hello")
    logger.warning("beware")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello\n\d\d:\d\d:\d\d WARNING: beware\n", err)


def test_other_ranks_only_warn_and_say_who_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(3, color=True)
    logger.info("hidden")
    logger.error("broken")
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 3\] ERROR: broken\n", capsys.readouterr().err)


def test_a_second_init_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(1, color=False)
    init_logging(0, color=False)
    logger.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_library_that_configures_the_root_logger_adds_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=False)
    root_handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root_handler)
    try:
        logger.info("once")
    finally:
        logging.getLogger().removeHandler(root_handler)
    assert capsys.readouterr().err.count("once") == 1


def test_an_exception_comes_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=False)
    try:
        raise ValueError("the cause")
    except ValueError:
        logger.exception("it failed")
    err = capsys.readouterr().err
    assert "ERROR: it failed" in err and "ValueError: the cause" in err


def test_colours_only_on_a_terminal_when_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    assert color_allowed(True)
    assert not color_allowed(False)
    init_logging(0, color=True)
    logger.warning("beware")
    assert paint("WARNING: ", "yellow") + "beware" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color_allowed(True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not color_allowed(True)


def test_warn_once(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=False)
    for message in ("a", "b", "a"):
        warn_once(message)
    assert re.findall(r"WARNING: (\w)", capsys.readouterr().err) == ["a", "b"]


def test_a_log_line_takes_the_bar_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm import tqdm

    terminal = use_terminal(monkeypatch)
    init_logging(0, color=False)
    with tqdm(total=3, file=terminal, ncols=60) as bar:
        bar.update()
        logger.info("between")
        bar.update()
    line = next(part for part in terminal.getvalue().split("\n") if "between" in part)
    # The bar was overwritten with blanks, and the line starts at the left edge.
    assert re.search(r"\r +\r\d\d:\d\d:\d\d between$", line)
