"""Normalisation layers by the name that `model.norm_type` gives."""

from torch import nn


def build_norm(norm_type: str, dim: int, eps: float) -> nn.Module:
    """A norm over the last dimension of `[..., dim]`.

    - rmsnorm: divide by the root mean square, times a gain (arXiv 1910.07467)
    - layernorm: subtract the mean, divide by the standard deviation, times a gain plus a bias (arXiv 1607.06450)
    - np_layernorm: the same without gain and bias, as in OLMo (arXiv 2402.00838)

    Raises:
        ValueError: another name.
    """
    match norm_type:
        case "rmsnorm":
            return nn.RMSNorm(dim, eps=eps)
        case "layernorm":
            return nn.LayerNorm(dim, eps=eps)
        case "np_layernorm":
            return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
    raise ValueError(f"unknown norm {norm_type!r}: expected rmsnorm, layernorm or np_layernorm")
