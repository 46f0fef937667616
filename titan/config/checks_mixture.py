"""Rules of [[training.sources]] and [[training.source_stages]]."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from titan.config.derived import source_names
from titan.config.job_config import JobConfig, Training
from titan.config.nearest import did_you_mean
from titan.config.rules import Mistakes, Rule, listed
from titan.config.toml_text import shown

_SOURCES, _STAGES = "training.sources", "training.source_stages"
_ONLY_ONE = ("dataset", "dataset_path", "dataset_subset")


def _instead(config: JobConfig, world_size: int) -> Mistakes:
    """What only a run on one dataset can have."""
    training, default = config.training, Training()
    if not training.sources:
        if training.source_stages:
            yield f"{_STAGES} are stages of a mixture, and there are no {_SOURCES}"
        return
    for name in _ONLY_ONE:
        if (value := getattr(training, name)) != getattr(default, name):
            yield (
                f"training.{name} = {shown(value)} isn't used beside [[{_SOURCES}]]; leave it out, or have no sources "
                f"({_SOURCES} = [])"
            )
    if not training.infinite:
        yield (
            f'training.infinite = false beside [[{_SOURCES}]]: say it of each source, with when_exhausted = "end" in '
            "its table"
        )
    if config.validation.enable and config.validation.dataset is None:
        yield f"validation.enable = true beside [[{_SOURCES}]] needs validation.dataset: which text to measure on"


def _names(config: JobConfig, world_size: int) -> Mistakes:
    names = source_names(config.training)
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        tables = listed(number for number, other in enumerate(names, start=1) if other == name)
        yield f'{_SOURCES}, tables {tables.replace(" or ", " and ")} are both called "{name}": give each a name'


def _weights(config: JobConfig, world_size: int) -> Mistakes:
    training = config.training
    names = source_names(training)
    if not names:
        return
    if not any(source.weight for source in training.sources):
        yield f"{_SOURCES}: all weights are 0, and the run begins with them; give one more"
    for number, stage in enumerate(training.source_stages, start=1):
        place = f"{_STAGES}, table {number}: weights"
        for name, weight in stage.weights.items():
            if name not in names:
                hint = did_you_mean(name, names) or f"; the sources are {', '.join(names)}"
                yield f'{place} name "{name}", which is no source{hint}'
            elif weight < 0:
                yield f"{place}.{name} = {weight:g}: expected at least 0"
        if not any(stage.weights.values()):
            yield f"{place} give no source more than 0: nothing would be read"
    for name, source in zip(names, training.sources, strict=True):
        if not source.weight and not any(stage.weights.get(name) for stage in training.source_stages):
            yield f'{_SOURCES}: "{name}" has a weight of 0 from the first step to the last: leave it out'


def _stages(config: JobConfig, world_size: int) -> Mistakes:
    stages = config.training.source_stages
    begins: list[tuple[str, int]] = []
    for number, stage in enumerate(stages, start=1):
        given = [key for key in ("after_step", "after_tokens") if getattr(stage, key) is not None]
        if len(given) != 1:
            has = "both" if given else "neither"
            yield f"{_STAGES}, table {number} has {has} of after_step and after_tokens: give one"
            return
        begins.append((given[0], getattr(stage, given[0])))
    if len({key for key, _ in begins}) > 1:
        yield f"{_STAGES}: some have after_step, others after_tokens; use one of them in all"
        return
    for number, ((key, before), (_, after)) in enumerate(pairwise(begins), start=2):
        if after <= before:
            yield f"{_STAGES}, table {number}: {key} = {after} isn't after the {before} of the table before it"


_KEYS = (_SOURCES, _STAGES)

RULES = (
    Rule(
        _instead,
        (
            *_KEYS,
            *(f"training.{name}" for name in _ONLY_ONE),
            "training.infinite",
            "validation.enable",
            "validation.dataset",
        ),
    ),
    Rule(_names, (_SOURCES,), _KEYS),
    Rule(_weights, _KEYS),
    Rule(_stages, (_STAGES,)),
)


def warnings(config: JobConfig, steps: int, tokens_per_step: int) -> Iterator[str]:
    """Stages that never come."""
    for number, stage in enumerate(config.training.source_stages, start=1):
        key = "after_step" if stage.after_step is not None else "after_tokens"
        given = getattr(stage, key)
        begin = given if key == "after_step" else -(-given // tokens_per_step)
        if begin >= steps:
            yield f"{_STAGES}, table {number}: {key} = {given} isn't before the end of the run, which has {steps} steps"
