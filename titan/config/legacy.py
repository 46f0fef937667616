"""Names that older TOML files use, and what they are called today.

The table works for files and the command line. A row renames a key, and may change its value's meaning too; a row whose
old and new names are equal only translates older spellings of the value.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan.config.convert import WrongValue, convert
from titan.config.derived import model_stages
from titan.config.fields import Setting, all_settings, build
from titan.config.given import Given
from titan.config.nearest import did_you_mean
from titan.config.rules import divisors, listed_near
from titan.config.toml_text import shown
from titan.parallelisms.schedules import SCHEDULES


@dataclass(frozen=True)
class FromOthers:
    """A value that depends on other settings, made once they are all known.

    Attributes:
        resolve: takes all settings' values by key. Raises WrongValue when none fits.
        given: what to name in a message.
    """

    resolve: Callable[[Mapping[str, Any]], Any]
    given: Given


@dataclass(frozen=True)
class Rename:
    """One older name.

    Attributes:
        old: as older files spell it; a trailing `.*` stands for any key of that section.
        new: today's key.
        hint: type of the old value; None when it is today's, or when `value` takes whatever was given.
        value: makes today's value of the old one. Raises WrongValue when it can't.
        other: makes today's value of the old one and all other settings' values. Raises WrongValue when it can't.
    """

    old: str
    new: str
    hint: Any = None
    value: Callable[[Any], Any] | None = None
    other: Callable[[Any, Mapping[str, Any]], Any] | None = None


def _negated(value: bool) -> bool:
    return not value


def _implementation(fused: bool) -> str:
    return "fused" if fused else "foreach"


def _has_float8(converters: list[str]) -> bool:
    unknown = [name for name in converters if name not in ("float8", "quantize.linear.float8")]
    if unknown:
        raise WrongValue(f'the converter "{unknown[0]}" isn\'t offered, only "float8"')
    return bool(converters)


def _schedule(name: object) -> object:
    plain = str(name).lower().replace("_", "").replace("-", "")
    plain = plain.removeprefix("flexible")  # what torch had as FlexibleInterleaved1F1B is Interleaved1F1B since 2.6
    return next((schedule for schedule in SCHEDULES if schedule.lower() == plain), name)


def _norm(name: object) -> object:
    return "rmsnorm" if name in ("fused_rmsnorm", "compiled_rmsnorm") else name


def _as_text(number: object) -> object:
    return str(number) if type(number) is int else number


def _microbatch_size(count: int, values: Mapping[str, Any]) -> int:
    """Windows per microbatch, when there are `count` of them; today's default without a pipeline."""
    if values[_PP] == 1:
        return int(all_settings()[_MICROBATCH].default)
    local = values["training.local_batch_size"]
    if count < 1 or local % count:
        legal = listed_near(divisors(local), count)
        raise WrongValue(f"training.local_batch_size = {local} can't be cut into {count} microbatches; legal: {legal}")
    return int(local // count)


def _model_parts(points: list[str], values: Mapping[str, Any]) -> list[list[str]] | None:
    """Modules of every stage, when each of `points` is the first one of the next; None without a pipeline or points."""
    modules = _modules_in_order(values)
    if values[_PP] == 1 or not points or modules is None:
        return None
    for point in points:
        if point not in modules:
            raise WrongValue(f'the model has no module "{point}"{did_you_mean(point, modules)}')
    starts = [0, *(modules.index(point) for point in points)]
    if starts != sorted(set(starts)):
        order = f"{modules[1]} … {modules[-1]}"
        raise WrongValue(f"each point starts a stage, so they go in the order of the model, once each: {order}")
    return [modules[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _modules_in_order(values: Mapping[str, Any]) -> list[str] | None:
    """The modules that stages are made of. None where there are none, or no such model: the checks say so."""
    config = build(dict(values))
    with contextlib.suppress(Exception):  # whatever the user's module raises; the checks show it
        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)
    try:
        stages = model_stages(config)
    except KeyError:
        return None
    return None if stages is None else [*stages.first, *stages.layers, *stages.last]


_SHARD = "parallelism.data_parallel_shard_degree"
_LAST_MODEL_ONLY = "checkpoint.last_save_model_only"
_LOSS_PARALLEL = "parallelism.disable_loss_parallel"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_PP = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PARTS = "parallelism.module_fqns_per_model_part"
_ASYNC_TP = "parallelism.enable_async_tensor_parallel"
_FLOAT8 = "float8.enable_float8_linear"

RENAMES = (
    Rename("job.print_args", "job.print_config"),
    Rename("job.custom_config_module", "experimental.custom_import"),
    Rename("model.converters", _FLOAT8, list[str], _has_float8),
    Rename("model.norm_type", "model.norm_type", value=_norm),
    Rename("model.print_after_conversion", "model.print_model"),
    Rename("optimizer.fused", "optimizer.implementation", bool, _implementation),
    Rename("lr_scheduler.lr_min", "lr_scheduler.min_lr_factor"),
    Rename("training.batch_size", "training.local_batch_size"),
    Rename("training.warmup_steps", "lr_scheduler.warmup_steps"),
    Rename("training.data_parallel_degree", _SHARD),
    Rename("training.data_parallel_shard_degree", _SHARD),
    Rename("training.data_parallel_replicate_degree", "parallelism.data_parallel_replicate_degree"),
    Rename("training.tensor_parallel_degree", "parallelism.tensor_parallel_degree"),
    Rename("training.disable_loss_parallel", _LOSS_PARALLEL),
    Rename("training.enable_loss_parallel", _LOSS_PARALLEL, bool, _negated),
    Rename("training.enable_async_tensor_parallel", _ASYNC_TP),
    Rename("experimental.enable_async_tensor_parallel", _ASYNC_TP),
    Rename("compile.enable_async_tensor_parallel", _ASYNC_TP),
    Rename("training.compile", "compile.enable"),
    Rename("training.seed", "debug.seed"),
    Rename("training.deterministic", "debug.deterministic"),
    Rename("experimental.pipeline_parallel_degree", _PP),
    Rename("experimental.pipeline_parallel_schedule", _SCHEDULE, value=_schedule),
    Rename(_SCHEDULE, _SCHEDULE, value=_schedule),
    Rename("experimental.pipeline_parallel_schedule_csv", "parallelism.pipeline_parallel_schedule_csv"),
    Rename("experimental.pipeline_parallel_microbatches", _MICROBATCH, int, other=_microbatch_size),
    Rename("experimental.pipeline_parallel_split_points", _PARTS, list[str], other=_model_parts),
    Rename("experimental.context_parallel_degree", "parallelism.context_parallel_degree"),
    Rename("experimental.context_parallel_rotate_method", "parallelism.context_parallel_rotate_method"),
    Rename("experimental.custom_args_module", "experimental.custom_import"),
    Rename("activation_checkpoint.selective_ac_option", "activation_checkpoint.selective_ac_option", value=_as_text),
    Rename("checkpoint.enable_checkpoint", "checkpoint.enable"),
    Rename("checkpoint.model_weights_only", _LAST_MODEL_ONLY),
    Rename("checkpoint.last_save_model_weights_only", _LAST_MODEL_ONLY),
    Rename("checkpoint.initial_load_model_weights_only", "checkpoint.initial_load_model_only"),
    Rename("metrics.rank_0_only", "metrics.save_for_all_ranks", bool, _negated),
    Rename("metrics.enable_color_printing", "metrics.disable_color_printing", bool, _negated),
    Rename("validation.enabled", "validation.enable"),
    Rename("quantize.linear.float8.*", "float8.*"),
)


def find_rename(key: str) -> Rename | None:
    """The row for this older name; None when it isn't one."""
    section, _, name = key.rpartition(".")
    for row in RENAMES:
        if row.old == key:
            return row
        if row.old == f"{section}.*":
            return replace(row, old=key, new=row.new.replace("*", name))
    return None


def translate(given: Given) -> tuple[str, object, bool]:
    """Today's key and value for what was given; unchanged when its name is today's.

    Returns:
        (key, value, whether the value is still the command line's text).

    Raises:
        WrongValue: the old value has no counterpart today.
    """
    row = find_rename(given.key)
    if row is None:
        return given.key, given.value, given.from_text
    if row.hint is None:
        return row.new, row.value(given.value) if row.value else given.value, given.from_text
    old = convert(given.value, Setting(row.old, row.hint), from_text=given.from_text)
    if row.other is not None:
        make = row.other
        return row.new, FromOthers(lambda values: make(old, values), given), False
    return row.new, row.value(old) if row.value else old, False


def renaming(given: Given, new: str, value: object) -> str | None:
    """The warning that an older name, of the key or of its value, was used; None when both are today's."""
    if given.key != new:
        row = find_rename(given.key)
        opposite = ", with the opposite value" if row and row.value is _negated else ""
        respelled = isinstance(given.value, str) and isinstance(value, str) and given.value != value
        return f"{given.name} is an older name; today it is {new}{f' = {shown(value)}' if respelled else opposite}"
    if isinstance(given.value, str) and given.value != value:
        return f"{given} is an older name; today it is {shown(value)}"
    return None
