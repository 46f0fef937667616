"""The report of runs: what is read of a folder, and the page as a browser shows it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts.report import main
from tests.browser import PHONE, WIDE, colours, opened, overflows
from titan.config.errors import UserError
from titan.observability.goodput import KINDS
from titan.observability.run_folder import read_run
from titan.observability.run_page import run_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
SECTIONS = ["short", "loss", "grad_norm", "lr", "tokens_per_second_per_device", "step_seconds", "memory_peak_bytes"]
SECTIONS += ["tokens_seen", "goodput", "wall_time", "starts", "config"]
CONFIG = """\
[job]
description = "a \\"b\\"  # c"

[optimizer]
lr = 0.004  # train_configs/debug.toml
groups = []

[training]
steps = 100  # command line
# total_tokens = (unset)
"""


def row(step: int, **other: Any) -> dict[str, Any]:
    """A line of metrics.jsonl after 10 steps of a second each."""
    values: dict[str, Any] = {"step": step, "loss": 2 + 3 / step, "loss_max": 2.1 + 3 / step, "grad_norm": 1.0}
    values |= {"lr": 1e-3, "tokens_seen": 1000 * step, "tokens_per_second": 2000.0}
    values |= {"tokens_per_second_per_device": 1000.0, "tflops_per_device": 1.0, "mfu": None, "step_seconds": 1.0}
    values |= {"data_seconds": 0.1, "checkpoint_seconds": 0.0, "profiling_seconds": 0.0, "memory_peak_bytes": 3 * 2**30}
    return values | other


def write_run(folder: Path, *, restarted: bool = True, **other: Any) -> Path:
    """A folder as train.py leaves it: 100 steps, logged every 10th, killed at 62 and started again from 40."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(10, 101, 10):
        when = 1000.0 + step + (50 if restarted and step > 40 else 0)
        timed = {"validation_seconds": 0.0, "time": when, "goodput": 0.5, "fingerprint": f"{step:x}"}
        lines.append(row(step, **(timed | other)))
        if step % 50 == 0:
            lines.append({"step": step, "validation_loss": 2.5, "validation_perplexity": 12.0})
    start = {"start": 0, "time": 995.0, "loop_time": 1000.0, "step": 0, "world_size": 2, "layout": {"pp": 1, "tp": 2}}
    start |= {"command": "python train.py <x>", "versions": {"torch": "2.13"}, "git_commit": "abc", "host": "h"}
    lost = [{"step": step, "time": 1000.0 + step} for step in (50, 60)]
    timings = {
        "step_seconds": 1.0,
        "data_seconds": 0.1,
        "checkpoint_seconds": 0.0,
        "validation_seconds": 0.0,
        "profiling_seconds": 0.0,
    }
    again = start | {"start": 1, "time": 1085.0, "loop_time": 1090.0, "step": 40}
    again["dropped"] = [own | timings for own in lost]
    starts = [start, again] if restarted else [start]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    (folder / "config.toml").write_text(CONFIG)
    return folder


