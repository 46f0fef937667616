"""scripts/download_tokenizer.py against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.data.test_tokenizer import huggingface_json, tiktoken_ranks

ROOT = Path(__file__).parents[2]
SECRET = "hf_verysecret"
COMMIT = "a" * 40


def repositories() -> dict[str, dict[str, bytes]]:
    model = huggingface_json().encode()
    return {
        "someone/open": {"tokenizer.json": model, "tokenizer_config.json": b'{"bos_token": null}', "model.bin": b"x"},
        "someone/old": {"config.json": b"{}", "original/tokenizer.model": tiktoken_ranks()},
        "someone/deep": {"a/tokenizer.json": model},
        "someone/none": {"config.json": b"{}"},
        "meta/gated": {"tokenizer.json": model},
    }


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as listing and downloading ask for. `meta/…` needs the token."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
        owner, name, *rest = path.split("/")
        files = repositories().get(f"{owner}/{name}")
        allowed = owner != "meta" or self.headers.get("Authorization") == f"Bearer {SECRET}"
        if files is None:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif not allowed:
            self.send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif not rest or rest[0] == "revision":
            info = {"id": path, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.send(200, json.dumps(info).encode())
        elif rest[0] == "tree":  # how newer versions of huggingface_hub list a repository
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            self.send(200, json.dumps(entries).encode())
        else:
            content = files.get("/".join(rest[2:]))  # resolve/<revision>/<file>
            if content is None:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self.send(200, content, {"ETag": hashlib.sha1(content).hexdigest(), "X-Repo-Commit": COMMIT})

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def download(hub: str, folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "download_tokenizer.py"), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_only_the_tokenizer_s_files_are_fetched(hub: str, tmp_path: Path) -> None:
    status, output = download(hub, tmp_path, "--repo_id=someone/open")
    assert status == 0, output
    folder = tmp_path / "assets" / "tokenizer" / "open"
    assert sorted(file.name for file in folder.iterdir() if file.is_file()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "Hugging Face tokenizer" in output
    assert 'set model.tokenizer_path = "assets/tokenizer/open"' in output


def test_a_folder_of_the_repository(hub: str, tmp_path: Path) -> None:
    """As guides have it: the folder named, and another place to put it."""
    status, output = download(
        hub, tmp_path, "--repo_id=someone/old", "--tokenizer_path=original", "--local_dir=here", "--hf_token=anything"
    )
    assert status == 0, output
    assert 'set model.tokenizer_path = "here/old/original"' in output and "tiktoken" in output
    assert (tmp_path / "here" / "old" / "original" / "tokenizer.model").read_bytes() == tiktoken_ranks()


def test_a_gated_repository_needs_the_token_which_is_never_shown(hub: str, tmp_path: Path) -> None:
    status, output = download(hub, tmp_path, "--repo_id=meta/gated", HF_TOKEN="hf_wrong_one")
    assert status == 2 and "granted access" in output and "HF_TOKEN" in output
    assert "Traceback" not in output and "hf_wrong_one" not in output
    status, output = download(hub, tmp_path, "--repo_id=meta/gated", HF_TOKEN=SECRET)
    assert status == 0 and SECRET not in output


def test_mistakes_are_named(tmp_path: Path, hub: str) -> None:
    for repository, expected in {
        "someone/none": "has none of tokenizer.json",
        "someone/deep": "it has a/tokenizer.json: give the folder as --tokenizer_path",
        "nobody/nothing": "no such repository",
    }.items():
        status, output = download(hub, tmp_path, f"--repo_id={repository}")
        assert status == 2 and expected in output and "Traceback" not in output, output
    status, output = download(hub, tmp_path, "--repo_id=someone/open", HF_HUB_OFFLINE="1")
    assert status == 2 and "can't be downloaded" in output and "Traceback" not in output, output
