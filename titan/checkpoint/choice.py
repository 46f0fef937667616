"""Which checkpoint a run resumes from, and whether its files are still what was saved."""

from __future__ import annotations

from typing import Literal

from titan.checkpoint.collective import Ranks
from titan.checkpoint.folders import find_checkpoint, recover, scan, step_folder
from titan.checkpoint.manifest import Manifest, ManifestError, find_damage
from titan.checkpoint.storage import Place
from titan.config.errors import UserError
from titan.config.job_config import Checkpoint
from titan.observability.logging import logger

_SHOWN = 5


def choose(root: Place, settings: Checkpoint) -> Manifest | None:
    """The checkpoint of `load_step`, -1 being the newest complete one; None when there is none. Rank 0's work.

    Finishes or clears away first what an interrupted save left, unless `load_only`: another run may be saving.

    Raises:
        UserError: the step that is asked for isn't there, or is no complete checkpoint.
    """
    if not settings.load_only:
        recover(root)
    found = scan(root)
    for step, reason in found.skipped.items():
        logger.warning(f"skipping {step_folder(root, step)}: {reason}")
    wanted = settings.load_step
    if wanted == -1:
        if not found.complete:
            return None
        wanted = max(found.complete)
    if wanted not in found.complete:
        why = found.skipped.get(wanted, "there is no such folder")
        steps = ", ".join(map(str, found.complete)) or "none"
        raise UserError(
            f"checkpoint.load_step = {wanted}: {step_folder(root, wanted)} can't be loaded: {why}. "
            f"Steps available: {steps}; -1 loads the newest, and starts anew where there is none."
        )
    if newer := [step for step in found.complete if step > wanted]:
        fate = "" if settings.load_only else "; the first save sets them aside"
        logger.warning(f"resuming from step {wanted} though there are newer ones: {', '.join(map(str, newer))}{fate}")
    chosen = found.complete[wanted]
    if chosen.model_only:
        whole = [step for step, manifest in found.complete.items() if not manifest.model_only]
        advice = f"go on from an earlier step with --checkpoint.load_step={whole[-1]}, or " if whole else ""
        raise UserError(
            f"{step_folder(root, wanted)} holds the model alone (checkpoint.last_save_model_only): that run is "
            f"finished and can't be resumed from there; {advice}start another run from its weights, in another "
            f"job.dump_folder, with --checkpoint.initial_load_path={step_folder(root, wanted)}"
        )
    return chosen


def find_initial(path: Place, model_only: bool) -> tuple[Place, Manifest]:
    """The checkpoint that checkpoint.initial_load_path means: a step's folder, or the newest of a folder of them.

    Returns:
        The folder that its `step-N` lies in, and its manifest.

    Raises:
        UserError: there is none, or it holds no more than the model where everything is asked for.
    """
    try:
        root, manifest = find_checkpoint(path)
    except ManifestError as error:
        raise UserError(
            f'checkpoint.initial_load_path = "{path}": no complete checkpoint there ({error}); expected a folder '
            "step-N, or one that holds such folders. For Hugging Face weights set checkpoint.initial_load_in_hf = true"
        ) from None
    if manifest.model_only and not model_only:
        raise UserError(
            f'checkpoint.initial_load_path = "{path}": {step_folder(root, manifest.step)} holds the model alone; set '
            "checkpoint.initial_load_model_only = true"
        )
    return root, manifest


def refuse_damaged(root: Place, manifest: Manifest, verify: Literal["size", "checksum", "none"], ranks: Ranks) -> None:
    """Check the files of a checkpoint, each rank its share. Collective.

    Raises:
        UserError: on all ranks, naming damaged files, what was expected and found, and the newest intact checkpoint.
    """
    damage = _damage(root, manifest, verify, ranks)
    if not damage:
        return
    complete = ranks.on_first(f"look for checkpoints in {root}", lambda: list(scan(root).complete.values()))
    others = [other for other in reversed(complete) if other.step != manifest.step]
    intact = next((other.step for other in others if not _damage(root, other, verify, ranks)), None)
    advice = (
        "No other checkpoint there is intact. To start anew, choose another job.dump_folder."
        if intact is None
        else f"The newest intact one is of step {intact}: resume from it with --checkpoint.load_step={intact}"
    )
    lines = [f"  - {line}" for line in damage[:_SHOWN]]
    if len(damage) > _SHOWN:
        lines.append(f"  - and {len(damage) - _SHOWN} more")
    raise UserError("\n".join([f"the checkpoint {step_folder(root, manifest.step)} is damaged:", *lines, advice]))


def _damage(root: Place, manifest: Manifest, verify: Literal["size", "checksum", "none"], ranks: Ranks) -> list[str]:
    if verify == "none":
        return []
    folder = step_folder(root, manifest.step)
    by_size = sorted(manifest.files.items(), key=lambda item: item[1].size)  # so that shares take about as long
    share = dict(by_size[ranks.rank :: ranks.size])
    return ranks.on_each(
        f"check the files of {folder}",
        lambda: find_damage(folder, share, verify),
        lambda by_rank: sorted(line for lines in by_rank for line in lines),
    )
