from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.checkpoint.toy import Toy
from titan.checkpoint.state import make_optimizer_state, plain_name, training_tensors


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_making_the_state_changes_no_bit(kind: type[torch.optim.Adam], implementation: str) -> None:
    model = Toy()
    with torch.no_grad():
        model.first.weight.view(-1)[:4] = torch.tensor([-0.0, 0.0, 1e-45, float("inf")])
    flags = {name: name == implementation for name in ("fused", "foreach")}
    optimizer = kind(model.parameters(), lr=0.3, weight_decay=0.5, eps=0.0, **flags)
    settings = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    gradient = model.head.bias.grad = torch.ones(3)
    before = _bits(model.state_dict())

    make_optimizer_state(optimizer)

    assert _bits(model.state_dict()) == before
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == settings
    assert model.head.bias.grad is gradient and model.first.weight.grad is None
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert not any(value.any() for value in state.values())


def test_state_that_exists_stays(tmp_path: object) -> None:
    model = Toy()
    model.second.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[model.head.weight])
    tensors = training_tensors([model], optimizer)
    for key, value in before.items():
        assert torch.equal(optimizer.state[model.head.weight][key], value)
    assert tensors["optimizer.head.weight.step"] == 1 and tensors["optimizer.first.bias.step"] == 0
    assert "optimizer.second.weight.step" not in tensors  # frozen


def test_an_untouched_start_trains_like_one_whose_state_was_made_ahead() -> None:
    models = [Toy(), Toy()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    make_optimizer_state(optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    assert _bits(models[0].state_dict()) == _bits(models[1].state_dict())


def test_wrappers_leave_no_trace_in_names() -> None:
    assert plain_name("layers._orig_mod.0._checkpoint_wrapped_module.w") == "layers.0.w"
    assert plain_name("my_orig_mod.w") == "my_orig_mod.w"
    bare, wrapped = Toy(), Toy()
    wrapped.second = checkpoint_wrapper(wrapped.second)
    wrapped.head = torch.compile(wrapped.head)
    names = [list(training_tensors([m], torch.optim.AdamW(m.parameters()))) for m in (bare, wrapped)]
    assert names[0] == names[1]
    assert "model.head.weight" in names[0]


def test_a_tied_weight_is_saved_once_under_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tensors = training_tensors([model], torch.optim.AdamW(model.parameters()))
    assert [name for name in tensors if name.startswith("model.")] == ["model.0.weight"]


def test_parts_with_distinct_names_make_one_model_and_others_are_refused() -> None:
    parts = [nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    assert {"model.0.weight", "model.1.weight"} <= training_tensors(parts, optimizer).keys()
    with pytest.raises(ValueError, match=r"two model parts have a tensor named 0\.weight"):
        training_tensors([parts[0], copy.deepcopy(parts[0])], optimizer)
    with pytest.raises(ValueError, match="no model part has"):
        training_tensors(parts[:1], optimizer)


def test_what_is_no_tensor_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.bias] = {"step": 3}
    with pytest.raises(TypeError, match=r"optimizer\.bias\.step is a int"):
        training_tensors([model], optimizer)


def test_an_optimizer_without_state() -> None:
    model = nn.Linear(2, 2)
    tensors = training_tensors([model], torch.optim.SGD(model.parameters(), lr=1.0))
    assert tensors.keys() == {"model.weight", "model.bias"}
