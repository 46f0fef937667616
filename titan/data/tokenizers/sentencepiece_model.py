"""SentencePiece models, the original format of Llama 2's tokenizer (Kudo and Richardson, 2018)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titan.data.tokenizers.base import TokenIds, Tokenizer, content_fingerprint, describe, require_encodable


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. A million-character run is no trouble to it: text is encoded whole.

    Args:
        content: the bytes of the model file.
        origin: where they are from, for the log.

    Raises:
        ValueError: the content isn't such a file.
    """

    def __init__(self, content: bytes, origin: str) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise ValueError("SentencePiece can't read it") from None
        self.vocab_size = self._processor.get_piece_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        self.fingerprint = content_fingerprint("sentencepiece", content)
        self.description = describe("SentencePiece", self.vocab_size, self.bos_id, self.eos_id, origin)

    def encode(self, text: str) -> TokenIds:
        require_encodable(text)
        return np.asarray(self._processor.encode_as_numpy(text), dtype=np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text of the ids; BOS and EOS show as nothing."""
        return str(self._processor.decode(np.asarray(ids, dtype=np.int64).tolist()))


def _id_or_none(token_id: int) -> int | None:
    """SentencePiece says -1 for a control token that the model lacks."""
    return token_id if token_id >= 0 else None
