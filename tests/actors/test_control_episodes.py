"""Groups of whole episodes: same start, masks, versions, arrays in order, judges; with fakes and with gymnasium."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from control_fakes import control, published

from actors.control.collector import EnvironmentFault
from actors.control.environments.base import Step
from actors.control.environments.factory import make_environment
from actors.control.episodes import EpisodeCollector, start_seed
from actors.control.judges import make_judge
from actors.control.policy import Policy
from async_rl.config import parse_control
from async_rl.control.fragment import check_control_group
from async_rl.control.networks import build_actor
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.protocol import Ticket
from async_rl.wire import decode_groups, encode_groups, unpack_header

SPACES = Spaces(
    observations={"policy": Observation((2,)), "picture": Observation((2, 2, 1), "uint8")},
    action=Action(kind="discrete", size=2, choices=(3, 4)),
)
REWARD = f"{__name__}:lengths_and_ends"
LENGTHS = (3, 1, 5)


class Scripted:
    """Episode i of three ends after ``LENGTHS[i]`` steps: terminated, terminated, truncated. Observes (episode, step).

    Args:
        mode: ``next`` resets in the step after, ``same`` at once and tells what the truncated one ended in, ``silent``
            at once without a word. What comes after an end is marked by steps from 100 on.
    """

    def __init__(self, mode="next"):
        self.num_envs, self.spaces, self.device, self.mode = 3, SPACES, torch.device("cpu"), mode
        self.actions, self.seeds = [], []

    def reset_alike(self, seed):
        self.seeds.append(seed)
        self.count = 0
        return self._observe(torch.zeros(3))

    def _observe(self, steps):
        policy = torch.stack([torch.arange(3.0), steps], 1)
        return {"policy": policy, "picture": steps.to(torch.uint8).view(3, 1, 1, 1).expand(3, 2, 2, 1)}

    def step(self, actions):
        self.actions.append(actions.clone())
        actions.zero_()  # may be done in place
        self.count += 1
        lengths = torch.tensor(LENGTHS)
        at_end, beyond = lengths == self.count, lengths < self.count
        steps = torch.where(beyond if self.mode == "next" else beyond | at_end, 100.0, float(self.count))
        truncated = at_end & (torch.arange(3) == 2)
        final = None
        if self.mode != "silent":
            final = {n: a[truncated] for n, a in self._observe(torch.full((3,), float(self.count))).items()}
        ends = at_end | (beyond & ((self.count % 2) == 0))  # what comes later ends, too, and must not matter
        return Step(
            observations=self._observe(steps),
            rewards=torch.where(beyond, 1000.0, self.count + 10.0 * torch.arange(3)),
            terminated=ends & ~truncated,
            truncated=truncated,
            final_observations=final,
            resets_next=ends if self.mode == "next" else None,
        )


def lengths_and_ends(episode):
    """A judge that codes what it sees into one number."""
    ends = 10 * int(episode["terminated"]) + 20 * int(episode["truncated"])
    return len(episode["actions"]) + ends + 100 * float(episode["final_obs/policy"][1])


def settings(**episodes):
    return control(
        algorithm={"name": "grpo"}, env={"horizon": 24, "num_envs": 64}, episodes={"group_size": 3, **episodes}
    )


def policy_of(config, spaces, version=4, greedy=False):
    torch.manual_seed(0)
    policy = Policy(config, spaces, torch.device("cpu"), greedy=greedy)
    policy.version = version
    return policy


def ticket(task=7, ordinal=1):
    return Ticket(ordinal=ordinal, attempt=2, task_index=task, group_size=3, version=0, lease_s=9.0)


def gather(collector, each=lambda step: None, task=7, ordinal=1):
    collector.begin(ticket(task, ordinal))
    for step in range(1000):
        each(step)
        collector.step()
        group = collector.finished()
        if group is not None:
            return group
    raise AssertionError("never finished")


def make(mode="next", greedy=False, **episodes):
    config = settings(**episodes)
    environment = Scripted(mode)
    return environment, EpisodeCollector(config, environment, policy_of(config, SPACES, greedy=greedy))


def test_episodes_lie_one_behind_the_other_without_the_steps_after_their_ends():
    environment, collector = make()
    group = gather(collector)
    assert (group.ordinal, group.attempt, group.task_index, group.lengths) == (1, 2, 7, LENGTHS)
    seen = [[i, step] for i, length in enumerate(LENGTHS) for step in range(length)]
    assert group.arrays["obs/policy"].tolist() == seen
    assert group.arrays["obs/picture"][:, 1, 1, 0].tolist() == [step for _, step in seen]
    taken = [environment.actions[step][i].tolist() for i, step in seen]
    assert group.arrays["actions"].tolist() == taken
    assert group.arrays["episode_lengths"].tolist() == list(LENGTHS)
    # rewards are count + 10 i: 1 + 2 + 3, 11, 21 + 22 + 23 + 24 + 25
    assert group.rewards.tolist() == group.arrays["episode_returns"].tolist() == [6, 11, 115]


def test_a_group_passes_the_servers_checks_and_the_wire():
    _, collector = make()
    group = gather(collector)
    assert check_control_group(group, SPACES, 64, episodes=True) == ""
    header, *frames = encode_groups("submit", [group])
    (back,) = decode_groups(unpack_header(header), frames)
    assert all(np.array_equal(back.arrays[name], array) for name, array in group.arrays.items())


def test_log_probabilities_are_those_of_each_part_under_the_policy():
    _, collector = make()
    group = gather(collector)
    actor = policy_of(settings(), SPACES).actor
    with torch.no_grad():
        distribution = actor.distribution(actor.features(torch.from_numpy(group.arrays["obs/policy"])))
        expected = distribution.log_prob_parts(torch.from_numpy(group.arrays["actions"]).long())
    assert group.arrays["logprobs"] == pytest.approx(expected.numpy(), abs=1e-6)


def test_each_step_carries_the_version_that_acted():
    _, collector = make()

    def swap(step):
        collector._policy.version = 4 + step // 2

    group = gather(collector, swap)
    expected = [4 + step // 2 for length in LENGTHS for step in range(length)]
    assert group.arrays["versions"].tolist() == [[version] * 2 for version in expected]


@pytest.mark.parametrize(("mode", "finals"), [("next", (3, 1, 5)), ("same", (2, 0, 5)), ("silent", (2, 0, 4))])
def test_a_judge_sees_the_end_of_each_episode_as_far_as_the_environment_tells(mode, finals):
    _, collector = make(mode, reward=REWARD)
    codes = [len_ + end + 100 * final for len_, end, final in zip(LENGTHS, (10, 10, 20), finals, strict=True)]
    assert gather(collector).rewards.tolist() == codes


def test_episodes_are_cut_off_at_the_longest_allowed_length():
    _, collector = make(reward=REWARD, max_steps=2)
    group = gather(collector)
    assert group.lengths == (2, 1, 2)
    assert group.rewards.tolist() == [2 + 200, 1 + 10 + 100, 2 + 200]  # neither terminated nor truncated


def test_a_dropped_ticket_leaves_nothing_behind():
    _, collector = make()
    whole = gather(collector)
    collector.begin(ticket())
    collector.step()
    collector.drop()
    assert collector.finished() is None
    assert gather(collector).lengths == whole.lengths


def test_the_start_follows_from_the_runs_seed_and_the_task_alone():
    seeds = []
    for config, task in [(settings(), 7), (settings(), 7), (settings(), 8), (control_with_seed(5), 7)]:
        environment = Scripted()
        gather(EpisodeCollector(config, environment, policy_of(config, SPACES)), task=task)
        seeds += environment.seeds
    assert seeds[0] == seeds[1] == start_seed(0, 7)
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_ticket_that_was_lost_is_played_again_as_it_was_by_any_actor_and_a_new_draw_is_another():
    def actions(collector, **changes):
        collector.begin(replace(ticket(), **changes))
        while (group := (collector.step(), collector.finished())[1]) is None:
            continue
        return group.arrays["actions"].tolist()

    (_, one), (_, other) = make(), make()
    first = actions(one, attempt=0)
    assert actions(one, ordinal=2) != first
    assert actions(other, attempt=3) == actions(one) == first
    assert actions(one, draw=1) != first


def control_with_seed(seed):
    return settings().model_copy(update={"seed": seed})


def test_a_greedy_policy_takes_the_likeliest_parts():
    _, collector = make(greedy=True)
    group = gather(collector)
    actor = policy_of(settings(), SPACES).actor
    with torch.no_grad():
        mode = actor.distribution(actor.features(torch.from_numpy(group.arrays["obs/policy"]))).mode()
    assert group.arrays["actions"].tolist() == mode.tolist()


def test_a_reward_that_is_no_number_is_the_environments_fault():
    environment, collector = make()
    step = environment.step
    environment.step = lambda actions: replace(step(actions), rewards=torch.tensor([0.0, np.nan, 0.0]))
    collector.begin(ticket())
    with pytest.raises(EnvironmentFault, match=r"rewards, index \[1\], is nan"):
        collector.step()
    assert collector.finished() is None


def test_as_many_environments_as_episodes_are_needed():
    config = settings(group_size=4)
    with pytest.raises(ConfigError, match=r"group_size = 4 episodes, and there are 3 environments"):
        EpisodeCollector(config, Scripted(), policy_of(config, SPACES))


# -- judges


class FinalPolicySum(torch.nn.Module):
    def forward(self, final: dict[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        return final["policy"].sum(1) + final["picture"].float().mean((1, 2, 3)) * 0.5 + lengths


def script(module, folder):
    torch.jit.save(torch.jit.script(module), str(folder / "reward.pt"))
    return str(folder / "reward.pt")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_model_scores_final_observations_and_lengths(tmp_path):
    _, collector = make(reward=script(FinalPolicySum(), tmp_path))
    # final observations (i, length) and a picture of lengths: i + length + length / 2 + length
    assert gather(collector).rewards.tolist() == [i + 2.5 * n for i, n in enumerate(LENGTHS)]


class WrongShape(torch.nn.Module):
    def forward(self, final: dict[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        return lengths.float().sum()


class WrongGroup(torch.nn.Module):
    def forward(self, final: dict[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        return final["nose"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "message"), [(WrongShape(), r"gave \[\], expected one score each: \[3\]"), (WrongGroup(), "nose")]
)
def test_a_model_that_cannot_score_says_why(tmp_path, module, message):
    _, collector = make(reward=script(module, tmp_path))
    with pytest.raises(AsyncRLError, match=message):
        gather(collector)


def broken(episode):
    return 1 / 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nowhere.pt", "no such file; it is module:function, or the path"),
        (f"{__name__}:lengths_and_end", "did you mean 'lengths_and_ends'"),
        ("no_such_module:f", "no module 'no_such_module'"),
        (__file__, "is no TorchScript model"),
    ],
)
def test_a_judge_that_cannot_be_had_is_refused_at_the_start(reward, message):
    with pytest.raises(ConfigError, match=message):
        make_judge(reward)


def test_a_function_that_fails_ends_the_run_with_its_name():
    _, collector = make(reward=f"{__name__}:broken")
    with pytest.raises(AsyncRLError, match=r"broken' failed on an episode: ZeroDivisionError"):
        gather(collector)


# -- real environments and networks


def test_episodes_of_cartpole_start_alike_and_end_apart():
    config = control(
        env={"id": "gymnasium:CartPole-v1", "horizon": 24, "num_envs": 64},
        algorithm={"name": "grpo"},
        episodes={"group_size": 3, "max_steps": 200},
    )
    environment = make_environment(config, 3, 0, "actor0")
    collector = EpisodeCollector(config, environment, policy_of(config, environment.spaces))
    group = gather(collector)
    starts = np.cumsum(group.lengths) - group.lengths
    first = group.arrays["obs/policy"][starts]
    assert (first == first[0]).all()
    assert len(set(group.lengths)) > 1
    assert group.rewards.tolist() == [float(length) for length in group.lengths]  # a reward of 1 in every step
    assert check_control_group(group, environment.spaces, 200, episodes=True) == ""
    again = gather(collector, ordinal=2)
    assert (again.arrays["obs/policy"][0] == first[0]).all()
    assert again.lengths != group.lengths
    environment.close()


def test_a_transformer_plays_the_table_with_published_weights():
    config = parse_control(
        {
            "domain": "control",
            "env": {"id": "actors.control.worlds.grid:PickAndPlace"},
            "observations": {"actor": ["image", "instruction"]},
            "policy": {"network": "transformer", "hidden": [32, 32], "device": "cpu"},
            "algorithm": {"name": "grpo"},
            "episodes": {"group_size": 6, "max_steps": 4, "reward": "actors.control.worlds.grid:reward"},
        }
    )
    environment = make_environment(config, 6, 0, "actor0")
    policy = Policy(config, environment.spaces, torch.device("cpu"))
    source = build_actor(config, environment.spaces)
    policy.load_weights(*published(source, version=9))
    group = gather(EpisodeCollector(config, environment, policy))
    assert check_control_group(group, environment.spaces, 4, episodes=True) == ""
    assert (group.arrays["versions"] == 9).all()
    obs = {name: torch.from_numpy(group.arrays[f"obs/{name}"]) for name in ("image", "instruction")}
    with torch.no_grad():
        distribution = source.distribution(source.features(source.observe(obs)))
        expected = distribution.log_prob_parts(torch.from_numpy(group.arrays["actions"]).long())
    assert group.arrays["logprobs"] == pytest.approx(expected.numpy(), abs=1e-5)
