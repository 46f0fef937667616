"""titan/observability/logging.py."""

import io
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore

from tests.observability.conftest import use_terminal
from titan.observability.logging import (
    color_allowed,
    init_logging,
    log_to_file,
    logger,
    paint,
    warn_once_per_job,
)


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


def test_a_warning_that_is_repeated_every_step_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=False)
    for message in ("a", "b", "a"):
        logger.warning(message)
        logger.info("step")
    shown = re.findall(r"(WARNING: \w|step)", capsys.readouterr().err)
    assert shown == ["WARNING: a", "step", "WARNING: b", "step", "step"]


def test_an_error_is_shown_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    init_logging(0, color=False)
    logger.error("broken")
    logger.error("broken")
    assert capsys.readouterr().err.count("broken") == 2


def test_a_warning_of_all_ranks_is_shown_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 0, 2):
        init_logging(rank, color=False)
        warn_once_per_job(store)
        logger.warning("the same from all")
        logger.warning(f"of {rank} alone")
    shown = re.findall(r"(\[rank \d\] )?WARNING: (.*)", capsys.readouterr().err)
    assert shown == [
        ("[rank 1] ", "the same from all"),
        ("[rank 1] ", "of 1 alone"),
        ("", "of 0 alone"),
        ("[rank 2] ", "of 2 alone"),
    ]


def test_a_store_that_is_gone_keeps_no_warning_back(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(HashStore):
        def clone(self) -> "Gone":
            return self

        def add(self, *_: object) -> int:
            raise DistNetworkError("connection reset")

    init_logging(0, color=False)
    warn_once_per_job(Gone())
    logger.warning("beware")
    assert "beware" in capsys.readouterr().err


def test_libraries_warnings_are_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        init_logging(0, color=False)
        for _ in range(2):
            warnings.warn("an old option", stacklevel=1)
    err = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING: UserWarning: an old option \(.*test_logging.py:\d+\)\n", err)


def test_a_ranks_file_has_all_that_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "rank_3.log"
    for start in (1, 2):
        init_logging(3, color=True, file=file)
        logger.info(paint(f"start {start}", "cyan"))
        logger.warning("beware")
        logging.getLogger("some.library").warning("its warning")
        logging.getLogger("torch.distributed").warning("torch's warning")
        log_to_file("Traceback of what Python shows itself")
    init_logging(3, color=True)
    logger.info("of no file")
    day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank 3\] "
    lines = [re.sub(day, "", line) for line in file.read_text().splitlines()]
    of_a_start = ["WARNING: beware", "WARNING: its warning", "WARNING: torch's warning"]
    of_a_start += ["ERROR: Traceback of what Python shows itself"]
    assert lines == ["start 1", *of_a_start, "start 2", *of_a_start]
    err = capsys.readouterr().err
    assert err.count("beware") == 2 and "start" not in err and "Traceback" not in err
    assert err.count("[rank 3] WARNING: its warning") == 2, "it would be shown without a file, too"


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
