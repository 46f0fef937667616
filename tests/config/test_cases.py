"""Kinds of faults that other trainers had, as their users met them."""

from __future__ import annotations

import pytest

from tests.config.conftest import Load, Mistakes

TP = "parallelism.tensor_parallel_degree"


def test_cfg_unknown_key(mistakes: Mistakes) -> None:
    wrong = {
        "[training]\nseqlen = 64": "training.seq_len",
        "[paralelism]\ntensor_parallel_degree = 2": "parallelism.tensor_parallel_degree",
        "tensor_parallel_degree = 2": "parallelism.tensor_parallel_degree",
        "[training.dataloader]\nprefetch_facter = 2": "training.dataloader.prefetch_factor",
    }
    for toml, meant in wrong.items():
        (mistake,) = mistakes(toml)
        assert mistake.startswith("run.toml: ") and f"did you mean {meant}?" in mistake
    (mistake,) = mistakes("", "--training.seq_lenn", "64")
    assert "command line" in mistake and "did you mean --training.seq_len?" in mistake


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "key",
    [
        "metrics.log_freq",
        "checkpoint.interval",
        "training.gc_freq",
        "profiling.profile_freq",
        "training.seq_len",
        "training.steps",
        "training.local_batch_size",
    ],
)
def test_cfg_zero_freq(key: str, value: int, mistakes: Mistakes) -> None:
    section, _, name = key.rpartition(".")
    for found in (mistakes(f"[{section}]\n{name} = {value}"), mistakes("", f"--{key}", str(value))):
        assert len(found) == 1 and key in found[0] and "at least 1" in found[0]


def test_cfg_zero_freq_of_a_profilers_period(load: Load, mistakes: Mistakes) -> None:
    short = ["--profiling.profile_freq=2", "--profiling.profiler_warmup=3", "--profiling.profiler_active=1"]
    for arguments in (short, [*short, "--profiling.enable_profiling"]):
        (mistake,) = mistakes("", *arguments)
        assert "profiler_warmup 3 + profiling.profiler_active 1 = 4; set it to 4 or more" in mistake
    load("", "--profiling.enable_profiling", "--profiling.profile_freq=4")  # the defaults fill it
    load("", *short, "--profiling.enable_memory_snapshot")  # which has no windows


def test_profiling_that_writes_nothing(load: Load, mistakes: Mistakes) -> None:
    for key in ("profiling.enable_profiling", "profiling.enable_memory_snapshot"):
        (mistake,) = mistakes("", f"--{key}", "--checkpoint.load_only", "--checkpoint.enable")
        assert f"{key} = true writes to job.dump_folder" in mistake
    short = load("", "--profiling.enable_profiling", "--training.steps=9")
    assert any(
        "the first trace ends with step profiling.profile_freq = 10, the run with step 9" in w for w in short.warnings
    )


def test_cfg_degrees(load: Load, mistakes: Mistakes) -> None:
    replicate, shard = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
    tp = "--parallelism.tensor_parallel_degree"
    for arguments, expected in {
        (f"{shard}=0",): "at least 1, or -1",
        (f"{replicate}=-1", f"{shard}=-1"): "data_parallel_replicate_degree",
        (f"{shard}=-2",): "at least 1, or -1",
        (f"{shard}=8",): "dp_replicate*dp_shard*cp*tp*pp = 1*8*1*1*1 = 8 but world size = 4; legal: "
        "data_parallel_shard_degree 4",
        (f"{replicate}=2", f"{shard}=3"): "= 2*3*1*1*1 = 6 but world size = 4; legal: data_parallel_shard_degree 2",
    }.items():
        (mistake,) = mistakes("", *arguments, world_size=4)
        assert expected in mistake
    for degree in (3, 8):
        product, sizes = mistakes("", f"{tp}={degree}", world_size=4)  # it divides neither the ranks nor the heads
        line = f"dp_replicate*dp_shard*cp*tp*pp = 1*?*1*{degree}*1, and {degree} doesn't divide world size = 4"
        assert f"{line}; legal: tensor_parallel_degree 1, 2 or 4" in product
        assert f"n_kv_heads 4 / {degree} = " in sizes and sizes.endswith("legal: 1, 2 or 4")
    load(world_size=1)


def test_cfg_types(load: Load, mistakes: Mistakes) -> None:
    for value in ('"100"', "true", "10.5"):
        (mistake,) = mistakes(f"[training]\nsteps = {value}")
        assert f"training.steps = {value}: expected a whole number" in mistake
    (mistake,) = mistakes('[optimizer]\nlr = "3e-4"')
    assert "optimizer.lr" in mistake and "expected a finite number" in mistake
    (mistake,) = mistakes('[training]\nmixed_precision_param = "fp8"')
    assert 'one of "bfloat16", "float16", "float32"' in mistake
    loaded = load("[optimizer]\nlr = 1", "--training.steps", "1e3")
    assert (loaded.config.optimizer.lr, loaded.config.training.steps) == (1.0, 1000)
    assert isinstance(loaded.config.optimizer.lr, float) and isinstance(loaded.config.training.steps, int)


