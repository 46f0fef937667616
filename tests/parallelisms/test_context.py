"""Context parallelism against one process that has the whole sequence, position by position."""

from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.tiny_models import UNTIED
from tests.distributed.traffic import Traffic
from tests.distributed.world import Worlds
from titan.config.errors import UserError
from titan.models.layers.attention import CausalAttention
from titan.models.llama.model import Llama
from titan.parallelisms.context import ContextParallelAttention, SequenceShards, apply_context_parallel, attend
from titan.parallelisms.ring_attention import (
    flash_backward,
    flash_forward,
    ring_attention,
    ring_attention_backward,
    ring_attention_forward,
    seen_of_block,
)
from titan.training.initialize import initialize_weights, materialize

METHODS: tuple[Literal["allgather", "alltoall"], ...] = ("allgather", "alltoall")
SEQ_LEN = 24  # cuts into 2 * cp chunks for cp = 2, 3, 4

# (heads, kv heads): grouped; and as many as tokens, so that cutting or gathering the wrong axis would not crash.
HEADS = [(4, 2), (24, 24), (24, 12)]


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def whole_inputs(n_heads: int, n_kv_heads: int, batch: int = 2, head_dim: int = 8) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence; the same on every rank."""
    generator = torch.Generator().manual_seed(n_heads + n_kv_heads)
    return [
        torch.randn(batch, heads, SEQ_LEN, head_dim, generator=generator)
        for heads in (n_heads, n_kv_heads, n_kv_heads, n_heads)
    ]


def with_gradients(attention: Any, inputs: list[torch.Tensor], *extra: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves, *extra)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    mask = (documents[:, :, None] == documents[:, None, :]).tril().unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def worst(ours: list[torch.Tensor], whole: list[torch.Tensor], shards: SequenceShards) -> tuple[float, float]:
    """Largest errors at this rank's positions: of the output, of the gradients."""
    out, *gradients = [(a - shards.take(b, dim=2)).abs().max().item() for a, b in zip(ours, whole, strict=True)]
    return out, max(gradients)


@pytest.mark.parametrize(("degree", "balanced"), list(product([1, 2, 3, 4], [True, False])))
def test_cp_every_token_has_one_place(degree: int, balanced: bool) -> None:
    shards = [SequenceShards(rank, degree, balanced) for rank in range(degree)]
    tokens = torch.arange(100, 100 + 2 * SEQ_LEN).view(2, SEQ_LEN)
    positions = [shard.positions(SEQ_LEN) for shard in shards]
    assert sorted(torch.cat(positions).tolist()) == list(range(SEQ_LEN))
    for shard, own in zip(shards, positions, strict=True):
        taken = shard.take(tokens)
        assert own.dtype == torch.int64 and own.diff().min() > 0
        assert taken.is_contiguous() and torch.equal(taken, tokens[:, own])
    assert torch.equal(shards[0].join([shard.take(tokens) for shard in shards], dim=1), tokens)
    if balanced:  # as many pairs of a query and a key that it sees on every rank
        assert len({int((own + 1).sum()) for own in positions}) == 1


def test_cp_head_and_tail() -> None:
    assert SequenceShards(1, 4, balanced=True).positions(16).tolist() == [2, 3, 12, 13]
    assert SequenceShards(1, 4, balanced=False).positions(16).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="36 tokens can't be cut into 8 equal chunks"):
        SequenceShards(0, 4, balanced=True).positions(36)


@pytest.mark.parametrize(("degree", "balanced"), list(product([1, 2, 3, 4], [True, False])))
def test_cp_ring_sees_what_a_causal_mask_shows(degree: int, balanced: bool) -> None:
    length = SEQ_LEN // degree
    positions = [SequenceShards(rank, degree, balanced).positions(SEQ_LEN) for rank in range(degree)]
    for rank, source in product(range(degree), repeat=2):
        mask = torch.zeros(length, length, dtype=torch.bool)
        if seen := seen_of_block(rank, source, length, balanced):
            mask[seen.queries, seen.keys] = True
            mask = mask.tril() if seen.causal else mask
        assert torch.equal(mask, positions[rank][:, None] >= positions[source][None, :])


