"""What [estimation] asks for that can't be (titan/config/checks_estimation.py): found before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.conftest import Load
from titan.config.errors import ConfigError
from titan.config.loader import load_and_check_plan
from titan.config.machine import Machine

SEARCH = "--estimation.search"


def planned(*arguments: str) -> None:
    load_and_check_plan(arguments, 1, lambda name: Machine(name, accelerates=True, multiplies_float8=True))


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planned(*arguments)
    return caught.value.mistakes


@pytest.mark.parametrize("name", ["json", "html", "search_output"])
def test_what_cant_be_written_to(name: str, in_empty_folder: Path) -> None:
    """A search by traces takes minutes, which an error at its end would waste."""
    search = [SEARCH] if name == "search_output" else []
    assert refused(f"--estimation.{name}=.", *search) == [f'estimation.{name} = ".": this is a folder; name a file']
    (mistake,) = refused(f"--estimation.{name}=no/out", *search)
    assert mistake == f'estimation.{name} = "no/out": there is no folder no'
    planned(f"--estimation.{name}=out", *search)
    planned(f"--estimation.{name}={in_empty_folder / 'out'}", *search)


def test_what_a_search_would_ignore() -> None:
    json, calibrate = refused(SEARCH, "--estimation.json=out.json", "--estimation.calibrate=metrics.jsonl")
    assert json.startswith('estimation.json = "out.json" with estimation.search = true') and "search_output" in json
    assert calibrate.startswith('estimation.calibrate = "metrics.jsonl" with estimation.search = true')
    (alone,) = refused("--estimation.search_output=out.toml")
    assert alone.endswith("add estimation.search = true")


def test_a_run_with_the_same_file_is_not_asked(load: Load) -> None:
    """train.py reads none of it."""
    load('[estimation]\nsearch_output = "out.toml"\nhtml = "no/out.html"\n')
