"""Where checkpoints go, and how, as far as the config can tell."""

from __future__ import annotations

import pytest

from titan.config import checks_checkpoint
from titan.config.errors import UserError
from titan.config.loader import load_and_check
from titan.config.machine import Machine


def test_pinned_memory_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--checkpoint.async_mode=async_with_pinned_mem"]
    monkeypatch.setattr(checks_checkpoint, "machine", lambda: Machine("a CPU", False, False))
    with pytest.raises(UserError, match=r'checkpoint.async_mode = "async_with_pinned_mem": .*no accelerator.*"async"'):
        load_and_check(arguments, 1)
    monkeypatch.setattr(checks_checkpoint, "machine", lambda: Machine("a GPU", True, True))
    assert load_and_check(arguments, 1).config.checkpoint.async_mode == "async_with_pinned_mem"


def test_a_folder_may_be_a_url_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("memory://run", "file:///somewhere/run", "runs/of today"):
        load_and_check([f"--checkpoint.folder={url}"], 1)
    with pytest.raises(UserError, match=r"checkpoint.folder = s4://bucket/run: .*s4"):
        load_and_check(["--checkpoint.folder=s4://bucket/run"], 1)

    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(UserError, match=r"s3://bucket/run: Install s3fs to access S3.*titan\[s3\]"):
        load_and_check(["--checkpoint.folder=s3://bucket/run"], 1)
