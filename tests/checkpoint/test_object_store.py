"""Checkpoints in an object store: a real S3 server of moto's, reached over HTTP as any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import verify_checkpoint
from tests.checkpoint.toy import Contents, Run, load
from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.checkpoint.folders import recover, scan, start_saving, step_folder
from titan.checkpoint.storage import ObjectPath, file_sizes
from titan.config.errors import UserError


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment in which s3:// means this server."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A prefix in a bucket of its own."""
    import s3fs

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{abs(hash(tmp_path))}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket)
    return f"s3://{bucket}/some run"


def _names(root: str) -> list[str]:
    return sorted(path.name for path in ObjectPath(root).iterdir())


def test_a_run_resumes_and_older_ones_are_removed(tmp_path: Path, url: str, alone: None) -> None:
    run = Run(tmp_path, folder=url, keep_latest_k=2, async_mode="async")
    assert run.manager.load() is None
    for step in (9, 10, 100):
        run.train(step - 1, step)
        run.manager.save(step, {"step": step})
    run.manager.wait()
    assert _names(url) == ["step-10", "step-100"]
    assert load(tmp_path, "plain", folder=url) == ({"step": 100}, run.contents())
    sizes = file_sizes(ObjectPath(url) / "step-100")
    assert sizes.keys() == {"__0_0.distcp", ".metadata", "train_state.json", "manifest.json"}
    assert not list(tmp_path.iterdir())


def test_ck_partial_damage_and_left_overs(tmp_path: Path, url: str, alone: None) -> None:
    Run(tmp_path, folder=url).save(5, 10)
    root = ObjectPath(url)
    data = root / "step-10" / "__0_0.distcp"
    with data.open("rb") as file:
        content = file.read()
    data.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(UserError, match=r"__0_0.distcp: SHA-256 .*(.|\n)*load_step=5"):
        load(tmp_path, "plain", folder=url)
    data.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"__0_0.distcp: {len(content)} bytes expected, {len(content) - 1} found"):
        load(tmp_path, "plain", folder=url, verify="size")
    # Half a save and half a removal, as kills leave them.
    start_saving(root, 15, 10)
    (root / "step-15" / "__0_0.distcp").write_bytes(b"half")
    (root / "step-10" / "manifest.json").rename(root / "step-10" / ".unfinished")
    (root / "step-20" / "notes").write_bytes(b"not titan's")
    recover(root)
    assert _names(url) == ["step-20", "step-5"]
    run = Run(tmp_path, folder=url)
    assert run.manager.load() == {"step": 5}
    with pytest.raises(UserError, match="step-20 holds something that isn't titan's"):
        run.save(20)
    assert (root / "step-20" / "notes").read_text() == "not titan's"


def test_a_time_line_that_was_left_is_set_aside_and_replaced(tmp_path: Path, url: str, alone: None) -> None:
    first = Run(tmp_path, folder=url)
    first.save(5, 10, 15)
    second = Run(tmp_path, folder=url, load_step=5)
    second.manager.load()
    second.train(5, 6)
    second.save(10)
    found = scan(ObjectPath(url))
    assert list(found.complete) == [5, 10] and list(found.skipped) == [15]
    assert "manifest.aside" in file_sizes(step_folder(ObjectPath(url), 15))
    assert "manifest.aside" not in file_sizes(step_folder(ObjectPath(url), 10))
    assert load(tmp_path, "plain", folder=url) == ({"step": 10}, second.contents())


def _train_on_s3(folder: str, url: str, environment: dict[str, str]) -> Contents:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run = Run(folder, "fsdp", folder=url, async_mode="async", keep_latest_k=1)
        run.manager.load()
        for step in (1, 2):
            run.train(step - 1, step)
            run.manager.save(step, {"step": step})
        run.manager.wait()
        return run.contents()


def test_ranks_save_and_load_by_url(
    worlds: Worlds, tmp_path: Path, url: str, server: dict[str, str], alone: None
) -> None:
    first, second = worlds(2).run(_train_on_s3, str(tmp_path), url, server)
    assert first == second
    assert _names(url) == ["step-2"]
    assert load(tmp_path, "plain", folder=url) == ({"step": 2}, first)


def test_a_server_that_is_gone_is_every_rank_s_error(
    tmp_path: Path, url: str, alone: None, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, folder=url, on_failure="continue")
    run.save(1)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "SlowDown: please reduce your request rate")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "open", refused)
        run.save(2)
    assert "could not write the tensors" in log.text and "SlowDown" in log.text and "goes on without" in log.text
    assert _names(url) == ["step-1"]
    run.save(3)
    assert _names(url) == ["step-1", "step-3"]


def test_verify_checkpoint_reads_urls(
    tmp_path: Path, url: str, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, folder=url).save(1, 2)
    assert verify_checkpoint.main([url]) == 0
    (ObjectPath(url) / "step-2" / "train_state.json").write_bytes(b"{}")
    assert verify_checkpoint.main([f"{url}/step-2"]) == 1
    out = capsys.readouterr().out
    assert "- train_state.json: " in out and out.endswith("the newest intact one is of step 1\n")


def _train_py(arguments: list[str], environment: dict[str, str]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return [row["step"] for row in train_here(arguments)]


def test_train_py_takes_a_url(worlds: Worlds, tmp_path: Path, url: str, server: dict[str, str]) -> None:
    command = [*TINY, f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--checkpoint.async_mode=async"]
    command += [f"--checkpoint.folder={url}"]
    assert worlds(1).run(_train_py, [*command, "--training.steps=2"], server) == [[1, 2]]
    assert list(scan(ObjectPath(url)).complete) == [2]
    assert worlds(1).run(_train_py, [*command, "--training.steps=3"], server) == [[1, 2, 3]]
    assert list(scan(ObjectPath(url)).complete) == [2, 3]


def test_other_stores(tmp_path: Path, alone: None) -> None:
    """Those in memory, and files by URL."""
    for url in (f"memory://{tmp_path.name}/run", f"file://{tmp_path}/by url"):
        run = Run(tmp_path, folder=url, keep_latest_k=1)
        run.save(1, 2)
        assert load(tmp_path, "plain", folder=url) == ({"step": 2}, run.contents())
    assert [path.name for path in (tmp_path / "by url").iterdir()] == ["step-2"]