def attention_errors() -> dict[tuple[Any, ...], tuple[float, float]]:
    mesh = cp_mesh()
    errors = {}
    for heads, method, balanced in product(HEADS, METHODS, (True, False)):
        inputs = whole_inputs(*heads)
        whole = with_gradients(CausalAttention(), inputs)
        attention = ContextParallelAttention(mesh, method, balanced)
        local = [attention.shards.take(x, dim=2) for x in inputs]
        errors[heads, method, balanced] = worst(with_gradients(attention, local), whole, attention.shards)
    return errors


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_cp_dim_and_cp_cpu_api_attention_equals_one_process(worlds: Worlds, degree: int) -> None:
    """Both methods, balanced and not, grouped heads, and as many heads as tokens."""
    for rank, errors in enumerate(worlds(degree).run(attention_errors)):
        assert len(errors) == 12
        for case, (out, gradients) in errors.items():
            assert out < 2e-6 and gradients < 5e-6, (rank, case, out, gradients)


def projected_attention_errors() -> list[float]:
    """Heads as a model makes them: transposed views; and an expanded gradient, as a sum gives it."""
    mesh = cp_mesh()
    errors = []
    for method, balanced in product(METHODS, (True, False)):
        attention = ContextParallelAttention(mesh, method, balanced)
        inputs = whole_inputs(4, 2)
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        CausalAttention()(*leaves).sum().backward()
        local = [attention.shards.take(x.transpose(1, 2)).requires_grad_() for x in inputs[:3]]
        attention(*(x.transpose(1, 2) for x in local)).sum().backward()
        for ours, whole in zip(local, leaves, strict=True):
            assert ours.grad is not None and whole.grad is not None
            expected = attention.shards.take(whole.grad.transpose(1, 2))
            errors.append((ours.grad - expected).abs().max().item())
    return errors


def test_cp_cpu_api_takes_strided_heads_and_gradients(worlds: Worlds) -> None:
    assert max(max(errors) for errors in worlds(2).run(projected_attention_errors)) < 5e-6


def bf16_errors() -> dict[tuple[Any, ...], tuple[float, float]]:
    mesh = cp_mesh()
    errors = {}
    for method, balanced in product(METHODS, (True, False)):
        inputs = [x.bfloat16() for x in whole_inputs(4, 2)]
        whole = with_gradients(CausalAttention(), [x.float() for x in inputs])
        attention = ContextParallelAttention(mesh, method, balanced)
        local = with_gradients(attention, [attention.shards.take(x, dim=2) for x in inputs])
        assert all(x.dtype == torch.bfloat16 for x in local)
        errors[method, balanced] = worst(local, whole, attention.shards)
    return errors


def test_cp_bf16(worlds: Worlds) -> None:
    """Values up to about 4, whose neighbours in bf16 are 1/64 apart."""
    for errors in worlds(4).run(bf16_errors):
        assert all(out < 0.03 and gradients < 0.06 for out, gradients in errors.values()), errors


# Borders that lie within chunks and on them, differently per row.
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 13 + [3] * 6, [1] * 12 + [2] * 1 + [3] * 11])


def document_outcomes() -> list[tuple[float, float, bool, bool]]:
    """Per balance: errors, whether document 2 ignores the others, whether document 1 depends on itself."""
    mesh = cp_mesh()
    outcomes = []
    for heads, balanced in product(HEADS, (True, False)):
        inputs = whole_inputs(*heads)
        attention = ContextParallelAttention(mesh, "allgather", balanced)
        shards = attention.shards
        documents = shards.take(DOCUMENTS)
        whole = with_gradients(masked_attention, inputs, DOCUMENTS)
        ours = with_gradients(attention, [shards.take(x, dim=2) for x in inputs], documents)

        other = [x.clone() for x in inputs]
        for x in other[:3]:  # query, key and value of document 1
            x.transpose(1, 2)[DOCUMENTS == 1] += 1.0
        changed = with_gradients(attention, [shards.take(x, dim=2) for x in other], documents)
        before, after = ours[0].transpose(1, 2), changed[0].transpose(1, 2)
        kept = torch.equal(before[documents == 2], after[documents == 2])
        moved = bool((before[documents == 1] != after[documents == 1]).any(-1).all())
        outcomes.append((*worst(ours, whole, shards), kept, moved))
    return outcomes


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_cp_data_doc_border_tokens_see_their_own_document(worlds: Worlds, degree: int) -> None:
    for rank, outcomes in enumerate(worlds(degree).run(document_outcomes)):
        for out, gradients, kept, moved in outcomes:
            assert out < 2e-6 and gradients < 5e-6 and kept and moved, (rank, out, gradients, kept, moved)


