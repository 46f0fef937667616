"""Rules of the mesh, of tensor parallelism and of context parallelism. Those of pipelines are in checks_pipeline.py."""

from __future__ import annotations

import math

from titan.config.derived import compiles, model_sizes
from titan.config.job_config import JobConfig
from titan.config.machine import machine
from titan.config.rules import (
    MODEL_KEYS,
    SEQUENCES,
    Mistakes,
    Rule,
    divisors,
    listed,
    listed_near,
    nearest_multiples,
    window_lengths,
)
from titan.models.spec import model_families

_REPLICATE = "data_parallel_replicate_degree"
_SHARD = "data_parallel_shard_degree"
_CP = "context_parallel_degree"
_TP = "tensor_parallel_degree"
_PP = "pipeline_parallel_degree"
_DEGREES = {"dp_replicate": _REPLICATE, "dp_shard": _SHARD, "cp": _CP, "tp": _TP, "pp": _PP}

_SEQUENCE_KEYS = (_CP, _TP, "enable_sequence_parallel", "context_parallel_load_balancer")


def _degrees(config: JobConfig, world_size: int) -> Mistakes:
    degrees = {field: getattr(config.parallelism, field) for field in _DEGREES.values()}
    takes_the_rest = degrees[_SHARD] == -1
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    if world_size % product == 0 if takes_the_rest else product == world_size:
        return
    line = f"{'*'.join(_DEGREES)} = {'*'.join('?' if d == -1 else str(d) for d in degrees.values())}"
    total = f"{line}, and {product} doesn't divide" if takes_the_rest else f"{line} = {product} but"
    given = [field for field, degree in degrees.items() if degree not in (1, -1)] or [_SHARD]
    keys = ", ".join(f"parallelism.{field} = {degrees[field]}" for field in given)
    legal = [text for field in given if (text := _legal_degrees(field, degrees, world_size))]
    fix = " or ".join(legal) or f"each degree must divide it: {listed_near(divisors(world_size), product)}"
    yield f"{keys}: {total} world size = {world_size}; legal: {fix}"


def _legal_degrees(field: str, degrees: dict[str, int], world_size: int) -> str:
    """What this degree could be, with the others as they are; empty when nothing fits."""
    others = math.prod(degree for name, degree in degrees.items() if name != field and degree != -1)
    if world_size % others:
        return ""
    left = world_size // others
    if field == _SHARD:
        return f"{field} {left} (-1 takes all ranks that are left)"
    return f"{field} {listed_near(divisors(left), degrees[field])}" if degrees[_SHARD] == -1 else f"{field} {left}"


def _tensor_parallel(config: JobConfig, world_size: int) -> Mistakes:
    tp = config.parallelism.tensor_parallel_degree
    if tp == 1:
        return
    sizes = model_families()[config.model.name].divisible_by_tp(model_sizes(config))
    if not sizes:
        yield f"parallelism.{_TP} = {tp}: model family {config.model.name} has no tensor parallelism; leave it at 1"
    wrong = {name: size for name, size in sizes.items() if size % tp}
    if wrong:
        arithmetic = ", ".join(f"{name} {size} / {tp} = {size / tp:.4g}" for name, size in wrong.items())
        legal = listed_near(divisors(math.gcd(*sizes.values())), tp)
        model = f"{config.model.name} {config.model.flavor}"
        yield f"parallelism.{_TP} = {tp}: it must divide the sizes of {model}: {arithmetic}; legal: {legal}"


def _vocabulary(config: JobConfig, world_size: int) -> Mistakes:
    """DTensor gives each rank ceil(V / tp) rows as long as there are any."""
    tp, rows = config.parallelism.tensor_parallel_degree, model_sizes(config).vocab_size
    if _every_rank_has_rows(rows, tp):
        return
    share = math.ceil(rows / tp)
    fitting = listed_near([degree for degree in range(1, tp) if _every_rank_has_rows(rows, degree)], tp)
    more = next(number for number in range(rows, rows + tp) if _every_rank_has_rows(number, tp))
    yield (
        f"parallelism.{_TP} = {tp}: a vocabulary of {rows} rows, in parts of ceil({rows} / {tp}) = {share}, is used up "
        f"by {math.ceil(rows / share)} ranks, and each needs a row; legal: {_TP} {fitting}, or model.vocab_size {more}"
    )


def _every_rank_has_rows(rows: int, tp: int) -> bool:
    return (tp - 1) * math.ceil(rows / tp) < rows


def _sequence(config: JobConfig, world_size: int) -> Mistakes:
    longest = model_sizes(config).max_seq_len
    unit, reason = _sequence_unit(config)
    for key, seq_len in window_lengths(config).items():
        if seq_len % unit:
            multiples = nearest_multiples(seq_len, unit, longest)
            legal = (
                f"nearest legal: {listed(multiples)}" if multiples else f"the model has positions for only {longest}"
            )
            yield f"{key} = {seq_len}: not a multiple of {reason}; {legal}"


def _sequence_unit(config: JobConfig) -> tuple[int, str]:
    """(what the sequence length must be a multiple of, how that comes about)."""
    settings = config.parallelism
    cp, tp = settings.context_parallel_degree, settings.tensor_parallel_degree
    if not settings.enable_sequence_parallel:
        tp = 1
    if cp == 1:
        return tp, f"{_TP} {tp}, over which sequence parallelism splits it"
    if settings.context_parallel_load_balancer == "none":
        unit, rank = cp * tp, "a chunk per rank"
        product = f"{_CP} {cp} * {_TP} {tp} = {unit}" if tp > 1 else f"{_CP} {cp}"
    else:
        unit, rank = cp * math.lcm(2, tp), "a head and a tail chunk per rank"
        product = f"{_CP} {cp} * lcm(2, {_TP} {tp}) = {unit}" if tp > 1 else f"{_CP} {cp} * 2 = {unit}"
    return unit, f"{product} ({rank}{', which sequence parallelism splits over tp' if tp > 1 else ''})"


def _async_tensor_parallel(config: JobConfig, world_size: int) -> Mistakes:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    lacking = []
    if (tp := config.parallelism.tensor_parallel_degree) == 1:
        lacking.append(f"{_TP} > 1 (it is {tp})")
    if not compiles(config, "model"):
        lacking.append(
            'compile.enable = true with "model" in compile.components, since it is torch.compile that overlaps'
        )
    if not (device := machine()).accelerates:
        lacking.append(f"GPUs with symmetric memory (this machine computes on {device.name})")
    if lacking:
        yield f"parallelism.enable_async_tensor_parallel = true needs {'; '.join(lacking)}; otherwise leave it at false"


def _parallelism(*fields: str) -> tuple[str, ...]:
    return tuple(f"parallelism.{field}" for field in fields)


DEGREE_RULES = (
    # A wrong product spoils only what follows from how many ranks read data; each degree has rules of its own.
    Rule(_degrees, _parallelism(*_DEGREES.values()), _parallelism(_REPLICATE, _SHARD)),
)

MODEL_RULES = (
    Rule(_tensor_parallel, (*MODEL_KEYS, *_parallelism(_TP)), _parallelism(_TP)),
    Rule(_vocabulary, (*MODEL_KEYS, "model.vocab_size", *_parallelism(_TP))),
    Rule(_sequence, (*MODEL_KEYS, *SEQUENCES, *_parallelism(*_SEQUENCE_KEYS))),
    Rule(
        _async_tensor_parallel,
        ("compile.enable", "compile.components", *_parallelism(_TP, "enable_async_tensor_parallel")),
    ),
)
