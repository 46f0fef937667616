"""What a tokenizer is to titan."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: the highest possible id + 1.
        bos_id, eos_id: the control tokens that begin and end a document; None when the tokenizer has none, never -1.
        fingerprint: changes whenever the ids of some text may change; the same on every machine.
        description: one line for the log.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    description: str

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """The ids of a text, int32 `[T]`, without BOS or EOS.

        The text is data: what looks like a control token in it ("<|end_of_text|>", "</s>") is encoded as plain text.

        Raises:
            ValueError: the text can't be written as UTF-8 (it holds a lone surrogate).
        """

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text of some ids. Bytes that aren't UTF-8 become U+FFFD; control tokens show as their library does it."""


def require_encodable(text: str) -> None:
    """Raise ValueError (a UnicodeEncodeError, which names the position) for a text that UTF-8 can't hold.

    The libraries disagree on lone surrogates: one raises TypeError, one RuntimeError, one replaces them silently.
    """
    text.encode("utf-8")


def content_fingerprint(kind: str, content: bytes, *settings: object) -> str:
    """The fingerprint of a tokenizer that a file's content and a few settings define."""
    digest = hashlib.sha256(repr(settings).encode("utf-8") + b"\n" + content)
    return f"{kind}:{digest.hexdigest()}"


def describe(kind: str, vocab_size: int, bos_id: int | None, eos_id: int | None, origin: str) -> str:
    """One line for the log."""
    bos = "no BOS" if bos_id is None else f"BOS {bos_id}"
    eos = "no EOS" if eos_id is None else f"EOS {eos_id}"
    return f"{kind} tokenizer, {vocab_size:,} ids, {bos}, {eos}, {origin}"
