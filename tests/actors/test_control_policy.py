"""The acting policy: published weights in, proof of what it holds out, actions and log-probabilities."""

import uuid
from dataclasses import replace

import pytest
import torch
from control_fakes import SPACES, control, published
from torch import nn

from actors.control.policy import Policy
from async_rl.control.networks import build_actor, build_critic
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import WeightsError
from async_rl.timer import StateTimer
from async_rl.weights.segment import SegmentReader
from learner.control.domain import ControlDomain, make_method
from learner.publisher import Publisher

CPU = torch.device("cpu")
RECURRENT = {"network": "lstm", "rnn_hidden": 5, "rnn_layers": 2, "normalize": True}


def networks(config, seed, spaces=SPACES):
    """What a learner would publish."""
    torch.manual_seed(seed)
    actor = build_actor(config, spaces)
    critic = build_critic(config, spaces, actor)
    for network in (actor, critic):
        for buffer in network.buffers():
            buffer.fill_(2.0)
    return nn.ModuleDict({"policy": actor, "critic": critic}) if critic.is_recurrent else actor


def test_weights_and_running_statistics_are_those_that_were_published_and_stay_so_after_the_next_version():
    config = control(policy={"normalize": True})
    policy = Policy(config, SPACES, CPU)
    assert (policy.version, policy.proven) == (-1, False)
    for version in (0, 1):
        source = networks(config, version)
        manifest, data = published(source, version)
        assert policy.load_weights(manifest, data) == manifest.checksum
        assert (policy.version, policy.proven) == (version, True)
        held = policy.actor.state_dict()
        assert held.keys() == source.state_dict().keys()
        assert all(torch.equal(held[name], value) for name, value in source.state_dict().items())
    assert held["normalizer.mean"].tolist() == [2.0, 2.0]
    x = {"policy": torch.tensor([[1.0, 3.0]])}
    expected = source.distribution(source.features(x["policy"])).mode()
    assert torch.equal(policy.distribution(x, ())[0].mode(), expected)


@pytest.mark.parametrize("policy", [{}, RECURRENT, {"network": "gru", "encoder": "shared", "normalize": True}])
def test_what_the_learner_publishes_is_taken_as_it_is(policy):
    config = control(policy=policy)
    domain = ControlDomain(config, SPACES, make_method(config, SPACES, OneRank()), OneRank(), StateTimer())
    publisher = Publisher(uuid.uuid4().hex, domain.published, 64)
    reader = SegmentReader()
    try:
        manifest = publisher.publish(domain.flat.data, 3, False)
        acting = Policy(config, SPACES, CPU)
        acting.load_weights(manifest, reader.open(manifest))
    finally:
        reader.close()
        publisher.close()
    trained = domain.flat.tensors("policy")
    assert acting.version == 3
    assert all(torch.equal(trained[name], value) for name, value in acting.actor.state_dict().items())


class OneRank:
    device, rank, world, is_leader = CPU, 0, 1, True


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: [x for x in t if x.name != "normalizer.var"], r"lacks \['normalizer.var'\]"),
        (lambda t: [*t, replace(t[0], name="critic.bias")], r"has \['critic.bias'\] that the model does not"),
        (lambda t: [replace(t[0], shape=(1, 1)), *t[1:]], r"std is float32 \[1, 1\], the engine's model has .* \[1\]"),
        (lambda t: [replace(t[0], offset=2), *t[1:]], "std starts at byte 2, inside an element"),
        (lambda t: [replace(t[0], offset=t[1].offset), *t[1:]], "overlaps"),
    ],
)
def test_tensors_that_do_not_match_are_named_and_nothing_has_changed(change, sentence):
    config = control(policy={"normalize": True})
    policy = Policy(config, SPACES, CPU)
    manifest, data = published(networks(config, 0))
    policy.load_weights(manifest, data)
    before = {name: value.clone() for name, value in policy.actor.state_dict().items()}
    other, data = published(networks(config, 1), 1)
    with pytest.raises(WeightsError, match=sentence):
        policy.load_weights(replace(other, tensors=tuple(change(list(other.tensors)))), data)
    assert (policy.version, policy.proven) == (0, True)
    assert all(torch.equal(policy.actor.state_dict()[name], value) for name, value in before.items())


