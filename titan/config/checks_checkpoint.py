"""Rules of checkpoints: what a run starts from, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan.config.derived import model_sizes
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.machine import machine
from titan.config.nearest import did_you_mean
from titan.config.rules import MODEL_KEYS, Mistakes, Rule
from titan.models.spec import model_families

_PINNED = "async_with_pinned_mem"


def _load_step(config: JobConfig, world_size: int) -> Mistakes:
    if config.checkpoint.load_step != -1 and not config.checkpoint.enable:
        yield (
            f"checkpoint.load_step = {config.checkpoint.load_step}: nothing is loaded while checkpoint.enable = false; "
            "set checkpoint.enable = true, or leave load_step at -1"
        )


def _initial_load(config: JobConfig, world_size: int) -> Mistakes:
    from titan.checkpoint.storage import is_url

    path = config.checkpoint.initial_load_path
    if path is not None and not is_url(path) and not Path(path).is_dir():
        beside = [str(entry) for entry in Path(path).parent.glob("*")]
        yield f'checkpoint.initial_load_path = "{path}": no such folder{did_you_mean(path, beside)}'


def _huggingface(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.checkpoint
    if settings.initial_load_in_hf and settings.initial_load_path is None and config.model.hf_assets_path is None:
        yield (
            "checkpoint.initial_load_in_hf = true: from where? Set checkpoint.initial_load_path or "
            "model.hf_assets_path to a folder with config.json and .safetensors files"
        )
    if settings.initial_load_in_hf and not settings.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only = false: a Hugging Face folder holds weights alone; set it to true, or "
            "checkpoint.initial_load_in_hf to false"
        )
    if not (settings.initial_load_in_hf or settings.last_save_in_hf):
        return
    key = "initial_load_in_hf" if settings.initial_load_in_hf else "last_save_in_hf"
    form = model_families()[config.model.name].huggingface
    if form is None:
        yield f"checkpoint.{key} = true: model.name {config.model.name} has no Hugging Face format; set it to false"
        return
    try:
        form.config(model_sizes(config))
    except UserError as error:
        yield f"checkpoint.{key} = true: {error}"


def _exclusions(config: JobConfig, world_size: int) -> Mistakes:
    excluded = config.checkpoint.exclude_from_loading
    pair = {"optimizer": "train_state", "train_state": "optimizer"}
    for name in excluded:
        if (other := pair.get(name, name)) not in excluded:
            yield (
                f"checkpoint.exclude_from_loading = {', '.join(excluded)}: moments and learning rate belong together "
                f"(the rate follows from the step, which is in train_state); name {other} too"
            )


def _seed_checkpoint(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.checkpoint
    if settings.create_seed_checkpoint and (settings.load_only or not settings.enable):
        reason = "checkpoint.load_only = true" if settings.load_only else "checkpoint.enable = false"
        yield f"checkpoint.create_seed_checkpoint = true: nothing is saved with {reason}; change one of them"


def _folder(config: JobConfig, world_size: int) -> Mistakes:
    from titan.checkpoint.storage import is_url, place

    if is_url(config.checkpoint.folder):
        try:
            place(config.job.dump_folder, config.checkpoint.folder)
        except UserError as error:
            yield f"checkpoint.folder = {error}"


def _async_mode(config: JobConfig, world_size: int) -> Mistakes:
    if config.checkpoint.async_mode == _PINNED and not machine().accelerates:
        yield (
            f'checkpoint.async_mode = "{_PINNED}": this machine has no accelerator whose copies pinned memory would '
            'speed up; choose "async"'
        )


RULES = (
    Rule(_folder, ("checkpoint.folder", "job.dump_folder"), local=True),
    Rule(_async_mode, ("checkpoint.async_mode",)),
    Rule(_load_step, ("checkpoint.load_step", "checkpoint.enable")),
    Rule(_initial_load, ("checkpoint.initial_load_path",), local=True),
    Rule(
        _huggingface,
        (
            "checkpoint.initial_load_path",
            "checkpoint.initial_load_in_hf",
            "checkpoint.initial_load_model_only",
            "checkpoint.last_save_in_hf",
            "model.hf_assets_path",
            "model.norm_type",
            "model.vocab_size",
            *MODEL_KEYS,
        ),
    ),
    Rule(_exclusions, ("checkpoint.exclude_from_loading",)),
    Rule(_seed_checkpoint, ("checkpoint.create_seed_checkpoint", "checkpoint.enable", "checkpoint.load_only")),
)


def warnings(config: JobConfig) -> Iterator[str]:
    settings = config.checkpoint
    if settings.export_dtype != "float32" and not (settings.last_save_model_only or settings.last_save_in_hf):
        yield (
            f'checkpoint.export_dtype = "{settings.export_dtype}" changes nothing without '
            "checkpoint.last_save_model_only or last_save_in_hf: a whole checkpoint keeps every type as it is"
        )
