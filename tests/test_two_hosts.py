"""Two hosts, as two network namespaces with a link between them that is cut in mid-run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.runs import train_here
from tests.distributed.world import Worlds
from tests.test_faults import FAULTY, same_numbers, saved_steps, started
from tests.test_train import arguments, metrics

HOSTS = {"a": "10.213.77.1", "b": "10.213.77.2"}
SCHEDULE = "--lr_scheduler.total_steps=100"  # the same for runs of all lengths


def namespace(host: str) -> str:
    return f"titan-{os.getpid()}-{host}"


def link(host: str) -> str:
    return f"titan-{host}"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[None]:
    """Namespaces a and b, and a link from one to the other."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command, so no network namespaces")
    try:
        try:
            for host in HOSTS:
                ip("netns", "add", namespace(host))
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        # Made within the namespaces, so that nothing of the machine's own network is touched.
        ip("-n", namespace("a"), "link", "add", link("a"), "type", "veth", "peer", link("b"), "netns", namespace("b"))
        for host, address in HOSTS.items():
            ip("-n", namespace(host), "address", "add", f"{address}/24", "dev", link(host))
            ip("-n", namespace(host), "link", "set", "lo", "up")
            ip("-n", namespace(host), "link", "set", link(host), "up")
            # torchrun waits for its store as long as TCP tries to reach it: a quarter of an hour by default.
            ip("netns", "exec", namespace(host), "sysctl", "-qw", "net.ipv4.tcp_retries2=5")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", namespace(host)], capture_output=True)


def command(host: str, folder: Path, steps: int) -> list[str]:
    """torchrun on one of the hosts."""
    inside = ["ip", "netns", "exec", namespace(host)]
    options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=two-hosts"]
    options += [f"--rdzv_endpoint={HOSTS['a']}:29477", f"--local_addr={HOSTS[host]}"]
    options += [f"--rdzv_conf=is_host={int(host == 'a')},read_timeout=20"]
    limits = ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=10"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*inside, *torchrun, "train.py", *arguments(folder, 4, steps), SCHEDULE, *limits, *FAULTY]


def settings(host: str) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": link(host), "FAULT": "none 0 none", "SLOW": "0.2"}


@pytest.mark.slow
def test_a_link_cut_in_mid_run(hosts: None, tmp_path: Path, worlds: Worlds) -> None:
    """Both sides end within a minute of the time limit and name the lost peer; with the link back, the run goes on."""
    folders = {"a": tmp_path, "b": tmp_path / "b"}  # the same run, and a log for each
    with (
        started(command("a", tmp_path, 100), folders["a"], **settings("a")) as a,
        started(command("b", tmp_path, 100), folders["b"], **settings("b")) as b,
    ):
        deadline = time.monotonic() + 90
        while len(metrics(tmp_path)) < 6 and time.monotonic() < deadline and a.poll() is None:
            time.sleep(0.1)
        ip("-n", namespace("a"), "link", "set", link("a"), "down")
        cut = time.monotonic()
        ended = {}
        while len(ended) < 2 and time.monotonic() < cut + 10 + 60:
            time.sleep(0.1)
            for host, process in (("a", a), ("b", b)):
                if host not in ended and process.poll() is not None:
                    ended[host] = time.monotonic() - cut
        print(f"link cut: ended after {ended} s")
        logs = {host: (folder / "log").read_text() for host, folder in folders.items()}
        assert set(ended) == {"a", "b"}, logs
    assert "rank 1 did not answer: the process is dead or stopped, or its host can't be reached" in logs["a"]
    assert f"can't reach rank 0's host ({HOSTS['a']}" in logs["b"]
    last = max(int(name.removeprefix("step-")) for name in saved_steps(tmp_path))

    ip("-n", namespace("a"), "link", "set", link("a"), "up")
    steps = last + 4
    with (
        started(command("a", tmp_path, steps), folders["a"], **settings("a")) as a,
        started(command("b", tmp_path, steps), folders["b"], **settings("b")) as b,
    ):
        assert a.wait(120) == 0 and b.wait(120) == 0, (tmp_path / "log").read_text()
    assert f"Loaded step {last}" in (tmp_path / "log").read_text()
    expected = worlds(2).run(train_here, [*arguments(tmp_path / "straight", 4, steps), SCHEDULE])[0]
    same_numbers(metrics(tmp_path), expected, 0)
