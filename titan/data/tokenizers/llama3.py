"""Tokenizers in Llama 3's original format: a text file of byte-pair ranks, read by tiktoken.

A line of the file is a token's bytes in base64, a space, and the token's rank, which is its id. The split pattern and
the control tokens aren't in the file; they are those of the Llama 3 release (Meta, "The Llama 3 Herd of Models", 2024).
"""

import base64
import binascii
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titan.data.tokenizers.base import TokenIds, Tokenizer, content_fingerprint, describe, require_encodable

FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|$)")

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # contractions
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with the one sign or space before it
    r"|\p{N}{1,3}"  # up to three digits
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # white space
)
_CONTROL_TOKEN_COUNT = 256
_RUN_LIMIT = 10_000  # characters
_WHITE_SPACE = re.compile(r"\s")


def control_tokens() -> list[str]:
    """Llama 3's 256 control tokens, in the order of their ids."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(_CONTROL_TOKEN_COUNT))
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(next(reserved) for _ in range(4))]
    names += ["<|start_header_id|>", "<|end_header_id|>", next(reserved), "<|eot_id|>"]
    return names + [next(reserved) for _ in range(_CONTROL_TOKEN_COUNT - len(names))]


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """The ranks of a file, by the token's bytes.

    Raises:
        ValueError: a line isn't `base64 rank`, a rank is missing or double, or one of the 256 bytes has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its rank: {line[:40]!r}") from None
    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"the ranks of its {len(ranks):,} different tokens are not 0 to {len(ranks) - 1:,}, once each")
    lacking = [value for value in range(256) if bytes([value]) not in ranks]
    if lacking:
        raise ValueError(f"it has no token for {len(lacking)} of the 256 bytes, such as {lacking[0]:#04x}")
    return ranks


def split_long_runs(text: str, limit: int = _RUN_LIMIT) -> list[str]:
    """Cut a text where a run of white space, or of anything else, is too long for the split pattern.

    The pattern's `\\s+(?!\\S)` overflows its engine's stack on about a million spaces, and older tiktoken merges a long
    word in quadratic time. A run of up to `limit` characters is never cut, so ordinary text is one piece; no run stays
    longer than twice `limit`. Only here do cuts change what the tokens would have been, near each cut.
    """
    cuts = [0]
    for place in range(limit, len(text), limit):
        window = text[place - limit : place + 1]  # all of one kind: the run began at least `limit` characters ago
        if window.isspace() or not _WHITE_SPACE.search(window):
            cuts.append(place)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


class Llama3Tokenizer(Tokenizer):
    """A file of byte-pair ranks with Llama 3's split pattern; its 256 control tokens follow the ranks.

    Args:
        content: the file's bytes.
        origin: where they are from, for the log.

    Raises:
        ValueError: the content isn't such a file.
    """

    def __init__(self, content: bytes, origin: str) -> None:
        import tiktoken

        ranks = parse_ranks(content)
        control = {token: len(ranks) + i for i, token in enumerate(control_tokens())}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=control
        )
        self.vocab_size = len(ranks) + len(control)
        self.bos_id: int | None = control["<|begin_of_text|>"]
        self.eos_id: int | None = control["<|end_of_text|>"]
        self.fingerprint = content_fingerprint("llama3", content, _RUN_LIMIT)
        self.description = describe("tiktoken (Llama 3)", self.vocab_size, self.bos_id, self.eos_id, origin)

    def encode(self, text: str) -> TokenIds:
        require_encodable(text)
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in split_long_runs(text)]
        ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return ids.view(np.int32)  # from uint32, without a copy

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).tolist(), errors="replace")
