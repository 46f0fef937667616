"""What the search found: printed, explained, and written as a config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from titan.config import checks
from titan.config.errors import UserError
from titan.config.fields import value_of
from titan.config.given import COMMAND_LINE
from titan.config.job_config import JobConfig
from titan.config.loader import LoadedConfig
from titan.config.machine import planned_for
from titan.config.toml_files import find_config
from titan.config.toml_text import toml_value
from titan.estimation.changes import Change, with_settings
from titan.estimation.hardware import GIB, Hardware, find_hardware
from titan.estimation.methods import METHODS
from titan.estimation.run import DOESNT_FIT_STATUS, make_report, write_target
from titan.estimation.search import TIE, Candidate, best_first, fitting_layouts, frontier, layers_per_stage
from titan.estimation.time import BAND, rounded


def settings_of(config: JobConfig, candidate: Candidate) -> Change:
    """The settings that make a config this layout."""
    own, pp = candidate.layout, candidate.layout.pp
    parallelism: Change = {
        "data_parallel_replicate_degree": own.dp_replicate,
        "data_parallel_shard_degree": own.dp_shard,
        "fsdp_reshard_after_forward": own.reshard,
        "tensor_parallel_degree": own.tp,
        "context_parallel_degree": own.cp,
        "pipeline_parallel_degree": pp,
    }
    if pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": own.schedule,
            "pipeline_parallel_microbatch_size": own.rows,
            "pipeline_parallel_layers_per_stage": layers_per_stage(config, own, pp, own.stages_per_rank()),
        }
    mode = own.checkpointing.mode
    checkpointing: Change = {"mode": "selective", "selective_ac_option": "op"} if mode == "op" else {"mode": mode}
    return {
        "training.local_batch_size": own.rows * own.microbatches,
        "training.global_batch_size": own.windows_per_step,
        **{f"parallelism.{name}": value for name, value in parallelism.items()},
        **{f"activation_checkpoint.{name}": value for name, value in checkpointing.items()},
        "activation_checkpoint.early_stop": mode == "full",
    }


def search(loaded: LoadedConfig, world_size: int) -> int:
    """Print the best layouts, why the first is the first, and write it where estimation.search_output says.

    Returns:
        0, or DOESNT_FIT_STATUS.

    Raises:
        UserError: the model's blocks aren't like Llama's, the config cuts the pipeline by hand, or the file can't be
            written.
    """
    config = loaded.config
    for name in ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part"):
        if getattr(config.parallelism, name) is not None:
            raise UserError(f"parallelism.{name} is of one layout: leave it out with estimation.search")
    hardware = find_hardware(config.estimation.hardware)
    fitting = fitting_layouts(config, world_size, hardware)
    ranked = [found for found in best_first(fitting) if _is_legal(config, found, hardware)]
    model = f"{config.model.name} {config.model.flavor} on {world_size:,} × {hardware.name}"
    notes: list[str] = []
    if config.estimation.method != "analytic":
        ranked, notes = verify(config, ranked, hardware)
    if not ranked:
        for note in notes:
            print(note)
        print(f"{model}: no layout fits; more ranks, or less per rank")
        return DOESNT_FIT_STATUS
    layout = ranked[0].layout
    print(
        f"{model}, {layout.windows_per_step:,} windows of {layout.seq_len:,} tokens a step; best first, ± {BAND:.0%}:"
    )
    for number, found in enumerate(ranked, start=1):
        speed, memory = rounded(found.tokens_per_second), found.reserved / GIB
        print(f"{number:3}. {speed:>8} tokens/s per GPU  {memory:6.1f} GiB  {found}")
    why = list(explain(ranked))
    for line in [*notes, *why, *_on_frontier(fitting)]:
        print(line)
    if (target := config.estimation.html) is not None:
        from titan.estimation.picture import search_page

        winner = replace(loaded, config=with_settings(config, settings_of(config, ranked[0])))
        write_target("html", target, search_page(fitting, ranked, why, make_report(winner, world_size)))
        print(f"picture written to {target}")
    if (target := config.estimation.search_output) is not None:
        write_target("search_output", target, as_toml(loaded, ranked[0], Path(target)))
        print(f"written to {target}")
    return 0


def verify(config: JobConfig, ranked: list[Candidate], hardware: Hardware) -> tuple[list[Candidate], list[str]]:
    """Trace a step of each layout that the closed form found.

    Returns:
        Those that fit by the trace too, in the same order and with the trace's memory; and what there is to say of the
        others. A layout that can't be traced stays.
    """
    kept, notes = [], []
    for number, found in enumerate(ranked, start=1):
        try:
            ranks = METHODS["trace"].ranks(with_settings(config, settings_of(config, found)), found.layout.world_size)
        except UserError as error:
            kept.append(found)
            notes.append(f"not verified: {found}: {error}")
            continue
        traced = max(rank.peak_reserved_bytes for rank in ranks)
        if traced <= hardware.fit_bytes:
            kept.append(replace(found, reserved=traced))
            continue
        notes.append(
            f"dropped: {found}: number {number} by the closed form, but its trace reserves {traced / GIB:.1f} GiB "
            f"rather than {found.reserved / GIB:.1f}, above the limit of {hardware.fit_bytes / GIB:.1f}"
        )
    fitting = len(ranked) - sum(note.startswith("dropped") for note in notes)
    return kept, [f"memory by trace: {fitting} of {len(ranked)} layouts fit", *notes]


def _is_legal(config: JobConfig, candidate: Candidate, hardware: Hardware) -> bool:
    changed = with_settings(config, settings_of(config, candidate))
    with planned_for(hardware.machine):
        return not checks.check(changed, candidate.layout.world_size, set())


def explain(ranked: list[Candidate]) -> Iterator[str]:
    """What the first has over the second."""
    first, *others = ranked
    yield f"first: {_why(first)}"
    if not others:
        yield "nothing else fits"
        return
    second = others[0]
    gain = second.time.seconds / first.time.seconds - 1
    if abs(gain) <= TIE:
        reason = "fewer dimensions" if first.dimensions < second.dimensions else "less memory"
        yield f"second: {_why(second)}; within {TIE:.0%}, which is a tie, and the first has {reason}"
    else:
        yield f"second: {_why(second)}; {gain:.0%} slower"
    if first.time.unsure:
        yield "so many ranks are beyond what the constants were fitted on: the network's part is a guess"


def _on_frontier(fitting: list[Candidate]) -> Iterator[str]:
    yield f"of {len(fitting):,} that fit, the fastest for their memory:"
    for found in frontier(fitting):
        speed = rounded(found.tokens_per_second)
        yield f"     {speed:>8} tokens/s per GPU  {found.reserved / GIB:6.1f} GiB  {found}"


def _why(candidate: Candidate) -> str:
    own, time = candidate.layout, candidate.time
    parts = [f"{100 * time.bubble:.0f} % bubble"] if own.pp > 1 else []
    parts.append(f"{100 * time.exposed['fsdp']:.0f} % of the weights' exchange exposed")
    parts += ["tp's exchange in the open"] if own.tp > 1 else []
    again = {
        "none": "nothing computed again",
        "op": "a part of each block computed again",
        "full": "blocks computed twice",
    }
    parts.append(again[own.checkpointing.mode])
    return ", ".join(parts)


def as_toml(loaded: LoadedConfig, candidate: Candidate, target: Path) -> str:
    """A file that makes the run of the command line one of this layout.

    Args:
        target: where it will lie.

    Raises:
        UserError: the config's file isn't there any more.
    """
    config = loaded.config
    given = {key: value_of(config, key) for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
    own = {key: value for key, value in given.items() if not key.startswith(("job.", "estimation."))}
    lines = [f"# {candidate}"]
    if config.job.config_file:
        path = Path(find_config(config.job.config_file)).resolve()
        lines.append(f"extends = {toml_value(os.path.relpath(path, target.expanduser().resolve().parent))}")
    sections: dict[str, list[str]] = {}
    for key, value in (own | settings_of(config, candidate)).items():
        section, _, name = key.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    for section, entries in sections.items():
        lines += ["", f"[{section}]", *entries]
    return "\n".join(lines) + "\n"