def traffic(method: Literal["allgather", "alltoall"], balanced: bool, dtype: torch.dtype, documents: bool) -> list[Any]:
    attention = ContextParallelAttention(cp_mesh(), method, balanced)
    inputs = [attention.shards.take(x, dim=2).to(dtype).requires_grad_() for x in whole_inputs(4, 2)]
    with Traffic() as forward:
        out = attention(*inputs[:3], attention.shards.take(DOCUMENTS) if documents else None)
    with Traffic() as backward:
        torch.autograd.grad(out, inputs[:3], inputs[3])
    return [dict(counter) for each in (forward, backward) for counter in (each.calls, each.bytes)]


@pytest.mark.parametrize(("degree", "dtype"), list(product([2, 3], [torch.float32, torch.bfloat16])))
@pytest.mark.parametrize("balanced", [True, False])
def test_cp_traffic_is_what_the_docstrings_say(worlds: Worlds, degree: int, dtype: torch.dtype, balanced: bool) -> None:
    keys = 2 * 2 * (SEQ_LEN // degree) * 8  # B * H_kv * S/cp * D
    size, hops = dtype.itemsize, degree - 1
    for result in worlds(degree).run(traffic, "allgather", balanced, dtype, False):
        assert result == [
            {"all_gather": 1},
            {"all_gather": 2 * keys * size},
            {"reduce_scatter": 1},
            {"reduce_scatter": 2 * keys * size * degree},
        ]
    for result in worlds(degree).run(traffic, "allgather", balanced, dtype, True):
        assert result[0] == {"all_gather": 2}
        assert result[1] == {"all_gather": 2 * keys * size + 8 * 2 * (SEQ_LEN // degree)}
        assert result[2] == {"reduce_scatter": 1}
    for result in worlds(degree).run(traffic, "alltoall", balanced, dtype, False):
        forward, backward = hops * 2 * keys * size, hops * (2 * keys * size + 8 * keys)
        assert result == [
            {"send": hops, "recv": hops},
            {"send": forward, "recv": forward},
            {"send": 2 * hops, "recv": 2 * hops},
            {"send": backward, "recv": backward},
        ]


def tiny_llama() -> Llama:
    with torch.device("meta"):
        model = Llama(UNTIED)
    materialize(model, torch.device("cpu"))
    initialize_weights(model, seed=1)
    return model


def llama_errors() -> dict[tuple[str, bool], tuple[float, float]]:
    mesh = cp_mesh()
    tokens = torch.randint(UNTIED.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    whole = tiny_llama()
    whole_logits = whole(tokens)
    F.cross_entropy(whole_logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    errors: dict[tuple[str, bool], tuple[float, float]] = {}
    for method, balanced in product(METHODS, (True, False)):
        model = tiny_llama()
        apply_context_parallel(model, mesh, method, balanced)
        shards = SequenceShards(mesh.get_local_rank(), mesh.size(), balanced)
        positions = shards.positions(SEQ_LEN).expand(len(tokens), -1)
        logits = model(shards.take(tokens), positions)
        F.cross_entropy(logits.flatten(0, 1), shards.take(labels).flatten(), reduction="sum").backward()
        difference = 0.0
        for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None and expected.grad is not None
            dist.all_reduce(ours.grad)
            difference = max(difference, ((ours.grad - expected.grad).norm() / expected.grad.norm()).item())
        errors[method, balanced] = (logits - shards.take(whole_logits)).abs().max().item(), difference
    return errors


@pytest.mark.parametrize("degree", [2, 4])
def test_cp_dim_llama_logits_equal_one_process(worlds: Worlds, degree: int) -> None:
    """Position by position; and the ranks' gradients of every weight add up to those of one process."""
    for errors in worlds(degree).run(llama_errors):
        assert all(logits < 1e-5 and gradients < 1e-5 for logits, gradients in errors.values()), errors


def replaced_modules() -> None:
    mesh = cp_mesh()
    model = nn.ModuleDict({"a": nn.ModuleDict({"core": CausalAttention()}), "b": nn.Linear(2, 2)})
    names = list(dict(model.named_modules()))
    apply_context_parallel(model, mesh, "allgather", balanced=True)
    assert list(dict(model.named_modules())) == names
    kind = CausalAttention if mesh.size() == 1 else ContextParallelAttention
    assert type(model.get_submodule("a.core")) is kind and not list(model.get_submodule("a").parameters())


@pytest.mark.parametrize("degree", [1, 2])
def test_cp_replaces_attention_alone(worlds: Worlds, degree: int) -> None:
    worlds(degree).run(replaced_modules)


def refusal_of_documents() -> str:
    attention = ContextParallelAttention(cp_mesh(), "alltoall", balanced=True)
    with pytest.raises(UserError) as caught:
        attention(*whole_inputs(4, 2)[:3], DOCUMENTS)
    return str(caught.value)


def test_cp_the_ring_refuses_documents(worlds: Worlds) -> None:
    (message,) = worlds(1).run(refusal_of_documents)
    assert 'context_parallel_rotate_method = "alltoall"' in message and '"allgather"' in message


def refusals_of_an_accelerator() -> list[str]:
    group = cp_mesh().get_group()
    messages = []
    for dtype, head_dim in ((torch.float32, 8), (torch.bfloat16, 12)):
        query = torch.empty(2, 4, 8, head_dim, dtype=dtype, device="meta")
        with pytest.raises(UserError) as caught:
            ring_attention(query, query, query, group, balanced=True)
        messages.append(str(caught.value))
    return messages


def test_cp_the_ring_names_what_flash_kernels_refuse(worlds: Worlds) -> None:
    ((dtype, heads),) = worlds(1).run(refusals_of_an_accelerator)
    assert 'training.mixed_precision_param = "bfloat16"' in dtype and "not float32" in dtype
    assert "multiple of 8" in heads and "not 12" in heads
    assert all('context_parallel_rotate_method = "allgather"' in message for message in (dtype, heads))


def test_cp_accelerator_kernels_take_these_arguments() -> None:
    """On the meta device, which has the accelerators' operators and checks their arguments."""
    query = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16, device="meta")
    key_value = torch.empty(2, 2, 2, 12, 8, dtype=torch.bfloat16, device="meta")
    out, lse, rng = flash_forward(query, key_value, causal=False)
    assert out.shape == query.shape and lse.shape == (2, 4, 6) and lse.dtype == torch.float32
    gradients = flash_backward(query, out, out, lse, key_value, False, rng)
    assert gradients[0].shape == query.shape and gradients[1].shape == key_value.shape
    out = attend(query.requires_grad_(), key_value[0], key_value[1], documents=None)
    assert out.shape == query.shape and out.grad_fn is not None
    assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"


def compiled_errors() -> dict[str, tuple[float, int, int]]:
    """Per method: largest error of a whole model's logits and gradients, graph breaks, graphs."""
    mesh = cp_mesh()
    shards = SequenceShards(mesh.get_local_rank(), mesh.size(), balanced=True)
    tokens = torch.randint(UNTIED.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    outcomes = {}
    for method in METHODS:
        torch._dynamo.reset()
        counters.clear()
        results = []
        for compiled in (False, True):
            model = tiny_llama()
            apply_context_parallel(model, mesh, method, balanced=True)
            if compiled:
                for block in model.layers.values():
                    block.compile(backend="aot_eager", fullgraph=True)
            logits = model(shards.take(tokens), shards.positions(SEQ_LEN).expand(len(tokens), -1))
            results.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
        error = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
        outcomes[method] = error, counters["graph_break"].total(), counters["stats"]["unique_graphs"]
    return outcomes


@pytest.mark.slow
def test_cp_compiled_blocks_equal_eager_ones(worlds: Worlds) -> None:
    """Each block one graph, which all blocks share."""
    assert UNTIED.n_layers > 1
    for outcomes in worlds(2).run(compiled_errors):
        for error, breaks, graphs in outcomes.values():
            assert error < 2e-6 and (breaks, graphs) == (0, 1), outcomes


def ring_operators_checked() -> None:
    """By torch: schema, aliases, what the fakes promise, gradients in eager and in a compiled graph."""
    group = cp_mesh().get_group().group_name
    query, key, value, grad_out = whole_inputs(4, 2)
    query = query.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    key_value = torch.stack((key, value)).requires_grad_()
    torch.library.opcheck(ring_attention_forward, (query, key_value, group, True))
    saved = ring_attention_forward(query.detach(), key_value.detach(), group, True)
    torch.library.opcheck(
        ring_attention_backward,
        (grad_out, query.detach(), key_value.detach(), *saved, group, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_cp_the_ring_is_an_operator_by_the_rules(worlds: Worlds) -> None:
    worlds(2).run(ring_operators_checked)


def fake_rings() -> None:
    group = cp_mesh().get_group()
    if dist.get_rank() > 0:
        return  # nobody for rank 0 to talk to
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, heads, SEQ_LEN, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
        )
        out = query
        for _ in range(2):
            out = ring_attention(out, key, value, group, balanced=True)
        out.sum().backward()
    assert out.shape == query.shape and out.dtype == query.dtype
    for leaf in (query, key, value):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype


def test_cp_the_ring_of_fake_tensors_sends_nothing(worlds: Worlds) -> None:
    """Two layers, one after the other."""
    worlds(2).run(fake_rings)
