"""Merging, padding and micro-batching change nothing: gradients equal a loop over single sequences, written apart."""

import math

import numpy as np
import pytest
import torch

from async_rl.data import make_group, token_trajectory
from async_rl.errors import AsyncRLError
from async_rl.logprobs import token_logprobs
from learner.batching import build_micro_batches, count_micro_batches, plan_micro_batches
from learner.mismatch import MismatchCheck
from learner.sequences import concatenate
from learner.signals import Signals
from learner.step_stats import StepStats, mean_differences
from learner.updater import MAX_SKIPPED, Applied

CPU = torch.device("cpu")


def batches_of(groups, budget=10_000, count=1):
    sequences = concatenate(groups, version=3)
    plan = plan_micro_batches(sequences, budget)
    nothing = Signals(advantages_M=torch.zeros(len(sequences.token_M)))
    return list(build_micro_batches(sequences, nothing, plan, count=count, device=CPU))


def brute_force_gradient(model, groups, *, aggregation="token", temperature=1.0, kl=None, clip=(0.2, 0.2)):
    """GRPO one sequence and one token at a time, with the model's own logits. ``kl`` is (coefficient, reference)."""
    model.zero_grad()
    tokens = sum(g.num_sampled for g in groups)
    sequences = sum(len(g) for g in groups)
    total = 0.0
    for group in groups:
        mean = sum(map(float, group.rewards)) / len(group)
        std = math.sqrt(sum((float(r) - mean) ** 2 for r in group.rewards) / len(group))
        for trajectory in group.trajectories:
            advantage = (trajectory.reward - mean) / (std + 1e-6) if std > 0 else 0.0
            ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
            if kl:
                with torch.no_grad():
                    ref_table = torch.log_softmax(kl[1](input_ids=ids[None]).logits[0] / temperature, -1)
            terms = []
            for t in range(1, len(ids)):
                if trajectory.loss_mask[t]:
                    logprob = table[t - 1, ids[t]]
                    ratio = torch.exp(logprob - float(trajectory.logprobs[t]))
                    low, high = 1 - clip[0], 1 + clip[1]
                    clipped = torch.clip(ratio, low, high)
                    term = -torch.min(ratio * advantage, clipped * advantage)
                    if kl:
                        delta = ref_table[t - 1, ids[t]] - logprob
                        term = term + kl[0] * (torch.exp(delta) - delta - 1)
                    terms.append(term)
            share = 1 / tokens if aggregation == "token" else 1 / (len(terms) * sequences)
            total = total + sum(terms) * share
    total.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float(total.detach()), gradient


def flat_gradient(updater):
    return torch.cat([updater.flat.grad[s.offset : s.offset + s.numel] for s in updater.flat.layout])


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("budget", [1, 12, 40, 10_000])
def test_the_gradient_is_that_of_a_loop_over_single_tokens(
    make_model, make_groups, make_mini_batch, make_updater, aggregation, budget
):
    groups = make_groups(5)
    loss, expected = brute_force_gradient(make_model(), groups, aggregation=aggregation, temperature=0.8)
    updater = make_updater(
        algorithm={"aggregation": aggregation},
        sampling={"temperature": 0.8},
        learner={"micro_batch_tokens": budget},
    )
    totals = updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    assert expected.abs().max() > 1e-3
    assert (flat_gradient(updater) - expected).abs().max() < 1e-6
    assert float(totals["loss_policy"]) == pytest.approx(loss, abs=1e-6)


def test_a_bound_that_is_as_good_as_none_costs_no_memory(make_updater):
    huge = make_updater(steps=10**9, buffer={"max_staleness": 10**9})
    assert len(huge.flat.grad_and_tail) - len(huge.flat.data) < 5000


