"""config.json of a Hugging Face folder: read, and compared with a model's sizes. Without torch, to check configs by."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from titan.config.errors import UserError
from titan.models.spec import ModelSpec, model_families

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: there is none, or it isn't a JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {CONFIG_FILE}: it isn't a Hugging Face model's folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def family_of(config: dict[str, Any]) -> ModelSpec[Any]:
    """The first family that reads this config.json.

    Raises:
        UserError: none does.
    """
    kind = config.get("model_type")
    readable: dict[str, ModelSpec[Any]] = {}
    for spec in model_families().values():
        if spec.huggingface is not None:
            readable.setdefault(spec.huggingface.model_type, spec)
    if kind not in readable:
        raise UserError(f"{CONFIG_FILE}: model_type = {kind!r}: titan has {', '.join(sorted(readable))}")
    return readable[kind]


def differing_sizes(sizes: Any, stored: Any) -> list[str]:
    """Where a stored model isn't this one: `dim (stored 64, here 192)`.

    The context isn't compared, since no weight depends on it; and fewer stored rows of the vocabulary are no
    difference: the rest is padding.
    """
    differing = []
    for field in dataclasses.fields(sizes):
        ours, theirs = getattr(sizes, field.name), getattr(stored, field.name)
        padded = field.name == "vocab_size" and theirs < ours
        if ours != theirs and field.name != "max_seq_len" and not padded:
            differing.append(f"{field.name} (stored {_plain(theirs)}, here {_plain(ours)})")
    return differing


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)
