"""Rules of pipelines: how a model is cut into stages, and how a batch is cut into microbatches.

What each schedule needs is in parallelisms/schedules.py. Without a pipeline (degree 1) none of these rules says a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from titan.config.derived import compiles, model_sizes, model_stages, pipeline_microbatches
from titan.config.job_config import JobConfig
from titan.config.nearest import did_you_mean, nearest
from titan.config.rules import MODEL_KEYS, Mistakes, Rule, divisors, listed, listed_near, nearest_multiples
from titan.config.toml_text import shown
from titan.models.spec import Stages
from titan.parallelisms.schedule_csv import Schedule, find_fault, read_schedule
from titan.parallelisms.schedules import SCHEDULES, ScheduleKind, layers_worth, number_of_stages, stages_of_rank

_DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_PARTS = "parallelism.module_fqns_per_model_part"
_LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
_LOCAL = "training.local_batch_size"


def _model(config: JobConfig, world_size: int) -> Mistakes:
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return
    if model_stages(config) is None:
        yield f"{_DEGREE} = {pp}: model family {config.model.name} can't be cut into stages; leave it at 1"
    elif model_sizes(config).tied:
        yield (
            f"{_DEGREE} = {pp}: the head of {config.model.name} {config.model.flavor} shares the embedding's weight, "
            "but the first stage would hold the embedding and the last one the head; leave it at 1"
        )


def _file(config: JobConfig, world_size: int) -> Mistakes:
    """The file of a schedule by itself: it is there, can be read, runs to its end, and has a row per rank."""
    path, pp = _path(config), config.parallelism.pipeline_parallel_degree
    if path is None:
        return
    try:
        schedule = read_schedule(path)
    except OSError as error:
        yield f'{_CSV} = "{path}": {error.strerror}'
    except ValueError as error:  # UnicodeDecodeError is one too
        yield f'{_CSV} = "{path}": {error}'
    else:
        if len(schedule.ranks) != pp:
            yield f'{_CSV} = "{path}": it has {len(schedule.ranks)} rows, one per rank, but {_DEGREE} = {pp}'
        elif fault := find_fault(schedule):
            yield f'{_CSV} = "{path}": {fault}'


def _file_stages(config: JobConfig, world_size: int) -> Mistakes:
    """The stages of a schedule's file are those of the model, and lie where stages_of_rank says."""
    schedule = _schedule_of_file(config)
    modules = model_stages(config)
    if schedule is None or modules is None:
        return
    settings, path = config.parallelism, _path(config)
    stages, pp = number_of_stages(settings, modules), settings.pipeline_parallel_degree
    source = _LAYERS if settings.module_fqns_per_model_part is None else _PARTS
    if schedule.stages != stages:
        yield f'{_CSV} = "{path}": it has {schedule.stages} stages, but {source} makes {stages}; legal: {stages}'
        return
    v_shaped = SCHEDULES[settings.pipeline_parallel_schedule].v_shaped
    for rank in range(pp):
        has, wanted = schedule.stages_of_rank(rank), stages_of_rank(rank, pp, stages, v_shaped)
        if has != wanted:
            name, other = settings.pipeline_parallel_schedule, "Interleaved1F1B" if v_shaped else "ZBVZeroBubble"
            yield (
                f'{_CSV} = "{path}": row {rank + 1} has stages {_numbers(has)}, but rank {rank} holds '
                f'{_numbers(wanted)}, as {_SCHEDULE} = "{name}" lays them out; "{other}" lays them out '
                f"{'in a loop' if v_shaped else 'in a V'}"
            )
            return


def _file_microbatches(config: JobConfig, world_size: int) -> Mistakes:
    schedule, count, path = _schedule_of_file(config), pipeline_microbatches(config), _path(config)
    if schedule is not None and schedule.microbatches != count:
        local, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
        yield (
            f'{_CSV} = "{path}": it has {schedule.microbatches} microbatches, but {_LOCAL} {local} / {_MICROBATCH} '
            f"{size} = {count}; legal: {_LOCAL} {schedule.microbatches * size}"
        )


def _schedule_of_file(config: JobConfig) -> Schedule | None:
    """None without one; `_file` has found that it can be read."""
    path = _path(config)
    return None if path is None else read_schedule(path)