def test_the_kl_term_pulls_towards_the_reference(make_model, make_groups, make_mini_batch, make_updater):
    groups, other = make_groups(3), make_model(seed=1)
    loss, expected = brute_force_gradient(make_model(), groups, kl=(0.3, other))
    updater = make_updater(reference_model=make_model(seed=1), algorithm={"kl_coef": 0.3})
    totals = updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    assert (flat_gradient(updater) - expected).abs().max() < 1e-5
    assert float(totals["loss_policy"] + totals["loss_kl"]) == pytest.approx(loss, abs=1e-6)
    assert float(totals["loss_kl"]) > 1e-3


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_epochs_and_mini_batches_ends_where_a_loop_of_torchs_own_parts_does(
    make_model, make_groups, make_mini_batch, make_updater, tied, trees
):
    groups = make_groups(5, size=6, seed=3)
    mini_batches, plain, losses = [groups[:2], groups[2:]], make_model(tied=tied), []
    adamw = torch.optim.AdamW(plain.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.01)
    updater = make_updater(
        make_model(tied=tied),
        reference_model=make_model(tied=tied, seed=7),
        algorithm={"aggregation": "sequence", "kl_coef": 0.2, "epochs": 2, "minibatches": 2},
        sampling={"temperature": 0.7},
        learner={"lr": 1e-3, "warmup_steps": 4, "weight_decay": 0.01, "max_grad_norm": 0.5, "micro_batch_tokens": 60},
    )
    updater.networks.trees = updater.networks.trees and trees
    stats, reference = StepStats(updater._config, kl_coef=0.2), make_model(tied=tied, seed=7)
    for mini_batch in mini_batches * 2:
        loss, _ = brute_force_gradient(plain, mini_batch, aggregation="sequence", temperature=0.7, kl=(0.2, reference))
        losses.append(loss)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        totals = updater.gradient(*updater.prepare([make_mini_batch(mini_batch)], version=3))
        stats.add(totals, updater.apply(totals, 1, adapt=False))
    metrics = stats.metrics()
    assert metrics["loss/policy"] + metrics["loss/kl"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert metrics["tokens/step"] == sum(g.num_sampled for g in groups)
    assert metrics["lr"] == 5e-4
    for ours, theirs in zip(updater.networks.policy.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 2e-5


def test_ranks_gradients_add_up_to_that_of_one_rank(make_groups, make_mini_batch, make_updater):
    groups = make_groups(6)
    whole = make_updater()
    whole.gradient(*whole.prepare([make_mini_batch(groups)], version=3))
    parts = torch.zeros_like(whole.flat.grad)
    for share in (groups[:2], groups[2:], []):
        rank = make_updater()
        rank.gradient(*rank.prepare([make_mini_batch(share, of=groups)], version=3))
        parts += rank.flat.grad
    assert (parts - whole.flat.grad).abs().max() < 1e-6


def test_mini_batches_of_equal_rewards_give_no_gradient(make_groups, make_mini_batch, make_updater):
    groups = [
        make_group(
            ordinal=0,
            attempt=0,
            task_index=0,
            trajectories=[
                token_trajectory(prompt=[3, 4], completion=[5, 2], logprobs=[-1, -1], versions=[3, 3], reward=0.3)
                for _ in range(4)
            ],
        )
    ]
    updater = make_updater()
    updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    assert updater.flat.grad.abs().max() == 0


def sequences(prompt, completions):
    trajectories = [
        token_trajectory(prompt=prompt, completion=c, logprobs=[-1.0] * len(c), versions=[3] * len(c), reward=float(i))
        for i, c in enumerate(completions)
    ]
    return make_group(ordinal=0, attempt=0, task_index=0, trajectories=trajectories)


def test_equal_sequences_and_prefixes_share_one_row():
    # inputs (without the last token): 7 8 | 5;  7 8 | 5;  7 8;  7 8 | 5;  7 8 | 6 -> rows 7 8 5 and 7 8 6
    group = sequences([7, 8], [[5, 2], [5, 2], [2], [5, 9], [6, 2]])
    (batch,) = batches_of([group])
    assert sorted(batch.inputs_RL.tolist()) == [[7, 8, 5], [7, 8, 6]]
    assert len(batch.reads_M) == 9
    # distinct predictions: 7 8 -> 5, 6, 2 (5 and 6 from rows that differ, 2 from either); 7 8 5 -> 2, 9; 7 8 6 -> 2
    assert len(batch.source_N) == 6
    assert batch.targets_N[batch.reads_M].tolist() == [5, 2, 5, 2, 2, 5, 9, 6, 2]
    assert batch.sequence_lengths_M.tolist() == [2, 2, 2, 2, 1, 2, 2, 2, 2]


def test_every_read_predicts_its_own_token_from_its_own_prefix(make_groups):
    groups = make_groups(8, size=6, seed=4)
    count = count_micro_batches([n for g in groups for n in g.lengths], budget=30)
    batches = batches_of(groups, budget=30, count=count)
    found = []
    for batch in batches:
        for read in batch.reads_M.tolist():
            row, position = divmod(int(batch.source_N[read]), batch.inputs_RL.shape[1])
            found.append((*batch.inputs_RL[row, : position + 1].tolist(), int(batch.targets_N[read])))
    expected = [
        tuple(t.tokens[: i + 1].tolist()) for g in groups for t in g.trajectories for i in np.flatnonzero(t.loss_mask)
    ]
    assert sorted(found) == sorted(expected)


def test_padding_stays_within_the_budget_and_merging_never_needs_more_micro_batches(make_groups):
    for seed in range(20):
        groups = make_groups(9, size=5, seed=seed)
        for budget in (8, 17, 33, 64):
            count = count_micro_batches([n for g in groups for n in g.lengths], budget)
            batches = batches_of(groups, budget=budget, count=count)
            assert len(batches) == count
            for batch in batches:
                rows, width = batch.inputs_RL.shape
                assert rows * width <= budget or rows == 1


def test_a_rank_without_groups_makes_as_many_empty_micro_batches(make_groups):
    batches = batches_of([], count=3)
    assert [len(b.reads_M) for b in batches] == [0, 0, 0]


def test_a_sampled_first_token_is_refused():
    group = make_group(
        ordinal=41,
        attempt=0,
        task_index=0,
        trajectories=[token_trajectory(prompt=[], completion=[5, 2], logprobs=[-1, -1], versions=[3, 3], reward=0.0)],
    )
    with pytest.raises(AsyncRLError, match=r"groups \[41\]: the first token is marked as sampled"):
        batches_of([group])


def test_chunked_log_probabilities_and_gradients_equal_those_of_the_full_softmax():
    torch.manual_seed(0)
    inputs = [torch.randn(23, 8), torch.randn(11, 8), torch.randn(11)]
    targets = torch.randint(0, 11, (23,))
    upstream = torch.randn(23)
    results = []
    for max_logits in (11 * 100, 11 * 5, 1):  # one chunk, five, one per row
        hidden, weight, bias = (t.clone().requires_grad_() for t in inputs)
        logprobs, entropy = token_logprobs(hidden, weight, bias, targets, 0.7, max_logits)
        (logprobs * upstream).sum().backward()
        assert not entropy.requires_grad
        results.append([logprobs.detach(), entropy, hidden.grad, weight.grad, bias.grad])
    hidden, weight, bias = (t.clone().requires_grad_() for t in inputs)
    table = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1)
    picked = table[torch.arange(23), targets]
    (picked * upstream).sum().backward()
    expected = [picked.detach(), -(table.exp() * table).sum(-1).detach(), hidden.grad, weight.grad, bias.grad]
    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_broken_update_is_skipped_and_five_in_a_row_end_the_run(make_groups, make_mini_batch, make_updater):
    updater, batch = make_updater(), make_mini_batch(make_groups(2))
    before = updater.flat.checksum()

    def broken():
        totals = updater.gradient(*updater.prepare([batch], version=3))
        updater.flat.grad[0] = float("nan")
        return updater.apply(totals, 0, adapt=False)

    for _ in range(MAX_SKIPPED - 1):
        assert broken().skipped
    assert updater.flat.checksum() == before
    assert not updater.apply(
        updater.gradient(*updater.prepare([batch], version=3)), 0, adapt=False
    ).skipped  # a good one in between
    assert updater.flat.checksum() != before
    for _ in range(MAX_SKIPPED - 1):
        broken()
    with pytest.raises(AsyncRLError, match="not finite in 5 updates in a row"):
        broken()


def test_the_adaptive_rate_moves_only_when_the_kl_means_something(make_groups, make_mini_batch, make_updater):
    updater = make_updater(learner={"lr_schedule": "kl_adaptive", "lr": 3e-4, "kl_target": 0.01, "warmup_steps": 2})
    totals = updater.gradient(
        *updater.prepare([make_mini_batch(make_groups(2))], version=3)
    )  # behaviour is far off: a large KL
    assert updater.apply(totals, 0, adapt=False).lr == pytest.approx(1.5e-4)
    assert updater.apply(totals, 5, adapt=True).lr == pytest.approx(2e-4)


def test_step_metrics_from_a_batch_counted_by_hand(make_updater, make_mini_batch):
    group = sequences([7, 8], [[5, 2], [5, 2], [2], [6, 2]])  # rewards 0, 1, 2, 3; 7 tokens, all of version 3
    updater = make_updater()
    stats = StepStats(updater._config)
    totals = updater.gradient(*updater.prepare([make_mini_batch([group])], version=4))
    stats.add(totals, Applied(grad_norm=2.0, lr=1e-3, skipped=True))
    metrics = stats.metrics()
    assert metrics["reward/mean"] == 1.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(5) / 2)
    assert metrics["accuracy"] == 0.75  # rewards of 1 or more
    assert metrics["length/mean"] == 7 / 4
    assert metrics["age/mean"] == metrics["age/max"] == 1
    assert metrics["tokens/step"] == 7
    assert metrics["updates_skipped"] == 1
    assert metrics["grad_norm"] == 2
    assert 0 < metrics["ess"] <= 1
    assert metrics["logp_diff/age0"] is None  # no token of the current version
    assert metrics["logp_diff/age1"] == metrics["logp_diff/older"] > 0
    assert metrics["kl/reference"] is metrics["loss/value"] is None


