"""Continue a text with a model, from any format of weights.

    python scripts/generate.py outputs/checkpoint --prompt "def main():" --max_new_tokens 100
    python scripts/generate.py exported --prompt "Once" --temperature 0

One process; the whole text goes through the model for each new token: enough to look at a model, not to serve it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan.config.errors import UserError
from titan.config.startup import exit_on_mistake

if TYPE_CHECKING:
    import torch
    from torch import nn


def main(argv: Sequence[str] | None = None) -> None:
    """Print the prompt and how the model goes on.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    parser = argparse.ArgumentParser(
        description="Continue a text with a model, from any format of weights.",
        epilog="And, where PATH doesn't say which model it is: --model.name NAME --model.flavor FLAVOR, with "
        "--experimental.custom_import MODULE for a model of your own.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, a Hugging Face folder, a torch file or Meta's folder"
    )
    parser.add_argument("--prompt", default="", help="text to go on from (unset: a new document)")
    parser.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="tokens at most (default 64)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, metavar="K", help="draw among the K likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and products")
    parser.add_argument("--tokenizer_path", metavar="PATH", help="tokenizer (unset: the one with the weights)")
    options, others = parser.parse_known_args(argv)
    with exit_on_mistake():
        if options.max_new_tokens < 0 or options.temperature < 0 or (options.top_k is not None and options.top_k < 1):
            raise UserError(
                "expected --max_new_tokens of at least 0, --temperature of at least 0, --top_k of at least 1"
            )

        import torch  # only now, so that --help needs no second

        from titan.checkpoint.conversion import load_model
        from titan.checkpoint.model_names import named_model
        from titan.checkpoint.sources import open_source
        from titan.data.tokenizer import build_tokenizer
        from titan.observability.device import find_device

        source = open_source(options.path, named_model(others), options.tokenizer_path)
        tokenizer = build_tokenizer(source.tokenizer_path)
        rows = source.sizes.vocab_size
        if tokenizer.vocab_size > rows or (source.tokenizer_path is None and tokenizer.vocab_size < rows / 2):
            raise UserError(
                f"the model has {rows} rows, the tokenizer {source.tokenizer_path or '(bytes, embedded)'} "
                f"{tokenizer.vocab_size} ids: give the model's own by --tokenizer_path"
            )
        device = find_device().torch_device
        model = load_model(source, device, getattr(torch, options.dtype))
        start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        prompt = [*start, *tokenizer.encode(options.prompt).tolist()]
        if not prompt:
            raise UserError("--prompt is empty, and the tokenizer has no token that begins a document")
        new = generate(
            model,
            prompt,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            ids=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            context=source.sizes.max_seq_len,
            device=device,
        )
        print(options.prompt + tokenizer.decode(new))


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    ids: int,
    eos_id: int | None,
    context: int,
    device: torch.device,
) -> list[int]:
    """Up to `count` tokens after a prompt; it ends before EOS.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens; None among all.
        ids: tokens that exist; rows of the vocabulary behind them are padding.
        context: tokens that the model sees at most, the latest ones.
    """
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)  # so that a seed gives the same draws on any device
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1, :ids].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                values, candidates = logits.topk(min(top_k or ids, ids))
                token = int(candidates[torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)])
            if token == eos_id:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


if __name__ == "__main__":
    main()
