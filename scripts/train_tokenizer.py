"""Train a tokenizer on text of one's own: byte-level BPE, as a tokenizer.json that titan and others read.

    python scripts/train_tokenizer.py --training.dataset json --training.dataset_path data --vocab_size 32000 \
        --output assets/tokenizer/mine

The text is said as for train.py. Needs the extra `hf` (pip install -e '.[hf]').
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.errors import UserError
from titan.config.job_config import Training
from titan.config.startup import data_config, exit_on_mistake

if TYPE_CHECKING:
    import tokenizers

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
LEAST = 256 + 2  # the bytes, BOS and EOS


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and write the tokenizer.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    options, others = _parser().parse_known_args(argv)
    with exit_on_mistake():
        if options.vocab_size < LEAST:
            raise UserError(f"--vocab_size {options.vocab_size}: the bytes, BOS and EOS are {LEAST} ids already")
        training, _ = data_config(others)

        from titan.data.tokenizer import build_tokenizer
        from titan.observability.logging import init_logging, logger

        init_logging(rank=0, color=True)
        tokenizer = train(itertools.islice(documents(training), options.documents), options.vocab_size)
        options.output.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(options.output / "tokenizer.json"))
        (options.output / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}) + "\n")
        built = build_tokenizer(str(options.output))
        logger.info(built.description)
        if built.vocab_size < options.vocab_size:
            logger.warning(f"the text gives no more than {built.vocab_size:,} ids")


def documents(training: Training) -> Iterator[str]:
    """Every usable document of a dataset, once; in the order that training.shuffle asks for."""
    from titan.data.readers import BadRowPolicy, open_reader
    from titan.data.sources import open_documents

    once = dataclasses.replace(training, infinite=False)
    reader = open_reader(open_documents(once), once, BadRowPolicy(once.bad_rows), 0, 1, seed=0)
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return


def train(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-pair encoding of bytes (Sennrich et al., 2016; Radford et al., 2019): any text can be encoded.

    Args:
        vocab_size: ids, BOS and EOS among them; fewer when the text doesn't have as many pairs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a byte-level BPE tokenizer on text of one's own.",
        epilog="And the arguments of train.py for the dataset: --training.dataset NAME, …",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where tokenizer.json goes")
    parser.add_argument("--vocab_size", type=int, default=32_000, metavar="N", help="ids (default 32000)")
    parser.add_argument("--documents", type=int, metavar="N", help="read no more than this many (unset: all)")
    return parser


if __name__ == "__main__":
    main()
