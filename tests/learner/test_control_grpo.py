"""GRPO for episodes: advantages within groups, the loss by hand, counts over ranks, agreement with the actors."""

import numpy as np
import pytest
import torch
from control_fragments import alone, build_domain, control_config, discrete

from async_rl.control.fragment import check_control_group
from async_rl.control.normalizer import Normalizer
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.data import Group
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.timer import StateTimer
from learner.control.demonstrations import imitate
from learner.control.grpo import Grpo
from learner.control.judging import judge, rows_of
from learner.control.main import build
from learner.rank import Rank

VLA = Spaces(
    observations={"image": Observation((8, 8, 3), "uint8"), "instruction": Observation((4,), "int32")},
    action=Action(kind="discrete", size=3, choices=(4, 4, 3)),
)
MLP = discrete(3, 2)
CONTINUOUS = Spaces(
    observations={"policy": Observation((4,))}, action=Action(kind="continuous", size=2, low=(-1,) * 2, high=(1,) * 2)
)
TRANSFORMER = {
    "policy": {"network": "transformer", "hidden": [32, 32]},
    "observations": {"actor": ["image", "instruction"]},
}


def settings(spaces, **sections):
    base = {"algorithm": {"name": "grpo", "epochs": 1, "minibatches": 1, "entropy_coef": 0.0}}
    base |= {"env": {"num_envs": 64, "horizon": 24}, "learner": {"lr_schedule": "constant"}}
    base |= TRANSFORMER if spaces is VLA else {}
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return control_config(**merged)


def observations(spaces, count, generator):
    drawn = {}
    for name, space in spaces.observations.items():
        high = {"uint8": 256, "int32": 9, "float32": 1000}[space.dtype]
        whole = torch.randint(0, high, (count, *space.shape), generator=generator)
        drawn[name] = whole.float() / 500 - 1 if space.dtype == "float32" else whole.to(getattr(torch, space.dtype))
    return drawn


@torch.no_grad()
def episodes(method, spaces, lengths=(3, 1, 2), rewards=(1.0, 0.0, 0.5), version=0, seed=0):
    """A group as an actor with the method's present policy would send it; observations are noise."""
    generator = torch.Generator().manual_seed(seed)
    actor, count = method.modules["policy"], sum(lengths)
    obs = observations(spaces, count, generator)
    distribution = actor.distribution(actor.features(actor.observe(obs)))
    actions = distribution.sample(generator)
    logprobs = distribution.log_prob_parts(actions)
    dtype = np.float32 if spaces.action.kind == "continuous" else np.int32
    group = Group(
        ordinal=seed,
        attempt=0,
        task_index=0,
        lengths=lengths,
        arrays={
            **{f"obs/{name}": array.numpy() for name, array in obs.items()},
            "actions": actions.numpy().astype(dtype),
            "logprobs": logprobs.numpy(),
            "versions": np.full(logprobs.shape, version, np.int32),
            "episode_returns": np.array(rewards, np.float32) * 2,
            "episode_lengths": np.array(lengths, np.int32),
        },
        rewards=np.array(rewards, np.float32),
    )
    assert check_control_group(group, spaces, 64, episodes=True) == ""
    return group


def with_arrays(group, **arrays):
    return Group(
        ordinal=group.ordinal,
        attempt=0,
        task_index=0,
        lengths=group.lengths,
        arrays={**group.arrays, **arrays},
        rewards=group.rewards,
    )


def gradient(domain, method, groups, step=0):
    """Gradient of the step's first update, as a dictionary, and the batch."""
    batch = method.prepare(groups, step)
    domain.flat.zero_grad()
    loss, sums = method.loss(batch, batch.updates[0])
    loss.backward()
    return domain.flat.grad.clone(), loss.item(), sums, batch


