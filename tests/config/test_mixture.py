"""Rules of [[training.sources]] and its stages."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from tests.config.conftest import Load, Mistakes
from titan.config.derived import source_names, validation_text
from titan.config.errors import UserError
from titan.config.job_config import SourceStage, TextSource
from titan.config.loader import load_config
from titan.config.startup import data_config
from titan.config.toml_text import to_toml

ONE, TWO = "[[training.sources]]\ndataset = 'python_stdlib'\n", "[[training.sources]]\ndataset = 'c4'\n"
BOTH = f"{ONE}weight = 0.8\nname = 'code'\n{TWO}weight = 0.2\nname = 'web'\n"
STAGE = "[[training.source_stages]]\n"


def test_sources_and_stages_of_a_file(load: Load) -> None:
    loaded = load(
        f"{BOTH}{STAGE}after_step = 9\nweights = {{web = 1, code = 0.5}}\n{STAGE}after_step=10\nweights.web=2"
    )
    training = loaded.config.training
    assert training.sources == [TextSource("python_stdlib", 0.8, "code"), TextSource("c4", 0.2, "web")]
    assert training.source_stages == [SourceStage({"web": 1.0, "code": 0.5}, 9), SourceStage({"web": 2.0}, 10)]
    assert loaded.warnings == []
    with open("again.toml", "w") as file:
        file.write(to_toml(loaded.config, loaded.origins))
    assert load_config(["--job.config_file=again.toml"]).config.training == training


def test_names_of_sources() -> None:
    paths = {"data/web": "web", "a/b.jsonl": "b.jsonl", "web/": "web", None: "json"}
    for path, name in paths.items():
        config = load_config([]).config.training
        config.sources = [TextSource("json", 1.0, dataset_path=path)]
        assert source_names(config) == [name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, ["training.sources, table 1: weight is missing"]),
        (f"{ONE}weight = -1", ["weight = -1: expected a finite number of at least 0"]),
        (f"{ONE}weigth = 1", ["did you mean weight?"]),
        (f"{ONE}weight = 1\nwhen_exhausted = 'stop'", ['"loop", "end"']),
        (f"{ONE}weight = 1\n{ONE}weight = 2", ['tables 1 and 2 are both called "python_stdlib": give each a name']),
        (f"{ONE}weight = 0\n{TWO}weight = 0", ["all weights are 0", '"python_stdlib" has a weight', '"c4" has a']),
        (f"{ONE}weight = 1\n{TWO}weight = 0", ['"c4" has a weight of 0 from the first step to the last']),
        (f"[training]\ndataset = 'c4'\n{BOTH}", ['training.dataset = "c4" isn\'t used beside [[training.sources]]']),
        (f"[training]\ndataset_path = 'x'\n{BOTH}", ['training.dataset_path = "x" isn\'t used']),
        (f"[training]\ninfinite = false\n{BOTH}", ["training.infinite = false", 'when_exhausted = "end"']),
        (f"[validation]\nenable = true\n{BOTH}", ["needs validation.dataset: which text to measure on"]),
        ("[[training.sources]]\ndataset = 'jsno'\nweight = 1", ['training.sources "jsno": ', "Did you mean json?"]),
        (
            "[[training.sources]]\ndataset = 'json'\nname = 'mine'\nweight = 1",
            ['training.sources "mine".dataset = "json" needs training.sources "mine".dataset_path'],
        ),
        (
            "[[training.sources]]\ndataset = 'tokens'\ndataset_path = '.'\nname = 'mine'\nweight = 1",
            ['training.sources "mine": dataset_path = ".": tokens.json is missing'],
        ),
        ("[training]\nsources = ['c4']", ['training.sources = ["c4"]: expected a list of tables']),
        # stages
        (f"{STAGE}after_step = 1\nweights = {{a = 1}}", ["there are no training.sources"]),
        (f"{BOTH}{STAGE}after_step = 1", ["source_stages, table 1: weights is missing"]),
        (f"{BOTH}{STAGE}after_step = 1\nweights = [1, 2]", ["weights = [1, 2]: expected a table of finite numbers"]),
        (f"{BOTH}{STAGE}after_step = 1\nweights = {{web = 'x'}}", ["expected a table of finite numbers"]),
        (
            f"{BOTH}{STAGE}after_step = 0\nweights = {{web = 1}}",
            ["after_step = 0: expected a whole number of at least 1"],
        ),
        (f"{BOTH}{STAGE}after_step = 1\nweights = {{wbe = 1}}", ['name "wbe", which is no source; did you mean web?']),
        (f"{BOTH}{STAGE}after_step = 1\nweights = {{zz = 1}}", ["no source; the sources are code, web"]),
        (f"{BOTH}{STAGE}after_step = 1\nweights = {{web = -1}}", ["weights.web = -1: expected at least 0"]),
        (f"{BOTH}{STAGE}after_step = 1\nweights = {{web = 0}}", ["give no source more than 0"]),
        (f"{BOTH}{STAGE}weights = {{web = 1}}", ["table 1 has neither of after_step and after_tokens: give one"]),
        (f"{BOTH}{STAGE}after_step = 1\nafter_tokens = 1\nweights = {{web = 1}}", ["table 1 has both"]),
        (
            f"{BOTH}{STAGE}after_step = 1\nweights = {{web = 1}}\n{STAGE}after_tokens = 9\nweights = {{web = 1}}",
            ["some have after_step, others after_tokens; use one of them in all"],
        ),
        (
            f"{BOTH}{STAGE}after_step = 7\nweights = {{web = 1}}\n{STAGE}after_step = 7\nweights = {{web = 1}}",
            ["table 2: after_step = 7 isn't after the 7 of the table before it"],
        ),
    ],
)
def test_wrong_mixtures(text: str, expected: list[str], mistakes: Mistakes) -> None:
    found = mistakes(text)
    if len(found) == 1:
        assert all(part in found[0] for part in expected), found
    else:
        assert [part in mistake for part, mistake in zip(expected, found, strict=True)] == [True] * len(found), found


def test_a_stage_that_never_comes_is_warned_of(load: Load) -> None:
    weights, run = "weights = {web = 1}\n", ("--training.steps=100", "--lr_scheduler.warmup_steps=2")
    text = f"{BOTH}{STAGE}{weights}after_step = 99\n{STAGE}{weights}after_step = 100"
    (warning,) = load(text, *run).warnings
    assert warning.startswith("training.source_stages, table 2: after_step = 100 isn't before the end of the run")
    text, step = f"{BOTH}{STAGE}{weights}after_tokens = ", 8 * 2048
    assert len(load(f"{text}{99 * step + 1}", *run).warnings) == 1
    assert load(f"{text}{99 * step}", *run).warnings == []


def test_a_base_file_with_the_default_dataset_is_no_contradiction(load: Load) -> None:
    load(f"[training]\ndataset = 'python_stdlib'\n{BOTH}")


def test_validation_reads_its_own_dataset(load: Load) -> None:
    loaded = load(f"[validation]\nenable = true\ndataset = 'python_stdlib'\n{BOTH}")
    text = validation_text(loaded.config)
    assert (text.dataset, text.sources, text.source_stages, text.infinite) == ("python_stdlib", [], [], False)


def test_scripts_that_read_one_dataset_say_so(load: Load) -> None:
    load(BOTH)
    with pytest.raises(UserError, match=r"this script reads one dataset: add --training.sources=\[\]"):
        data_config(["--job.config_file=run.toml"])
    training, _ = data_config(["--job.config_file=run.toml", "--training.sources=[]"])
    assert training.dataset == "python_stdlib"


def test_help_has_the_keys_of_the_tables() -> None:
    with redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit):
        load_config(["--help"])
    assert (
        "weights TABLE (needed)" in output.getvalue() and "after_tokens INT (default: unset; >= 1)" in output.getvalue()
    )
