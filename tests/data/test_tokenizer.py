"""Tokenizers of every kind: plain text stays plain, ids are exact, long runs are no trouble, mistakes are named."""

import base64
import functools
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from titan.config.errors import UserError
from titan.data.tokenizer import Tokenizer, build_tokenizer, document_tokens, register_tokenizer
from titan.data.tokenizers.byte_level import ByteTokenizer
from titan.data.tokenizers.huggingface import HuggingFaceTokenizer
from titan.data.tokenizers.llama3 import Llama3Tokenizer, control_tokens, split_long_runs
from titan.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

CORPUS = Path(functools.__file__).read_text().splitlines()
ADVICE = "Download tokenizer.json or tokenizer.model from the model's page on its hub and set model.tokenizer_path"
TRICKY = "def f(x):\n\treturn 'naïve €5 — 日本語 🎉'  # don't\r\n\n   \x00 end  "


def sentencepiece_model(**settings: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{
            "sentence_iterator": iter(CORPUS),
            "model_writer": model,
            "model_type": "bpe",
            "vocab_size": 600,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "num_threads": 1,
            "minloglevel": 2,
            **settings,
        }
    )
    return model.getvalue()


@functools.cache
def tiktoken_ranks() -> bytes:
    """256 bytes and a few merges, in Llama 3's format."""
    merges = [b"  ", b"    ", b"        ", b"aa", b"aaaa", b"th", b"the", b" the", b"re", b"ret"]
    tokens = [bytes([value]) for value in range(256)] + merges
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def huggingface_json(change: Callable[[tokenizers.Tokenizer], None] = lambda tokenizer: None) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    change(tokenizer)
    return str(tokenizer.to_str())


