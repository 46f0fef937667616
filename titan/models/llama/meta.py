"""Llama as Meta releases it: consolidated.00.pth … and params.json.

Tensors have titan's names there. Two things differ. Rotary pairs are neighbours (2i, 2i + 1) within a head, titan's are
(i, i + D/2), so the rows of wq and wk stand in another order. And each file holds one tensor-parallel rank's part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from titan.config.errors import UserError
from titan.models.llama.sizes import LlamaSizes, RopeScaling

IGNORED = ("rope.freqs",)  # the frequencies, in files of Llama 2


def to_half_split(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of wq or wk, `[H · D, dim]`: pairs that are neighbours become pairs that are D/2 apart."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The reverse of `to_half_split`."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def is_rotated(name: str) -> bool:
    """Whether the rows of this tensor are those of rotary pairs."""
    return name.endswith(("attention.wq.weight", "attention.wk.weight"))


def join_dim(name: str, shapes: Sequence[tuple[int, ...]], dim: int) -> int | None:
    """Along which dimension a tensor's parts are joined; None where each file has the whole (norms).

    Args:
        shapes: of the parts.
        dim: the width of the stream.
    """
    if len(shapes[0]) == 1:
        return None
    if name == "tok_embeddings.weight":  # by its columns in Llama 2, by its rows in Llama 3
        return 1 if shapes[0][1] != dim else 0
    return 1 if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")) else 0


def whole_shape(shapes: Sequence[tuple[int, ...]], dim: int | None) -> tuple[int, ...]:
    """The shape of a tensor of these parts, joined along `dim`."""
    if dim is None:
        return shapes[0]
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


def sizes_from_params(
    params: Mapping[str, Any], ffn_dim: int, vocab_size: int, known: Sequence[LlamaSizes]
) -> LlamaSizes:
    """The sizes of a release.

    params.json is silent about the context, the factor of the rotary scaling and a tied head; these are taken from the
    published model that has the other numbers.

    Args:
        ffn_dim, vocab_size: as the tensors have them; params.json holds what the first is computed from, and often -1
            for the second.
        known: sizes of published models.

    Raises:
        UserError: a number is missing, or what the file is silent about can't be known.
    """
    try:
        sizes = LlamaSizes(
            dim=int(params["dim"]),
            n_layers=int(params["n_layers"]),
            n_heads=int(params["n_heads"]),
            n_kv_heads=int(params.get("n_kv_heads") or params["n_heads"]),
            ffn_dim=ffn_dim,
            vocab_size=vocab_size,
            max_seq_len=8192,
            rope_theta=float(params.get("rope_theta", 10_000.0)),
            norm_eps=float(params["norm_eps"]),
        )
    except KeyError as error:
        raise UserError(f"params.json: {error.args[0]} is missing") from None
    scaled = bool(params.get("use_scaled_rope", False))
    for model in known:
        silent = {"max_seq_len": model.max_seq_len, "rope_scaling": model.rope_scaling, "tied": model.tied}
        if scaled == (model.rope_scaling is not None) and dataclasses.replace(sizes, **silent) == model:  # type: ignore[arg-type]
            return model
    if not scaled:
        return sizes
    if "rope_scaling_factor" not in params:
        raise UserError(
            "params.json: use_scaled_rope is set, but not by which factor (8 in Llama 3.1, 32 in 3.2), and no "
            "published model has these sizes: name the model with --model.name and --model.flavor"
        )
    scaling = RopeScaling(float(params["rope_scaling_factor"]))
    return dataclasses.replace(sizes, rope_scaling=scaling, max_seq_len=131_072)


def params_from_sizes(sizes: LlamaSizes) -> dict[str, Any]:
    """params.json for sizes.

    Raises:
        UserError: Meta's Llama has no such sizes.
    """
    if sizes.norm_type != "rmsnorm":
        raise UserError(f'model.norm_type = "{sizes.norm_type}": Meta\'s Llama has no norm but rmsnorm')
    if sizes.head_dim * sizes.n_heads != sizes.dim:
        raise UserError(
            f"head_dim {sizes.head_dim} isn't dim {sizes.dim} / n_heads {sizes.n_heads}, and params.json has no word "
            "for that; write a Hugging Face folder instead"
        )
    scaling = sizes.rope_scaling
    if scaling is not None and scaling != RopeScaling(scaling.factor):
        raise UserError(
            f"{scaling}: params.json knows the factor of a rotary scaling only; write a Hugging Face folder"
        )
    # Meta's code computes the width of the feed-forward: 2/3 · 4 · dim, times a factor, rounded up to a multiple.
    multiple = sizes.ffn_dim & -sizes.ffn_dim  # the largest power of two that divides it
    factor = (sizes.ffn_dim - multiple // 2 + 0.5) / int(8 * sizes.dim / 3)
    return {
        "dim": sizes.dim,
        "n_layers": sizes.n_layers,
        "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads,
        "vocab_size": sizes.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": factor,
        "norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        **({} if scaling is None else {"use_scaled_rope": True, "rope_scaling_factor": scaling.factor}),
    }