def test_advantages_are_those_of_the_episodes_within_their_own_group():
    _, method = build_domain(settings(MLP), MLP)
    groups = [episodes(method, MLP, (2, 1), (1.0, 3.0)), episodes(method, MLP, (1, 3), (-8.0, -2.0), seed=1)]
    (part,) = method.prepare(groups, 0).updates
    by_reward = torch.tensor([-1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0])  # mean 2, deviation 1; mean -5, deviation 3
    assert part.count == 7
    assert sorted(part.samples.advantages.tolist()) == pytest.approx(sorted(by_reward.tolist()), abs=1e-4)
    for group, start, expected in ((groups[0], 0, by_reward[:3]), (groups[1], 0, by_reward[3:])):
        for row, advantage in enumerate(expected):
            observed = torch.from_numpy(group.arrays["obs/policy"][start + row])
            (found,) = (part.samples.x == observed).all(1).nonzero()[:, 0].tolist()
            assert part.samples.advantages[found] == pytest.approx(advantage.item(), abs=1e-4)


@pytest.mark.parametrize("spaces", [MLP, CONTINUOUS, VLA], ids=["mlp", "gaussian", "transformer"])
def test_the_first_gradient_is_the_plain_policy_gradient_over_the_parts_of_actions(spaces):
    config = settings(spaces, algorithm={"entropy_coef": 0.3})
    domain, method = build_domain(config, spaces)
    group = episodes(method, spaces, (3, 1, 2), (1.0, 0.0, 0.5))
    found, loss, sums, _ = gradient(domain, method, [group])
    actor, size = method.modules["policy"], spaces.action.size
    obs = {name: torch.from_numpy(group.arrays[f"obs/{name}"]) for name in actor.groups}
    actions = torch.from_numpy(group.arrays["actions"])
    logprobs, entropies = judge(actor, actor.observe(obs), actions if spaces is CONTINUOUS else actions.long())
    spread = (1 / 6) ** 0.5  # of 1, 0, 0.5
    advantages = torch.tensor([0.5] * 3 + [-0.5] + [0.0] * 2) / spread
    # at ratio 1 the gradient of -r A is -A ∇log π; six steps of `size` parts each
    expected = -(advantages[:, None] * logprobs).sum() / (6 * size) - 0.3 * entropies.sum() / (6 * size)
    domain.flat.zero_grad()
    expected.backward()
    assert (found - domain.flat.grad).abs().max() < 1e-5
    policy = -(3 * 0.5 - 0.5) / spread / 6
    assert loss == pytest.approx(policy - 0.3 * entropies.sum().item() / (6 * size), abs=1e-5)
    assert float(sums["kl"]) == pytest.approx(0, abs=1e-5)
    assert float(sums["samples"]) == 6


def test_parts_whose_ratio_has_left_the_clip_have_no_gradient_and_are_counted():
    domain, method = build_domain(settings(MLP), MLP)
    group = episodes(method, MLP, (2, 2), (1.0, 0.0))
    shift = np.zeros((4, 2), np.float32)
    shift[:, 0] = np.log(2.0)  # the first part is twice as likely now as when it was chosen
    older = with_arrays(group, logprobs=group.arrays["logprobs"] - shift, versions=group.arrays["versions"] - 0)
    _, loss, sums, _ = gradient(domain, method, [older], step=1)
    # A = +1, +1, -1, -1. First part: min(2, 1.2) · 1 twice, min(-2, -1.2) twice. Second part: 1, 1, -1, -1.
    assert loss == pytest.approx(-(2 * 1.2 - 2 * 2.0) / 8, abs=1e-3)
    assert float(sums["clipped"]) == pytest.approx(2 / 8)


def test_the_decoupled_loss_weights_with_the_proximal_policy_and_takes_its_ratio_to_it():
    config = settings(MLP, algorithm={"proximal": "recomputed", "weight_max": 1.5}, buffer={"max_staleness": 1})
    domain, method = build_domain(config, MLP)
    group = episodes(method, MLP, (2, 2), (1.0, 0.0))
    shift = np.tile(np.log(np.array([2.0, 0.5], np.float32)), (4, 1))
    older = with_arrays(group, logprobs=group.arrays["logprobs"] - shift)
    _, loss, sums, _ = gradient(domain, method, [older], step=1)
    _, plain, _, _ = gradient(domain, method, [group])
    assert plain == pytest.approx(0, abs=1e-5)  # two steps of +1, two of -1
    unequal = episodes(method, MLP, (3, 1), (1.0, 0.0))
    older = with_arrays(unequal, logprobs=unequal.arrays["logprobs"] - shift)
    _, loss, sums, _ = gradient(domain, method, [older], step=1)
    # ratios are 1; weights min(2, 1.5) and 0.5 for the parts: -(3 - 1) (1.5 + 0.5) / 8
    assert loss == pytest.approx(-0.5, abs=1e-4)
    assert float(sums["clipped"]) == 0


