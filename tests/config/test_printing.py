"""What --job.print_config prints loads back to an equal config."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from tests.config.conftest import Load
from titan.config.convert import convert
from titan.config.fields import Setting, all_settings, build, keys_of, table_of
from titan.config.job_config import JobConfig, ParameterGroup
from titan.config.loader import load_config
from titan.config.toml_text import to_toml, toml_value

TEXTS = [
    "plain",
    'quotes " and \' and """',
    "back\\slash \\n \\u0041 C:\\new",
    "two\nlines\r\n\ttab \b \f",
    "control \x00 \x01 \x1f \x7f \x85 \u2028",
    "ünï ☃ 🦙 \U0010ffff",
    "# no comment = [x]",
    " spaces ",
    "''' \\",
]


def some_value(setting: Setting, draw: random.Random) -> Any:
    hint = setting.hint
    if get_origin(hint) in (Union, types.UnionType):
        if draw.random() < 0.3:
            return None
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return draw.choice(get_args(hint))
    if hint is bool:
        return draw.random() < 0.5
    if hint is str:
        return draw.choice(TEXTS)
    if (table := table_of(hint)) is not None:
        keys = keys_of(table).values()
        return [table(**{key.name: some_value(key, draw) for key in keys}) for _ in range(draw.randrange(3))]
    if get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal:
        return draw.choices(get_args(get_args(hint)[0]), k=draw.randrange(3))
    if hint == list[str]:
        return draw.choices(TEXTS, k=draw.randrange(3))
    if hint == list[list[str]]:
        return [draw.choices(TEXTS, k=draw.randrange(3)) for _ in range(draw.randrange(3))]
    if hint == dict[str, float]:
        return {draw.choice(TEXTS): draw.uniform(-1, 1) for _ in range(draw.randrange(3))}
    low = setting.minimum or 0
    if hint is int:
        return draw.choice([*setting.also, int(low), int(low) + draw.randrange(10**9)])
    assert hint is float, f"teach this test about {hint}"
    high = 1e30 if setting.maximum is None else setting.maximum
    return draw.choice([low, min(high, low + 10.0 ** draw.randrange(-30, 30)), draw.uniform(low, high)]) * 1.0


@pytest.mark.parametrize("seed", range(100))
def test_round_trip(seed: int) -> None:
    draw = random.Random(seed)
    printed = [setting for setting in all_settings().values() if setting.printed]
    config = build({setting.key: some_value(setting, draw) for setting in printed})
    Path("printed.toml").write_text(to_toml(config, {}), encoding="utf-8")
    assert load_config(["--job.config_file", "printed.toml"]).config == config


@pytest.mark.parametrize("text", TEXTS)
def test_texts_in_lists(text: str) -> None:
    import tomli

    for value in ([text, text], [[text], []]):
        assert tomli.loads(f"x = {toml_value(value)}")["x"] == value


def test_tables_in_lists(load: Load) -> None:
    groups = '[[optimizer.groups]]\npattern = "*"\nlr_factor = 2\n[[optimizer.groups]]\npattern = "a]\\"b"'
    loaded = load_config_text(groups)
    assert loaded.optimizer.groups == [ParameterGroup("*", 2.0, None), ParameterGroup('a]"b', 1.0, None)]
    lines = to_toml(loaded, {}).splitlines()
    assert 'groups = [{pattern = "*", lr_factor = 2.0}, {pattern = "a]\\"b", lr_factor = 1.0}]' in lines


def load_config_text(text: str) -> JobConfig:
    Path("tables.toml").write_text(text, encoding="utf-8")
    return load_config(["--job.config_file", "tables.toml"]).config


def test_origins_and_unset_values_are_comments(load: Load) -> None:
    loaded = load("[training]\nsteps = 5", "--job.description", "a run")
    lines = to_toml(loaded.config, loaded.origins).splitlines()
    assert "steps = 5  # run.toml" in lines
    assert 'description = "a run"  # command line' in lines
    assert "seq_len = 2048" in lines
    assert "# total_tokens = (unset)" in lines
    assert lines.index("[training.dataloader]") > lines.index("[training]")


def test_how_the_command_was_called_isnt_printed(load: Load) -> None:
    loaded = load("[training]\nsteps = 5", "--job.print_config", "--job.check_only")
    text = to_toml(loaded.config, loaded.origins)
    assert "print_config" not in text and "config_file" not in text and "check_only" not in text


def test_an_origin_cant_break_the_file() -> None:
    config = JobConfig()
    text = to_toml(config, {"training.steps": "odd\nname.toml"})
    assert "steps = 10000  # odd?name.toml" in text.splitlines()


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("a,b", list[str], ["a", "b"]),
        ("a, b", list[str], ["a", "b"]),
        ("", list[str], []),
        ('["a,b", "c"]', list[str], ["a,b", "c"]),
        ('[["a"], ["b", "c"]]', list[list[str]], [["a"], ["b", "c"]]),
        ("[]", list[list[str]], []),
    ],
)
def test_lists_on_the_command_line(text: str, hint: Any, value: Any) -> None:
    assert convert(text, Setting("x.y", hint), from_text=True) == value


@pytest.mark.parametrize("text", ["[1]", "[", '[["a"]]', '{"a": 1}x['])
def test_wrong_lists_on_the_command_line(text: str) -> None:
    setting = Setting("x.y", list[str])
    if text.startswith("["):
        with pytest.raises(ValueError, match="a list of texts"):
            convert(text, setting, from_text=True)
    else:
        assert convert(text, setting, from_text=True) == [text]
