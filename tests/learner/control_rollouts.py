"""Small rollouts and settings for the tests of what the control learner adds to PPO."""

import torch

from async_rl.config.load import parse_control
from async_rl.control.spaces import Action, Observation, Spaces
from learner.control.rollout import Rollout
from learner.group import LearnerGroup, Placement

CPU = torch.device("cpu")


def lone_group() -> LearnerGroup:
    return LearnerGroup(Placement(0, 1, CPU), 10.0)


def make_config(**sections):
    return parse_control({"domain": "control", **sections})


def make_spaces(discrete=False, **widths) -> Spaces:
    """Flat groups of these widths; two continuous actions, or one of three choices."""
    groups = {name: Observation((width,)) for name, width in (widths or {"policy": 3}).items()}
    continuous = Action(kind="continuous", size=2, low=(-1.0, -1.0), high=(1.0, 1.0))
    return Spaces(observations=groups, action=Action(kind="discrete", size=1, choices=(3,)) if discrete else continuous)


def make_rollout(
    obs, last_obs, terminated=(), truncated=(), skipped=(), final_obs=None, states=None, **arrays
) -> Rollout:
    """A rollout of groups [T, N, ...]; ``terminated``, ``truncated`` and ``skipped`` name steps and environments."""
    t, n = next(iter(obs.values())).shape[:2]

    def mask(places):
        made = torch.zeros(t, n, dtype=torch.bool)
        for place in places:
            made[place] = True
        return made

    acted, ended = ~mask(skipped), mask(terminated) | mask(truncated)
    resets = torch.zeros(t, n, dtype=torch.bool)
    resets[1:] = (ended | ~acted)[:-1]
    index = mask(truncated).nonzero(as_tuple=True)
    given = {"actions": torch.zeros(t, n, 2), "rewards": torch.zeros(t, n), "logprobs": torch.zeros(t, n)} | arrays
    return Rollout(
        obs=obs,
        last_obs=last_obs,
        final_obs=final_obs,
        final_index=(index[0], index[1]),
        versions=torch.where(acted, 0, -1).int(),
        terminated=mask(terminated),
        truncated=mask(truncated),
        acted=acted,
        resets=resets,
        states=states or {},
        **given,
    )