def test_the_kl_is_k3_to_the_policy_of_the_steps_start_summed_over_the_parts():
    domain, method = build_domain(settings(VLA), VLA)
    group = episodes(method, VLA, (3, 2), (1.0, 0.0))
    batch = method.prepare([group], 0)
    (part,) = batch.updates
    with torch.no_grad():
        domain.flat.data.add_(0.05 * torch.randn(domain.flat.data.shape, generator=torch.Generator().manual_seed(1)))
        now, _ = judge(method.modules["policy"], part.samples.x, part.samples.actions)
        _, sums = method.loss(batch, part)
    d = (now - part.samples.start).double()
    assert float(sums["kl"]) == pytest.approx((d.exp() - 1 - d).sum().item(), rel=1e-3)
    assert float(sums["kl"]) > 1e-3


def test_groups_without_differences_teach_nothing():
    domain, method = build_domain(settings(VLA), VLA)
    found, loss, _, batch = gradient(domain, method, [episodes(method, VLA, rewards=(0.25, 0.25, 0.25))])
    assert not found.any()
    assert loss == 0
    assert batch.facts["groups/varied"] == 0


def test_two_ranks_and_any_split_add_up_to_the_gradient_of_one(monkeypatch):
    config = settings(VLA, algorithm={"minibatches": 2, "entropy_coef": 0.1})
    domain, method = build_domain(config, VLA)
    groups = [episodes(method, VLA, (3, 2, 2), (1, 0, 0), seed=0), episodes(method, VLA, (1, 4), (0, 1), seed=1)]
    whole = build_domain(settings(VLA, algorithm={"entropy_coef": 0.1}), VLA)
    whole[0].flat.data.copy_(domain.flat.data)
    expected, _, _, _ = gradient(*whole, groups)
    total = torch.zeros_like(expected)
    # each of two ranks has one group and two parts; the counts that all ranks hear of are those of the whole batch: 12
    for group in groups:
        monkeypatch.setattr("learner.control.grpo.sum_together", lambda _, parts: counting(parts, 12))
        batch = method.prepare([group], 0)
        assert len(batch.updates) == 2
        for part in batch.updates:
            domain.flat.zero_grad()
            method.loss(batch, part)[0].backward()
            total += domain.flat.grad
    assert (total - expected).abs().max() < 1e-5


def counting(parts, count):
    """What the ranks would hear if every part had ``count`` samples over all of them."""
    return {name: part.double() for name, part in parts.items()} | {"counts": torch.full_like(parts["counts"], count)}


def test_every_sample_is_in_one_part_of_an_epoch_and_all_epochs_have_the_same():
    _, method = build_domain(settings(MLP, algorithm={"epochs": 3, "minibatches": 4}), MLP)
    group = episodes(method, MLP, (4, 3, 2), (1, 0, 0))
    updates = method.prepare([group], 5).updates
    assert len(updates) == 12
    rows = torch.cat([part.samples.x for part in updates[:4]])
    everything = torch.from_numpy(group.arrays["obs/policy"])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, everything.tolist()))
    assert [part.count for part in updates] == [3, 2, 2, 2] * 3
    assert all(a is b for a, b in zip(updates[:4], updates[4:8], strict=True))
    assert not torch.equal(torch.cat([p.samples.x for p in method.prepare([group], 6).updates[:4]]), rows)


@pytest.mark.parametrize("spaces", [MLP, VLA], ids=["mlp", "transformer"])
def test_a_rank_without_samples_in_a_part_adds_nothing_to_it(spaces, monkeypatch):
    domain, method = build_domain(settings(spaces, algorithm={"minibatches": 4}), spaces)
    monkeypatch.setattr("learner.control.grpo.sum_together", lambda _, parts: counting(parts, 3))  # others have some
    batch = method.prepare([episodes(method, spaces, (1, 1), (1, 0))], 0)
    assert [len(part.samples.advantages) for part in batch.updates] == [1, 1, 0, 0]
    domain.flat.zero_grad()
    loss, sums = method.loss(batch, batch.updates[-1])
    loss.backward()
    assert not domain.flat.grad.any()
    assert float(sums["samples"]) == 0