def _path(config: JobConfig) -> str | None:
    """The schedule's file; None without one or without a pipeline."""
    settings = config.parallelism
    return None if settings.pipeline_parallel_degree == 1 else settings.pipeline_parallel_schedule_csv


def _names(config: JobConfig, world_size: int) -> Mistakes:
    """Every module of the model once, in the order of the forward pass."""
    parts, modules = config.parallelism.module_fqns_per_model_part, model_stages(config)
    if parts is None or modules is None or config.parallelism.pipeline_parallel_degree == 1:
        return
    known = [*modules.first, *modules.layers, *modules.last]
    given = [name for part in parts for name in part]
    faults = list(_wrong_names(given, known))
    faults += [f"part {number} is empty; each needs a module" for number, part in enumerate(parts) if not part]
    if not faults and given != known:
        at = next(place for place, name in enumerate(given) if name != known[place])
        faults = [f'"{given[at]}" comes before "{known[at]}", which goes first in the forward pass']
    if faults:
        yield f"{_PARTS} = {shown(parts)}: {'; '.join(faults)}"


def _wrong_names(given: list[str], known: list[str]) -> Iterator[str]:
    meant = set()
    for name in dict.fromkeys(given):
        if name not in known:
            meant.add(nearest(name, known))
            yield f'the model has no module "{name}"{did_you_mean(name, known)}'
        elif given.count(name) > 1:
            yield f'"{name}" is there {given.count(name)} times; each module belongs to one part'
    missing = [name for name in known if name not in given and name not in meant]
    if missing:
        yield f"no part has {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"


def _stages(config: JobConfig, world_size: int) -> Mistakes:
    """The number of stages fits the ranks, the schedule and the layers. A schedule's file has its own rule."""
    settings, modules = config.parallelism, model_stages(config)
    pp, name = settings.pipeline_parallel_degree, settings.pipeline_parallel_schedule
    if pp == 1 or modules is None:
        return
    kind = None if settings.pipeline_parallel_schedule_csv is not None else SCHEDULES[name]
    stages, layers = number_of_stages(settings, modules), len(modules.layers)
    needs = "" if kind is None else f'{_SCHEDULE} = "{name}" needs {_possible_stages(kind, pp)}'
    if settings.module_fqns_per_model_part is not None:
        if kind is not None and not kind.possible_stages(stages, pp):
            yield f"{_PARTS}: it has {stages} parts, but {needs}"
    elif settings.pipeline_parallel_layers_per_stage is not None:
        if stages > layers or (kind is not None and not kind.possible_stages(stages, pp)):
            yield _wrong_layers_per_stage(config, modules, kind, needs)
    elif stages > layers:
        per_rank = stages // pp
        most = layers // per_rank
        model = f"{config.model.name} {config.model.flavor}"
        fix = f"legal: at most {most}" if most > 1 else f"no pipeline of {per_rank} stages per rank fits it"
        yield (
            f"{_DEGREE} = {pp}: {pp} ranks * {per_rank} stages = {stages}, and each stage needs a layer, but {model} "
            f"has {layers}; {fix}"
        )


def _possible_stages(kind: ScheduleKind, pp: int) -> str:
    if kind.looped:
        return f"a multiple of {_DEGREE} {pp}"
    per_rank = kind.stages_per_rank
    return f"exactly {pp * per_rank}" + (f", {per_rank} for each of {pp} ranks" if per_rank > 1 else ", one per rank")


