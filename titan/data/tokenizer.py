"""Text to token ids: which tokenizer a run uses, and the tokens of a document.

What `model.tokenizer_path` may be:

    build_tokenizer(None)                 bytes, embedded: needs no file
    build_tokenizer("tokenizer.model")    Llama 3's ranks (tiktoken) or a SentencePiece model, told apart by content
    build_tokenizer("tokenizer.json")     Hugging Face's format (the extra `hf`)
    build_tokenizer("folder")             the first of tokenizer.json, tokenizer.model, original/tokenizer.model in it
    build_tokenizer("my_name")            what `register_tokenizer` was given under that name
"""

import difflib
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from titan.config.errors import UserError
from titan.data.tokenizers import llama3
from titan.data.tokenizers.base import TokenIds, Tokenizer
from titan.data.tokenizers.byte_level import ByteTokenizer
from titan.data.tokenizers.huggingface import HuggingFaceTokenizer
from titan.data.tokenizers.llama3 import Llama3Tokenizer
from titan.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

__all__ = ["Tokenizer", "build_tokenizer", "document_tokens", "has_tokenizer", "register_tokenizer"]

_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
_EXPECTED = (
    "expected a Hugging Face tokenizer.json, a SentencePiece model, or a tiktoken file of 'base64 rank' lines (Llama 3)"
)
_ADVICE = (
    "Download tokenizer.json or tokenizer.model from the model's page on its hub and set model.tokenizer_path to the "
    "file or its folder; unset, the model trains on bytes."
)

_registered: dict[str, Callable[[], Tokenizer]] = {}


def register_tokenizer(name: str, factory: Callable[[], Tokenizer]) -> None:
    """Make `model.tokenizer_path = name` mean what `factory()` returns. For modules of experimental.custom_import.

    Raises:
        ValueError: the name is taken.
    """
    if name in _registered:
        raise ValueError(f"a tokenizer {name!r} is registered already")
    _registered[name] = factory


@functools.cache
def build_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of `model.tokenizer_path`, built once per path.

    Args:
        path: a registered name, a file, a folder that holds one, or None for the byte tokenizer.

    Raises:
        UserError: there is nothing at the path, it's of no known kind, or the library for its kind is missing.
    """
    if path is None:
        return ByteTokenizer()
    if path in _registered:
        return _registered[path]()
    file = _find_file(path)
    try:
        return _read(file)
    except (OSError, ValueError) as error:
        raise UserError(f"model.tokenizer_path = {path!r}: {file} can't be used: {error}. {_EXPECTED}.") from error
    except ImportError as error:
        raise UserError(
            f"model.tokenizer_path = {path!r}: {file} needs a library that isn't installed ({error}). "
            "`pip install 'titan[hf]'` installs it; a tokenizer.model needs no extra."
        ) from error


def has_tokenizer(folder: str | Path) -> bool:
    """Whether there is one in a folder."""
    return any((Path(folder).expanduser() / name).is_file() for name in _FILES)


def document_tokens(tokenizer: Tokenizer, text: str) -> TokenIds:
    """The tokens of one document, int32 `[T]`: BOS (once), the text's ids, EOS; each where the tokenizer has it.

    Raises:
        ValueError: the text can't be encoded.
    """
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.concatenate([before, tokenizer.encode(text), after], dtype=np.int32, casting="unsafe")


def _read(file: Path) -> Tokenizer:
    """Tell the kind by the content, since Llama 2's and Llama 3's files have the same name, and build it."""
    content = file.read_bytes()
    if re.match(rb"\s*\{", content):
        if "model" not in _json_keys(content):
            raise ValueError("it is JSON without a 'model', so not a tokenizer.json")
        return HuggingFaceTokenizer(content, file)
    if llama3.FIRST_LINE.match(content):
        return Llama3Tokenizer(content, str(file))
    if not content:
        raise ValueError("it is empty")
    if content.startswith(b"version https://git-lfs"):
        raise ValueError("it is a Git LFS pointer; `git lfs pull` fetches the file itself")
    if content.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        raise ValueError("it is a web page, probably from a download that needed a login")
    try:
        return SentencePieceTokenizer(content, str(file))
    except ValueError as error:
        raise ValueError(f"{error}, and it is of no other kind either: it starts with {content[:16]!r}") from None


def _json_keys(content: bytes) -> set[str]:
    try:
        return set(json.loads(content))
    except ValueError as error:
        raise ValueError(f"it starts like JSON but is broken: {error}") from None


def _find_file(path: str) -> Path:
    """The tokenizer file at a path, or within the folder at a path."""
    place = Path(path).expanduser()
    if place.is_file():
        return place
    if place.is_dir():
        for name in _FILES:
            if (place / name).is_file():
                return place / name
        found = ", ".join(sorted(entry.name for entry in place.iterdir())[:10]) or "nothing"
        raise UserError(
            f"model.tokenizer_path = {path!r}: the folder has none of {', '.join(_FILES)}; it has {found}. {_ADVICE}"
        )
    raise UserError(f"model.tokenizer_path = {path!r}: no such file or folder. {_nearest(place)} {_ADVICE}")


def _nearest(place: Path) -> str:
    """What to try instead of a path that doesn't exist."""
    folder = next(parent for parent in place.absolute().parents if parent.is_dir())
    missing = place.absolute().relative_to(folder).parts[0]
    near = difflib.get_close_matches(missing, [entry.name for entry in folder.iterdir()])
    near = [str(folder / name) for name in near] + difflib.get_close_matches(place.name, list(_registered))
    if near:
        return f"Did you mean {' or '.join(near)}?"
    registered = f" Registered tokenizers: {', '.join(sorted(_registered))}." if _registered else ""
    return f"{folder} has nothing with such a name.{registered}"
