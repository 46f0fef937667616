"""Keys that titan knows but can't act on: of features that aren't built yet, and of those that it will never have.

A value that asks for nothing is accepted silently, so that a TOML that somebody already has runs; any other is refused
by name. Landing a feature deletes its rows here and adds its fields to job_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.convert import BARE, WrongValue, convert
from titan.config.fields import Setting
from titan.config.toml_text import shown

ANY = None


@dataclass(frozen=True)
class Missing:
    """What a key would need.

    Attributes:
        reason: why the key can't act.
        harmless: values that ask for nothing; ANY when the key matters only beside another one.
    """

    reason: str
    harmless: tuple[object, ...] | None


def _not_built(feature: str, *harmless: object) -> Missing:
    return Missing(f"{feature} built yet", harmless)


NOT_BUILT = {
    "parallelism.expert_parallel_degree": _not_built("expert parallelism isn't", 1),
    "parallelism.expert_tensor_parallel_degree": _not_built("expert parallelism isn't", 1),
}

# Choices of keys that are built: (key, value) -> the reason.
NOT_BUILT_CHOICES: dict[tuple[str, object], str] = {}

NEVER = {
    "experimental.enable_compiled_autograd": Missing("compiled autograd isn't offered", (False,)),
    "parallelism.enable_compiled_autograd": Missing("compiled autograd isn't offered", (False,)),
    "memory_estimation.enable": Missing("run estimation.py with the same arguments instead", (False,)),
    "memory_estimation.enabled": Missing("run estimation.py with the same arguments instead", (False,)),
    "memory_estimation.disable_fake_mode": Missing("", ANY),
    "float8.scaling_type_input": Missing("only dynamic scaling is offered", ("dynamic",)),
    "float8.scaling_type_weight": Missing("only dynamic scaling is offered", ("dynamic",)),
    "float8.scaling_type_grad_output": Missing("only dynamic scaling is offered", ("dynamic",)),
    # torchao always casts weights anew in the backward pass: what the key asked for.
    "float8.force_recompute_fp8_weight_in_bwd": Missing("", ANY),
    "fault_tolerance.enable": Missing("fault tolerance by torchft isn't offered", (False,)),
    # Workers live as long as the run: what the key asks for.
    "training.dataloader.persistent_workers": Missing("", ANY),
    "training.gc_debug": Missing("the garbage collector's debugging isn't offered", (False,)),
    "job.use_for_integration_test": Missing("", ANY),
}


def find_missing(key: str) -> Missing | None:
    """The row of a key that can't act; None when it isn't one."""
    return NOT_BUILT.get(key) or NEVER.get(key)


def refuse_missing(missing: Missing, value: object, *, from_text: bool) -> None:
    """Pass a value that asks for nothing.

    Raises:
        WrongValue: the value asks for something that isn't there.
    """
    if missing.harmless is ANY or any(_same(value, harmless, from_text) for harmless in missing.harmless):
        return
    first = missing.harmless[0]
    raise WrongValue(f"{missing.reason}; {'leave it out' if first == '' else f'leave it at {shown(first)}'}")


def _same(value: object, harmless: object, from_text: bool) -> bool:
    """Equal as values of the same type: `true` isn't 1, and the command line's `1` is the number."""
    if value is BARE and not isinstance(harmless, bool):
        return False
    hint = list[str] if isinstance(harmless, list) else type(harmless)
    try:
        return bool(convert(value, Setting("", hint), from_text=from_text) == harmless)
    except WrongValue:
        return False
