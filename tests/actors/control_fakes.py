"""Pieces for the tests of control actors: a counting environment, and published weights made of any module."""

import numpy as np
import torch

from actors.control.environments.base import Step
from async_rl.config import parse_control
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

SPACES = Spaces(
    observations={"policy": Observation((2,)), "extra": Observation((3,), "uint8")},
    action=Action(kind="continuous", size=1, low=(-1.0,), high=(1.0,)),
)


def control(**sections):
    env = {"id": "here:Counting", "num_envs": 3, "horizon": 4} | sections.pop("env", {})
    policy = {"hidden": [8], "device": "cpu"} | sections.pop("policy", {})
    sections["algorithm"] = {"minibatches": 1} | sections.get("algorithm", {})
    return parse_control({"domain": "control", "env": env, "policy": policy, **sections})


class Counting:
    """Environment i counts its steps; every (i + 2)-th ends its episode: truncated where i is even, else terminated.

    The observation is (environment, count), the reward is the count; the buffers are its own and overwritten.

    Args:
        tells: whether what followed a truncated step is told.
        lazy: reset in the step after an end, as gymnasium's ``next_step``.
    """

    can_reset = True

    def __init__(self, num_envs=3, tells=True, lazy=False, spaces=SPACES):
        self.num_envs, self.spaces, self.device = num_envs, spaces, torch.device("cpu")
        self.tells, self.lazy = tells, lazy
        self.seeds, self.poison, self.actions, self.closed = [], {}, [], False
        """``poison``: by number of the step, from 1, what to do to its outcome."""
        self.num_steps = 0
        self._seen = {
            name: torch.zeros((num_envs, *o.shape), dtype=getattr(torch, o.dtype))
            for name, o in spaces.observations.items()
        }

    def reset(self, seed):
        self.seeds.append(seed)
        self.count = torch.zeros(self.num_envs)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._observe()

    def _observe(self):
        seen = self._seen["policy"]
        seen[:, 0], seen[:, 1] = torch.arange(self.num_envs), self.count
        return self._seen

    def step(self, actions):
        self.actions.append(actions.clone())
        actions.clamp_(0, 0)  # may be done in place
        self.num_steps += 1
        resetting = self.done.clone() if self.lazy else torch.zeros_like(self.done)
        self.count = torch.where(resetting, 0.0, self.count + 1)
        rewards = self.count.clone()
        which = torch.arange(self.num_envs)
        self.done = (self.count == which + 2) & ~resetting
        truncated, terminated = self.done & (which % 2 == 0), self.done & (which % 2 == 1)
        final = {name: array[truncated] for name, array in self._observe().items()} if self.tells else None
        if not self.lazy:
            self.count = torch.where(self.done, 0.0, self.count)
        outcome = Step(
            observations=self._observe(),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_observations=final,
            resets_next=self.done if self.lazy else None,
        )
        self.poison.get(self.num_steps, lambda outcome: None)(outcome)
        return outcome

    def render(self):
        return None

    def close(self):
        self.closed = True


def published(module, version=0, chunk_bytes=64, align=128):
    """The manifest and the bytes of a module's parameters and buffers, laid out as the learner does."""
    tensors, parts, offset = [], [], 0
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        raw = tensor.detach().cpu().numpy().astype(np.float32).tobytes()
        tensors.append(Tensor(name, "float32", tuple(tensor.shape), offset))
        parts.append(raw.ljust(-(-len(raw) // align) * align, b"\0"))
        offset += len(parts[-1])
    data = memoryview(b"".join(parts))
    chunks = chunk_checksums(data, chunk_bytes)
    manifest = Manifest(
        version=version,
        run_id="r",
        tensors=tuple(tensors),
        nbytes=data.nbytes,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        checksum=combine(chunks),
        segment="s",
        host="h",
    )
    return manifest, data
