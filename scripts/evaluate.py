"""Measure the loss of a checkpoint on a dataset, as validation during training does.

    python scripts/evaluate.py outputs/checkpoint/step-100 --dataset text --dataset_path 'books/*.txt'
    torchrun --nproc_per_node=2 scripts/evaluate.py outputs/checkpoint --dataset c4 --dataset_split validation --steps 9

The checkpoint is a folder step-N, or one of such folders, whose newest it is. Model and tokenizer are those that it was
trained with. Options without a dot are those of [validation]; any other setting goes by its full name. `--steps` counts
steps of the training run, whatever the number of ranks is here.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path

from titan.checkpoint.choice import find_initial
from titan.checkpoint.drift import read_config
from titan.config.loader import LoadedConfig
from titan.config.startup import config_from_command_line, exit_on_mistake
from titan.config.toml_text import toml_value

# What the checkpoint's run says of the model and of reading text; how it was spread over ranks and what computed it
# doesn't matter here.
_KEPT = ("model.", "training.", "loss.", "experimental.custom_import", "validation.")
_LEFT = (
    "model.attn_backend",
    "training.global_batch_size",
    "training.steps",
    "training.total_tokens",
    "training.enable_cpu_offload",
)


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        raise SystemExit(0 if {"-h", "--help"} & set(arguments) else 2)
    loaded, global_batch = _config(Path(arguments[0]), arguments[1:])

    from titan.observability.failures import failures_shown

    with failures_shown():
        score(loaded, global_batch)


def _config(checkpoint: Path, arguments: list[str]) -> tuple[LoadedConfig, int]:
    """The config of the checkpoint's run, as far as it says what the model is, with the arguments on top of it.

    Also the windows of a step of that run.
    """
    with exit_on_mistake():
        _, manifest = find_initial(checkpoint, model_only=True)
        saved = read_config(manifest.config)
    given = [re.sub(r"^--(?=[^.=]+(=|$))", "--validation.", argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "saved.toml"
        kept = {key: value for key, value in saved.items() if key.startswith(_KEPT) and key not in _LEFT}
        file.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in kept.items()), encoding="utf-8")
        own = [f"--job.config_file={file}", "--validation.enable", "--checkpoint.load_only"]
        loaded = config_from_command_line([*own, f"--checkpoint.initial_load_path={checkpoint}", *given])
    global_batch = saved["training.global_batch_size"]
    if global_batch == -1:
        ranks = manifest.layout["dp_replicate"] * manifest.layout["dp_shard"]
        global_batch = saved["training.local_batch_size"] * ranks
    return loaded, global_batch


def score(loaded: LoadedConfig, global_batch: int) -> None:
    """Load the weights and print what they score. Collective over the job's ranks.

    Args:
        global_batch: windows that validation.steps counts by.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from titan.checkpoint.collective import Ranks
    from titan.checkpoint.loading import Loader
    from titan.checkpoint.state import model_tensors
    from titan.config.derived import tokenizer_path
    from titan.config.toml_text import to_toml
    from titan.data.tokenizer import build_tokenizer
    from titan.data.validation import validation_rows
    from titan.observability.device import configure_allocator, find_device
    from titan.observability.logging import init_logging
    from titan.observability.metric_writers import ValidationMetrics
    from titan.parallelisms.parallel_dims import ParallelDims
    from titan.parallelisms.process_group import start_process_group
    from titan.training.initialize import materialize
    from titan.training.loss import set_loss
    from titan.training.step import build_model, build_stages
    from titan.training.validate import evaluate

    job = loaded.config
    configure_allocator()
    device = find_device()
    owns_group = start_process_group(device, job.comm.init_timeout_seconds)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    init_logging(rank, color=not job.metrics.disable_color_printing)
    dims = ParallelDims.from_config(job.parallelism, world_size, device.type)
    dims.build()

    stages = build_stages(build_model(job), job, dims, device.torch_device)
    for part in stages.parts:
        materialize(part, device.torch_device)
    set_loss(stages.parts, job, dims)
    ranks = Ranks(timedelta(hours=1))
    toml = to_toml(job, loaded.origins)
    Loader(job.checkpoint, Path(job.job.dump_folder), toml, ranks, lambda: model_tensors(stages.parts)).load()

    rows = validation_rows(job, build_tokenizer(tokenizer_path(job)), global_batch, dims)
    loss = evaluate(stages, job, dims, device.torch_device, rows.microbatches)
    if rank == 0:
        for name, value in dataclasses.asdict(ValidationMetrics.of(loss, rows.bytes_per_token)).items():
            print(f"{name}  {'unknown' if value is None else format(value, '.6f')}")
    if owns_group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
