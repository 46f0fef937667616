"""`train.py` as a user runs it: from the command line, killed, resumed, started wrongly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from tests.forked import run_forked
from titan.config.loader import load_config
from titan.observability.goodput import account

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, "train.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**variables: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables


def run(command: list[str], timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(**variables)
    if command[: len(TRAIN)] == TRAIN and "--help" not in command:
        return run_forked(command[1:], ROOT, environment, timeout)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


CHECKPOINTED = [*TINY, "--checkpoint.enable", "--checkpoint.interval=4", "--training.global_batch_size=8"]


def arguments(folder: Path, local: int, steps: int = 20) -> list[str]:
    return [
        *CHECKPOINTED,
        f"--job.dump_folder={folder}",
        f"--training.local_batch_size={local}",
        f"--training.steps={steps}",
    ]


@pytest.fixture(scope="module")
def straight(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Twenty steps on one process without a stop."""
    rows: list[dict[str, Any]] = worlds(1).run(train_here, arguments(tmp_path_factory.mktemp("straight"), 4))[0]
    return rows


def kill_between(folder: Path, first: int, last: int) -> int:
    """Start the run and kill -9 it somewhere within these steps; returns the last step that was logged."""
    process = subprocess.Popen(
        TRAIN + arguments(folder, 4), cwd=ROOT, env=clean_environment(), stderr=subprocess.DEVNULL
    )
    target = random.randint(first, last)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if metrics(folder) and metrics(folder)[-1]["step"] >= target:
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return int(metrics(folder)[-1]["step"])


