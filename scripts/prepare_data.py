"""Tokenize a dataset once, into token files that `training.dataset = "tokens"` trains from.

    python scripts/prepare_data.py --training.dataset json --training.dataset_path data --output tokens --processes 8

What is read, and with which tokenizer, is said as for train.py: --job.config_file FILE, --section.field VALUE. The same
command again goes on where the last one stopped; of a folder that is finished it verifies the checksums.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from titan.config.startup import data_config, exit_on_mistake


def main(argv: Sequence[str] | None = None) -> None:
    """Write the token files.

    Raises:
        SystemExit: status 2 after a mistake was printed, 130 after Ctrl-C.
    """
    options, others = _parser().parse_known_args(argv)
    with exit_on_mistake():
        training, tokenizer_path = data_config(others)

        from titan.data.prepare import prepare
        from titan.data.readers import BadRowPolicy
        from titan.data.sources import open_documents
        from titan.data.tokenizer import build_tokenizer
        from titan.observability.logging import init_logging, logger

        init_logging(rank=0, color=True)
        try:
            tokenizer = build_tokenizer(tokenizer_path)
            logger.info(tokenizer.description)
            shards = prepare(
                open_documents(training),
                tokenizer,
                options.output,
                processes=options.processes,
                shard_tokens=options.shard_tokens,
                bad_rows=BadRowPolicy(training.bad_rows),
            )
        except KeyboardInterrupt:
            logger.warning("interrupted; the same command goes on behind the last finished shard")
            raise SystemExit(130) from None
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens", "left_out")}
    logger.info(
        f"{options.output} is finished: {counts['documents']:,} documents, {counts['tokens']:,} tokens "
        f"({shards[0].run['dtype']}) in {len(shards):,} shard(s); {counts['left_out']:,} rows left out"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Tokenize a dataset once, into token files.",
        epilog="And the arguments of train.py for the dataset and the tokenizer: --training.dataset NAME, "
        "--training.dataset_path PATH, --model.tokenizer_path PATH, --job.config_file FILE, …",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the token files go")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=_at_least_1, default=cores, metavar="N", help=f"unset: {cores}, all cores")
    parser.add_argument(
        "--shard_tokens", type=_at_least_1, default=250_000_000, metavar="N", help="size of a shard (default 250000000)"
    )
    return parser


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
