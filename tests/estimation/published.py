"""Published memory and speed of torchtitan's runs, as layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

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
