"""A document per file or line; text that isn't UTF-8 is named."""

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.tiny_data import documents, texts, write
from titan.data import text_files
from titan.data.documents import BadRow


def test_python_stdlib() -> None:
    opened = documents("python_stdlib", None)
    assert len(opened) > 400
    assert opened.name == "python_stdlib"
    assert documents("python_stdlib", None).fingerprint == opened.fingerprint
    found = set()
    for i in range(len(opened)):
        try:
            found.add(opened[i])
        except BadRow as row:
            assert "UTF-8" in row.reason
    assert Path(dataclasses.__file__).read_text() in found
    assert Path(pytest.__file__).read_text() not in found


def test_wish_localdata_text_files(tmp_path: Path) -> None:
    contents = {"b.txt": "B", "a.md": "A\n", "sub/c.text": "C", ".hidden.txt": "x", "sub/.git/d.txt": "x", "e.csv": "x"}
    opened = documents("text", write(tmp_path, {**contents, "empty.txt": ""}))
    assert texts(opened) == ["A\n", "B", "C"]
    assert texts(documents("text", tmp_path / "e.csv")) == ["x"]  # a single file may have any ending
    assert texts(documents("text", tmp_path / "*.txt")) == ["B"]
    assert texts(documents("text", tmp_path / "**" / "*.t*xt")) == ["B", "C"]


def test_wish_localdata_text_lines(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\n\n \t \n  two\nthree", "b.txt": "four\n\n"})
    assert texts(documents("text", tmp_path, text_unit="line")) == ["one", "  two", "three", "four"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 24])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n \n"])
def test_line_index_agrees_with_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, end: str) -> None:
    monkeypatch.setattr(text_files, "_SCAN_BYTES", chunk)
    draw = random.Random(1)
    lines = ["".join(draw.choice("ab é\t\x00") for _ in range(draw.choice([0, 1, 2, 3, 9]))) for _ in range(200)]
    content = "\n".join([*lines, "last"]) + end
    write(tmp_path, {"a.txt": content})
    opened = documents("text", tmp_path / "a.txt", text_unit="line")
    assert texts(opened) == [line for line in [*lines, "last"] if line.strip(" \t\r\n\v\f")]


def test_tok_bad_utf8_nul_is_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": r'{"text": "a\u0000b"}', "a.txt": "a\x00b"})
    assert documents("json", tmp_path)[0] == "a\x00b"
    assert documents("text", tmp_path)[0] == "a\x00b"


def test_tok_bad_utf8_in_text(tmp_path: Path) -> None:
    write(tmp_path, {"sub/bad.txt": b"fine\n\xff\xfe", "sub/good.txt": "fine"})
    with pytest.raises(BadRow, match=r"^sub/bad.txt: not UTF-8"):
        documents("text", tmp_path)[0]
    lines = documents("text", tmp_path, text_unit="line")
    with pytest.raises(BadRow, match=r"^sub/bad.txt:2: not UTF-8"):
        lines[1]
    assert (lines[0], lines[2]) == ("fine", "fine")


def test_local_data_needs_no_heavy_library() -> None:
    """Reading text and JSON lines imports neither datasets nor Arrow."""
    code = (
        "import sys; from titan.config.job_config import Training; from titan.data.sources import open_documents; "
        "open_documents(Training())[0]; "
        "print([name for name in ('datasets', 'pyarrow', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
