from __future__ import annotations

import re

import pytest

from async_rl.config import Config, load_config, parse_config, to_toml
from async_rl.config.recipes import RECIPES
from async_rl.errors import ConfigError


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match="groups_per_step"):
        parse_config({"buffer": {"group_per_step": 3}})
    with pytest.raises(ConfigError, match="buffer"):
        parse_config({"bufer": {}})


BROADCAST = {"path": "broadcast"}
ON_POLICY = {"max_staleness": 0}
GUESS_BRINGS = "task.environment = 'guess', which brings the problems"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"sampling": {"top_p": 0.9}}, "set sampling.top_p = 1"),
        ({"sampling": {"group_size": 1}}, "no relative advantage"),
        ({"buffer": {"lease_s": 10}}, "task.timeout_s = 10 is not below buffer.lease_s = 10"),
        ({"algorithm": {"minibatches": 65}}, "needs at least one group"),
        ({"learner": {"ranks": 65}}, "raise buffer.groups_per_step"),
        ({"learner": {"kl_target": 0.1}}, "has no effect"),
        ({"task": {"name": "jsonl"}}, "task.data"),
        ({"buffer": {"stragglers": "drop"}}, "stragglers"),
        ({"steps": "many"}, "steps"),
        ({"steps": True}, "valid integer"),
        ({"steps": "3"}, "valid integer"),
        ({"steps": 1 << 62}, "must be below"),
        ({"seed": 1 << 99}, "must be below"),
        ({"log": {"wandb": 1}}, "valid boolean"),
        ({"learner": {"lr": float("inf")}}, "finite"),
        ({"learner": {"betas": [0.9, 1.0]}}, r"learner\.betas\.1 = 1\.0"),
        ({"weights": {"chunk_bytes": 1025}}, "multiple of 4"),
        ({"sampling": {"group_size": 65_537}}, "less than or equal to 65536"),
    ],
)
def test_what_makes_no_sense_is_refused_with_field_and_remedy(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_the_resolved_file_reads_back_as_the_same_configuration(tmp_path):
    config = parse_config(
        {
            "name": 'quote " and ü, \x7f, \\ and \n',
            "seed": 3,
            "learner": {"lr": 1e-5, "betas": [0.8, 0.9]},
            "buffer": {"stragglers": "reissue"},
        }
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(str(path)) == config
    adaptive = parse_config({"learner": {"lr_schedule": "kl_adaptive", "kl_target": 0.02}})
    path.write_text(to_toml(adaptive))
    assert load_config(str(path)) == adaptive


def test_overrides_are_typed_and_win(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("steps = 5\n[buffer]\nmax_staleness = 1\n")
    config = load_config(str(path), ["buffer.max_staleness=4", "learner.lr=1e-4", "name=hello", "log.wandb=false"])
    assert (config.buffer.max_staleness, config.learner.lr, config.name, config.log.wandb) == (4, 1e-4, "hello", False)
    assert config.steps == 5
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(str(path), ["steps"])


def test_a_missing_or_broken_file_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        load_config(str(tmp_path / "none.toml"))
    path = tmp_path / "c.toml"
    path.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(str(path))
    with pytest.raises(ConfigError, match="no preset"):
        load_config("arithmetics")


def test_the_contract_covers_what_both_sides_must_share_and_nothing_else():
    base = Config().contract_hash()
    same = [{"steps": 7}, {"buffer": {"max_staleness": 5}}, {"model": {"device": "cpu"}}, {"task": {"timeout_s": 3.0}}]
    other = [{"seed": 1}, {"sampling": {"temperature": 0.7}}, {"model": {"path": "x"}}, {"task": {"digits": 3}}]
    assert {parse_config(raw).contract_hash() for raw in same} == {base}
    assert len({base, *(parse_config(raw).contract_hash() for raw in other)}) == 5


def test_data_means_a_jsonl_task():
    assert parse_config({"task": {"data": "x.jsonl"}}).task.name == "jsonl"


# -- recipes, effects, contradictions


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_recipe_survives_the_round_trip_through_the_resolved_file(tmp_path, name):
    raw = {"algorithm": {"name": name}}
    if name == "distillation":
        raw["reference"] = {"path": "teacher"}
    config = parse_config(raw)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(str(tmp_path / "c.toml")) == config


def test_a_key_that_is_given_wins_over_the_recipe():
    config = parse_config({"algorithm": {"name": "gspo", "clip_low": 0.1}})
    assert (config.algorithm.loss, config.algorithm.clip_low, config.algorithm.clip_high) == ("gspo", 0.1, 4e-4)


def test_an_override_with_an_empty_value_brings_the_default_back():
    given = load_config("arithmetic").algorithm.clip_high
    assert given != load_config("arithmetic", ["algorithm.clip_high="]).algorithm.clip_high == 0.2


@pytest.mark.parametrize(
    ("raw", "knob"),
    [
        ({"algorithm": {"kl_in": "reward"}}, "algorithm.kl_coef = 0"),
        ({"algorithm": {"kl_coef": 0.1, "kl_target": 0.3}}, "algorithm.kl_controller = 'fixed'"),
        ({"algorithm": {"lam": 0.5}}, "algorithm.advantage = 'grpo'"),
        ({"learner": {"critic_lr": 1e-3}}, "algorithm.advantage = 'grpo'"),
        ({"algorithm": {"loss": "importance", "clip_low": 0.1}}, "algorithm.loss = 'importance'"),
        ({"algorithm": {"loss": "cispo", "dual_clip": 3.0}}, "algorithm.loss = 'cispo'"),
        ({"algorithm": {"correction_high": 3.0}}, "algorithm.correction = 'none'"),
        ({"reward": {"scorers": 2}}, "reward.placement = 'actor'"),
        ({"reward": {"judge_url": "http://x/v1"}}, "reward.judge = 0"),
        ({"reward": {"model_path": "rm"}}, "reward.model = 0"),
        ({"reference": {"placement": "scorer"}}, "algorithm.kl_coef = 0"),
        ({"task": {"max_turns": 3}}, "task.environment = ''"),
        ({"task": {"environment": "guess", "verifier": "a:b"}}, "task.environment = 'guess', which gives the reward"),
        ({"task": {"environment": "guess", "name": "sorting"}}, GUESS_BRINGS),
        ({"task": {"environment": "guess", "digits": 3}}, "task.environment = 'guess'"),
        ({"task": {"dataset": "basic_arithmetic"}}, "task.name = 'addition'"),
        ({"actors": {"mock_tokens": 3}}, "actors.engine = 'torch'"),
        ({"actors": {"engine": "mock", "mock_lengths": "constant", "mock_spread": 3.0}}, "actors.mock_lengths"),
        ({"actors": {"engine": "mock", "mock_lengths": "old.json", "mock_tokens": 3}}, "actors.mock_lengths"),
        ({"actors": {"weight_updates": "drained"}, "buffer": {"max_staleness": 0}}, "buffer.max_staleness = 0"),
        ({"learner": {"checksum_every": 5}}, "learner.ranks = 1"),
        ({"learner": {"timeout_s": 5.0}}, "learner.ranks = 1"),
        ({"algorithm": {"value_clip": 0.1}}, "algorithm.advantage = 'grpo'"),
        ({"algorithm": {"name": "ppo", "value_clip": 0.1}}, "one update a step"),
        ({"algorithm": {"proximal": "recomputed", "clip_high": 0.3}}, "algorithm.proximal = 'recomputed' and one"),
        ({"algorithm": {"proximal": "recomputed", "dual_clip": 3.0}}, "algorithm.proximal = 'recomputed' and one"),
        ({"weights": {"broadcast_s": 5.0}}, "weights.path = 'auto'"),
        ({"weights": {"path": "broadcast", "relay": 2}}, "weights.path = 'broadcast'"),
        ({"weights": {"path": "broadcast", "delta": True}}, "weights.path = 'broadcast'"),
    ],
)
def test_a_setting_without_effect_is_refused_with_what_makes_it_useless(raw, knob):
    with pytest.raises(ConfigError, match=re.escape(f"has no effect with {knob}")):
        parse_config(raw)


@pytest.mark.parametrize(
    ("raw", "advice"),
    [
        ({"algorithm": {"proximal": "behaviour", "correction": "mask"}}, "set algorithm.proximal = 'recomputed'"),
        ({"algorithm": {"dual_clip": 0.5}}, "must lie above 1"),
        ({"algorithm": {"name": "gspo", "aggregation": "token"}}, "set algorithm.aggregation = 'sequence'"),
        ({"algorithm": {"name": "gspo", "advantage": "gae"}}, "set algorithm.loss = 'ppo'"),
        ({"algorithm": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "algorithm.kl_in = 'reward'"),
        ({"algorithm": {"name": "distillation"}}, "set reference.path"),
        ({"algorithm": {"overlong_buffer": 16}}, "not below the longest completion"),
        ({"algorithm": {"max_token_age": 2}, "buffer": {"max_staleness": 2}}, "masks nothing"),
        ({"algorithm": {"age_decay": 0.5}, "buffer": {"max_staleness": 0}}, "remove them"),
        ({"algorithm": {"proximal": "interpolated"}, "buffer": {"max_staleness": 0}}, "every token has age 0"),
        ({"actors": {"placement": "colocated"}}, "set buffer.max_staleness = 0"),
        ({"buffer": {"max_uses": 2, "max_staleness": 0}}, "buffer.max_uses = 2 is never reached"),
        ({"sampling": {"group_size": 1}}, "algorithm.name = 'ppo'"),
        ({"reward": {"verifier": 0.0}}, "nothing would be rewarded"),
        ({"reward": {"model": 1.0}}, "needs reward.model_path"),
        ({"reward": {"judge": 1.0}}, "needs reward.judge_url"),
        ({"task": {"name": "reasoning_gym"}}, "needs task.dataset"),
        ({"task": {"environment": "guess"}, "reward": {"placement": "scorer"}}, "set reward.placement = 'actor'"),
        ({"weights": BROADCAST, "actors": {"engine": "mock"}}, "no weights to receive; set weights.path = 'auto'"),
        ({"weights": BROADCAST, "lora": {"rank": 8}}, "an adapter is small"),
        ({"weights": BROADCAST, "actors": {"placement": "colocated"}, "buffer": ON_POLICY}, "takes each device once"),
        ({"weights": BROADCAST, "actors": {"weight_updates": "drained"}}, "weight_updates = 'in_flight'"),
        ({"weights": BROADCAST, "learner": {"ranks": 2, "timeout_s": 30.0}}, "not below learner.timeout_s"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_knob_to_change(raw, advice):
    with pytest.raises(ConfigError, match=re.escape(advice)):
        parse_config(raw)


def test_a_group_of_one_is_fine_for_what_needs_no_group():
    assert parse_config({"algorithm": {"name": "ppo"}, "sampling": {"group_size": 1}}).sampling.group_size == 1


def test_stages_are_what_scorers_have_to_add():
    assert parse_config({}).stages == ()
    assert parse_config({"reward": {"placement": "scorer"}}).stages == ("reward",)
    both = {"reward": {"placement": "scorer"}, "reference": {"placement": "scorer"}, "algorithm": {"kl_coef": 0.1}}
    assert parse_config(both).stages == ("reward", "reference")


def test_the_contract_covers_what_scorers_and_actors_must_agree_on():
    base = parse_config({"algorithm": {"kl_coef": 0.1}})
    other = parse_config({"algorithm": {"kl_coef": 0.1}, "reference": {"path": "elsewhere"}})
    weights = parse_config({"algorithm": {"kl_coef": 0.1}, "reward": {"verifier": 2.0}})
    assert len({c.contract_hash() for c in (base, other, weights)}) == 3


@pytest.mark.parametrize(
    ("raw", "advice"),
    [
        (
            {
                "algorithm": {"name": "ppo"},
                "sampling": {"group_size": 1},
                "buffer": {"replace_zero_variance": True},
            },
            "set buffer.replace_zero_variance = false",
        ),
        ({"algorithm": {"loss": "importance", "proximal": "recomputed"}}, "set algorithm.correction"),
        (
            {"algorithm": {"name": "gspo", "advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"}},
            "set algorithm.kl_in = 'loss'",
        ),
    ],
)
def test_combinations_that_train_on_nothing_new_are_refused(raw, advice):
    with pytest.raises(ConfigError, match=re.escape(advice)):
        parse_config(raw)


def test_importance_weighting_with_a_correction_or_a_plain_base_is_allowed():
    corrected = {"algorithm": {"loss": "importance", "proximal": "recomputed", "correction": "truncate"}}
    assert parse_config(corrected).algorithm.correction == "truncate"
    assert parse_config({"algorithm": {"loss": "importance"}}).algorithm.proximal == "behaviour"


def test_a_recipe_named_by_an_override_wins_over_what_the_file_tuned_for_another():
    file, gspo = load_config("arithmetic").algorithm, load_config("arithmetic", ["algorithm.name=gspo"]).algorithm
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert load_config("arithmetic", ["algorithm.name=rloo"]).algorithm.clip_high == file.clip_high == 3.0
    dapo = load_config("arithmetic", ["algorithm.name=dapo"]).algorithm
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)  # the file's 0.5 belongs to its 3.0
    last = load_config("arithmetic", ["algorithm.clip_high=0.3", "algorithm.name=gspo"]).algorithm
    assert last.clip_high == 0.3


def test_a_file_that_is_tuned_for_the_named_recipe_keeps_its_keys(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[algorithm]\nname = "gspo"\nclip_low = 0.01\nclip_high = 0.02\n')
    again = load_config(str(file), ["algorithm.name=gspo"]).algorithm
    assert (again.clip_low, again.clip_high) == (0.01, 0.02)
    assert load_config(str(file), ["algorithm.name=cispo"]).algorithm.clip_high == 2.0


def test_distillation_needs_nothing_cleared_from_a_preset():
    config = load_config("arithmetic", ["algorithm.name=distillation", "reference.path=teacher"])
    assert (config.algorithm.loss, config.buffer.replace_zero_variance) == ("importance", False)
