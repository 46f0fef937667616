"""Token files: what prepare_data.py writes is the text, whoever encodes it and however often it is killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.tiny_data import documents, json_lines, texts, write
from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.data import prepare as prepare_module
from titan.data.documents import StreamedDocuments
from titan.data.prepare import prepare
from titan.data.readers import BadRowPolicy
from titan.data.sources import open_documents
from titan.data.token_files import TokenFiles, open_token_files
from titan.data.token_shards import ShardHeader, shard_name
from titan.data.tokenizer import Tokenizer, build_tokenizer, document_tokens

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
BYTES = build_tokenizer(None)
ROWS = [f"{i} " * (i * 7 % 23 + 1) for i in range(700)]


class LargeVocabulary(Tokenizer):
    """Ids that 16 bits don't hold; no BOS and EOS."""

    vocab_size, bos_id, eos_id = 70_000, None, None
    fingerprint = description = "large"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + 69_000

    def decode(self, ids: object) -> str:
        raise NotImplementedError


def rows_file(folder: Path, rows: list[str] = ROWS) -> Path:
    return write(folder, {"rows.jsonl": json_lines(rows)}) / "rows.jsonl"


def prepared(
    source: Path,
    output: Path,
    *,
    tokenizer: Tokenizer = BYTES,
    dataset: str = "json",
    processes: int = 1,
    shard_tokens: int = 4000,
    bad_rows: str = "skip",
) -> list[ShardHeader]:
    opened = open_documents(Training(dataset=dataset, dataset_path=str(source)))
    policy = BadRowPolicy(bad_rows)
    return prepare(opened, tokenizer, output, processes=processes, shard_tokens=shard_tokens, bad_rows=policy)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("tokenizer", [BYTES, LargeVocabulary()], ids=["uint16", "uint32"])
