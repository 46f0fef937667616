"""Rules of the data: that it is there, and can be read as the config says."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from titan.config.derived import source_names, source_text, tokenizer_path, validation_text
from titan.config.errors import UserError, of_source
from titan.config.job_config import JobConfig, Training
from titan.config.machine import machine
from titan.config.nearest import did_you_mean
from titan.config.rules import SEQUENCES, Mistakes, Rule
from titan.data.files import matching_paths

_DATASET, _PATH = "training.dataset", "training.dataset_path"
_WORKERS, _PIN = "training.dataloader.num_workers", "training.dataloader.pin_memory"


def _texts(config: JobConfig) -> dict[str, Training]:
    """What is read, by the section or the table that names it."""
    training = config.training
    texts = {
        f'training.sources "{name}"': source_text(training, source)
        for name, source in zip(source_names(training), training.sources, strict=True)
    } or {"training": training}
    if config.validation.enable:
        texts["validation"] = validation_text(config)
    return texts


def _told(section: str, error: UserError) -> str:
    return of_source(section, error) if section.startswith("training.sources") else str(error)


def _dataset(config: JobConfig, world_size: int) -> Mistakes:
    from titan.data.sources import check_dataset  # imports numpy, so not before it is needed

    places = {text.dataset: section for section, text in reversed(_texts(config).items())}
    for name, section in reversed(places.items()):
        try:
            check_dataset(name)
        except UserError as error:
            yield _told(section, error)


def _dataset_path(config: JobConfig, world_size: int) -> Mistakes:
    places = {(text.dataset, text.dataset_path): section for section, text in reversed(_texts(config).items())}
    for (dataset, path), section in places.items():
        if dataset not in ("text", "json", "parquet", "tokens"):
            continue
        if path is None:
            what = (
                "a folder that scripts/prepare_data.py wrote" if dataset == "tokens" else "a file, a folder or a glob"
            )
            yield f'{section}.dataset = "{dataset}" needs {section}.dataset_path: {what}'
        elif not os.path.exists(place := os.path.expanduser(path)) and not any(matching_paths(place)):
            beside = [str(file) for file in Path(place).parent.glob("*")]
            yield f'{section}.dataset_path = "{path}": matches no file{did_you_mean(path, beside)}'


def _token_files(config: JobConfig, world_size: int) -> Mistakes:
    texts = {
        text.dataset_path: (section, text)
        for section, text in reversed(_texts(config).items())
        if text.dataset == "tokens"
    }
    if not texts:
        return
    from titan.data.token_files import open_token_files
    from titan.data.tokenizer import build_tokenizer

    for section, text in reversed(texts.values()):
        try:
            open_token_files(text, build_tokenizer(tokenizer_path(config)))
        except UserError as error:
            yield _told(section, error)


def _workers(config: JobConfig, world_size: int) -> Mistakes:
    workers = config.training.dataloader.num_workers
    if workers and "fork" not in multiprocessing.get_all_start_methods():
        yield f"{_WORKERS} = {workers}: this system can't fork processes; leave it at 0"


_READ = (_DATASET, _PATH, "training.sources", "validation.enable", "validation.dataset", "validation.dataset_path")
_TOKENS_READ = ("experimental.custom_import", "model.tokenizer_path", "model.hf_assets_path", *SEQUENCES, *_READ)

RULES = (
    Rule(_dataset, ("experimental.custom_import", *_READ), (_DATASET,)),
    Rule(_dataset_path, _READ, (_PATH,), local=True),
    Rule(_token_files, _TOKENS_READ, local=True),
    Rule(_workers, (_WORKERS,), local=True),
)


def warnings(config: JobConfig) -> Iterator[str]:
    """What gains nothing."""
    if config.training.dataloader.pin_memory and not machine().accelerates:
        yield f"{_PIN} = true: batches stay in a CPU's memory, where there is nothing to pin them for"
