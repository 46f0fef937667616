"""Hugging Face's tokenizer.json, read by the `tokenizers` library.

Which tokens are BOS and EOS isn't in a fixed place. The first of these that speaks decides, for each of the two:
  1. `bos_token` / `eos_token` of tokenizer_config.json, then of special_tokens_map.json, beside the file: a string,
     an object with "content", or null, which says that there is none;
  2. the file's own post-processor: the control token that it puts before, or after, a single text;
  3. an added token with a well-known name (`<s>`, `<|begin_of_text|>`, … and `</s>`, `<|end_of_text|>`, …).
The post-processor itself never runs: titan adds BOS and EOS, once, to every document. `add_bos_token` and
`add_eos_token` of tokenizer_config.json aren't honoured: they describe prompts, and pretraining marks both ends.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan.data.tokenizers.base import TokenIds, Tokenizer, content_fingerprint, describe, require_encodable

_WELL_KNOWN = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]"),
    "eos_token": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]"),
}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json. A million-character run is no trouble to it: text is encoded whole.

    Tokens that the file marks as special, and BOS and EOS in any case, are plain text when they occur in a text. Added
    tokens that it doesn't mark (such as runs of spaces) are part of its vocabulary and are used.

    Args:
        content: the bytes of the file.
        origin: where they are from; files beside it name BOS and EOS.

    Raises:
        ImportError: the `tokenizers` library isn't installed.
        ValueError: the content isn't such a file, or BOS or EOS isn't among its tokens.
    """

    def __init__(self, content: bytes, origin: Path) -> None:
        import tokenizers

        spec = json.loads(content)
        bos, eos = (_control_token(key, spec, origin.parent) for key in ("bos_token", "eos_token"))
        for token in spec.get("added_tokens") or ():
            token["special"] = token.get("special", False) or token["content"] in (bos, eos)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"the tokenizers library {tokenizers.__version__} can't read it: {error}") from None
        self._tokenizer.encode_special_tokens = True  # i.e. encode their text, don't parse them
        self._tokenizer.no_truncation()  # some files carry a length limit or padding
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._id_of("BOS", bos)
        self.eos_id = self._id_of("EOS", eos)
        self.fingerprint = content_fingerprint("huggingface", content, self.bos_id, self.eos_id)
        self.description = describe("Hugging Face", self.vocab_size, self.bos_id, self.eos_id, str(origin))

    def encode(self, text: str) -> TokenIds:
        require_encodable(text)
        # The batch call is the one that leaves out character offsets, nearly half of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return str(self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False))

    def _id_of(self, role: str, token: str | None) -> int | None:
        if token is None:
            return None
        token_id: int | None = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"its {role} is said to be {token!r}, which isn't among its tokens")
        return token_id


def _control_token(key: str, spec: dict[str, Any], folder: Path) -> str | None:
    """The text of BOS (key "bos_token") or EOS ("eos_token"), by the rule above."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            beside = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        if key in beside:
            token: str | None = beside[key]["content"] if isinstance(beside[key], dict) else beside[key]
            return token
    for processor in _post_processors(spec.get("post_processor")):
        before, after = _template(processor)
        around = before if key == "bos_token" else after
        if around:
            return around[0]
    added = {token["content"] for token in spec.get("added_tokens") or ()}
    return next((name for name in _WELL_KNOWN[key] if name in added), None)


def _post_processors(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The post-processors of a file, those within a Sequence one by one."""
    if spec is None:
        return
    if spec["type"] == "Sequence":
        for inner in spec["processors"]:
            yield from _post_processors(inner)
    else:
        yield spec


def _template(processor: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The control tokens that a post-processor puts before and after a single text."""
    if processor["type"] in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][0]], [processor["sep"][0]]
    if processor["type"] != "TemplateProcessing":
        return [], []
    parts = processor["single"]
    text = next(i for i, part in enumerate(parts) if "Sequence" in part)
    before, after = (
        [part["SpecialToken"]["id"] for part in side if "SpecialToken" in part]
        for side in (parts[:text], parts[text + 1 :])
    )
    return before, after
