"""Actor and critic: rsl_rl's models with the same weights, sequences against single steps, gradients through time."""

import math

import pytest
import torch
from torch import nn

from async_rl.config import parse_control
from async_rl.control.networks import Actor, build_actor, build_critic, reset_state
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError

T, N = 9, 5
SIZES = {"policy": 4, "extra": 3}
CONTINUOUS = Action(kind="continuous", size=2, low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = Action(kind="discrete", size=2, choices=(3, 2))


def spaces(action=CONTINUOUS):
    return Spaces(observations={name: Observation((size,)) for name, size in SIZES.items()}, action=action)


def configure(observations=None, **policy):
    if policy.get("network") in ("gru", "lstm"):
        policy = {"rnn_hidden": 6, **policy}
    return parse_control(
        {"domain": "control", "observations": observations or {}, "policy": {"hidden": [8, 7], **policy}}
    )


def observations(*leading, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*leading, size, generator=generator) for name, size in SIZES.items()}


def actor_of(action=CONTINUOUS, observed=("policy", "extra"), **policy):
    torch.manual_seed(0)
    config = configure({"actor": list(observed)}, **policy)
    return build_actor(config, spaces(action))


def set_statistics(normalizer):
    normalizer.mean.copy_(torch.linspace(-1, 1, len(normalizer.mean)))
    normalizer.var.copy_(torch.linspace(0.1, 4, len(normalizer.var)))


def rsl_model(actor, distribution=None, **kwargs):
    """rsl_rl's own actor model with the weights and statistics of ours."""
    models = pytest.importorskip("rsl_rl.models")
    tensordict = pytest.importorskip("tensordict")
    kind = models.MLPModel if actor.encoder.rnn is None else models.RNNModel
    obs = tensordict.TensorDict(observations(N), [N])
    groups = {"actor": list(actor.groups)}
    model = kind(obs, groups, "actor", 2, (8, 7), obs_normalization=True, distribution_cfg=distribution, **kwargs)
    own = [m for m in (*actor.encoder.mlp, actor.head) if isinstance(m, nn.Linear)]
    theirs = [m for m in model.mlp if isinstance(m, nn.Linear)]
    for source, target in zip(own, theirs, strict=True):
        target.load_state_dict(source.state_dict())
    if actor.encoder.rnn is not None:
        model.rnn.rnn.load_state_dict(actor.encoder.rnn.state_dict())
    model.obs_normalizer._mean[0] = actor.normalizer.mean
    model.obs_normalizer._var[0] = actor.normalizer.var
    model.obs_normalizer._std[0] = actor.normalizer.var.sqrt()
    return model, lambda obs: tensordict.TensorDict(obs, [N])


