"""How the config of a run differs from the one that a checkpoint was saved with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from titan.config.derived import model_sizes
from titan.config.errors import UserError
from titan.config.fields import build
from titan.config.toml_text import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MODEL_KEYS = ("model.name", "model.flavor", "model.vocab_size", "model.norm_type")


def read_config(toml: str) -> dict[str, Any]:
    """A resolved config's values by key; keys that are unset are missing."""
    return dict(_flat(tomllib.loads(toml), ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """`key: then → now` for each key whose value isn't the saved one, in the order of our config."""
    keys = dict.fromkeys([*ours, *saved])
    return [
        f"{key}: {shown(saved.get(key))} → {shown(ours.get(key))}" for key in keys if saved.get(key) != ours.get(key)
    ]


def refuse_other_model(place: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a model with other sizes, those that no tensor's shape shows included (rope_theta).

    Raises:
        UserError: naming what differs.
    """
    try:
        theirs, mine = (vars(model_sizes(build({k: c[k] for k in _MODEL_KEYS if k in c}))) for c in (saved, ours))
    except (KeyError, TypeError):  # a family or flavor that isn't there any more: the tensors' shapes have to do
        return
    changed = [name for name in mine if theirs.get(name) != mine[name]]
    if changed:
        lines = [f"  - {name}: {theirs.get(name)} there, {mine[name]} here" for name in changed]
        keys = " and ".join(key for key in _MODEL_KEYS if saved.get(key) != ours.get(key))
        raise UserError(
            "\n".join([f"{place} is a checkpoint of another model:", *lines])
            + f"\nSet {keys} as they were (manifest.json holds the config that it was saved with), or start anew with "
            "another job.dump_folder."
        )