def older(folder: Path) -> Path:
    """A folder of a titan that kept no account of time."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in (1, 10, 20)))
    return folder


def test_a_run_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(run_page([read_run(write_run(tmp_path / "one"))], now=1200.0))
    for width, dark in ((WIDE, False), (PHONE, True)):
        with opened(browser, file, width=width, dark=dark) as page:
            assert page.eval_on_selector_all("section", "all => all.map(one => one.id)") == SECTIONS
            assert overflows(page) == []
            assert colours(page.screenshot()) > 20
            assert page.locator("#loss path.trace").count() == 3  # mean, largest, validation
            assert page.locator("#loss path.event").count() == 1  # the restart
            for text in ("finished", "50 s before this page", "3.0 GiB", "2.5"):
                assert page.locator("#short").get_by_text(text, exact=False).count(), text
            page.locator("#loss .plot").hover()
            assert page.locator("#tip").is_visible() and "mean of a window  2.06" in page.locator("#tip").inner_text()
            shares = page.eval_on_selector_all("#wall_time .bar i", "all => all.map(one => one.dataset.tip)")
            assert "lost, and done again  20 s, 12.9%" in shares


def test_two_runs_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", restarted=False, fingerprint="other", mfu=0.4)]
    (folders[1] / "config.toml").write_text(CONFIG.replace("0.004", "0.008"))
    file = tmp_path / "both.html"
    main([*map(str, folders), "--output", str(file)])
    for width in (WIDE, PHONE):
        with opened(browser, file, width=width) as page:
            assert page.locator("#lr path.trace").count() == 2
            assert page.locator("#wall_time .bar").count() == 2
            assert page.locator("#mfu").count() == 1
            differing = page.locator("#config table").inner_text().split()
            assert differing[-3:] == ["optimizer.lr", "0.004", "0.008"]
            assert "has read something else" in page.locator("#tokens_seen").inner_text()
            assert overflows(page) == []


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    file = folder / "metrics.jsonl"
    file.write_bytes(b"no json\n" + file.read_bytes()[:-30])
    run = read_run(folder)
    assert (run.cut, run.unreadable, run.step) == (True, 1, 100)
    made = run_page([run])
    assert "it was being written, or a kill cut it off" in made and "1 line(s) of the file can&#x27;t be read" in made
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:5]))
    assert "running, or killed" in run_page([read_run(folder)])


def test_an_older_folder(tmp_path: Path) -> None:
    run = read_run(older(tmp_path / "old"))
    assert (run.seconds, run.settings, run.restarts) == (None, {}, [])
    made = run_page([run])
    assert "No starts.jsonl: an older titan wrote this folder." in made and "No config.toml." in made
    assert 'id="goodput"' not in made
    new = read_run(write_run(tmp_path / "new"))
    for both in ([run, new], [new, run]):
        assert "No starts.jsonl in " in run_page(both)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    folder = older(tmp_path / "one")
    bad = [row(30, loss="nan", loss_max="nan"), row(40, loss="inf", loss_max="inf", grad_norm="-inf")]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in bad)
    run = read_run(folder)
    assert run.not_finite == [30, 40]
    assert math.isnan(run.series("loss")[1][-2] or 0)
    made = run_page([run])
    assert "loss or gradient norm isn&#x27;t finite in 2 line(s): steps 30, 40" in made
    assert 'class="wrong"' in made
    only = folder / "metrics.2.jsonl"
    only.write_text(json.dumps(bad[0]) + "\n")
    assert 'class="wrong"' in run_page([read_run(only)])


def test_earlier_runs_of_a_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    (folder / "metrics.1.jsonl").write_text(json.dumps(row(7)) + "\n")
    assert "earlier runs in this folder: metrics.1.jsonl" in run_page([read_run(folder)])
    earlier = read_run(folder / "metrics.1.jsonl")
    assert (earlier.step, earlier.settings, earlier.starts) == (7, {}, [])
    main([str(folder / "metrics.1.jsonl")])
    assert (folder / "report.html").exists()


def test_a_copy_under_another_name(tmp_path: Path) -> None:
    """Its lines have times, as starts have."""
    copy = (write_run(tmp_path / "one") / "metrics.jsonl").rename(tmp_path / "copy.jsonl")
    run = read_run(copy)
    assert (run.step, run.starts) == (100, [])
    assert "No starts.jsonl" in run_page([run])


def test_a_very_long_run_is_thinned_out(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    lines = [row(step, loss=9.75 if step == 12_345 else 2 + step % 5 / 100) for step in range(1, 20_001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = run_page([read_run(folder)])
    assert len(made) < 1_500_000
    assert "the largest, 9.75, at step 12,345" in made


def test_where_time_went_is_what_the_account_says(tmp_path: Path) -> None:
    seconds = read_run(write_run(tmp_path / "one")).seconds
    assert seconds is not None and tuple(seconds) == KINDS
    assert sum(seconds.values()) == pytest.approx(1150 - 995)
    assert (seconds["startup"], seconds["lost"], seconds["down"]) == pytest.approx((10, 20, 25))


def test_writing_of_traces_has_its_part_of_the_bar(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", restarted=False, step_seconds=0.8, profiling_seconds=2.0)
    assert "writing traces  20 s, 19.0%" in run_page([read_run(folder)])


def test_settings_know_their_origins(tmp_path: Path) -> None:
    settings = read_run(write_run(tmp_path / "one")).settings
    found = {key: (each.value, each.origin) for key, each in settings.items()}
    assert settings["job.description"].text == 'a "b"  # c'
    assert found == {
        "job.description": ('"a \\"b\\"  # c"', None),
        "optimizer.lr": ("0.004", "train_configs/debug.toml"),
        "optimizer.groups": ("[]", None),
        "training.steps": ("100", "command line"),
    }


def test_nothing_to_show_is_a_plain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older(tmp_path / "deep")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    cases = {tmp_path: "no metrics.jsonl in it; there is one in", tmp_path / "no": "no such folder or file"}
    for path, text in (cases | {tmp_path / "empty": "no step is logged in it yet"}).items():
        with pytest.raises(UserError, match=text):
            read_run(path)
    starts = write_run(tmp_path / "one") / "starts.jsonl"
    with pytest.raises(UserError, match=r"starts\.jsonl: no step is logged in it yet"):
        read_run(starts)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "deep"), "--output", str(tmp_path / "no" / "page.html")])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "deep")] * 9)
    assert "9 runs: one page shows 8 at most" in capsys.readouterr().err


def test_the_script_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    code = "import sys; from scripts.report import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, timeout=60)
    assert (folder / "report.html").stat().st_size > 10_000