def test_the_mismatch_of_an_actor_with_the_same_weights_is_rounding(model, make_updater, make_mini_batch):
    prompt, completion = [7, 8], [5, 6, 2]
    with torch.no_grad():
        table = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    logprobs = [float(table[1 + i, token]) for i, token in enumerate(completion)]
    trajectories = [
        token_trajectory(prompt=prompt, completion=completion, logprobs=logprobs, versions=[3] * 3, reward=float(i))
        for i in range(2)
    ]
    group = make_group(ordinal=0, attempt=0, task_index=0, trajectories=trajectories)
    updater = make_updater(model)
    totals = updater.gradient(*updater.prepare([make_mini_batch([group])], version=3))
    assert float(totals["age_histogram"][0]) == 6
    assert mean_differences(totals)[0] < 1e-6


def test_a_rank_that_has_no_token_of_the_version_points_to_the_others(make_updater, make_groups, make_mini_batch):
    updater = make_updater()
    (batch,) = updater.prepare([make_mini_batch(make_groups(2))], version=9)  # sampled by version 3 at most
    totals = updater.gradient(batch)
    totals["fresh"], totals["fresh_difference"] = torch.tensor(2.0), torch.tensor(10.0)  # another rank's
    check = MismatchCheck(updater._config, updater.networks, CPU, warns=False)
    with pytest.raises(AsyncRLError, match=r"difference\| 5 over 2 tokens.*this rank has none of these tokens"):
        check.check(totals, batch, version=9)