KINDS = ["bytes", "llama3", "sentencepiece", "huggingface"]


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind. The three files have the same misleading name."""
    contents = {
        "llama3": tiktoken_ranks(),
        "sentencepiece": sentencepiece_model(),
        "huggingface": huggingface_json().encode(),
    }
    built = {"bytes": build_tokenizer(None)}
    for kind, content in contents.items():
        file = tmp_path_factory.mktemp(kind) / "vocabulary.txt"
        file.write_bytes(content)
        built[kind] = build_tokenizer(str(file))
    return built


def write(folder: Path, name: str, content: str | bytes | dict[str, Any]) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(content)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_kind_is_found_by_content(every_kind: dict[str, Tokenizer]) -> None:
    assert isinstance(every_kind["bytes"], ByteTokenizer)
    assert isinstance(every_kind["llama3"], Llama3Tokenizer)
    assert isinstance(every_kind["sentencepiece"], SentencePieceTokenizer)
    assert isinstance(every_kind["huggingface"], HuggingFaceTokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", " ", "hello world", TRICKY, "\n".join(CORPUS)])
def test_round_trip(every_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = every_kind[kind]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("control", ["<|end_of_text|>", "<|begin_of_text|>", "<s>", "</s>", "<|eot_id|>", "<unk>"])
def test_tok_special_text(every_kind: dict[str, Tokenizer], kind: str, control: str) -> None:
    tokenizer = every_kind[kind]
    text = f"a {control} b{control}"
    ids = tokenizer.encode(text)
    assert tokenizer.bos_id not in ids and tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_tok_double_bos(every_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = every_kind[kind]
    ids = document_tokens(tokenizer, "hello")
    assert ids.dtype == np.int32
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert (ids == tokenizer.bos_id).sum() == 1 and (ids == tokenizer.eos_id).sum() == 1
    assert ids[1:-1].tolist() == tokenizer.encode("hello").tolist()


def test_tok_double_bos_post_processor(tmp_path: Path) -> None:
    """A file whose post-processor adds BOS and EOS itself: it never runs."""

    def add_template(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> <s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )

    tokenizer = build_tokenizer(str(write(tmp_path, "tokenizer.json", huggingface_json(add_template))))
    assert document_tokens(tokenizer, "hello").tolist() == [0, *tokenizer.encode("hello"), 1]
    assert not np.isin([0, 1], tokenizer.encode("hello")).any()


def test_tok_no_bos(tmp_path: Path) -> None:
    model = write(tmp_path, "tokenizer.model", sentencepiece_model(bos_id=-1, eos_id=-1))
    tokenizer = build_tokenizer(str(model))
    assert tokenizer.bos_id is None and tokenizer.eos_id is None
    assert document_tokens(tokenizer, "hello").tolist() == tokenizer.encode("hello").tolist()
    assert "no BOS" in tokenizer.description
    assert document_tokens(tokenizer, "").dtype == np.int32


@pytest.mark.parametrize("kind", KINDS)
def test_tok_bad_utf8_lone_surrogate(every_kind: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        every_kind[kind].encode("a\ud800b")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        document_tokens(every_kind[kind], "a\ud800b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["a", " ", "\n", "!", "日", "\t ", "\r\n", "\u00a0"])
def test_long_run(every_kind: dict[str, Tokenizer], kind: str, run: str) -> None:
    # A million characters where it is known to matter; a tenth elsewhere, since the libraries take a second for each.
    million = run in (" ", "a") or kind in ("bytes", "llama3")
    text = "before " + run * ((1_000_000 if million else 100_000) // len(run)) + " after"
    start = time.perf_counter()
    ids = every_kind[kind].encode(text)
    assert time.perf_counter() - start < 20
    assert every_kind[kind].decode(ids) == text


def test_split_long_runs_leaves_ordinary_text_whole() -> None:
    text = "word and more words, " * 100_000
    assert split_long_runs(text) == [text]
    assert split_long_runs("") == [""]
    assert split_long_runs("a" * 10) == ["a" * 10]


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 15])
@pytest.mark.parametrize("length", [9, 10, 11, 19, 20, 21, 30, 101])
@pytest.mark.parametrize(("run", "around"), [("x", " "), (" ", "x")])
def test_split_long_runs_bounds(start: int, length: int, run: str, around: str) -> None:
    """With a limit of 10, a run of up to 10 is whole, and no piece of a run is longer than 20."""
    text = around * min(start, 1) + (run + around) * (start // 2) + run * length + around + run
    pieces = split_long_runs(text, limit=10)
    assert "".join(pieces) == text
    assert max(len(part) for piece in pieces for part in piece.split(around)) <= 20
    if length <= 10:
        assert pieces == [text]


def test_byte_ids() -> None:
    tokenizer = build_tokenizer(None)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert document_tokens(tokenizer, "é\x00").tolist() == [256, 0xC3, 0xA9, 0, 257]
    assert tokenizer.decode([256, 104, 105, 255, 257]) == "hi\N{REPLACEMENT CHARACTER}"


def test_llama3_ids(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["llama3"]
    assert tokenizer.vocab_size == 266 + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (266, 267)
    assert tokenizer.encode("a the").tolist() == [ord("a"), 263]
    assert tokenizer.decode([266, 104, 267]) == "<|begin_of_text|>h<|end_of_text|>"
    assert tokenizer.decode([0xFF]) == "\N{REPLACEMENT CHARACTER}"


def test_llama3_control_tokens_have_the_release_s_ids() -> None:
    """With 128,000 ranks: the ids that Llama 3's published generation_config and chat format use."""
    ids = {token: 128_000 + i for i, token in enumerate(control_tokens())}
    assert len(ids) == 256
    assert ids["<|begin_of_text|>"] == 128_000
    assert ids["<|end_of_text|>"] == 128_001
    assert ids["<|start_header_id|>"] == 128_006
    assert ids["<|end_header_id|>"] == 128_007
    assert ids["<|reserved_special_token_4|>"] == 128_008
    assert ids["<|eot_id|>"] == 128_009
    assert ids["<|reserved_special_token_250|>"] == 128_255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranks: ranks + b"not a rank\n", "line 267 is not a token in base64"),
        (lambda ranks: ranks.replace(b" 265\n", b" 900\n"), "not 0 to 265"),
        (lambda ranks: ranks.replace(b" 265\n", b" 264\n"), "not 0 to 265"),
        (lambda ranks: b"".join(ranks.splitlines(keepends=True)[:200]), "no token for 56 of the 256 bytes"),
    ],
)
def test_llama3_broken_file(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    file = write(tmp_path, "tokenizer.model", change(tiktoken_ranks()))
    with pytest.raises(UserError, match=message):
        build_tokenizer(str(file))


def test_sentencepiece_ids(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["sentencepiece"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (600, 1, 2)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, (0, 2)),  # well-known names
        ({"tokenizer_config.json": {"bos_token": "</s>", "eos_token": {"content": "<s>"}}}, (1, 0)),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, (0, 1)),
        ({"tokenizer_config.json": {"bos_token": None}, "special_tokens_map.json": {"bos_token": "<s>"}}, (None, 2)),
    ],
)
def test_huggingface_bos_and_eos(
    tmp_path: Path, beside: dict[str, dict[str, Any]], expected: tuple[int | None, int | None]
) -> None:
    file = write(tmp_path, "tokenizer.json", huggingface_json())
    for name, content in beside.items():
        write(tmp_path, name, content)
    tokenizer = build_tokenizer(str(file))
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected


