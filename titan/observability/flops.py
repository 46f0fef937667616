"""From tokens per second to TFLOP/s and MFU. A token's FLOPs come from the family (`ModelSpec.flops_per_token`)."""

from titan.models.spec import FlopsPerToken

CONVENTION = (
    "FLOPs of a token, forward and backward = 6 × parameters that multiply (the head counts, tied or not; looking up "
    "an input embedding doesn't) + 12 × layers × heads × head_dim × seq_len for attention over the full square, also "
    "when it is causal. Recomputed activations don't count. MFU = FLOP/s ÷ dense peak of the compute type."
)


def describe_flops(flops: FlopsPerToken, peak_flops: float | None) -> str:
    """What a run's FLOPs and MFU figures mean, to print once at its start.

    Args:
        flops: FLOPs per token.
        peak_flops: the device's peak in FLOP/s; None when unknown.
    """
    peak = "unknown, so MFU is n/a" if peak_flops is None else f"{peak_flops / 1e12:,.4g} TFLOP/s"
    return (
        f"{flops.full / 1e9:,.4g} GFLOPs per token ({flops.causal / 1e9:,.4g} with attention counted as causal); "
        f"peak of the device: {peak}. {CONVENTION}"
    )


def tflops_per_device(tokens_per_second_per_device: float, flops: FlopsPerToken) -> float:
    """Model TFLOP/s (10¹² FLOP/s) of one device, by the full-attention count."""
    return tokens_per_second_per_device * flops.full / 1e12


def model_flops_utilization(
    tokens_per_second_per_device: float, flops: FlopsPerToken, peak_flops: float | None
) -> float | None:
    """MFU, a share of 1 (PaLM, arXiv 2204.02311, appendix B), by the full-attention count; None when no peak is known.

    The published tables that people compare with count full attention, which is why the causal count isn't used.
    """
    return None if peak_flops is None else tokens_per_second_per_device * flops.full / peak_flops
