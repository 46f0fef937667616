"""Published memory and speed of torchtitan's runs, as layouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan.config.job_config import JobConfig
from titan.config.loader import load_and_check_plan
from titan.estimation.hardware import find_hardware
from titan.estimation.layout import Checkpointing, Layout, ModelShape, even_stages
from titan.models.spec import model_families

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "published_measurements.json").read_text())

_OWN_GROUPS = "2025-06"  # from when on embedding and head were groups of FSDP's
_FLAVORS = {"llama2": {"7B", "13B", "70B"}, "llama3": {"8B", "70B", "405B"}}


def layout_of_row(row: dict[str, Any]) -> Layout:
    """The run of a row; where it doesn't say, a pipeline had as many microbatches as ranks."""
    name, flavor = row["model"].replace("3.1", "3").split("-")
    assert flavor in _FLAVORS[name]
    sizes = model_families()[name].flavors[flavor]
    names = [field.name for field in dataclasses.fields(ModelShape)]
    model = ModelShape(**{name: getattr(sizes, name) for name in names})
    schedule = row["pp_schedule"] or "1F1B"
    microbatches = row["pp"] if row["pp"] > 1 else 1
    return Layout(
        model=model,
        stages=even_stages(model.n_layers, row["pp"], 2 if schedule == "Interleaved1F1B" else 1),
        seq_len=row["seq_len"],
        rows=row["local_batch"] // microbatches,
        microbatches=microbatches,
        dp_replicate=row["dp_replicate"],
        dp_shard=row["dp_shard"],
        cp=row["cp"],
        tp=row["tp"],
        schedule=schedule,
        checkpointing=Checkpointing("full" if row["ac"] == "full" else "op"),
        chunks=1,
        compiled=bool(row["compile"]),
        float8=row["quant"].startswith("float8"),
        float8_gather="fp8 all-gather" in row["quant"],
        async_tp=row["async_tp"],
        reference="torchtitan-2025" if row["date"] >= _OWN_GROUPS else "torchtitan-2024",
    )


def arguments_of_row(row: dict[str, Any]) -> tuple[str, ...]:
    """The run of a row as a command line."""
    name, flavor = row["model"].replace("3.1", "3").split("-")
    settings: dict[str, object] = {
        "estimation.gpus": row["gpus"],
        "estimation.hardware": "h100-500w",
        "estimation.compat": "torchtitan-2025" if row["date"] >= _OWN_GROUPS else "torchtitan-2024",
        "model.name": name,
        "model.flavor": flavor,
        "training.seq_len": row["seq_len"],
        "training.local_batch_size": row["local_batch"],
        "parallelism.data_parallel_replicate_degree": row["dp_replicate"],
        "parallelism.data_parallel_shard_degree": row["dp_shard"],
        "parallelism.tensor_parallel_degree": row["tp"],
        "parallelism.context_parallel_degree": row["cp"],
        "parallelism.enable_async_tensor_parallel": row["async_tp"],
        "activation_checkpoint.mode": "full" if row["ac"] == "full" else "selective",
        "compile.enable": bool(row["compile"]),
    }
    if row["pp"] > 1:
        settings |= {
            "parallelism.pipeline_parallel_degree": row["pp"],
            "parallelism.pipeline_parallel_schedule": row["pp_schedule"],
            "parallelism.pipeline_parallel_microbatch_size": row["local_batch"] // row["pp"],
        }
    if row["quant"].startswith("float8"):
        settings |= {
            "float8.enable_float8_linear": True,
            "float8.recipe_name": "rowwise" if "rowwise" in row["quant"] else "tensorwise",
            "float8.enable_fsdp_float8_all_gather": "fp8 all-gather" in row["quant"],
        }
    return tuple(
        f"--{key}={'true' if value is True else value}" for key, value in settings.items() if value is not False
    )


def job_of_row(arguments: Sequence[str]) -> JobConfig:
    """The config of a row's command line, checked for the hardware that it names."""
    loaded, _ = load_and_check_plan(arguments, 1, lambda name: find_hardware(name).machine)
    return loaded.config