@pytest.mark.parametrize("activation", ["elu", "relu", "selu", "tanh"])
def test_an_mlp_gives_what_rsl_rl_gives_with_the_same_weights(activation):
    actor = actor_of(activation=activation, normalize=True)
    set_statistics(actor.normalizer)
    model, wrap = rsl_model(actor, activation=activation)
    obs = observations(N)
    got = actor.distribution(actor.features(actor.observe(obs))).mode()
    torch.testing.assert_close(got, model(wrap(obs)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["elu", "relu", "selu", "tanh", "gelu", "silu", "leaky_relu"])
def test_each_activation_is_torchs_function_of_that_name_with_its_gradient(activation):
    actor = actor_of(activation=activation)
    function, (first, second) = getattr(nn.functional, activation), (actor.encoder.mlp[0], actor.encoder.mlp[2])
    x = actor.observe(observations(N))
    wanted = function(second(function(first(x))))
    got = actor.features(x)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(got.sum(), actor.encoder.parameters()),
        torch.autograd.grad(wanted.sum(), actor.encoder.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("std", ["scalar", "log", "state"])
def test_the_gaussian_is_that_of_rsl_rl(std):
    actor = actor_of(std=std, init_std=0.7, normalize=True)
    kind = "HeteroscedasticGaussianDistribution" if std == "state" else "GaussianDistribution"
    pytest.importorskip("rsl_rl.modules")
    settings = {
        "class_name": f"rsl_rl.modules.distribution:{kind}",
        "init_std": 0.7,
        "std_type": "log" if std == "state" else std,
    }
    model, wrap = rsl_model(actor, settings)
    obs, actions = observations(N), torch.randn(N, 2, generator=torch.Generator().manual_seed(2))
    model(wrap(obs), stochastic_output=True)
    made = actor.distribution(actor.features(actor.observe(obs)))
    torch.testing.assert_close(made.mean, model.output_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.std.expand(N, 2), model.output_std, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.log_prob(actions), model.get_output_log_prob(actions), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.entropy(), model.output_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_recurrent_actor_gives_what_rsl_rl_gives_over_episodes(network, layers):
    actor = actor_of(network=network, rnn_layers=layers, normalize=True)
    set_statistics(actor.normalizer)
    model, wrap = rsl_model(actor, rnn_type=network, rnn_hidden_dim=6, rnn_num_layers=layers)
    resets = random_resets()
    state = actor.initial_state(N, torch.device("cpu"))
    for step in range(T):
        obs = observations(N, seed=step)
        if step:
            model.reset(resets[step])
            state = reset_state(state, resets[step])
        with torch.no_grad():
            features, state = actor.step(actor.observe(obs), state)
            torch.testing.assert_close(actor.distribution(features).mode(), model(wrap(obs)), rtol=1e-6, atol=1e-6)


def random_resets():
    resets = torch.rand(T, N, generator=torch.Generator().manual_seed(7)) < 0.2
    resets[0] = torch.tensor([True, False, False, True, False])
    resets[4] = False  # a run of steps with no reset between
    resets[-1, 1] = True
    assert 2 < int(resets.any(1).sum()) < T
    return resets


@pytest.mark.parametrize("network", ["gru", "lstm", "mlp"])
@pytest.mark.parametrize("kind", ["random", "none", "every step"])
def test_a_sequence_is_the_same_as_stepping_one_by_one(network, kind):
    layers = {} if network == "mlp" else {"rnn_layers": 2}
    actor = actor_of(network=network, normalize=True, **layers)
    x = actor.observe(observations(T, N))
    resets = {"random": random_resets(), "none": torch.zeros(T, N) > 0, "every step": torch.ones(T, N) > 0}[kind]
    generator = torch.Generator().manual_seed(3)
    first = tuple(
        torch.randn(part.shape, generator=generator, requires_grad=True)
        for part in actor.initial_state(N, torch.device("cpu"))
    )
    weights = torch.randn(T, N, 7, generator=generator)

    def gradients(features, state):
        loss = (features * weights).sum() + sum(part.sum() for part in state)
        return torch.autograd.grad(loss, [*actor.encoder.parameters(), *first], allow_unused=True)

    state, outputs = first, []
    for step in range(T):
        features, state = actor.step(x[step], reset_state(state, resets[step]))
        outputs.append(features)
    stepped = torch.stack(outputs)
    features, after = actor.sequence(x, first, resets)
    assert len(after) == {"gru": 1, "lstm": 2, "mlp": 0}[network]
    torch.testing.assert_close(features, stepped, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(after, state, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(gradients(features, after), gradients(stepped, state), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_gradients_flow_through_time_and_stop_at_an_episodes_begin(network):
    actor = actor_of(network=network)
    x = actor.observe(observations(T, N)).requires_grad_()
    first = tuple(part.requires_grad_() for part in actor.initial_state(N, torch.device("cpu")))
    resets = torch.zeros(T, N, dtype=torch.bool)
    resets[4, 2] = True
    features, _ = actor.sequence(x, first, resets)
    (gradient, *states) = torch.autograd.grad(features[-1].sum(), [x, *first])
    reached = gradient.abs().sum(-1) > 0
    wanted = torch.ones(T, N, dtype=torch.bool)
    wanted[:4, 2] = False
    assert torch.equal(reached, wanted)
    for part in states:
        assert torch.equal(part.abs().sum((0, 2)) > 0, torch.arange(N) != 2)


@pytest.mark.parametrize("network", ["gru", "lstm"])
def test_recurrent_layers_compute_in_full_precision_on_every_device(network, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    actor_of(network=network)
    assert not torch.backends.cudnn.allow_tf32


def test_the_state_of_one_environment_is_reset_and_the_others_stay():
    state = (torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0))
    h, c = reset_state(state, torch.tensor([False, True, False]))
    assert h.sum((0, 2)).tolist() == [8, 0, 8]
    assert c.sum((0, 2)).tolist() == [16, 0, 16]
    assert state[0].sum() == 24, "the state that was given is not changed"
    assert reset_state((), torch.tensor([True])) == ()


def test_groups_are_concatenated_in_the_order_of_the_configuration_as_float32():
    actor = actor_of(observed=("extra", "policy"))
    obs = {"policy": torch.arange(4).int().view(1, 4), "extra": torch.tensor([[7, 8, 9]], dtype=torch.uint8)}
    assert actor.observe(obs).tolist() == [[7, 8, 9, 0, 1, 2, 3]]
    assert actor.observe(obs).dtype == torch.float32


def test_a_group_that_is_missing_or_not_flat_is_named():
    with pytest.raises(ConfigError, match=r"no group 'camera'.*policy, extra"):
        actor_of(observed=("camera",))
    image = Spaces(observations={"policy": Observation((8, 8, 3), "uint8")}, action=CONTINUOUS)
    with pytest.raises(ConfigError, match=r"'policy' has shape \[8, 8, 3\]"):
        build_actor(configure(), image)


def test_a_discrete_head_has_a_logit_for_each_choice_of_each_part():
    actor = actor_of(DISCRETE)
    assert actor.head.out_features == 5
    assert actor.std is None
    assert actor.log_std is None
    made = actor.distribution(actor.features(actor.observe(observations(T, N))))
    assert made.log_prob(made.sample()).shape == (T, N)
    assert made.mode().amax((0, 1)).tolist() <= [2, 1]


@pytest.mark.parametrize("std", ["scalar", "log", "state"])
def test_the_deviation_starts_where_it_is_configured_and_is_trained(std):
    actor = actor_of(std=std, init_std=0.3)
    made = actor.distribution(actor.features(actor.observe(observations(N)) * 100))
    torch.testing.assert_close(made.std, torch.full_like(made.std, 0.3))
    made.log_prob(torch.zeros(N, 2)).sum().backward()
    trained = {"scalar": "std", "log": "log_std", "state": "head.bias"}[std]
    gradient = dict(actor.named_parameters())[trained].grad
    assert (gradient[-2:] != 0).all()


def test_a_deviation_that_training_made_negative_stays_positive():
    actor = actor_of(std="scalar")
    with torch.no_grad():
        actor.std.fill_(-1.0)
    made = actor.distribution(actor.features(actor.observe(observations(N))))
    assert made.std.tolist() == pytest.approx([1e-6, 1e-6])
    assert math.isfinite(float(made.entropy()[0].detach()))


@pytest.mark.parametrize(("std", "far"), [("scalar", -0.5), ("log", -20.0), ("state", -20.0)])
def test_a_deviation_that_has_left_its_bounds_is_trained_on(std, far):
    actor = actor_of(std=std)
    trained = {"scalar": "std", "log": "log_std", "state": "head.bias"}[std]
    parameter = dict(actor.named_parameters())[trained]
    with torch.no_grad():
        parameter[-2:].fill_(far)
    made = actor.distribution(actor.features(actor.observe(observations(N))))
    assert made.std.amax().item() == pytest.approx(1e-6)
    made.entropy().sum().backward()
    assert (parameter.grad[-2:] > 0).all()  # a bonus for entropy leads back


def test_a_separate_critic_has_its_own_groups_widths_and_statistics():
    config = configure({"actor": ["policy"], "critic": ["policy", "extra"]}, critic_hidden=[5], normalize=True)
    actor = build_actor(config, spaces())
    critic = build_critic(config, spaces(), actor)
    assert not critic.shared
    assert [tuple(p.shape) for p in critic.parameters()] == [(5, 7), (5,), (1, 5), (1,)]
    assert critic.normalizer.mean.shape == (7,)
    assert actor.normalizer.mean.shape == (4,)
    assert critic.value(critic.features(critic.observe(observations(T, N)))).shape == (T, N)


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_a_shared_critic_is_one_linear_layer_on_the_actors_features(network):
    config = configure(encoder="shared", network=network)
    actor = build_actor(config, spaces())
    critic = build_critic(config, spaces(), actor)
    assert critic.shared
    assert not critic.is_recurrent
    assert critic.initial_state(N, torch.device("cpu")) == ()
    assert {name: tuple(t.shape) for name, t in critic.state_dict().items()} == {
        "head.weight": (1, 7),
        "head.bias": (1,),
    }
    features = torch.randn(T, N, 7)
    torch.testing.assert_close(critic.value(features), (features @ critic.head.weight[0]) + critic.head.bias)


def test_a_critic_is_as_wide_as_the_actor_where_nothing_else_is_said():
    config = configure(network="gru")
    actor = build_actor(config, spaces())
    critic = build_critic(config, spaces(), actor)
    assert critic.is_recurrent
    shapes = [tuple(p.shape) for p in critic.encoder.parameters()]
    assert shapes == [tuple(p.shape) for p in actor.encoder.parameters()]


def test_no_hidden_layer_is_a_linear_policy():
    actor = actor_of(hidden=[], observed=("policy",))
    assert isinstance(actor, Actor)
    x = torch.randn(N, 4)
    torch.testing.assert_close(actor.distribution(actor.features(x)).mode(), actor.head(x))