def test_cfg_renamed(load: Load, mistakes: Mistakes) -> None:
    loaded = load(
        "[training]\nbatch_size = 8\n[lr_scheduler]\nlr_min = 0.1\n[experimental]\npipeline_parallel_degree = 1"
    )
    assert (loaded.config.training.local_batch_size, loaded.config.lr_scheduler.min_lr_factor) == (8, 0.1)
    for old, new in {
        "training.batch_size": "training.local_batch_size",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    }.items():
        assert sum(f"{old} is an older name; today it is {new}" in warning for warning in loaded.warnings) == 1
    (mistake,) = mistakes("[optimizer]\nlr_min = 0.1")
    assert "did you mean lr_scheduler.min_lr_factor?" in mistake


def test_cfg_bool_off(load: Load, mistakes: Mistakes) -> None:
    toml, flag = "[metrics]\nenable_tensorboard = true", "--metrics.enable_tensorboard"
    for off in ([f"{flag}=false"], [flag, "false"], [f"{flag}=False"], ["--metrics.no_enable_tensorboard"]):
        assert load(toml, *off).config.metrics.enable_tensorboard is False
    assert load(toml, "--metrics.no-enable-tensorboard").config.metrics.enable_tensorboard is False
    for on in ([flag], [f"{flag}=true"], [flag, "TRUE"], ["--metrics.enable-tensorboard"]):
        assert load("", *on).config.metrics.enable_tensorboard is True
        assert load(toml, *on).config.metrics.enable_tensorboard is True
    (mistake,) = mistakes(toml, flag, "maybe")
    assert "maybe" in mistake and "expected true or false" in mistake


def test_loss_gbs(load: Load, mistakes: Mistakes) -> None:
    for batch, local, world_size, legal in ((10, 4, 2, "8 or 16"), (4, 4, 2, "8")):
        arguments = (f"--training.global_batch_size={batch}", f"--training.local_batch_size={local}")
        (mistake,) = mistakes("", *arguments, world_size=world_size)
        assert f"training.global_batch_size = {batch}" in mistake
        assert f"{local} * {world_size} batch ranks" in mistake and mistake.endswith(f"nearest legal: {legal}")
    load("", "--training.global_batch_size=16", "--training.local_batch_size=4", world_size=2)
    pipeline = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=16")
    load("", *pipeline, "--training.global_batch_size=16", world_size=2)  # ranks of a pipeline read the same rows
    (mistake,) = mistakes("", *pipeline, "--training.global_batch_size=16", world_size=4)
    assert "16 * 2 batch ranks (dp_replicate * dp_shard) = 32; nearest legal: 32" in mistake


def test_cp_seqlen(load: Load, mistakes: Mistakes) -> None:
    cp, tp, seq_len = (f"--{key}" for key in ("parallelism.context_parallel_degree", TP, "training.seq_len"))
    (mistake,) = mistakes("", f"{seq_len}=36", f"{cp}=4", world_size=4)
    assert mistake == (
        "training.seq_len = 36: not a multiple of context_parallel_degree 4 * 2 = 8 (a head and a tail chunk per "
        "rank); nearest legal: 32 or 40"
    )
    (mistake,) = mistakes("", f"{seq_len}=4", f"{cp}=4", world_size=4)
    assert mistake.endswith("nearest legal: 8")
    (mistake,) = mistakes("", f"{seq_len}=18", f"{cp}=2", f"{tp}=2", world_size=4)
    assert "context_parallel_degree 2 * lcm(2, tensor_parallel_degree 2) = 4" in mistake and "16 or 20" in mistake
    load(
        "", f"{seq_len}=20", f"{cp}=2", f"{tp}=2", world_size=4
    )  # 10 tokens a rank: two chunks of 5, and 5 per tp rank


def test_lr_too_long(load: Load) -> None:
    warnings = load("", "--training.steps=10", "--lr_scheduler.warmup_steps=20").warnings
    assert len(warnings) == 1 and "warmup_steps = 20" in warnings[0]
    warnings = load(
        "", "--training.steps=10", "--lr_scheduler.warmup_steps=6", "--lr_scheduler.decay_ratio=0.8"
    ).warnings
    assert len(warnings) == 1 and "6 + decay_ratio 0.8 * 10 steps = 14" in warnings[0]
