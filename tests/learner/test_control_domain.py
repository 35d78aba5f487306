"""The control domain: what happens to one update whatever the method, and checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from control_fragments import SIZE, alone, build_domain, continuous, control_config, fragment
from safetensors.torch import save_file
from torch import nn

from async_rl.config import load_control
from async_rl.control.checkpoint import load_actor
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.timer import StateTimer
from async_rl.wire import encode_groups, unpack_header
from learner.control.domain import MAX_SKIPPED, ControlDomain
from learner.control.main import build
from learner.control.method import Batch
from learner.rank import Rank


class Scripted:
    """A method of two roles with one weight each, whose losses have the gradients and KLs that a test tells."""

    def __init__(self, kls, gradients=(1.0, 1.0), outside=None):
        self.published, self.memories, self.sums = ("policy",), {}, {"kl": 1, "samples": 1}
        self.modules = {"policy": nn.Linear(1, 1, bias=False), "critic": nn.Linear(1, 1, bias=False)}
        self._kls, self._gradients, self._outside = kls, gradients, outside
        self.finished = []

    def rates(self, lr, step):
        return {"policy": lr, "critic": 0.5 * lr}

    def clipped(self):
        return ("policy",)

    def prepare(self, groups, step):
        return Batch(data=None, updates=self._kls, amount=7.0, facts={"step": float(step)})

    def loss(self, batch, part):
        weights = [module.weight.sum() for module in self.modules.values()]
        loss = sum(weight * gradient for weight, gradient in zip(weights, self._gradients, strict=True))
        if self._outside is not None:
            loss = loss + self._outside(torch.ones(1)).sum()
        return loss, {"kl": part * 10.0, "samples": 10.0}

    def finish(self, batch, step):
        self.finished.append(step)

    def metrics(self, totals, num_updates):
        return {"kl": float(totals["kl"] / totals["samples"]), "updates": num_updates}


def scripted(method, **learner):
    config = control_config(learner={"lr": 0.1, "lr_max": 1.0, **learner})
    return ControlDomain(config, continuous(), method, alone(), StateTimer())


@pytest.mark.parametrize(
    ("kls", "factor"),
    [
        ([0.5], 1.0),  # the first update of a step is that of the start's policy
        ([0.0, 0.021], 1 / 1.5),  # above twice the target
        ([0.0, 0.0199], 1.0),
        ([0.0, 0.004], 1.5),  # below half
        ([0.0, 0.0051], 1.0),
        ([0.0, 0.0], 1.0),  # nothing has moved
        ([0.0, 0.021, 0.021, 0.001], 1 / 1.5),
    ],
)
def test_the_adaptive_rate_follows_the_kl_of_each_update(kls, factor):
    domain = scripted(Scripted(kls))
    assert domain.train_groups([], 0).metrics["lr"] == pytest.approx(0.1 * factor)


def test_the_rate_is_adapted_before_the_update_that_measured_the_kl():
    method = Scripted([0.0, 0.021])
    domain = scripted(method)
    before = {role: module.weight.item() for role, module in method.modules.items()}
    domain.train_groups([], 0)
    # Adam moves by the rate in its first updates when gradients stay equal: 0.1, then 0.1 / 1.5; the critic half of it
    assert before["policy"] - method.modules["policy"].weight.item() == pytest.approx(0.1 + 0.1 / 1.5, rel=1e-4)
    assert before["critic"] - method.modules["critic"].weight.item() == pytest.approx(0.05 + 0.05 / 1.5, rel=1e-4)


def test_limits_and_other_schedules():
    fast = scripted(Scripted([0.0, 1e-6, 1e-6, 1e-6]), lr_max=0.2)
    assert fast.train_groups([], 0).metrics["lr"] == pytest.approx(0.2)
    slow = scripted(Scripted([0.0, 9.0, 9.0, 9.0]), lr_min=0.06)
    assert slow.train_groups([], 0).metrics["lr"] == pytest.approx(0.06)
    constant = scripted(Scripted([0.0, 9.0]), lr_schedule="constant", lr_max=1e-2)
    assert constant.train_groups([], 3).metrics["lr"] == 0.1
    linear = scripted(Scripted([0.0, 9.0]), lr_schedule="linear", lr_max=1e-2)
    assert linear.train_groups([], 25).metrics["lr"] == pytest.approx(0.075)  # of 100 steps


def test_each_role_is_clipped_by_its_own_norm_and_only_if_the_method_says_so():
    domain = scripted(Scripted([0.0], gradients=(30.0, 40.0)), max_grad_norm=2.0)
    metrics = domain.train_groups([], 0).metrics
    assert (metrics["grad_norm/policy"], metrics["grad_norm/critic"]) == (30.0, 40.0)
    spans = {role: domain.flat.grad[domain.flat.trained_span(role)].sum().item() for role in domain.flat.roles}
    assert spans == {"policy": pytest.approx(2.0), "critic": 40.0}


def test_updates_that_are_not_finite_are_skipped_and_too_many_end_the_run():
    method = Scripted([0.0] * (MAX_SKIPPED - 1), gradients=(1.0, float("nan")))
    domain = scripted(method)
    before = domain.flat.data.clone()
    metrics = domain.train_groups([], 0).metrics
    assert metrics["updates_skipped"] == MAX_SKIPPED - 1 == domain.numbers()["skipped_in_row"]
    assert torch.equal(domain.flat.data, before)
    with pytest.raises(AsyncRLError, match=r"step 1: .*norm/critic not finite in 5 updates in a row"):
        domain.train_groups([], 1)


def test_a_module_outside_the_flat_vector_is_refused():
    domain = scripted(Scripted([0.0], outside=nn.Linear(1, 3)))
    with pytest.raises(RuntimeError, match=r"gradient for a tensor \[3, 1\] outside the flat vector"):
        domain.train_groups([], 0)


def test_what_a_step_tells():
    method = Scripted([0.01, 0.03])
    trained = scripted(method).train_groups([], 4)
    assert trained.amount == trained.metrics["env_steps/step"] == 7.0
    assert trained.metrics["kl"] == pytest.approx(0.02)
    assert (trained.metrics["step"], trained.metrics["updates"], trained.metrics["updates_skipped"]) == (4.0, 2, 0.0)
    assert method.finished == [4]


def test_numbers_continue_what_a_controller_moved_and_leave_what_is_configured():
    adaptive, constant = scripted(Scripted([0.0])), scripted(Scripted([0.0]), lr_schedule="constant", lr_max=1e-2)
    for domain in (adaptive, constant):
        domain.set_numbers({"lr": 0.03, "skipped_in_row": 2.0})
        assert domain.skipped_in_row == 2
    assert adaptive.numbers()["lr"] == 0.03
    assert constant.numbers()["lr"] == 0.1


@pytest.mark.parametrize(("network", "roles"), [("mlp", {"policy"}), ("gru", {"policy", "critic"})])
def test_actors_get_the_policy_and_a_critic_only_if_it_carries_a_state(network, roles):
    domain, _ = build_domain(control_config(policy={"network": network, "normalize": True}), continuous())
    names = [slot.name for slot in domain.published]
    assert [slot.offset for slot in domain.published] == [slot.offset for slot in domain.flat.layout[: len(names)]]
    if len(roles) == 1:
        assert {"std", "head.weight", "normalizer.mean", "normalizer.count"} < set(names)
    else:
        assert {name.partition(".")[0] for name in names} == roles


def test_a_checkpoint_continues_bit_by_bit_and_is_enough_to_act_from(tmp_path):
    generator = torch.Generator().manual_seed(8)
    states = torch.randn(2, 20, SIZE, generator=generator)
    save_file({"states": states[0], "next_states": states[1]}, tmp_path / "expert.safetensors")
    amp = {"style_weight": 0.5, "expert": str(tmp_path / "expert.safetensors"), "hidden": [4], "replay": 60}
    config = control_config(
        policy={"normalize": True}, rnd={"weight": 0.1}, algorithm={"epochs": 2}, amp=amp
    )  # the replay holds more than the last step had, and its ring has gone round
    spaces = continuous()
    first, method = build_domain(config, spaces, seed=1)
    steps = [lambda s=s: [fragment(config, spaces, method, seed=s, version=s)] for s in range(3)]
    for step in range(2):
        first.train_groups(steps[step](), step)
    first.save(tmp_path)
    second, _ = build_domain(config, spaces, seed=2)
    second.load(tmp_path)
    second.set_numbers(json.loads(json.dumps(first.numbers())))
    assert torch.equal(first.flat.data, second.flat.data)
    last = steps[2]()
    for domain in (first, second):
        domain.train_groups(last, 2)
    assert torch.equal(first.flat.data, second.flat.data)

    again, _, actor = load_actor(tmp_path)
    assert again == config
    first.load(tmp_path)
    obs = {"policy": torch.randn(5, SIZE)}
    policy = method.modules["policy"]
    assert torch.equal(actor.features(actor.observe(obs)), policy.features(policy.observe(obs)))


def test_a_checkpoint_of_other_networks_is_refused(tmp_path):
    build_domain(control_config(), continuous())[0].save(tmp_path)
    wider, _ = build_domain(control_config(policy={"hidden": [17, 16]}), continuous())
    with pytest.raises(ConfigError, match=r"policy\.safetensors does not fit what is trained"):
        wider.load(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors does not fit"):
        build_domain(control_config(), continuous())[0].load(tmp_path)


def test_a_rank_builds_its_domain_from_the_spaces_of_the_run_and_trains_a_message(tmp_path):
    spaces, config = continuous(), control_config()
    spaces.write(tmp_path)
    domain = build(config, Rank(group=alone(), timer=StateTimer(), out=tmp_path, resume=None))
    header, *frames = encode_groups("shard", [fragment(config, spaces, domain._method)])
    trained = domain.train(unpack_header(header), frames, 0)
    assert trained.amount == 48
    assert trained.metrics["logp_diff/fresh"] < 1e-6
    domain.save(tmp_path)
    assert load_control(str(tmp_path / "config.toml")) == config
