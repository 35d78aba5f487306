"""What is worked out before the first update: old values, proximal and reference log-probabilities, advantages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.data import make_group, token_trajectory
from async_rl.errors import AsyncRLError

ALGORITHMS = [
    {"name": "ppo", "entropy_coef": 0.01},
    {"name": "ppo", "critic": "model"},
    {"name": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"},
    {"name": "rloo", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"name": "gspo"},
    {"name": "cispo", "max_token_age": 1},
    {"name": "dr_grpo", "overlong_buffer": 3},
    {"name": "decoupled_ppo", "correction": "sequence_mask", "correction_high": 3.0},
    {"proximal": "interpolated", "correction": "mask", "age_decay": 0.5},
    {"name": "distillation"},
]
REFERENCE = {"reference": {"path": "another"}}


def logprobs_one_by_one(model, groups):
    """The trained tokens' log-probabilities, one sequence at a time."""
    found = []
    with torch.no_grad():
        for trajectory in (t for g in groups for t in g.trajectories):
            ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
            found += [float(table[t - 1, ids[t]]) for t in np.flatnonzero(trajectory.loss_mask)]
    return found


def one_group(rewards, completions, logprobs=-1.0):
    trajectories = [
        token_trajectory(prompt=[7, 8], completion=c, logprobs=[logprobs] * len(c), versions=[3] * len(c), reward=r)
        for c, r in zip(completions, rewards, strict=True)
    ]
    return make_group(ordinal=17, attempt=0, task_index=0, trajectories=trajectories)


def annotated(group, value):
    reference = np.full(sum(group.lengths), value, np.float32)
    return replace(group, arrays={**group.arrays, "ref_logprobs": reference})


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"])
def test_what_needs_no_forward_pass_gets_none_and_makes_no_collective(
    make_updater, make_groups, make_mini_batch, make_model, monkeypatch, name
):
    updater = make_updater(reference_model=make_model(seed=7), algorithm={"name": name, "kl_coef": 0.1})

    def forbidden(*_):
        raise AssertionError("a forward pass or collective that nothing needs")

    monkeypatch.setattr(updater._group, "sum_over_ranks", forbidden)
    for owner, method in ((updater.networks, "logprobs_and_values"), (updater.networks.reference, "logprobs")):
        monkeypatch.setattr(owner, method, forbidden)
    (prepared,) = updater.prepare([make_mini_batch(make_groups(3))], version=3)
    assert set(prepared.signals.known) == {"advantages_M"}


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("budget", [30, 10_000])
def test_what_is_forwarded_is_in_the_order_of_the_tokens_however_they_are_packed(
    make_updater, make_groups, make_mini_batch, make_model, budget, trees
):
    groups = make_groups(4, size=4)
    updater = make_updater(
        reference_model=make_model(seed=7),
        algorithm={"name": "ppo", "critic": "model", "proximal": "recomputed", "kl_coef": 0.1, "kl_in": "reward"},
        learner={"micro_batch_tokens": budget},
    )
    updater.networks.trees = updater.networks.trees and trees
    head = updater.networks.critic.head
    head.weight.data.copy_(torch.linspace(-1, 1, 16)[None])
    signals = [
        b.signals for b in updater.prepare([make_mini_batch(groups[:2]), make_mini_batch(groups[2:])], version=3)
    ]
    joined = {name: torch.cat([s.known[name] for s in signals]) for name in signals[0].known}
    assert joined["proximal_logprobs_M"].tolist() == pytest.approx(logprobs_one_by_one(make_model(), groups), abs=1e-5)
    assert joined["ref_logprobs_M"].tolist() == pytest.approx(logprobs_one_by_one(make_model(seed=7), groups), abs=1e-5)
    values, trunk = [], make_model(seed=5).base_model
    with torch.no_grad():
        for t in (t for g in groups for t in g.trajectories):
            hidden = trunk(input_ids=torch.from_numpy(t.tokens.astype(np.int64))[None])[0][0]
            values += head(hidden).squeeze(-1)[np.flatnonzero(t.loss_mask) - 1].tolist()
    assert joined["old_values_M"].tolist() == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a.values())))