def template(tokenizer: tokenizers.Tokenizer) -> None:
    inner = processors.TemplateProcessing(single="</s> $A <s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), inner])


def roberta(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.RobertaProcessing(("<s>", 0), ("</s>", 1))


def bos_only(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])


@pytest.mark.parametrize(("change", "expected"), [(template, (1, 0)), (roberta, (1, 0)), (bos_only, (1, 2))])
def test_huggingface_bos_from_the_post_processor(
    tmp_path: Path, change: Callable[[tokenizers.Tokenizer], None], expected: tuple[int, int]
) -> None:
    tokenizer = build_tokenizer(str(write(tmp_path, "tokenizer.json", huggingface_json(change))))
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected


def test_huggingface_unmarked_bos_is_plain_text(tmp_path: Path) -> None:
    """A BOS that the file doesn't mark as special would be found in text: web text could inject it."""

    def add(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.add_tokens(["<begin>", "<tool>"])

    write(tmp_path, "tokenizer.json", huggingface_json(add))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<begin>"})
    tokenizer = build_tokenizer(str(tmp_path))
    assert tokenizer.bos_id == 500
    assert tokenizer.vocab_size == 502
    assert 500 not in tokenizer.encode("a <begin> b")
    assert 501 in tokenizer.encode("a <tool> b")  # an added token that is vocabulary


def test_huggingface_length_limit_and_padding_are_off(tmp_path: Path) -> None:
    def limit(tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=4096)

    tokenizer = build_tokenizer(str(write(tmp_path, "tokenizer.json", huggingface_json(limit))))
    assert (
        tokenizer.decode(tokenizer.encode("one two three four five six " * 20)) == "one two three four five six " * 20
    )


def test_huggingface_bos_must_exist(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.json", huggingface_json())
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<bos>"})
    with pytest.raises(UserError, match=r"BOS is said to be '<bos>', which isn't among its tokens"):
        build_tokenizer(str(tmp_path))


def test_library_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "tokenizer.json", huggingface_json())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'titan\[hf\]'"):
        build_tokenizer(str(tmp_path))


def test_folder_order(tmp_path: Path) -> None:
    write(tmp_path, "original/tokenizer.model", tiktoken_ranks())
    assert isinstance(build_tokenizer(str(tmp_path)), Llama3Tokenizer)
    build_tokenizer.cache_clear()
    write(tmp_path, "tokenizer.model", sentencepiece_model())
    assert isinstance(build_tokenizer(str(tmp_path)), SentencePieceTokenizer)
    build_tokenizer.cache_clear()
    write(tmp_path, "tokenizer.json", huggingface_json())
    assert isinstance(build_tokenizer(str(tmp_path)), HuggingFaceTokenizer)


def test_built_once_per_path(tmp_path: Path) -> None:
    file = str(write(tmp_path, "tokenizer.model", tiktoken_ranks()))
    assert build_tokenizer(file) is build_tokenizer(file)


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one = build_tokenizer(str(write(tmp_path, "one/tokenizer.model", tiktoken_ranks())))
    same = build_tokenizer(str(write(tmp_path, "two/a.model", tiktoken_ranks())))
    other = build_tokenizer(
        str(write(tmp_path, "three/a.model", tiktoken_ranks() + base64.b64encode(b"xyz") + b" 266"))
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint
    plain = build_tokenizer(str(write(tmp_path, "four/tokenizer.json", huggingface_json())))
    write(tmp_path, "five/tokenizer_config.json", {"bos_token": "</s>"})
    configured = build_tokenizer(str(write(tmp_path, "five/tokenizer.json", huggingface_json())))
    assert plain.fingerprint != configured.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"hello, this is no tokenizer", "it starts with b'hello, this is n'"),
        (b"\x0a\x05abc" + bytes(range(200)), "SentencePiece can't read it"),
        (b'{"bos_token": "<s>"}', "JSON without a 'model'"),
        (b'{"model": ', "starts like JSON but is broken"),
        (b'{"model": {"type": "Nonsense"}}', "the tokenizers library .* can't read it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
    ],
)
def test_unusable_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = write(tmp_path, "tokenizer.model", content)
    with pytest.raises(UserError, match=message) as caught:
        build_tokenizer(str(file))
    assert str(file) in str(caught.value)
    assert "expected a Hugging Face tokenizer.json" in str(caught.value)


def test_missing_file_names_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.data.tokenizer._registered", {})
    write(tmp_path, "assets/tokenizer.model", tiktoken_ranks())
    with pytest.raises(UserError, match=r"Did you mean .*/assets/tokenizer\.model\?"):
        build_tokenizer(str(tmp_path / "assets" / "tokeniser.model"))
    with pytest.raises(UserError, match=r"Did you mean .*/assets\?"):
        build_tokenizer(str(tmp_path / "asset" / "tokenizer.model"))
    with pytest.raises(UserError, match="has nothing with such a name") as caught:
        build_tokenizer(str(tmp_path / "zzz"))
    assert ADVICE in str(caught.value) and "none" not in str(caught.value)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    with pytest.raises(UserError, match=r"has none of tokenizer\.json, .*it has config\.json") as caught:
        build_tokenizer(str(tmp_path))
    assert ADVICE in str(caught.value) and "scripts/" not in str(caught.value)


def test_registered_tokenizer() -> None:
    class Constant(ByteTokenizer):
        """A user's own."""

    register_tokenizer("test_constant", Constant)
    assert isinstance(build_tokenizer("test_constant"), Constant)
    with pytest.raises(ValueError, match="registered already"):
        register_tokenizer("test_constant", Constant)
    with pytest.raises(UserError, match="Did you mean test_constant"):
        build_tokenizer("test_konstant")
