"""Which model of titan's some weights are of: by options, by a checkpoint's manifest, or by their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan.checkpoint.drift import read_config
from titan.checkpoint.huggingface_config import differing_sizes
from titan.config import checks
from titan.config.derived import model_sizes
from titan.config.errors import ConfigError, UserError
from titan.config.fields import all_settings, build
from titan.config.job_config import JobConfig
from titan.config.loader import load_config
from titan.config.rules import MODEL_KEYS
from titan.models.spec import model_families


def named_model(arguments: Sequence[str]) -> JobConfig | None:
    """The model that options such as `--model.flavor 8B` name; None when there are no options.

    Raises:
        ConfigError: they aren't options of the config, or there is no such model.
    """
    return _check_model(load_config(arguments).config) if arguments else None


def model_of_manifest(text: str) -> JobConfig:
    """[model], and the module that registers it, of a resolved config; what else it says isn't looked at."""
    saved = read_config(text)
    keys = [key for key in all_settings() if key.startswith("model.")] + ["experimental.custom_import"]
    return _check_model(build({key: saved[key] for key in keys if key in saved}))


def _check_model(config: JobConfig) -> JobConfig:
    """The config, if there is a model of its name and flavor. Imports experimental.custom_import first.

    Raises:
        ConfigError: there is none.
    """
    if mistakes := checks.check(config, 1, set(all_settings()) - set(MODEL_KEYS)):
        raise ConfigError(mistakes)
    return config


def model_of_sizes(sizes: Any, named: JobConfig | None) -> JobConfig | None:
    """The [model] that has these sizes, with the vocabulary as it is stored; None when no flavor has them.

    Raises:
        UserError: the model that was named has others.
    """
    if named is not None:
        config = _with_vocabulary(named.model.name, named.model.flavor, sizes)
        if differing := differing_sizes(model_sizes(config), sizes):
            raise UserError(f"it isn't a {named.model.name} {named.model.flavor}: {', '.join(differing)}")
        config.experimental.custom_import = named.experimental.custom_import
        return config
    for name, family in model_families().items():
        for flavor, known in family.flavors.items():
            if isinstance(known, type(sizes)):
                config = _with_vocabulary(name, flavor, sizes)
                if not differing_sizes(model_sizes(config), sizes):
                    return config
    return None


def _with_vocabulary(name: str, flavor: str, sizes: Any) -> JobConfig:
    known = model_families()[name].flavors[flavor]
    rows = None if known.vocab_size == sizes.vocab_size else sizes.vocab_size
    norm = None if known.norm_type == sizes.norm_type else sizes.norm_type
    return build({"model.name": name, "model.flavor": flavor, "model.vocab_size": rows, "model.norm_type": norm})
