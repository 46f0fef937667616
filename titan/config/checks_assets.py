"""Rules about model.hf_assets_path: the folder is there, and is the model's."""

from __future__ import annotations

from pathlib import Path

from titan.checkpoint.huggingface_config import CONFIG_FILE, differing_sizes, read_config
from titan.config.derived import model_sizes
from titan.config.errors import UserError
from titan.config.job_config import JobConfig
from titan.config.rules import MODEL_KEYS, Mistakes, Rule
from titan.models.spec import model_families


def _folder(config: JobConfig, world_size: int) -> Mistakes:
    path = config.model.hf_assets_path
    if path is None:
        return
    key, folder = f'model.hf_assets_path = "{path}"', Path(path).expanduser()
    if not folder.is_dir():
        yield f"{key}: no such folder"
        return
    hf = model_families()[config.model.name].huggingface
    if hf is None:
        yield f"{key}: model.name {config.model.name} has no Hugging Face format; leave it out"
        return
    try:
        stored = hf.sizes(read_config(folder))
    except UserError as error:
        yield f"{key}: {error}"
        return
    if differing := differing_sizes(model_sizes(config), stored):
        yield (
            f"{key}: its {CONFIG_FILE} isn't of {config.model.name} {config.model.flavor}: {', '.join(differing)}; "
            "choose the model's own flavor"
        )


RULES = (
    Rule(
        _folder,
        ("model.hf_assets_path", "model.vocab_size", "model.norm_type", *MODEL_KEYS),
        ("model.hf_assets_path",),
        local=True,
    ),
)