def test_fewer_samples_than_parts_over_all_ranks_are_refused():
    _, method = build_domain(settings(MLP, algorithm={"minibatches": 4}), MLP)
    with pytest.raises(AsyncRLError, match="2 samples do not fill 4 mini-batches"):
        method.prepare([episodes(method, MLP, (1, 1), (1, 0))], 0)


def test_an_actor_with_other_log_probabilities_of_the_same_version_ends_the_run():
    _, method = build_domain(settings(VLA), VLA)
    group = episodes(method, VLA)
    facts = method.prepare([group], 0).facts
    assert facts["logp_diff/fresh"] < 1e-5
    _, method = build_domain(settings(VLA), VLA)
    wrong = with_arrays(group, logprobs=group.arrays["logprobs"] - 0.1)
    with pytest.raises(AsyncRLError, match="disagree about the same weights"):
        method.prepare([wrong], 0)
    older = method.prepare([wrong], 1).facts  # of an older version nothing can be said
    assert (older["logp_diff/fresh"], older["logp_diff/older"]) == (None, pytest.approx(0.1, abs=1e-4))


def test_the_metrics_tell_judged_rewards_and_ages():
    _, method = build_domain(settings(MLP), MLP)
    groups = [episodes(method, MLP, version=1), episodes(method, MLP, rewards=(1, 1, 1), version=2, seed=1)]
    batch = method.prepare(groups, 3)
    assert batch.amount == 12
    assert batch.facts["reward/mean"] == pytest.approx((1.5 + 3) / 6)
    assert batch.facts["groups/varied"] == 0.5
    assert batch.facts["age/mean"] == pytest.approx(1.5)


def test_the_normaliser_takes_in_every_step_of_a_batch_after_the_updates():
    domain, method = build_domain(settings(MLP, policy={"normalize": True}), MLP)
    group = episodes(method, MLP)
    domain.train_groups([group], 0)
    normalizer = method.modules["policy"].normalizer
    assert isinstance(normalizer, Normalizer)
    assert normalizer.mean.numpy() == pytest.approx(group.arrays["obs/policy"].mean(0), abs=1e-5)
    assert normalizer.count == 6


@pytest.mark.parametrize("spaces", [MLP, VLA], ids=["mlp", "transformer"])
def test_training_makes_rewarded_actions_likelier(spaces):
    """A bandit: the episode is one step, and worth as much as its first part's choice says."""
    config = settings(
        spaces, algorithm={"epochs": 2, "minibatches": 2}, learner={"lr": 3e-3, "lr_schedule": "kl_adaptive"}
    )
    domain, method = build_domain(config, spaces)
    means = []
    for step in range(25):
        groups = []
        for number in range(2):
            group = episodes(method, spaces, (1,) * 16, (0.0,) * 16, version=step, seed=2 * step + number)
            rewards = (group.arrays["actions"][:, 0] == 1).astype(np.float32)
            groups.append(
                Group(
                    **{n: getattr(group, n) for n in ("ordinal", "attempt", "task_index", "lengths", "arrays")},
                    rewards=rewards,
                )
            )
        means.append(np.mean([group.rewards.mean() for group in groups]))
        trained = domain.train_groups(groups, step)
        assert np.isfinite([v for v in trained.metrics.values() if v is not None]).all()
    assert np.mean(means[-5:]) > np.mean(means[:3]) + 0.4


# -- demonstrations


