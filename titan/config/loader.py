"""TOML files and the command line → JobConfig.

Precedence: dataclass default < file under `extends` < the file < command line. Mistakes are gathered, not raised one by
one; fields with a mistake keep their default, so that the rules across fields (checks.py) find what else is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan.config import checks, checks_estimation
from titan.config.command_line import read_command_line, wants_help
from titan.config.convert import BARE, WrongTables, WrongValue, convert
from titan.config.errors import ConfigError, UserError
from titan.config.fields import all_settings, build
from titan.config.given import Given
from titan.config.help_text import help_text
from titan.config.job_config import JobConfig
from titan.config.known import explain_unknown, is_empty_section, is_key, is_switch, todays_key
from titan.config.legacy import FromOthers, renaming, translate
from titan.config.machine import Machine, planned_for
from titan.config.not_built import NOT_BUILT_CHOICES, find_missing, refuse_missing
from titan.config.toml_files import BadFile, find_config, read_files
from titan.config.toml_text import DEFAULT

CONFIG_FILE = "job.config_file"

# What estimation.search decides, whatever the config says. Every layout that it finds is checked by itself.
SEARCHED = (
    "training.global_batch_size",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
)


@dataclass(frozen=True)
class LoadedConfig:
    """A config and how it came about.

    Attributes:
        origins: for every key "default", the file's name, or "command line".
        warnings: what worked but deserves a word, such as an older name.
    """

    config: JobConfig
    origins: dict[str, str]
    warnings: list[str]


def load_config(argv: Sequence[str]) -> LoadedConfig:
    """The config of a command line (without the program's name), each field checked by itself.

    Raises:
        ConfigError: with every mistake that the files and the command line have.
        SystemExit: with status 0, after `--help` was printed.
    """
    reading = _read(argv)
    if reading.mistakes:
        raise ConfigError(reading.mistakes)
    return reading.loaded()


def load_and_check(argv: Sequence[str], world_size: int) -> LoadedConfig:
    """The config of a command line, with the rules that span fields checked for this many ranks.

    Raises:
        ConfigError: with every mistake, of single fields and across them. A rule that reads a field which is reported
            already is left out, since it would only repeat the mistake.
        SystemExit: with status 0, after `--help` was printed.
    """
    return _checked(_read(argv), world_size)


def load_and_check_plan(
    argv: Sequence[str], world_size: int, machine_named: Callable[[str], Machine]
) -> tuple[LoadedConfig, int]:
    """The config of a command line, checked for the ranks and the machine that [estimation] names, and these ranks.

    Args:
        world_size: ranks where estimation.gpus doesn't say.
        machine_named: the machine of estimation.hardware; raises UserError when there is none of that name.

    Raises:
        ConfigError, SystemExit: as `load_and_check`.
    """
    reading = _read(argv)
    own = reading.loaded().config.estimation
    try:
        machine = machine_named(own.hardware)
    except UserError as error:
        raise ConfigError([*reading.mistakes, str(error)]) from None
    reading.mistakes += checks_estimation.mistakes(own)
    ranks = own.gpus or world_size
    if own.search:  # it finds values for these
        reading.reported.update(SEARCHED)
    with planned_for(machine):
        return _checked(reading, ranks), ranks


def _checked(reading: _Reading, world_size: int) -> LoadedConfig:
    loaded = reading.loaded()
    mistakes = reading.mistakes
    if reading.complete:
        mistakes = mistakes + checks.check(loaded.config, world_size, reading.reported)
    if mistakes:
        raise ConfigError(mistakes)
    warnings = loaded.warnings + checks.warn(loaded.config, world_size, loaded.origins)
    return LoadedConfig(loaded.config, loaded.origins, warnings)


def _read(argv: Sequence[str]) -> _Reading:
    if wants_help(argv):
        print(help_text())
        raise SystemExit(0)
    reading = _Reading()
    options, malformed = read_command_line(argv)
    options = [_positive(option) for option in options]
    names = [option.value for option in options if option.key == CONFIG_FILE and isinstance(option.value, str)]
    if names and names[-1]:
        try:
            sources, unreadable = read_files(find_config(names[-1]), is_key)
        except BadFile as error:
            sources, unreadable = [], [str(error)]
        for source in sources:
            reading.take(source)
        reading.mistakes += unreadable
        reading.complete = not unreadable
    reading.mistakes += malformed
    reading.take(options)
    reading.resolve()
    return reading


class _Reading:
    """What the sources gave so far, later ones over earlier ones.

    Attributes:
        values, origins: what was understood, by today's keys.
        mistakes, warnings: texts, in the order of the sources.
        reported: keys that a mistake names.
        complete: every file could be read.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = dict.fromkeys(all_settings(), DEFAULT)
        self.mistakes: list[str] = []
        self.warnings: list[str] = []
        self.reported: set[str] = set()
        self.complete = True
        self._renamed: set[str] = set()

    def loaded(self) -> LoadedConfig:
        return LoadedConfig(build(self.values), self.origins, self.warnings)

    def take(self, source: list[Given]) -> None:
        """Add one source, a file or the command line."""
        taken: dict[str, tuple[Given, object]] = {}
        for given in source:
            try:
                key, value, from_text = translate(given)
                self._warn_once(given, key, value)
                if not self._can_act(given, key, value, from_text):
                    continue
                if not isinstance(value, FromOthers):
                    _refuse_choice(key, value)
                    value = convert(value, all_settings()[key], from_text=from_text)
                _refuse_contradiction(given, value, taken.setdefault(key, (given, value)))
            except WrongValue as error:
                today = todays_key(given.key)
                renamed = "" if today == given.key else f" (today {today})"
                for mistake in _mistakes(given, renamed, error):
                    self._report(mistake, today)
                continue
            self.values[key], self.origins[key] = value, given.origin

    def resolve(self) -> None:
        """Settle the values that depend on others, once all sources are taken."""
        known = {key: self.values.get(key, setting.default) for key, setting in all_settings().items()}
        for key, value in list(self.values.items()):
            if not isinstance(value, FromOthers):
                continue
            try:
                self.values[key] = value.resolve(known)
            except WrongValue as error:
                del self.values[key]
                self._report(f"{value.given}: {error}", key)

    def _can_act(self, given: Given, key: str, value: object, from_text: bool) -> bool:
        """The key is one of a setting. False when it is another that asks for nothing, or unknown (then reported)."""
        if key == CONFIG_FILE and not from_text:
            raise WrongValue("is for the command line; write extends at the top of the file")
        if key in all_settings():
            return True
        missing = find_missing(key)
        if missing is not None:
            refuse_missing(missing, value, from_text=from_text)
        elif not is_empty_section(given):
            mistake, doubtful = explain_unknown(given)
            self._report(mistake, *doubtful)
        return False

    def _report(self, mistake: str, *keys: str) -> None:
        self.mistakes.append(mistake)
        self.reported.update(keys)

    def _warn_once(self, given: Given, key: str, value: object) -> None:
        warning = renaming(given, key, value)
        if warning and given.key not in self._renamed:
            self._renamed.add(given.key)
            self.warnings.append(warning)


def _mistakes(given: Given, renamed: str, error: WrongValue) -> list[str]:
    """A text per mistake. Tables are long: of those only the wrong keys are shown, not the whole list."""
    if isinstance(error, WrongTables):
        return [f"{given.name}{renamed}, {mistake}" for mistake in error.mistakes]
    return [f"{given}{renamed}: {error}"]


def _positive(option: Given) -> Given:
    """`--section.no_flag` as `--section.flag false`, when section.flag is a switch; any other option unchanged."""
    section, _, name = option.key.rpartition(".")
    key = f"{section}.{name.removeprefix('no_')}"
    if option.value is not BARE or not name.startswith("no_") or not is_switch(key):
        return option
    return Given(key, "false", option.origin, option.option)


def _refuse_choice(key: str, value: object) -> None:
    reason = NOT_BUILT_CHOICES.get((key, value)) if isinstance(value, str) else None
    if reason:
        raise WrongValue(reason)


def _refuse_contradiction(given: Given, value: object, earlier: tuple[Given, object]) -> None:
    """One source may repeat an option (the last counts), but not give today's name and an older one other values."""
    other, other_value = earlier
    if other.key != given.key and other_value != value:
        raise WrongValue(f"contradicts {other.name}, another name of the same setting; keep one")
