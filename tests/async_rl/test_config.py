from __future__ import annotations

import pytest

from async_rl.config import Config, load_config, parse_config, to_toml
from async_rl.errors import ConfigError


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match="groups_per_step"):
        parse_config({"buffer": {"group_per_step": 3}})
    with pytest.raises(ConfigError, match="buffer"):
        parse_config({"bufer": {}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"sampling": {"top_p": 0.9}}, "set sampling.top_p = 1"),
        ({"sampling": {"group_size": 1}}, "no relative advantage"),
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