def echo(count, seed, **kwargs):
    """The right action is what the instruction says: its first three words."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, [4, 4, 3, 9], (count, 4)).astype(np.int32)
    return {"obs/image": np.zeros((count, 8, 8, 3), np.uint8), "obs/instruction": words, "actions": words[:, :3]}


def wrong(count, seed, **kwargs):
    return echo(count, seed) | {"actions": np.zeros((count, 2), np.int32)}


def demonstrated(name, updates=30):
    return settings(VLA, episodes={"demonstrations": f"{__name__}:{name}", "demonstration_updates": updates})


def test_demonstrations_teach_the_policy_before_the_first_step():
    torch.manual_seed(0)
    method = Grpo(demonstrated("echo"), VLA, alone())
    shown = {name: torch.from_numpy(array) for name, array in echo(200, 99).items()}
    actor = method.modules["policy"]
    x = actor.observe({name: shown[f"obs/{name}"] for name in actor.groups})
    with torch.no_grad():
        found = actor.distribution(actor.features(rows_of(x, torch.arange(200)))).mode()
    assert (found == shown["actions"]).all(1).float().mean() > 0.3  # by chance: 1 / 48
    assert all(p.grad is None for p in actor.parameters())


def test_a_resumed_policy_sees_no_demonstrations(tmp_path):
    VLA.write(tmp_path)
    config = demonstrated("wrong")  # imitating these would be refused
    build(config, Rank(group=alone(), timer=StateTimer(), out=tmp_path, resume=tmp_path))
    with pytest.raises(ConfigError, match="actions"):
        build(config, Rank(group=alone(), timer=StateTimer(), out=tmp_path, resume=None))


def far_away(count, seed, **kwargs):
    """Numbers far from 0; the right action is which of the first three is the largest."""
    rng = np.random.default_rng(seed)
    largest = rng.integers(0, 3, count)
    obs = 50 + 10 * np.eye(4, dtype=np.float32)[largest] + rng.normal(0, 0.5, (count, 4)).astype(np.float32)
    return {"obs/policy": obs, "actions": np.stack([largest, largest % 2], 1).astype(np.int32)}


def test_the_first_steps_statistics_do_not_undo_what_demonstrations_taught():
    sections = {"demonstrations": f"{__name__}:far_away", "demonstration_updates": 60}
    config = settings(MLP, policy={"normalize": True, "hidden": [32]}, episodes=sections, learner={"lr": 1e-6})
    domain, method = build_domain(config, MLP)
    actor = method.modules["policy"]
    shown = {name: torch.from_numpy(array) for name, array in far_away(300, 9).items()}

    def share_right():
        with torch.no_grad():
            found = actor.distribution(actor.features(shown["obs/policy"])).mode()
        return (found == shown["actions"]).all(1).float().mean().item()

    assert actor.normalizer.count == 60 * 256
    assert share_right() > 0.95
    played = episodes(method, MLP)
    obs = far_away(6, 3)["obs/policy"]
    with torch.no_grad():
        distribution = actor.distribution(actor.features(torch.from_numpy(obs)))
        logprobs = distribution.log_prob_parts(torch.from_numpy(played.arrays["actions"]).long()).numpy()
    domain.train_groups([with_arrays(played, **{"obs/policy": obs}, logprobs=logprobs)], 0)
    assert share_right() > 0.95


def test_imitation_ends_once_the_demonstrated_actions_are_likely_enough(monkeypatch):
    made = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: made.append(1) or step(self))
    torch.manual_seed(0)
    actor = Grpo(settings(VLA), VLA, alone()).modules["policy"]
    config = demonstrated("echo", updates=30)
    enough = config.episodes.model_copy(update={"demonstration_loss": 100.0})  # it is below that from the start
    imitate(actor, config.model_copy(update={"episodes": enough}), VLA)
    assert len(made) == 8  # as many as the mean is taken over


def test_a_number_of_updates_without_demonstrations_is_refused():
    with pytest.raises(ConfigError, match="demonstration_updates = 7 has no effect"):
        settings(VLA, episodes={"demonstration_updates": 7})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"gave int32 \[256, 2\] as 'actions', expected int32 \[256, 3\]"),
        ("nothing", "cannot be imported"),
        ("VLA", "is no function"),
    ],
)
def test_demonstrations_that_do_not_fit_are_refused(name, message):
    config = demonstrated(name, updates=1)
    method = Grpo(settings(VLA), VLA, alone())
    with pytest.raises(ConfigError, match=message):
        imitate(method.modules["policy"], config, VLA)