def test_bytes_that_are_not_those_published_are_found_and_nothing_is_proven_until_the_next_version():
    config = control()
    policy = Policy(config, SPACES, CPU)
    manifest, data = published(networks(config, 0))
    torn = bytearray(data)
    last = manifest.tensors[-1]
    torn[last.offset] ^= 1
    with pytest.raises(WeightsError, match=f"version 0: the policy holds .* differs lies within {last.name}"):
        policy.load_weights(manifest, memoryview(torn))
    assert (policy.version, policy.proven) == (-1, False)
    policy.load_weights(manifest, data)
    assert policy.proven


def test_a_recurrent_policy_carries_the_critics_state_behind_its_own():
    config = control(policy=RECURRENT)
    policy = Policy(config, SPACES, CPU)
    source = networks(config, 0)
    policy.load_weights(*published(source))
    assert policy.hidden == ("actor0", "actor1", "critic0", "critic1")
    state = policy.initial_state(3)
    assert [tuple(part.shape) for part in state] == [(2, 3, 5)] * 4
    obs = {"policy": torch.randn(3, 2)}
    own, others = source["policy"].initial_state(3, CPU), source["critic"].initial_state(3, CPU)
    for _ in range(2):
        _, _, state = policy.act(obs, state, None)
        _, own = source["policy"].step(obs["policy"], own)
        _, others = source["critic"].step(obs["policy"], others)
    for held, expected in zip(state, (*own, *others), strict=True):
        torch.testing.assert_close(held, expected)
    reset = policy.reset_state(state, torch.tensor([False, True, False]))
    assert all((part[:, 1] == 0).all() and (part[:, 0] != 0).any() for part in reset)


def test_log_probabilities_are_of_the_actions_that_were_drawn():
    config = control(policy={"init_std": 0.5})
    policy = Policy(config, SPACES, CPU)
    policy.load_weights(*published(networks(config, 0)))
    obs = {"policy": torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))}
    actions, logprobs, state = policy.act(obs, (), torch.Generator().manual_seed(1))
    assert (actions.dtype, actions.shape, logprobs.dtype, state) == (torch.float32, (1000, 1), torch.float32, ())
    mean = policy.actor.distribution(policy.actor.features(obs["policy"])).mode().detach()
    expected = torch.distributions.Normal(mean, 0.5).log_prob(actions).sum(-1)
    torch.testing.assert_close(logprobs, expected)
    assert (actions - mean).std().item() == pytest.approx(0.5, rel=0.1)
    again, _, _ = policy.act(obs, (), torch.Generator().manual_seed(1))
    assert torch.equal(actions, again)


def test_choices_are_int32_and_the_greedy_policy_takes_the_most_likely_ones():
    spaces = Spaces(observations={"policy": Observation((2,))}, action=Action(kind="discrete", size=2, choices=(2, 3)))
    config = control()
    policies = [Policy(config, spaces, CPU, greedy=greedy) for greedy in (False, True)]
    source = networks(config, 0, spaces)
    for policy in policies:
        policy.load_weights(*published(source))
    obs = {"policy": torch.randn(50, 2)}
    sampled, logprobs, _ = policies[0].act(obs, (), torch.Generator().manual_seed(1))
    greedy, best, _ = policies[1].act(obs, (), None)
    assert sampled.dtype == greedy.dtype == torch.int32
    logits = source.head(source.features(obs["policy"])).detach()
    first, second = logits[:, :2].log_softmax(-1), logits[:, 2:].log_softmax(-1)
    assert greedy.tolist() == torch.stack([first.argmax(-1), second.argmax(-1)], -1).tolist()
    rows = torch.arange(50)
    torch.testing.assert_close(logprobs, first[rows, sampled[:, 0]] + second[rows, sampled[:, 1]])
    assert (best >= logprobs).all()
    assert (sampled != greedy).any()
