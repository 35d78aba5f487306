"""One step of PPO against rsl_rl's own, on the same rollout: the same parameters, normalisers and learning rate."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from control_fragments import build_domain, continuous, control_config
from torch import nn

from async_rl.data import Group

pytest.importorskip("rsl_rl")
tensordict = pytest.importorskip("tensordict")

HORIZON, NUM_ENVS, ACTIONS, SIZE = 12, 32, 2, 4
GRU = {"network": "gru", "rnn_hidden": 12}


class Peer:
    """rsl_rl's PPO with two networks, and a rollout of random environments that it collected itself."""

    def __init__(self, schedule: str, policy: dict[str, Any]) -> None:
        ppo, storage, models = (importlib.import_module(f"rsl_rl.{m}") for m in ("algorithms", "storage", "models"))
        torch.manual_seed(3)
        self.obs = torch.randn(HORIZON + 1, NUM_ENVS, SIZE) * 2 + 1
        kind = models.RNNModel if "network" in policy else models.MLPModel
        more = {"rnn_type": "gru", "rnn_hidden_dim": policy["rnn_hidden"]} if "network" in policy else {}
        more |= {"hidden_dims": [16, 16], "activation": "elu", "obs_normalization": True}
        groups = {"actor": ["policy"], "critic": ["policy"]}
        distribution = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution", "init_std": 0.8}
        first = self._dict(0)
        self.actor = kind(first, groups, "actor", ACTIONS, distribution_cfg=distribution, **more)
        self.critic = kind(first, groups, "critic", 1, **more)
        for model in (self.actor, self.critic):
            model.obs_normalizer.update(torch.randn(50, SIZE) + 1)
        self.storage = storage.RolloutStorage("rl", NUM_ENVS, HORIZON, first, [ACTIONS], "cpu")
        self.ppo = ppo.PPO(self.actor, self.critic, self.storage, schedule=schedule, learning_rate=1e-3)
        self.weights = {name: self.tensors(name) for name in ("actor", "critic")}
        self.arrays = self._collect()

    def _dict(self, step: int) -> Any:
        return tensordict.TensorDict({"policy": self.obs[step]}, batch_size=[NUM_ENVS])

    def _collect(self) -> dict[str, np.ndarray]:
        """Steps of random rewards and ends; a fifth of the ends are timeouts. Returns the fragment's arrays."""
        hidden = {}
        if self.actor.is_recurrent:  # a state from an earlier rollout
            for name, model in (("actor", self.actor), ("critic", self.critic)):
                state = torch.randn(1, NUM_ENVS, 12)
                model.reset(hidden_state=state.clone())
                hidden[f"hidden/{name}0"] = state.numpy()
        rewards, dones = torch.randn(HORIZON, NUM_ENVS), torch.rand(HORIZON, NUM_ENVS) < 0.15
        timeouts = dones & (torch.rand(HORIZON, NUM_ENVS) < 0.5)
        actions, logprobs = [], []
        with torch.inference_mode():
            for step in range(HORIZON):
                actions.append(self.ppo.act(self._dict(step)).clone())
                logprobs.append(self.ppo.transition.actions_log_prob.clone())
                extras = {"time_outs": timeouts[step].float()}
                self.ppo.process_env_step(self._dict(step + 1), rewards[step], dones[step].long(), extras)
            self.ppo.compute_returns(self._dict(HORIZON))
        return {
            "obs/policy": self.obs[:-1].numpy(),
            "last_obs/policy": self.obs[-1:].numpy(),
            "actions": torch.stack(actions).numpy(),
            "logprobs": torch.stack(logprobs).numpy(),
            "versions": np.zeros((HORIZON, NUM_ENVS), np.int32),
            "step_rewards": rewards.numpy(),
            "terminated": (dones & ~timeouts).numpy(),
            "truncated": timeouts.numpy(),
            "episode_returns": np.zeros(0, np.float32),
            "episode_lengths": np.zeros(0, np.int32),
            **hidden,
        }

    def tensors(self, name: str) -> list[torch.Tensor]:
        """Copies of parameters in the order of ours: linear layers, recurrent ones, deviation, statistics."""
        model = getattr(self, name)
        found = [*of_layers(model)]
        found += [model.distribution.std_param] if name == "actor" else []
        normalizer = model.obs_normalizer
        found += [normalizer._mean[0], normalizer._var[0], normalizer.count.float()]
        return [tensor.detach().clone() for tensor in found]


def of_layers(model: nn.Module) -> list[nn.Parameter]:
    kinds = (nn.Linear, nn.GRU)
    return [p for kind in kinds for m in model.modules() if isinstance(m, kind) for p in m.parameters()]


def ours(network: Any, name: str) -> list[torch.Tensor]:
    found = [*of_layers(network)]
    found += [network.std] if name == "actor" else []
    return [*found, network.normalizer.mean, network.normalizer.var, network.normalizer.count]


@pytest.mark.parametrize(
    ("schedule", "policy"), [("adaptive", {}), ("fixed", {}), ("adaptive", GRU)], ids=["adaptive", "fixed", "recurrent"]
)
def test_a_step_gives_the_parameters_of_rsl_rl(schedule, policy, monkeypatch):
    peer = Peer(schedule, policy)
    config = control_config(
        env={"num_envs": NUM_ENVS, "horizon": HORIZON},
        policy={"hidden": [16, 16], "normalize": True, **policy},
        learner={"lr_schedule": "kl_adaptive" if schedule == "adaptive" else "constant"},
    )
    domain, method = build_domain(config, continuous(ACTIONS))
    networks = {"actor": method.modules["policy"], "critic": method.modules["critic"]}
    with torch.no_grad():
        for name, network in networks.items():
            for target, source in zip(ours(network, name), peer.weights[name], strict=True):
                target.copy_(source)
    # rsl_rl does not shuffle environments
    order = torch.arange(NUM_ENVS) if policy else torch.randperm(HORIZON * NUM_ENVS)
    monkeypatch.setattr(torch, "randperm", lambda count, **_: order[:count])

    losses = peer.ppo.update()
    group = Group(
        ordinal=0, attempt=0, task_index=0, lengths=(HORIZON,), arrays=peer.arrays, rewards=np.zeros(1, np.float32)
    )
    metrics = domain.train_groups([group], step=0).metrics

    assert domain.lr == pytest.approx(peer.ppo.learning_rate)
    for name, network in networks.items():
        for found, expected, start in zip(ours(network, name), peer.tensors(name), peer.weights[name], strict=True):
            assert (found - expected).abs().max() < 1e-5
            assert (found - start).abs().max() > 1e-4  # far more than that has changed
    assert metrics["loss/policy"] == pytest.approx(losses["surrogate"], abs=1e-5)
    assert metrics["loss/value"] == pytest.approx(losses["value"], abs=1e-4)
    assert metrics["entropy"] == pytest.approx(losses["entropy"], abs=1e-5)
