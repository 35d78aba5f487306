"""Settings of the control domain: strict, without useless or contradicting ones, and readable again."""

import tomllib

import pytest

from async_rl.config import ControlConfig, load_any, load_config, load_control, parse_control, preset_names, to_toml
from async_rl.errors import ConfigError


def parse(**sections):
    return parse_control({"domain": "control", **sections})


def test_the_domain_decides_which_configuration_a_preset_is():
    assert isinstance(load_any("cartpole"), ControlConfig)
    assert not isinstance(load_any("arithmetic"), ControlConfig)
    with pytest.raises(ConfigError, match="trains no language model"):
        load_config("cartpole")
    with pytest.raises(ConfigError, match="lacks domain"):
        load_control("arithmetic")


@pytest.mark.parametrize("name", [n for n in preset_names() if isinstance(load_any(n), ControlConfig)])
def test_each_preset_survives_the_round_trip_through_the_resolved_file(name):
    config = load_control(name)
    assert parse_control(tomllib.loads(to_toml(config))) == config


def test_keyword_arguments_of_an_environment_survive_the_resolved_file():
    config = parse(env={"id": "a.b:C", "kwargs": {"level": 3, "name": 'x"y', "sizes": [1, 2], "deep": {"on": True}}})
    assert parse_control(tomllib.loads(to_toml(config))).env.kwargs == config.env.kwargs


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"env\.horizon"):
        parse(env={"horison": 3})


def test_another_domain_is_refused():
    with pytest.raises(ConfigError, match="domain"):
        parse_control({"domain": "chess"})


@pytest.mark.parametrize(
    ("sections", "knob"),
    [
        ({"policy": {"rnn_hidden": 32}}, r"policy\.rnn_hidden"),
        ({"policy": {"encoder": "shared", "critic_hidden": [8]}}, r"policy\.critic_hidden"),
        ({"env": {"id": "m:C", "autoreset": "same_step"}}, r"env\.autoreset"),
        ({"algorithm": {"rho_max": 2.0}}, r"algorithm\.rho_max"),
        ({"algorithm": {"weight_max": 3.0}}, r"algorithm\.weight_max"),
        ({"algorithm": {"imitation": "huber"}}, r"algorithm\.imitation"),
        ({"rnd": {"lr": 0.5}}, r"rnd\.lr"),
        ({"rnd": {"weight": 1.0, "final_step": 5}}, r"rnd\.final_step"),
        ({"amp": {"replay": 5}}, r"amp\.replay"),
        (
            {"amp": {"style_weight": 1.0, "task_weight": 0.0}, "algorithm": {"reward_scale": 2.0}},
            r"algorithm\.reward_scale",
        ),
        ({"symmetry": {"mirror_coef": 1.0}}, r"symmetry\.mirror_coef"),
        ({"learner": {"lr_schedule": "constant", "kl_target": 0.5}}, r"learner\.kl_target"),
        ({"episodes": {"tasks": 5}}, r"episodes\.tasks"),
        ({"algorithm": {"name": "grpo", "gamma": 0.5}}, r"algorithm\.gamma"),
        ({"algorithm": {"name": "grpo"}, "rnd": {"weight": 1.0}}, r"rnd\.weight"),
        ({"buffer": {"replace_zero_variance": True}}, r"buffer\.replace_zero_variance"),
    ],
)
def test_a_setting_without_effect_is_refused(sections, knob):
    with pytest.raises(ConfigError, match=rf"{knob} = .* has no effect"):
        parse(**sections)


@pytest.mark.parametrize(
    ("sections", "advice"),
    [
        ({"learner": {"ranks": 2}}, "raise buffer.groups_per_step"),
        ({"algorithm": {"name": "distillation"}, "learner": {"lr_schedule": "constant"}}, "set teacher.path"),
        ({"algorithm": {"name": "distillation"}, "teacher": {"path": "x"}}, "'constant' or 'linear'"),
        ({"policy": {"network": "transformer"}}, "'grpo'"),
        (
            {"algorithm": {"minibatches": 9}, "env": {"num_envs": 2, "horizon": 4}},
            "9 > env.num_envs × .* = 8 environment steps",
        ),
        ({"policy": {"network": "gru"}, "algorithm": {"minibatches": 8}, "env": {"num_envs": 4}}, "minibatches"),
        ({"amp": {"style_weight": 1.0}}, "amp.expert"),
        ({"symmetry": {"function": "m:f"}}, "symmetry.augment"),
        ({"learner": {"lr_min": 0.1, "lr_max": 0.01}}, "lr_max"),
        ({"buffer": {"max_staleness": 0}, "algorithm": {"correction": "vtrace"}}, "there are none"),
        ({"algorithm": {"epochs": 1, "minibatches": 1}}, "'constant' or 'linear'"),
        ({"buffer": {"max_staleness": 1, "max_uses": 3}}, "at most 2 steps"),
        ({"learner": {"betas": [0.9, 1.0]}}, r"learner\.betas"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_knob_to_change(sections, advice):
    with pytest.raises(ConfigError, match=advice):
        parse(**sections)


def test_the_contract_covers_environment_and_networks_but_not_how_much_an_actor_steps():
    config = parse()
    assert config.contract_hash() == parse(env={"num_envs": 7}, learner={"lr": 1.0}).contract_hash()
    for sections in (
        {"env": {"horizon": 3}},
        {"policy": {"hidden": [3]}},
        {"observations": {"actor": ["x"]}},
        {"seed": 1},
    ):
        assert config.contract_hash() != parse(**sections).contract_hash()


def test_networks_without_groups_of_their_own_read_what_the_actor_reads():
    config = parse(observations={"actor": ["a", "b"], "critic": ["c"]})
    assert config.groups_of("critic") == ("c",)
    assert config.groups_of("rnd") == ("a", "b")
