"""Flat parameters: one vector, all views, nothing left out."""

import pytest
import torch
from torch import nn

from learner.flat import FlatParameters, view_of
from learner.optimizer import FlatAdamW, clip_flat
from learner.scalars import Scalars

CPU = torch.device("cpu")


def test_parameters_and_gradients_of_a_qwen2_are_views_of_two_vectors(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters({"policy": model}, CPU, num_scalars=5)
    assert [slot.name for slot in flat.layout] == [name for name, _ in model.named_parameters()]
    assert flat.grad_and_tail.numel() == flat.size + 5
    model(input_ids=torch.tensor([[3, 4, 5]])).logits.square().mean().backward()
    flat.check_views()
    for slot, (name, parameter) in zip(flat.layout, model.named_parameters(), strict=True):
        assert torch.equal(parameter, before[name])
        assert torch.equal(view_of(flat.data, slot), parameter)
        assert torch.equal(view_of(flat.grad, slot), parameter.grad)
        assert parameter.grad.abs().sum() > 0
        assert slot.offset % 32 == 0
    flat.data.zero_()
    assert all((p == 0).all() for p in model.parameters())


def test_tied_parameters_appear_once_and_both_uses_add_their_gradient(make_model):
    model = make_model(tied=True)
    flat = FlatParameters({"policy": model}, CPU, 0)
    names = [slot.name for slot in flat.layout]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    flat.check_views()


def test_several_modules_share_one_vector_under_their_roles():
    flat = FlatParameters({"policy": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}, CPU, 0)
    assert [s.name for s in flat.layout] == ["policy.weight", "policy.bias", "critic.weight", "critic.bias"]
    assert [s.numel for s in flat.layout] == [6, 2, 3, 1]


def test_frozen_parameters_stay_out():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert [s.name for s in FlatParameters({"policy": layer}, CPU, 0).layout] == ["weight"]
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatParameters({"policy": layer.requires_grad_(False)}, CPU, 0)


def test_a_lost_gradient_view_is_named():
    layer = nn.Linear(3, 2)
    flat = FlatParameters({"policy": layer}, CPU, 0)
    layer.zero_grad(set_to_none=True)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight: its \.grad was replaced"):
        flat.check_views()


def test_a_replaced_parameter_is_named():
    layer = nn.Linear(3, 2)
    flat = FlatParameters({"policy": layer}, CPU, 0)
    layer.bias.data = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"bias: its \.data was replaced"):
        flat.check_views()


def test_zero_grad_clears_gradient_and_tail_and_keeps_the_views():
    layer = nn.Linear(3, 2)
    flat = FlatParameters({"policy": layer}, CPU, 2)
    layer(torch.ones(1, 3)).sum().backward()
    flat.tail.fill_(7)
    flat.zero_grad()
    assert flat.grad_and_tail.abs().sum() == 0
    flat.check_views()


def test_checksums_name_the_tensor_that_changed():
    layer = nn.Linear(3, 2)
    flat = FlatParameters({"policy": layer}, CPU, 0)
    whole, parts = flat.checksum(), flat.checksums()
    layer.bias.data[1] += 1e-3
    assert flat.checksum() != whole
    assert [a != b for a, b in zip(parts, flat.checksums(), strict=True)] == [False, True]