def test_token_files_hold_each_document_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = rows_file(tmp_path)
    expected = [document_tokens(tokenizer, text) for text in texts(documents("json", source))]
    shards = prepared(source, tmp_path / "tokens", tokenizer=tokenizer)
    files = TokenFiles(tmp_path / "tokens")
    whole = np.concatenate(expected)
    ends = np.cumsum([len(tokens) for tokens in expected])
    assert len(shards) == files.shards > 3
    assert files.documents == len(ROWS)
    assert {shard.run["dtype"] for shard in shards} == {"uint16" if tokenizer is BYTES else "uint32"}
    assert files.read(0, len(files)).tolist() == whole.tolist()
    assert files.document_ends(0, len(files)).tolist() == ends.tolist()
    draw = random.Random(0)
    for _ in range(200):  # within shards and across several
        start = draw.randrange(len(whole))
        count = draw.randrange(1, len(whole) - start + 1) if draw.random() < 0.3 else min(50, len(whole) - start)
        assert np.array_equal(files.read(start, count), whole[start : start + count])
        inside = ends[(ends > start) & (ends <= start + count)] - start
        assert files.document_ends(start, count).tolist() == inside.tolist()
    with pytest.raises(IndexError):
        files.read(len(whole) - 3, 4)


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    source = rows_file(tmp_path)
    for processes in (1, 2, 3):
        prepared(source, tmp_path / str(processes), processes=processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


@pytest.mark.usefixtures("offline")
def test_a_streamed_dataset_gives_its_own_order(tmp_path: Path) -> None:
    """From the middle on too: the position behind each shard is the stream's."""
    (tmp_path / "hub").mkdir()
    rows_file(tmp_path / "hub")
    assert isinstance(open_documents(Training(dataset="a/b", dataset_path=str(tmp_path / "hub"))), StreamedDocuments)
    for processes in (1, 2):
        output = tmp_path / str(processes)
        prepared(tmp_path / "hub", output, dataset="a/b", processes=processes)
        files = TokenFiles(output)
        assert (
            files.read(0, len(files)).tolist() == np.concatenate([document_tokens(BYTES, row) for row in ROWS]).tolist()
        )
        whole = contents(output)
        for name in ("tokens.json", shard_name(2)):
            (output / name).unlink()
        prepared(tmp_path / "hub", output, dataset="a/b", processes=processes)
        assert contents(output) == whole


def test_bad_rows_are_counted_and_named_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = json_lines(["one"]) + '{"text": null}\n' + json_lines(["", "two"])
    source = write(tmp_path, {"rows.jsonl": text}) / "rows.jsonl"
    for processes in (1, 2):
        with caplog.at_level("WARNING", logger="titan"):
            (shard,) = prepared(source, tmp_path / str(processes), processes=processes)
        assert (shard.documents, shard.left_out) == (2, 1)
        assert "left out rows.jsonl:2" in caplog.text
        with pytest.raises(UserError, match=r"rows.jsonl:2: .*bad_rows"):
            prepared(source, tmp_path / f"strict {processes}", processes=processes, bad_rows="stop")
        assert not list((tmp_path / f"strict {processes}").iterdir())
    with pytest.raises(UserError, match="can't be made a folder for token files: File exists"):
        prepared(source, source)
    with pytest.raises(UserError, match="no usable document"):
        prepared(rows_file(tmp_path / "empty", [""]), tmp_path / "none")


def test_an_encoder_that_dies_is_an_error(tmp_path: Path) -> None:
    class Dying(LargeVocabulary):
        def encode(self, text: str) -> np.ndarray:
            if text.startswith("300 "):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode(text)

    with pytest.raises(UserError, match=r"a process that encodes died.*Run the same command again"):
        prepared(rows_file(tmp_path), tmp_path / "tokens", tokenizer=Dying(), processes=2)


def command(source: Path, output: Path) -> list[str]:
    arguments = f"--training.dataset=json --training.dataset_path={source} --output={output}"
    options = "--processes=2 --shard_tokens=150000"
    return [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *arguments.split(), *options.split()]


def test_killed_at_any_moment_and_run_again(tmp_path: Path) -> None:
    """Ten kills at random moments of a run, then a run to the end: the same files as without."""
    source = rows_file(tmp_path, [f"{i} " * 100 for i in range(6_000)])
    subprocess.run(command(source, tmp_path / "straight"), env=ENVIRONMENT, check=True, capture_output=True)
    draw, output, seen = random.Random(0), tmp_path / "killed", set()

    def shards() -> list[Path]:
        return sorted(output.glob("shard-*"))

    for _ in range(10):
        more = len(shards()) + draw.randrange(3)
        process = subprocess.Popen(command(source, output), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(shards()) < more:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.wait()
        seen.add(len(shards()))
        if (output / "tokens.json").exists():  # it was quicker: from here on it verifies, unless something is lost
            (output / "tokens.json").unlink()
            for file in shards()[draw.randrange(3) :]:
                file.unlink()
    assert len(seen) > 1, "no kill came in the middle"
    subprocess.run(command(source, output), env=ENVIRONMENT, check=True, capture_output=True)
    assert contents(output) == contents(tmp_path / "straight")


def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    source = rows_file(tmp_path, [f"{i} " * 100 for i in range(20_000)])
    process = subprocess.Popen(command(source, tmp_path / "out"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "out").glob("shard-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command goes on" in log
    assert "Traceback" not in log


def test_a_run_again_verifies_and_mends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, output = rows_file(tmp_path), tmp_path / "tokens"
    prepared(source, output)
    whole = contents(output)
    file = output / shard_name(1)
    raw = bytearray(file.read_bytes())
    raw[9000] ^= 1
    file.write_bytes(raw)
    prepared(source, output)
    assert "shard-00001.tokens has the SHA-256" in caplog.text
    assert contents(output) == whole
    with pytest.raises(UserError, match=r"holds token files of another run: .*shard_tokens: 4000, not 4001"):
        prepared(source, output, shard_tokens=4001)
    with pytest.raises(UserError, match=r"another run: .*tokenizer: 'bytes:1', not 'large'; dtype"):
        prepared(source, output, tokenizer=LargeVocabulary())
    assert contents(output) == whole


def test_blocks_are_what_shards_are_cut_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_BLOCK", 2)
    source = rows_file(tmp_path, ["a" * 8] * 7)  # 10 tokens each
    shards = prepared(source, tmp_path / "tokens", shard_tokens=21)
    assert [(shard.documents, shard.tokens, shard.position) for shard in shards] == [
        (4, 40, {"document": 4}),
        (3, 30, {"document": 7}),
    ]


# --- refusals at the start of a run


def damaged(output: Path, **settings: object) -> str:
    training = Training(dataset="tokens", dataset_path=str(output), **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        open_token_files(training, BYTES)
    assert str(output) in str(caught.value)
    return str(caught.value)


def test_what_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    source, output = rows_file(tmp_path), tmp_path / "tokens"
    prepared(source, output)
    prepared(rows_file(tmp_path / "other", ROWS[:-1]), tmp_path / "second")
    prepared(rows_file(tmp_path / "same sizes", ROWS[::-1]), tmp_path / "third")
    prepared(source, tmp_path / "wide", tokenizer=LargeVocabulary())

    def changed(name: str, raw: bytes | None) -> str:
        """The refusal while a file has other bytes, or none."""
        before = (output / name).read_bytes() if (output / name).exists() else None
        (output / name).unlink(missing_ok=True)
        if raw is not None:
            (output / name).write_bytes(raw)
        try:
            return damaged(output)
        finally:
            (output / name).unlink(missing_ok=True)
            if before is not None:
                (output / name).write_bytes(before)

    one, raw = shard_name(1), (output / shard_name(1)).read_bytes()
    assert f"{one} has {len(raw) - 5:,} bytes, its header says {len(raw):,}. Run scripts/prep" in changed(one, raw[:-5])
    assert f"{one} is missing" in changed(one, None)
    assert f"{one} has no header that can be read" in changed(one, b"\0" * len(raw))
    assert f"{one} isn't the shard that tokens.json lists: it is number 0" in changed(
        one, (output / shard_name(0)).read_bytes()
    )
    assert f"{one} is of another run than tokens.json: documents:" in changed(
        one, (tmp_path / "second" / one).read_bytes()
    )
    assert f"{one} isn't the shard that tokens.json lists" in changed(one, (tmp_path / "third" / one).read_bytes())
    assert "dtype: 'uint32', not 'uint16'" in changed(one, (tmp_path / "wide" / one).read_bytes())
    assert "its preparation wasn't finished" in changed("tokens.json", None)
    assert "tokens.json can't be read" in changed("tokens.json", b'{"shards": ')
    index = json.loads((output / "tokens.json").read_text())
    index["run"]["dtype"] = "float32"
    assert "tokens of an unknown type" in changed("tokens.json", json.dumps(index).encode())
    assert "doesn't list shard-00099.tokens" in changed(shard_name(99), raw)

    wide = Training(dataset="tokens", dataset_path=str(tmp_path / "wide"))
    with pytest.raises(UserError, match=r"tokens of another tokenizer \(large\) than model.tokenizer_path's \(bytes:1"):
        open_token_files(wide, BYTES)
    assert "fewer than a window of training.seq_len + 1 = 1,000,001" in damaged(output, seq_len=10**6)
    assert "there is no such folder" in damaged(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"needs training\.dataset_path"):
        open_token_files(Training(dataset="tokens"), BYTES)
    open_token_files(Training(dataset="tokens", dataset_path=str(output), seq_len=16), BYTES)


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    prepared(rows_file(tmp_path), tmp_path / "tokens", shard_tokens=10**6)
    files = TokenFiles(tmp_path / "tokens")
    with (tmp_path / "tokens" / shard_name(0)).open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(OSError, match=r"shard-00000.tokens: 0 bytes at"):
        files.read(5000, 10)
