"""The tokenizer that is always there: a token per byte of UTF-8."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titan.data.tokenizers.base import TokenIds, Tokenizer, describe


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, 256 is BOS, 257 is EOS."""

    vocab_size = 258

    def __init__(self) -> None:
        self.bos_id: int | None = 256
        self.eos_id: int | None = 257
        self.fingerprint = "bytes:1"
        self.description = describe("byte", self.vocab_size, self.bos_id, self.eos_id, "embedded")

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text of the bytes among the ids; BOS and EOS show as nothing."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