def _wrong_layers_per_stage(config: JobConfig, modules: Stages, kind: ScheduleKind | None, needs: str) -> str:
    """The message, with the layers per stage for which the number of stages fits."""
    settings, pp = config.parallelism, config.parallelism.pipeline_parallel_degree
    worth, given = layers_worth(settings, modules), settings.pipeline_parallel_layers_per_stage
    fitting: dict[int, list[int]] = {}
    for per_stage in range(1, worth + 1):
        stages = -(-worth // per_stage)
        if stages <= len(modules.layers) and (kind is None or kind.possible_stages(stages, pp)):
            fitting.setdefault(stages, []).append(per_stage)
    legal = listed(f"{_range(sizes)} ({stages} stages)" for stages, sizes in fitting.items()) if fitting else "none"
    less = worth - len(modules.layers)
    return (
        f"{_LAYERS} = {given}: {len(modules.layers)} layers + {less} that the ends count for = {worth}, in stages of "
        f"{given}, are {number_of_stages(settings, modules)} stages, but {needs or 'each'}"
        f"{', and each' if needs else ''} needs a layer; legal: {legal}"
    )


def _microbatch_size(config: JobConfig, world_size: int) -> Mistakes:
    local, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if config.parallelism.pipeline_parallel_degree > 1 and local % size:
        yield (
            f"{_MICROBATCH} = {size}: it doesn't divide {_LOCAL} {local} ({local} / {size} = {local / size:.4g}); "
            f"legal: {listed_near(divisors(local), size)}, or {_LOCAL} {listed(nearest_multiples(local, size))}"
        )


def _microbatches(config: JobConfig, world_size: int) -> Mistakes:
    settings = config.parallelism
    name, pp = settings.pipeline_parallel_schedule, settings.pipeline_parallel_degree
    local, size = config.training.local_batch_size, settings.pipeline_parallel_microbatch_size
    kind, count = SCHEDULES[name], pipeline_microbatches(config)
    if pp == 1 or settings.pipeline_parallel_schedule_csv is not None or kind.possible_microbatches(count, pp):
        return
    fitting = [divisor for divisor in divisors(local) if kind.possible_microbatches(local // divisor, pp)]
    counts = [number for number in range(max(1, count - pp), count + 2 * pp) if kind.possible_microbatches(number, pp)]
    next_to_it = [*[number for number in counts if number < count][-1:], *[n for n in counts if n > count][:1]]
    sizes = [f"{_MICROBATCH} {listed_near(fitting, size)}"] if fitting else []
    yield (
        f"{_MICROBATCH} = {size}: {_LOCAL} {local} / {size} = {count} microbatches, but {_SCHEDULE} = "
        f'"{name}" needs {_possible_microbatches(kind, count, pp)}; legal: '
        f"{', or '.join([*sizes, f'{_LOCAL} {listed(number * size for number in next_to_it)}'])}"
    )


def _possible_microbatches(kind: ScheduleKind, count: int, pp: int) -> str:
    if kind.fills:
        return f"at least one per stage, {pp * kind.stages_per_rank}"
    rounds = max(1, count // pp)
    return f"rounds of one size: {count} // {pp} ranks = {rounds} rounds, and {count} isn't a multiple of {rounds}"


def _numbers(stages: list[int]) -> str:
    return " and ".join(str(stage) for stage in stages) or "none"


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


_STAGE_KEYS = (*MODEL_KEYS, _DEGREE, _SCHEDULE, _CSV, _PARTS, _LAYERS, *_LESS)


def _splitting_schedule(config: JobConfig) -> str | None:
    """Key and value of the pipeline's schedule, if gradients of inputs and of weights are separate passes in it."""
    settings = config.parallelism
    if settings.pipeline_parallel_degree == 1:
        return None
    if (schedule := _schedule_of_file(config)) is not None:
        splits = any(action.kind in "IW" for actions in schedule.ranks for action in actions)
        return f'{_CSV} = "{_path(config)}"' if splits else None
    name = settings.pipeline_parallel_schedule
    return f'{_SCHEDULE} = "{name}"' if SCHEDULES[name].splits_backward else None


def _compile(config: JobConfig, world_size: int) -> Mistakes:
    if compiles(config, "model") and (schedule := _splitting_schedule(config)):
        whole = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]
        yield (
            f"compile.enable = true beside {schedule}: a compiled block computes the gradients of inputs and of "
            f"weights in one pass, which this schedule splits; choose {listed(whole)}, or leave compile.enable at false"
        )


RULES = (
    Rule(_model, (*MODEL_KEYS, _DEGREE), (_DEGREE,)),
    Rule(_names, (*MODEL_KEYS, _DEGREE, _PARTS)),
    Rule(_file, (_DEGREE, _CSV), (_CSV,)),
    Rule(_stages, _STAGE_KEYS, (_PARTS, _LAYERS)),
    Rule(_file_stages, _STAGE_KEYS),
    Rule(_microbatch_size, (_DEGREE, _MICROBATCH, _LOCAL), (_MICROBATCH,)),
    Rule(_microbatches, (_DEGREE, _SCHEDULE, _CSV, _MICROBATCH, _LOCAL)),
    Rule(_compile, (_DEGREE, _SCHEDULE, _CSV, "compile.enable", "compile.components")),
    Rule(_file_microbatches, (_DEGREE, _CSV, _MICROBATCH, _LOCAL)),
)
