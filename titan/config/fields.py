"""The dataclasses of job_config.py seen as one flat list of settings, such as `training.seq_len`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from titan.config.job_config import JobConfig


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of one section.

    Attributes:
        key: full name, such as `training.dataloader.prefetch_factor`.
        hint: its type, such as `int | None` or `Literal["a", "b"]`.
        default: its value when nobody gives one.
        meaning: its sentence for `--help`.
        minimum, maximum: inclusive bounds of a number.
        also: values that are legal beside the bounds.
        printed: False for fields that say how the command was called, which a printed config leaves out.
    """

    key: str
    hint: Any
    default: Any = None
    meaning: str = ""
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[Any, ...] = ()
    printed: bool = True

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@lru_cache(maxsize=1)
def all_settings() -> dict[str, Setting]:
    """Every setting by its key, in the order of job_config.py; a section's own fields before its nested sections'."""
    return {setting.key: setting for setting in _walk(JobConfig, "")}


def table_of(hint: Any) -> type | None:
    """The dataclass of each table, when a type is a list of tables; else None."""
    (inner,) = get_args(hint) if get_origin(hint) is list else (None,)
    return inner if dataclasses.is_dataclass(inner) else None  # type: ignore[return-value]


def keys_of(table: type) -> dict[str, Setting]:
    """The keys of a table of a list, by name. A key without a default has MISSING there: each table must have it."""
    return {setting.key: setting for setting in _walk(table, "")}


def sections() -> list[str]:
    """Names of all sections, nested ones (`training.dataloader`) included."""
    return list(dict.fromkeys(setting.section for setting in all_settings().values()))


def value_of(config: JobConfig, key: str) -> Any:
    """The value of one setting."""
    return attrgetter(key)(config)


def build(values: dict[str, Any]) -> JobConfig:
    """A JobConfig with these values by key, and defaults elsewhere."""
    config = JobConfig()
    for key, value in values.items():
        *path, name = key.split(".")
        setattr(attrgetter(".".join(path))(config), name, value)
    return config


def _walk(section: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(section)
    nested = []
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            nested.append(_walk(hint, f"{prefix}{field.name}."))  # type: ignore[arg-type]
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Setting(f"{prefix}{field.name}", hint, default, printed=field.compare, **field.metadata)
    for inner in nested:
        yield from inner