def test_any_micro_batching_makes_the_same_update(make_updater, make_groups, make_mini_batch, make_model, algorithm):
    groups = make_groups(4, size=5)
    results = []
    for budget, trees in ((30, False), (60, True), (10_000, True)):
        sections = {
            "algorithm": algorithm,
            "learner": {"micro_batch_tokens": budget},
            "sampling": {"max_new_tokens": 5},
        }
        if algorithm.get("name") == "distillation":
            sections |= REFERENCE
        updater = make_updater(reference_model=make_model(seed=7), **sections)
        updater.networks.trees = updater.networks.trees and trees
        totals = updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
        results.append((updater.flat.grad.clone(), totals))
    for gradient, totals in results[1:]:
        assert (gradient - results[0][0]).abs().max() < 2e-5
        assert gradient.abs().max() > 1e-3
        for name, total in totals.items():
            if not name.endswith("histogram"):  # a ratio at the edge of two bins may fall into either
                assert torch.allclose(total, results[0][1][name], rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_advantages_are_normalised_over_all_mini_batches(make_updater, make_groups, make_mini_batch, name):
    groups = make_groups(6)
    updater = make_updater(algorithm={"name": name, "minibatches": 2})
    prepared = updater.prepare([make_mini_batch(groups[:2]), make_mini_batch(groups[2:])], version=3)
    joined = torch.cat([p.signals.advantages_M for p in prepared]).double()
    assert joined.mean().abs() < 1e-6
    assert joined.std(correction=0) == pytest.approx(1.0, abs=1e-5)
    assert prepared[0].signals.advantages_M.mean().abs() > 0.01  # not each for itself


def test_the_penalty_in_the_reward_lowers_what_its_tokens_get(make_updater, make_mini_batch):
    # behaviour -1, reference -3 by annotation: k1 = -1 - (-3) = 2 a token, times 0.25 is 0.5
    group = annotated(one_group([1.0, 0.0], [[5, 2], [6]]), -3.0)
    common = {"kl_coef": 0.25, "kl_in": "reward", "kl_estimator": "k1"}
    expected = {
        "rloo": [0.5, 0.5, -0.5],  # totals 1 - 1 = 0 and 0 - 0.5: each minus the other
        "dr_grpo": [0.25, 0.25, -0.25],
    }
    for name, advantages in expected.items():
        updater = make_updater(algorithm={"name": name, **common}, reference={"placement": "scorer"})
        (prepared,) = updater.prepare([make_mini_batch([group])], version=3)
        assert prepared.signals.advantages_M.tolist() == pytest.approx(advantages)
        assert prepared.signals.ref_logprobs_M.tolist() == [-3.0] * 3
    # to go: 1 - 1, 1 - 0.5 and 0 - 0.5, that is 0, 0.5 and -0.5: mean 0, standard deviation sqrt(1 / 6)
    updater = make_updater(algorithm={"name": "reinforce_pp", **common}, reference={"placement": "scorer"})
    (prepared,) = updater.prepare([make_mini_batch([group])], version=3)
    expected = [0.0, 0.5 * 6**0.5, -0.5 * 6**0.5]
    assert prepared.signals.advantages_M.tolist() == pytest.approx(expected, abs=1e-5)


def test_distillation_reads_the_teacher_and_no_reward(make_updater, make_mini_batch):
    group = annotated(one_group([float("nan"), 1.0], [[5, 2], [6]]), -0.25)
    updater = make_updater(algorithm={"name": "distillation"}, reference={"path": "teacher", "placement": "scorer"})
    (prepared,) = updater.prepare([make_mini_batch([group])], version=3)
    assert prepared.signals.advantages_M.tolist() == [0.75] * 3  # -0.25 - (-1)


def test_long_answers_lose_reward_but_the_reported_one_is_raw(make_updater, make_mini_batch):
    # longest 4, buffer 2: lengths 2, 3, 4 are punished by 0, 1/2, 1
    group = one_group([1.0, 1.0, 1.0], [[5, 2], [5, 5, 2], [5, 5, 5, 2]])
    updater = make_updater(algorithm={"name": "dr_grpo", "overlong_buffer": 2}, sampling={"max_new_tokens": 4})
    (prepared,) = updater.prepare([make_mini_batch([group])], version=3)
    assert prepared.signals.advantages_M.tolist() == [0.5] * 2 + [0.0] * 3 + [-0.5] * 4
    totals = updater.gradient(prepared)
    assert float(totals["reward"]) == float(totals["correct"]) == 3


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "grpo", "rloo"])
def test_a_sequence_that_nothing_scored_teaches_nothing(make_updater, make_mini_batch, name):
    completions = [[5, 6, 2], [6, 2], [5, 2]]
    scored, unscored = one_group([1.0, 0.0, 0.5], completions), one_group([1.0, 0.0, float("nan")], completions)
    pair = one_group([1.0, 0.0], completions[:2])
    gradients = []
    for group in (unscored, pair, scored):
        updater = make_updater(algorithm={"name": name})
        totals = updater.gradient(*updater.prepare([make_mini_batch([group], of=[unscored])], version=3))
        gradients.append(updater.flat.grad.clone())
        assert torch.isfinite(gradients[-1]).all()
        assert float(totals["scored"]) == np.isfinite(group.rewards).sum()
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6
    assert (gradients[0] - gradients[2]).abs().max() > 1e-4


def test_annotations_are_used_as_they_are_and_needed_in_full(make_updater, make_groups, make_mini_batch):
    groups = [annotated(g, -2.0) for g in make_groups(3)]
    updater = make_updater(algorithm={"kl_coef": 0.1}, reference={"placement": "scorer"})
    assert updater.networks.reference is None
    totals = updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    assert float(totals["kl_ref"]) > 0
    assert float(totals["loss_kl"]) > 0
    broken = annotated(groups[1], float("nan"))
    with pytest.raises(AsyncRLError, match=r"groups \[1\]: the reference's log-probabilities are missing or"):
        updater.prepare([make_mini_batch([groups[0], broken])], version=3)
    bare = make_groups(3)[2]
    with pytest.raises(AsyncRLError, match=r"groups \[2\]: the reference's log-probabilities are missing"):
        updater.prepare([make_mini_batch([bare])], version=3)


def test_a_rank_without_groups_prepares_an_empty_share(make_updater, make_groups, make_mini_batch):
    for algorithm in ALGORITHMS[:9]:
        updater = make_updater(algorithm=algorithm)
        groups = make_groups(3)
        (prepared,) = updater.prepare([make_mini_batch([], of=groups)], version=3)
        updater.gradient(prepared)
        assert updater.flat.grad.abs().max() == 0
