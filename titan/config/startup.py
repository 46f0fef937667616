"""From a script's command line to a checked config, or to a message and an exit status."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titan.config import checks, checks_data
from titan.config.command_line import wants_help
from titan.config.derived import tokenizer_path
from titan.config.errors import ConfigError, UserError, refused_by_system
from titan.config.job_config import Training
from titan.config.loader import LoadedConfig, load_and_check, load_and_check_plan, load_config
from titan.config.toml_text import to_toml

_WAIT_SECONDS = 10.0


@contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Make a UserError inside the block a message on stderr and exit status 2; one process of the job prints it.

    Raises:
        SystemExit: with status 2.
    """
    try:
        yield
    except UserError as error:
        who = ""
        if not _is_first_rank():
            # torchrun kills all ranks as soon as one has failed: the one that prints must be the first to exit. A rank
            # that is still alive then has a mistake of its own, such as a path that is missing on its node.
            time.sleep(_WAIT_SECONDS)
            who = f"[rank {os.environ['RANK']}] "
        print(f"{who}error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `--help | head`: nobody reads on, which is no mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def config_from_command_line(argv: Sequence[str] | None = None) -> LoadedConfig:
    """The checked config of a script, and what job.print_config and job.save_config_file ask for.

    Args:
        argv: the arguments; those of this process when None.

    Raises:
        SystemExit: status 2 after the mistakes were printed; 0 after `--help` or the config was.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if wants_help(arguments) and not _is_first_rank():
        raise SystemExit(0)
    with exit_on_mistake():
        loaded = load_and_check(arguments, _world_size())
        _save(loaded)
    _print_if_asked(loaded)
    return loaded


def estimation_config(argv: Sequence[str] | None = None) -> tuple[LoadedConfig, int]:
    """The config of a dry run, checked for other ranks and another machine than this, and how many ranks.

    Raises:
        SystemExit: status 2 after the mistakes were printed; 0 after `--help` was.
    """
    from titan.estimation.hardware import find_hardware

    with exit_on_mistake():
        arguments = sys.argv[1:] if argv is None else argv
        loaded, ranks = load_and_check_plan(arguments, _world_size(), lambda name: find_hardware(name).machine)
        _save(loaded)
    _print_if_asked(loaded)
    return loaded, ranks


def _print_if_asked(loaded: LoadedConfig) -> None:
    """Do what job.print_config says.

    Raises:
        SystemExit: status 0, when it was asked for.
    """
    if not loaded.config.job.print_config:
        return
    if _is_first_rank():
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(to_toml(loaded.config, loaded.origins), end="")
    raise SystemExit(0)


def data_config(argv: Sequence[str]) -> tuple[Training, str | None]:
    """`[training]` and `model.tokenizer_path` of a script that reads a run's text. Nothing else is checked.

    Raises:
        UserError: with every mistake; or the dataset is no text.
        SystemExit: status 0 after `--help` was printed.
    """
    config = load_config(argv).config
    if config.training.sources:
        raise UserError(
            "the config has training.sources, and this script reads one dataset: add --training.sources=[] "
            "--training.source_stages=[] and name it as training.dataset"
        )
    if config.training.dataset == "tokens":
        raise UserError('training.dataset = "tokens" was made of text: name the dataset that it was made of')
    if mistakes := checks.check(config, 1, set(), (checks.CUSTOM_IMPORT, *checks_data.RULES)):
        raise ConfigError(mistakes)
    return config.training, tokenizer_path(config)


def _save(loaded: LoadedConfig) -> None:
    target = loaded.config.job.save_config_file
    if target is None or not _is_first_rank():
        return
    with refused_by_system(f'job.save_config_file = "{target}"'):
        _write(Path(target), loaded)


def save_config(loaded: LoadedConfig) -> None:
    """Write the resolved config as config.toml to job.dump_folder, on the first rank and unless checkpoint.load_only.

    The file is replaced in one moment; it describes the newest start.

    Raises:
        UserError: the folder can't be written to.
    """
    folder = Path(loaded.config.job.dump_folder)
    if loaded.config.checkpoint.load_only or not _is_first_rank():
        return
    with refused_by_system(f'job.dump_folder = "{folder}"'):
        draft = folder / ".config.toml.draft"
        _write(draft, loaded)
        draft.replace(folder / "config.toml")


def _write(path: Path, loaded: LoadedConfig) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(loaded.config, loaded.origins), encoding="utf-8")


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _world_size() -> int:
    """WORLD_SIZE of the launcher, 1 without one."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"WORLD_SIZE = {text}: expected a whole number of at least 1; torchrun sets it")
    return int(text)
