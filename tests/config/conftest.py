"""Each test of the config runs in a folder of its own, so that files have short names in messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from titan.config.errors import ConfigError
from titan.config.loader import LoadedConfig, load_and_check

Load = Callable[..., LoadedConfig]
Mistakes = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def load(in_empty_folder: Path) -> Load:
    """load(toml, *arguments, world_size=1): the checked config of run.toml (unless it's empty) and arguments."""

    def load_toml(toml: str = "", *arguments: str, world_size: int = 1) -> LoadedConfig:
        argv = list(arguments)
        if toml:
            (in_empty_folder / "run.toml").write_text(toml, encoding="utf-8")
            argv += ["--job.config_file", "run.toml"]
        return load_and_check(argv, world_size)

    return load_toml


@pytest.fixture
def mistakes(load: Load) -> Mistakes:
    """Like load, for configs that are wrong: the mistakes."""

    def mistakes_of(toml: str = "", *arguments: str, world_size: int = 1) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(toml, *arguments, world_size=world_size)
        return caught.value.mistakes

    return mistakes_of
