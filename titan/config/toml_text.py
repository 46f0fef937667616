"""A config written as TOML that loads back to an equal one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from titan.config.fields import all_settings, sections, value_of
from titan.config.job_config import JobConfig

DEFAULT = "default"


def to_toml(config: JobConfig, origins: Mapping[str, str]) -> str:
    """The whole config as TOML.

    Every value that isn't a default has its origin behind it as a comment; unset values are commented out. Fields that
    say how the command was called rather than what the run is (such as job.print_config) are left out.

    Args:
        origins: where each value came from, as LoadedConfig has it; a key that is missing counts as a default.
    """
    settings = [setting for setting in all_settings().values() if setting.printed]
    blocks = []
    for section in sections():
        lines = [f"[{section}]"]
        for setting in settings:
            if setting.section == section:
                lines.append(_line(setting.name, value_of(config, setting.key), origins.get(setting.key, DEFAULT)))
        if len(lines) == 1:
            continue
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def toml_value(value: object) -> str:
    """A text, number, truth value, table, or list of them as TOML writes it; a table's unset keys are left out."""
    if dataclasses.is_dataclass(value):
        value = {key: item for key, item in vars(value).items() if item is not None}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL is one that JSON leaves alone and TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def shown(value: object) -> str:
    """Any value for a message: as TOML writes it, shortened."""
    if isinstance(value, dict):
        text = "a table"
    elif value is None:
        text = "unset"
    else:
        text = toml_value(value) if isinstance(value, (str, bool, int, float, list)) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _line(name: str, value: object, origin: str) -> str:
    comment = "" if origin == DEFAULT else "  # " + "".join(c if c.isprintable() else "?" for c in origin)
    return f"# {name} = (unset)" if value is None else f"{name} = {toml_value(value)}{comment}"
