"""A tiny Qwen2 and groups of it, shared by the tests of the learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config import Config, parse_config
from async_rl.data import Group, make_group, token_trajectory
from async_rl.timer import StateTimer
from learner.critic import Critic
from learner.group import LearnerGroup, Placement
from learner.networks import Networks
from learner.reference import Reference
from learner.shard import MiniBatch
from learner.updater import Updater

VOCAB = 24
Model = Any


def build_model(*, tied: bool = False, seed: int = 0) -> Model:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).eval()


def build_groups(count: int, size: int = 4, seed: int = 0, version: int = 3) -> list[Group]:
    """Groups with short completions over few tokens, so that many are equal or prefixes of others."""
    generator = np.random.default_rng(seed)
    groups = []
    for ordinal in range(count):
        prompt = generator.integers(3, VOCAB, generator.integers(2, 6)).tolist()
        trajectories = []
        for _ in range(size):
            completion = [*generator.integers(3, 5, generator.integers(0, 4)).tolist(), 2]
            trajectories.append(
                token_trajectory(
                    prompt=prompt,
                    completion=completion,
                    logprobs=generator.normal(-3, 0.5, len(completion)),
                    versions=np.sort(generator.integers(version - 2, version + 1, len(completion))),
                    reward=float(generator.integers(0, 3)) / 2,
                )
            )
        groups.append(make_group(ordinal=ordinal, attempt=0, task_index=ordinal, trajectories=trajectories))
    return groups


def mini_batch(groups: list[Group], *, of: list[Group] | None = None) -> MiniBatch:
    """``groups`` as one rank's share of ``of`` (default: it has them all)."""
    whole = of or groups
    return MiniBatch(
        groups=groups,
        num_tokens=sum(g.num_sampled for g in whole),
        num_sequences=sum(len(g) for g in whole),
        lengths_per_rank=[[n for g in whole for n in g.lengths]],
    )


def build_networks(config: Config, policy: Model | None = None, reference: Model | None = None) -> Networks:
    """As :func:`learner.networks.load_networks`, from models in memory; a critic's trunk has weights of its own."""
    policy, critic = policy or build_model(), None
    if config.algorithm.advantage == "gae":
        trunk = build_model(seed=5).base_model if config.algorithm.critic == "model" else None
        critic = Critic(policy.config.hidden_size, trunk)
    return Networks(
        policy,
        critic,
        Reference(reference, config.sampling.temperature) if reference is not None else None,
        temperature=config.sampling.temperature,
        entropy_gradient=config.algorithm.entropy_coef > 0,
    )


def build_updater(policy: Model | None = None, /, reference_model: Model | None = None, **sections: Any) -> Updater:
    config: Config = parse_config(sections)
    group = LearnerGroup(Placement(0, 1, torch.device("cpu")), timeout_s=60.0)
    return Updater(config, build_networks(config, policy, reference_model), group, StateTimer())


@pytest.fixture
def model() -> Model:
    return build_model()


@pytest.fixture
def make_model() -> Callable[..., Model]:
    return build_model


@pytest.fixture
def make_groups() -> Callable[..., list[Group]]:
    return build_groups


@pytest.fixture
def make_mini_batch() -> Callable[..., MiniBatch]:
    return mini_batch


@pytest.fixture
def make_updater() -> Callable[..., Updater]:
    return build_updater
