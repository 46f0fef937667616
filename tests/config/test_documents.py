"""Documents in windows: what can't keep them apart is refused, with what can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.config.conftest import Load, Mistakes
from titan.models import spec
from titan.observability import device
from titan.observability.device import Device

DOCUMENT = "--model.attn_mask=document"


class WithoutDocuments(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return x


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("gpu", torch.device("meta"), "nccl", "a GPU")
    monkeypatch.setattr(device, "find_device", lambda: gpu)


def test_every_family_must_take_documents(load: Load, mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("", DOCUMENT).config.model.attn_mask == "document"
    family = replace(spec.model_families()["llama3"], name="deaf", build=lambda sizes: WithoutDocuments())
    monkeypatch.setitem(spec._FAMILIES, "deaf", family)
    load("", "--model.name=deaf")
    (mistake,) = mistakes("", "--model.name=deaf", DOCUMENT)
    assert 'model.attn_mask = "document": the models of family deaf take no documents' in mistake


def test_the_ring_cannot(load: Load, mistakes: Mistakes) -> None:
    ring = ("--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_rotate_method=alltoall")
    (mistake,) = mistakes("", *ring, DOCUMENT, world_size=2)
    assert 'rotate_method = "alltoall"' in mistake and 'set it to "allgather"' in mistake
    load("", *ring, world_size=2)
    load("", ring[1], DOCUMENT)


@pytest.mark.parametrize(("backend", "reason"), [("flex", "no backward pass"), ("varlen", "has no kernel")])
def test_kernels_are_for_gpus(mistakes: Mistakes, backend: str, reason: str) -> None:
    (mistake,) = mistakes("", f"--model.attn_backend={backend}", DOCUMENT, "--compile.enable")
    assert f'model.attn_backend = "{backend}"' in mistake and reason in mistake and 'leave it at "sdpa"' in mistake


def test_kernels_and_context_parallelism(mistakes: Mistakes, on_gpu: None) -> None:
    more = (DOCUMENT, "--compile.enable", "--parallelism.context_parallel_degree=2")
    for backend in ("flex", "varlen"):
        (mistake,) = mistakes("", f"--model.attn_backend={backend}", *more, world_size=2)
        assert "context_parallel_degree = 2 has an attention of its own" in mistake


def test_what_kernels_need(load: Load, mistakes: Mistakes, on_gpu: None) -> None:
    (mistake,) = mistakes("", "--model.attn_backend=flex", DOCUMENT)
    assert 'compile.enable = true with "model"' in mistake
    (mistake,) = mistakes("", "--model.attn_backend=varlen", DOCUMENT, "--training.mixed_precision_param=float32")
    assert "computes in 16 bits" in mistake
    assert load("", "--model.attn_backend=varlen", DOCUMENT).warnings == []
    (warning,) = load("", "--model.attn_backend=flex", "--compile.enable").warnings
    assert 'attn_backend = "flex" changes nothing with model.attn_mask = "causal"' in warning


def test_best_fit_needs_text(load: Load, mistakes: Mistakes) -> None:
    load("", "--training.packing=best_fit")
    found = mistakes("", "--training.packing=best_fit", "--training.dataset=tokens")
    assert any('packing = "best_fit": token files are read by the numbers of their windows' in text for text in found)
