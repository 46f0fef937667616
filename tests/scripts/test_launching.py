"""The Kubernetes and SkyPilot examples: their structure, and what their commands tell torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.runs import train_here
from tests.distributed.world import Worlds
from tests.test_faults import same_numbers, started
from tests.test_train import arguments, free_port, metrics
from titan.config.loader import load_and_check

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "scripts/kubernetes/titan.yaml"
SKYPILOT = ROOT / "scripts/skypilot/titan.yaml"
TORCHRUN = 'printf "%s\\n" "$@" >"torchrun-was"; exit "${STATUS:-0}"'


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def container() -> dict[str, Any]:
    found: dict[str, Any] = read(KUBERNETES)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][
        0
    ]
    return found


def pod_command() -> list[str]:
    return [*container()["command"], *container()["args"]]


def environment(**variables: str) -> dict[str, str]:
    """What the operator sets in a pod and what the container's own `env` does, of the second of two nodes."""
    own = {entry["name"]: entry["value"] for entry in container()["env"] if "value" in entry}
    return own | {"MASTER_ADDR": "titan-master-0", "RANK": "1", "WORLD_SIZE": "2", "POD_IP": "10.0.0.8"} | variables


def run(command: list[str], folder: Path, **variables: str) -> tuple[int, list[str]]:
    """A command with a torchrun that only writes down its arguments: the status, and these."""
    (folder / "bin").mkdir()
    standin = folder / "bin" / "torchrun"
    standin.write_text(f"#!/usr/bin/env bash\n{TORCHRUN}\n")
    standin.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables, "PATH": path}, timeout=20)
    return done.returncode, (folder / "torchrun-was").read_text().splitlines()


def options(words: list[str]) -> dict[str, str]:
    """torchrun's own, those before train.py."""
    return dict(word.removeprefix("--").split("=", 1) for word in words[: words.index("train.py")])


# --- Kubernetes


def test_kubernetes_structure() -> None:
    job = read(KUBERNETES)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert {spec["restartPolicy"] for spec in replicas.values()} == {"OnFailure"}  # a status of 75 starts it again
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert container()["name"] == "pytorch"
    assert environment()["NODES"] == str(1 + replicas["Worker"]["replicas"])
    pod = replicas["Master"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "persistentVolumeClaim" in volumes["outputs"] and mounts["shm"] == "/dev/shm"
    config = load_and_check(pod_command()[pod_command().index("titan") + 1 :], 16).config
    assert config.checkpoint.enable and config.job.dump_folder.startswith(mounts["outputs"])
    save = int(next(word for word in pod_command()[2].split() if "shutdown_timeout" in word).partition("=")[2])
    assert save < pod["terminationGracePeriodSeconds"]


def test_kubernetes_command(tmp_path: Path) -> None:
    status, words = run(pod_command(), tmp_path, **environment())
    told = options(words)
    assert status == 0 and told["nnodes"] == "2" and told["nproc_per_node"] == "gpu"
    assert (told["rdzv_endpoint"], told["local_addr"]) == ("titan-master-0:29500", "10.0.0.8")
    assert told["rdzv_conf"].startswith("is_host=0,")
    assert words[words.index("train.py") + 1 :] == pod_command()[4:]


@pytest.mark.slow
def test_kubernetes_two_pods_train(tmp_path: Path, worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods' own command, twice on this machine: two torchruns that meet, over gloo."""
    port = free_port()
    command = [word.replace(":29500", f":{port}") for word in pod_command()[:4]] + arguments(tmp_path, 4, 4)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    local = {"MASTER_ADDR": "127.0.0.1", "POD_IP": "127.0.0.1", "PROCESSES_PER_NODE": "1"}
    with ExitStack() as stack:
        pods = [
            stack.enter_context(started(command, tmp_path / f"pod{rank}", **environment(RANK=str(rank), **local)))
            for rank in range(2)
        ]
        logs = [tmp_path / f"pod{rank}" / "log" for rank in range(2)]
        assert [pod.wait(120) for pod in pods] == [0, 0], [log.read_text() for log in logs]
    assert "2 process(es) on 2 node(s)" in logs[0].read_text() + logs[1].read_text()
    expected = worlds(2).run(train_here, arguments(tmp_path / "straight", 4, 4))[0]
    same_numbers(metrics(tmp_path), expected, 0)


# --- SkyPilot


def sky(folder: Path, **variables: str) -> tuple[int, list[str]]:
    job = read(SKYPILOT)
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": str(job["num_nodes"])}
    nodes |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    return run(["bash", "-c", job["run"]], folder, **{**job["envs"], **nodes, **variables})


def test_skypilot_command(tmp_path: Path) -> None:
    status, words = sky(tmp_path)
    told = options(words)
    assert status == 0 and (told["nnodes"], told["nproc_per_node"]) == ("2", "8")
    assert (told["rdzv_endpoint"], told["local_addr"]) == ("10.0.0.7:29500", "10.0.0.8")
    assert told["rdzv_conf"].startswith("is_host=0,")
    config = load_and_check(words[words.index("train.py") + 1 :], 16).config
    assert config.checkpoint.enable and config.checkpoint.folder == read(SKYPILOT)["envs"]["CHECKPOINTS"]


@pytest.mark.parametrize(("asked", "expected"), [(True, 75), (False, 1)])
def test_skypilot_starts_again_what_was_asked_to_stop(tmp_path: Path, asked: bool, expected: int) -> None:
    (tmp_path / "outputs").mkdir()
    if asked:
        (tmp_path / "outputs" / "requeue").touch()
    status, _ = sky(tmp_path, STATUS="1")
    assert status == expected
    assert read(SKYPILOT)["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


# --- both


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck isn't installed")
    for name, text in {"pod": pod_command()[2], "run": read(SKYPILOT)["run"], "setup": read(SKYPILOT)["setup"]}.items():
        (tmp_path / name).write_text(text)
        done = subprocess.run([program, "--shell=bash", str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
