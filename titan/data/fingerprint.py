"""A hash of a step's global batch, to see whether two runs train on the same data in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from titan.data.microbatch import Microbatch


def batch_fingerprint(microbatches: Sequence[Microbatch], group: dist.ProcessGroup) -> str:
    """16 hexadecimal digits that tokens, labels and order of a global batch give, however its rows are spread.

    It is the sum, modulo 2**64, of a hash of every row's number and content. Collective over the group.

    Args:
        microbatches: this rank's rows, in their order.
        group: the ranks that read different rows (ParallelDims.batch), each as many.
    """
    number = dist.get_rank(group) * sum(len(batch.tokens) for batch in microbatches)
    total = 0
    for batch in microbatches:
        for tokens, labels in zip(batch.tokens.numpy(), batch.labels.numpy(), strict=True):
            digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
            digest.update(tokens.astype("<i8").tobytes())
            digest.update(labels.astype("<i8").tobytes())
            total += int.from_bytes(digest.digest(), "little")
            number += 1
    # Halves, as int64: their sums over ranks can't overflow.
    halves = torch.tensor([total >> 32 & 0xFFFFFFFF, total & 0xFFFFFFFF])
    dist.all_reduce(halves, group=group)
    high, low = halves.tolist()
    return f"{((high << 32) + low) % (1 << 64):016x}"