def test_bfloat16_keeps_a_float32_master_and_adds_gradients_in_float32():
    layer = nn.Linear(4, 3)
    exact = layer.weight.detach().clone()
    flat = FlatParameters({"policy": layer}, CPU, 0, dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(view_of(flat.data, flat.layout[0]), exact)
    for _ in range(2):
        layer(torch.full((1, 4), 1.0, dtype=torch.bfloat16)).sum().backward()
    # one unit input and one unit output gradient, twice; then 1/1024 more, which bfloat16 could not add to 2
    layer(torch.full((1, 4), 1 / 1024, dtype=torch.bfloat16)).sum().backward()
    flat.check_views()
    assert torch.equal(view_of(flat.grad, flat.layout[0]), torch.full((3, 4), 2 + 1 / 1024))
    flat.data.add_(1.0)
    flat.refresh()
    assert torch.equal(layer.weight, (exact + 1.0).bfloat16())


def test_the_flat_step_is_that_of_adamw_on_the_tensors_one_by_one():
    torch.manual_seed(0)
    layer, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(layer.state_dict())
    flat = FlatParameters({"policy": layer}, CPU, 1)
    ours = FlatAdamW(flat, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=False)
    for step in range(4):
        inputs = torch.randn(8, 5)
        for module, clear in ((layer, flat.zero_grad), (twin, theirs.zero_grad)):
            clear()
            module(inputs).square().mean().backward()
        theirs.param_groups[0]["lr"] = 0.01 / (step + 1)
        ours.step({"policy": 0.01 / (step + 1)})
        theirs.step()
    assert torch.allclose(layer.weight, twin.weight, atol=1e-6)
    assert torch.allclose(layer.bias, twin.bias, atol=1e-6)


def test_clipping_scales_to_the_norm_and_leaves_small_and_broken_gradients():
    gradient = torch.tensor([3.0, 4.0])
    assert clip_flat(gradient, 1.0) == 5.0
    assert gradient.tolist() == pytest.approx([0.6, 0.8])
    assert clip_flat(gradient, 2.0) == pytest.approx(1.0)
    assert gradient.tolist() == pytest.approx([0.6, 0.8])
    broken = torch.tensor([float("nan"), 1.0])
    assert clip_flat(broken, 1.0) != clip_flat(broken, 1.0)  # NaN
    assert broken[1] == 1.0


class Normalised(nn.Module):
    """A trained layer, running statistics, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.full((3,), 7.0))
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.layer(x - self.mean))


def test_state_lies_behind_the_parameters_of_its_module():
    policy, critic = Normalised(), Normalised()
    flat = FlatParameters({"policy": policy, "critic": critic}, CPU, 0, with_state=True)
    names = ["layer.weight", "layer.bias", "frozen.weight", "frozen.bias", "mean"]
    assert [s.name for s in flat.layout] == [f"{role}.{name}" for role in ("policy", "critic") for name in names]
    policy.mean.mul_(2)
    assert view_of(flat.data, flat.slots("policy")[-1]).tolist() == [14.0, 14.0, 14.0]
    assert flat.trained_span("policy") == slice(0, flat.slots("policy")[2].offset)
    assert flat.trained_span("critic").start == flat.span("policy").stop


def test_the_optimiser_leaves_state_alone_and_its_moments_survive_a_checkpoint():
    torch.manual_seed(0)
    module = Normalised()
    flat = FlatParameters({"policy": module}, CPU, 0, with_state=True)
    optimizer = FlatAdamW(flat, (0.9, 0.999), weight_decay=0.1)
    before = {slot.name: view_of(flat.data, slot).clone() for slot in flat.layout}
    for _ in range(2):
        flat.zero_grad()
        module(torch.ones(4, 3)).square().sum().backward()
        flat.check_views()
        optimizer.step({"policy": 0.1})
    changed = {slot.name for slot in flat.layout if not torch.equal(view_of(flat.data, slot), before[slot.name])}
    assert changed == {"layer.weight", "layer.bias"}
    state = optimizer.state()
    assert state["exp_avg"].numel() == flat.size
    again = FlatAdamW(flat, (0.9, 0.999), weight_decay=0.1)
    again.load_state(state)
    assert torch.equal(again.state()["exp_avg_sq"], state["exp_avg_sq"])
    assert state["exp_avg_sq"][flat.trained_span("policy")].abs().sum() > 0


def test_state_that_is_not_float32_is_refused_by_name():
    module = nn.BatchNorm1d(2)  # counts batches in an int64
    with pytest.raises(ValueError, match="num_batches_tracked"):
        FlatParameters({"policy": module}, CPU, 0, with_state=True)


def test_a_module_outside_the_flat_vector_is_found_in_the_graph_of_the_loss():
    inside, outside = Normalised(), nn.Linear(2, 1)
    flat = FlatParameters({"policy": inside}, CPU, 0, with_state=True)
    flat.check_graph(inside(torch.ones(1, 3)).sum())
    with pytest.raises(RuntimeError, match=r"tensor \[1, 2\] outside the flat vector|tensor \[1\] outside"):
        flat.check_graph(outside(inside(torch.ones(1, 3))).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_that_were_read_stay_when_the_next_update_clears_the_tail(dtype):
    tail = torch.zeros(4, dtype=dtype)
    scalars = Scalars(tail, {"tokens": 1, "ages": 3})
    scalars.add({"tokens": 5, "ages": torch.tensor([1.0, 0.0, 2.0])})
    found = scalars.read()
    tail.zero_()
    assert (found["tokens"].tolist(), found["ages"].tolist()) == (5, [1, 0, 2])