def test_kill_at_any_step_and_resume(worlds: Worlds, tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    """Bit for bit on the same layout, to 1e-5 on 2 and 4 ranks, twice in a row, without doubled points."""
    folder = tmp_path / "run"
    first = kill_between(folder, 5, 8)
    second = kill_between(folder, max(first, 9), 14)
    assert first < 20 and second < 20
    for ranks, local in ((2, 2), (4, 2), (4, 1)):
        copy = tmp_path / f"on-{ranks}-{local}"
        shutil.copytree(folder, copy)
        resumed = worlds(ranks).run(train_here, arguments(copy, local))[0]
        assert [row["step"] for row in resumed] == list(range(1, 21))
        for key in ("loss", "grad_norm", "lr", "tokens_seen"):
            assert [row[key] for row in resumed] == pytest.approx([row[key] for row in straight], rel=1e-5), key
    resumed = worlds(1).run(train_here, arguments(folder, 4))[0]
    for key in ("step", "loss", "loss_max", "grad_norm", "lr", "tokens_seen"):
        assert [row[key] for row in resumed] == [row[key] for row in straight], key
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    again = [first - starts[1]["step"], second - starts[2]["step"]]
    assert [len(start["dropped"]) for start in starts] == [0, *again]
    seconds = account(starts, resumed)
    assert sum(seconds.values()) == pytest.approx(starts[2]["end"]["time"] - starts[0]["time"], abs=0.05)
    assert (seconds["lost"] > 0) == (sum(again) > 0)
    assert min(seconds[kind] for kind in ("training", "startup", "data", "checkpoint", "down")) > 0
    assert resumed[-1]["goodput"] == pytest.approx(seconds["training"] / sum(seconds.values()), rel=0.2)


def test_lr_resume_and_a_finished_run_can_be_extended(worlds: Worlds, tmp_path: Path) -> None:
    """The learning rate is a function of the step: a resume doesn't restart it, a longer run stretches it."""
    worlds(1).run(train_here, arguments(tmp_path, 4, steps=8))
    before = metrics(tmp_path)
    rows = worlds(1).run(train_here, arguments(tmp_path, 4, steps=8))[0]  # nothing is left to do
    assert rows == before
    rows = worlds(1).run(train_here, arguments(tmp_path, 4, steps=12))[0]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[8]["lr"] == pytest.approx(8e-4 * (12 + 1 - 9) / 10)  # warm-up 2, then ten steps of decay
    assert rows[11]["tokens_seen"] == 12 * 8 * 32


def test_a_finished_run_says_that_nothing_is_left_to_do(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(train_here, arguments(tmp_path, 4, steps=4))
    tokens = [f"--training.total_tokens={4 * 8 * 32}"]
    for extra, length in (([], "training.steps"), (tokens, "training.total_tokens")):
        result = run([*TRAIN, *arguments(tmp_path, 4, steps=4), *extra])
        assert result.returncode == 0, result.stderr
        advice = f"raise {length}, or choose another job.dump_folder"
        assert result.stderr.count(f"step 4 of 4: nothing is left to do; {advice}\n") == 1


def test_ck_initial_a_seed_checkpoint_starts_runs_in_any_layout(
    worlds: Worlds, tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    """Made by one process, taken up by two: in the folder that it lies in, and by a run that has another seed."""

    def losses(ranks: int, folder: str, *more: str) -> list[float]:
        case = [*arguments(tmp_path / folder, 8 // ranks, steps=2), *more]
        return [row["loss"] for row in worlds(ranks).run(train_here, case)[0]]

    fresh = losses(1, "fresh", "--debug.seed=5")
    assert losses(1, "seed", "--debug.seed=5", "--checkpoint.create_seed_checkpoint") == []
    assert [path.name for path in (tmp_path / "seed/checkpoint").iterdir()] == ["step-0"]
    with pytest.raises(Exception, match="has a checkpoint of step 0"):
        losses(1, "seed", "--debug.seed=5", "--checkpoint.create_seed_checkpoint")
    start = f"--checkpoint.initial_load_path={tmp_path / 'seed/checkpoint/step-0'}"
    elsewhere = losses(1, "one", start)
    assert elsewhere[0] != pytest.approx(straight[0]["loss"], rel=1e-4)  # other weights
    assert losses(2, "two", start) == pytest.approx(elsewhere, rel=1e-6)
    assert losses(2, "seed", "--debug.seed=5") == pytest.approx(fresh, rel=1e-6)


def test_ck_exclude_the_data_position(worlds: Worlds, tmp_path: Path) -> None:
    """Other data may follow once its position is excluded; moments, step and learning rate go on."""
    worlds(1).run(train_here, arguments(tmp_path, 4, steps=4))
    other = [*arguments(tmp_path, 4, steps=8), "--debug.seed=7", "--checkpoint.interval=2"]
    with pytest.raises(Exception, match="belongs to other data"):
        worlds(1).run(train_here, other)
    rows = worlds(1).run(train_here, [*other, "--checkpoint.exclude_from_loading=dataloader"])[0]
    assert [row["step"] for row in rows] == list(range(1, 9))


def test_ck_export_dtype_of_a_run_s_last_save(worlds: Worlds, tmp_path: Path) -> None:
    only_model = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    worlds(2).run(train_here, [*arguments(tmp_path, 4, steps=8), *only_model])
    sizes = {
        path.name: sum(file.stat().st_size for file in path.glob("*.distcp"))
        for path in (tmp_path / "checkpoint").iterdir()
    }
    assert sizes.keys() == {"step-4", "step-8"}
    assert sizes["step-8"] < sizes["step-4"] / 4  # a sixth, and what the format adds
    with pytest.raises(Exception, match="step-8 holds the model alone"):
        worlds(2).run(train_here, arguments(tmp_path, 4, steps=12))


def test_hugging_face_weights_begin_and_end_a_run(worlds: Worlds, tmp_path: Path) -> None:
    """Written by two ranks, read by two stages of a pipeline, which learn nothing and write them again."""
    first, second = tmp_path / "first", tmp_path / "second"
    in_hf = "--checkpoint.last_save_in_hf"
    worlds(2).run(train_here, [*arguments(first, 4, steps=2), in_hf])
    start = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={first / 'hf/step-2'}"]
    pipeline = ["--parallelism.pipeline_parallel_degree=2", "--optimizer.lr=0", "--optimizer.weight_decay=0"]
    for _ in range(2):  # the second time it resumes from its own checkpoint, and leaves what it wrote
        rows = worlds(2).run(train_here, [*arguments(second, 8, steps=1), *start, *pipeline, in_hf])[0]
    assert len(rows) == 1
    found = [
        {
            name: tensor.numpy().tobytes()
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for folder in (first / "hf/step-2", second / "hf/step-1")
    ]
    assert found[0] == found[1] and "lm_head.weight" in found[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_only_loads_writes_nothing(worlds: Worlds, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    worlds(1).run(train_here, arguments(folder, 4, steps=8))
    before = contents(folder)
    only_load = ["--checkpoint.load_only", "--checkpoint.load_step=4", "--metrics.enable_tensorboard"]
    result = run([*TRAIN, *arguments(folder, 4, steps=6), *only_load, "--metrics.progress=lines"])
    assert result.returncode == 0, result.stderr
    assert "step 6/6" in result.stderr
    assert contents(folder) == before
    only_load.remove("--checkpoint.load_step=4")
    result = run([*TRAIN, *arguments(tmp_path / "new", 4, steps=1), *only_load])
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "new").exists()


def test_the_dump_folder_holds_the_config_of_the_newest_start(worlds: Worlds, tmp_path: Path) -> None:
    for steps in (2, 3):
        worlds(2).run(train_here, arguments(tmp_path, 4, steps=steps))
        assert f"steps = {steps}  # command line\n" in (tmp_path / "config.toml").read_text()
    saved = load_config([f"--job.config_file={tmp_path / 'config.toml'}"]).config
    assert saved == load_config(arguments(tmp_path, 4, steps=3)).config
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        "config.toml",
        "metrics.jsonl",
        "starts.jsonl",
    ]


def test_an_unknown_dataset_is_a_mistake_of_the_config(tmp_path: Path) -> None:
    for mode in ([], ["--job.check_only"]):
        result = run([*TRAIN, *arguments(tmp_path / "none", 4), "--training.dataset=pyton_stdlib", *mode])
        assert result.returncode == 2
        assert "training.dataset = 'pyton_stdlib'" in result.stderr and "mean python_stdlib?" in result.stderr


def test_metrics_have_exactly_the_promised_keys(straight: list[dict[str, Any]]) -> None:
    keys = "step loss loss_max grad_norm lr tokens_seen tokens_per_second tokens_per_second_per_device "
    keys += "tflops_per_device mfu step_seconds data_seconds checkpoint_seconds validation_seconds "
    keys += "profiling_seconds memory_peak_bytes time goodput"
    assert all(list(row) == keys.split() for row in straight)
    assert all(row["mfu"] is None for row in straight)


def test_another_model_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(train_here, arguments(tmp_path, 4, steps=1))
    result = run([*TRAIN, *arguments(tmp_path, 4), "--model.flavor=layernorm"])
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "norm" in result.stderr and "model" in result.stderr


def test_ck_load_step_that_does_not_exist(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(train_here, arguments(tmp_path, 4, steps=5))
    result = run([*TRAIN, *arguments(tmp_path, 4), "--checkpoint.load_step=999"])
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "999" in result.stderr and "4, 5" in result.stderr


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_job_with_its_cause(tmp_path: Path) -> None:
    start = time.monotonic()
    result = run(
        [
            *TORCHRUN,
            "--standalone",
            "train.py",
            *arguments(tmp_path, 4),
            "--experimental.custom_import=tests.faulty_module",
        ]
    )
    assert result.returncode != 0
    assert time.monotonic() - start < 60
    assert "a fault on purpose" in result.stderr
    assert "rank      : 1" in result.stderr  # the launcher's summary of the first failure


def test_la_no_torchrun_is_one_process(tmp_path: Path) -> None:
    result = run([*TRAIN, *arguments(tmp_path, 4, steps=1)])
    assert result.returncode == 0, result.stderr
    assert "1 process(es)" in result.stderr


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_la_no_torchrun_half_a_launcher(tmp_path: Path) -> None:
    result = run([*TRAIN, *arguments(tmp_path, 4)], WORLD_SIZE="2")
    assert result.returncode == 1
    assert "RANK, MASTER_ADDR, MASTER_PORT missing" in result.stderr and "torchrun" in result.stderr
    assert "Traceback" not in result.stderr


def test_la_no_torchrun_peers_that_never_come(tmp_path: Path) -> None:
    result = run(
        [*TRAIN, *arguments(tmp_path, 4), "--comm.init_timeout_seconds=3"],
        **{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )
    assert result.returncode == 1
    assert "WORLD_SIZE = 2" in result.stderr and "comm.init_timeout_seconds = 3" in result.stderr
    assert "Traceback" not in result.stderr


def test_la_no_torchrun_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = run(
            [*TRAIN, *arguments(tmp_path, 4), "--comm.init_timeout_seconds=5"],
            **{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr and "is the port free" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_check_only_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    result = run([*TRAIN, *arguments(tmp_path / "none", 2), "--job.check_only"], WORLD_SIZE="4", RANK="0")
    assert result.returncode == 0, result.stderr
    assert "dp_shard 4" in result.stdout
    assert "8 windows × 32 tokens = 256 tokens, as 4 rank(s) × 1 microbatch(es) × 2 windows" in result.stdout
    assert not (tmp_path / "none").exists()


def test_help_is_quick_and_needs_no_torch() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = run([*TRAIN, "--help"])
        times.append(time.perf_counter() - start)
        assert result.returncode == 0 and "--training.seq_len" in result.stdout
    assert min(times) < 2
    code = (
        "import sys, runpy; sys.argv = ['train.py', '--help']\ntry: runpy.run_path('train.py', run_name='__main__')\n"
    )
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules"
    assert run([sys.executable, "-c", code]).returncode == 0


def test_first_step_comes_soon(tmp_path: Path) -> None:
    """Within ten seconds of the command on a quiet machine; a busy one is given more."""
    start = time.monotonic()
    process = subprocess.Popen(
        [*TRAIN, "--job.config_file=debug.toml", f"--job.dump_folder={tmp_path}", "--training.steps=1"],
        cwd=ROOT,
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    while not metrics(tmp_path) and process.poll() is None and time.monotonic() - start < 60:
        time.sleep(0.05)
    seconds = time.monotonic() - start
    assert process.wait(60) == 0
    assert seconds < 30


def test_imports_are_those_of_what_is_used(tmp_path: Path) -> None:
    """Half a second here and there: a plain run on one process loads no library of a technique that is off."""
    command = ["train.py", *TINY, f"--job.dump_folder={tmp_path}", "--training.steps=1"]
    code = f"import runpy, sys; sys.argv = {command}; runpy.run_path('train.py', run_name='__main__')\n"
    result = run([sys.executable, "-c", code + "print(*sys.modules)"])
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "torch" in loaded
    lazy = "torch.distributed.pipelining torch.distributed.checkpoint.state_dict_saver torch._inductor.compile_fx "
    lazy += (
        "datasets tensorboard wandb transformers torchao tokenizers safetensors tiktoken sentencepiece pandas pyarrow"
    )
    assert loaded.isdisjoint(lazy.split())
