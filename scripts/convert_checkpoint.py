"""Convert a model's weights: titan's checkpoint, a Hugging Face folder, one torch file, Meta's consolidated files.

    python scripts/convert_checkpoint.py outputs/checkpoint exported --to hf --export_dtype bfloat16
    python scripts/convert_checkpoint.py Llama-3.1-8B converted --to dcp

What FROM is, is found out. One process, no GPU; docs/weights.md says which format needs how much memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titan.config.startup import exit_on_mistake

FORMATS = {
    "dcp": "a checkpoint, step-0 in the folder TO, for checkpoint.initial_load_path",
    "hf": "a folder for transformers: config.json, .safetensors files, tokenizer",
    "torch": "a file with a dict of tensors by titan's names",
    "meta": "a folder with consolidated.00.pth and params.json (Llama only)",
}
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    """Convert, and say what was written.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    parser = argparse.ArgumentParser(
        description="Convert a model's weights from any of the formats to any other.",
        epilog="And, where FROM doesn't say which model it is: --model.name NAME --model.flavor FLAVOR, with "
        "--experimental.custom_import MODULE for a model of your own.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="FROM", type=Path, help="a step-N folder, a folder of such, or another format"
    )
    parser.add_argument("target", metavar="TO", type=Path, help="a new file or folder")
    kinds = "; ".join(f"{name}: {meaning}" for name, meaning in FORMATS.items())
    parser.add_argument("--to", required=True, choices=FORMATS, help=kinds)
    parser.add_argument("--export_dtype", choices=DTYPES, help="type of all weights (unset: as they are)")
    parser.add_argument("--tokenizer_path", metavar="PATH", help="tokenizer to put beside them (unset: FROM's own)")
    parser.add_argument(
        "--vocab_size",
        type=int,
        metavar="N",
        help="hf: write N rows of the vocabulary, without the padding behind them",
    )
    options, others = parser.parse_known_args(argv)
    with exit_on_mistake():
        import torch  # only now, so that --help needs no second

        from titan.checkpoint.conversion import write_weights
        from titan.checkpoint.model_names import named_model
        from titan.checkpoint.sources import open_source

        source = open_source(options.source, named_model(others), options.tokenizer_path)
        dtype = None if options.export_dtype is None else getattr(torch, options.export_dtype)
        written = write_weights(source, options.target, options.to, dtype, options.vocab_size)
        print(f"{options.source} ({source.format}) -> {written} ({options.to})")


if __name__ == "__main__":
    main()
