"""The bound that titan's speed is held to: a Llama trained by plain PyTorch, by hand, all in this file.

Random weights and tokens, fp32, one process, nothing of titan's. It prints what it measured as a line of JSON:
`python tests/reference_loop.py --size S --compile --chunks 2`
"""
# ruff: noqa: E402  (the clock starts before the imports, a part of the time to the first step)

import time

START = time.perf_counter()

import argparse
import json
import resource
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {  # dim, layers, heads, kv heads, ffn, vocabulary, sequence, batch
    "S": (256, 6, 8, 4, 768, 2_048, 256, 8),
    "M": (512, 8, 8, 4, 1_536, 32_000, 512, 4),
    "L": (768, 12, 12, 4, 2_048, 128_256, 1_024, 2),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.head_dim = head_dim = dim // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.wq, self.wo = nn.Linear(dim, heads * head_dim, bias=False), nn.Linear(heads * head_dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(dim, ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.wo(h.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Llama(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        dim, layers, heads, kv_heads, ffn, vocabulary, seq_len, _ = SIZES[size]
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocabulary, bias=False)
        frequencies = 500_000.0 ** -torch.arange(0, 1, 2 * heads / dim).double()
        angles = torch.outer(torch.arange(seq_len).double(), frequencies)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        for matrix in (parameter for parameter in self.parameters() if parameter.ndim > 1):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return self.norm(h).flatten(0, 1)


def chunk_of_loss(h: Tensor, labels: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's share of the loss, and of the gradients of `h` and of the head's weight."""
    logits = h @ weight.T
    normalizer = logits.logsumexp(-1, keepdim=True)
    loss = (normalizer - logits.gather(-1, labels[:, None])).sum() / count
    gradient = logits.sub_(normalizer).exp_().mul_(1 / count)
    gradient.scatter_add_(-1, labels[:, None], torch.full_like(normalizer, -1 / count))
    return loss, gradient @ weight, gradient.T @ h


@torch.no_grad()
def chunked_loss(h: Tensor, weight: Tensor, labels: Tensor, chunks: int, chunk_function: Any) -> tuple[Tensor, ...]:
    """Mean cross entropy and both gradients at once: no logits wait for a backward pass."""
    loss, gradients, weight_gradient = torch.zeros(()), [], torch.zeros_like(weight)
    for part in zip(h.chunk(chunks), labels.chunk(chunks), strict=True):
        part_loss, gradient, part_weight_gradient = chunk_function(*part, weight, len(h))
        loss += part_loss
        gradients.append(gradient)
        weight_gradient += part_weight_gradient
    return loss, torch.cat(gradients), weight_gradient


def peak_and_faults() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), usage.ru_minflt  # Linux counts KiB


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama by hand and measure it.")
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--compile", action="store_true", help="compile blocks and loss with inductor")
    parser.add_argument("--chunks", type=int, default=0, help="of the loss; 0: whole logits")
    parser.add_argument("--warmup", type=int, default=5, help="steps that aren't measured")
    parser.add_argument("--steps", type=int, default=20, help="steps that are")
    options = parser.parse_args()
    idle, _ = peak_and_faults()
    torch.manual_seed(0)
    vocabulary, seq_len, batch = SIZES[options.size][5:]
    model = Llama(options.size)
    matrices, gains = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=8e-4, betas=(0.9, 0.95), fused=True)
    loss_function: Any = chunk_of_loss if options.chunks else lambda h, w, labels: F.cross_entropy(h @ w.T, labels)
    for block in model.blocks if options.compile else []:
        block.compile(fullgraph=True)
    loss_function = torch.compile(loss_function, fullgraph=True, disable=not options.compile)
    windows = torch.randint(vocabulary, (8, batch, seq_len + 1))
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            wall, cpu, faults = time.perf_counter(), time.process_time(), peak_and_faults()[1]
        tokens, labels = windows[step % 8, :, :-1], windows[step % 8, :, 1:].flatten()
        h, weight = model(tokens), model.head.weight
        if options.chunks:
            loss, gradient, weight.grad = chunked_loss(h, weight, labels, options.chunks, loss_function)
            h.backward(gradient)
        else:
            loss = loss_function(h, weight, labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            first_step = time.perf_counter() - START
    measured = options.steps * batch * seq_len
    figures = {
        "tokens_per_second": measured / (time.perf_counter() - wall),
        "tokens_per_cpu_second": measured / (time.process_time() - cpu),
        "page_faults_per_step": (peak_and_faults()[1] - faults) / options.steps,
        "peak_bytes": peak_and_faults()[0],
        "idle_bytes": idle,
        "seconds_to_first_step": first_step,
        "loss": loss.item(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
