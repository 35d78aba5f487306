"""Checkpoints: whole or absent, and a resumed learner continues bit by bit."""

import json
import os
from pathlib import Path

import pytest
import torch
from server_part import server_part
from token_domains import counters, domain_of

from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.models import load_causal_lm
from async_rl.runfolder import RunFolder
from learner.checkpoint import CheckpointError, Checkpoints, read_state
from learner.token_domain import load_tensors, model_folder

CONFIG = parse_config({"learner": {"lr": 2e-4}})


def state_at(step):
    return counters(step, CONFIG.contract_hash(), lr=2e-4, skipped_in_row=1.0)


def train(updater, make_groups, make_mini_batch, steps):
    for step in steps:
        totals = updater.gradient(*updater.prepare([make_mini_batch(make_groups(3, seed=step))], version=3))
        updater.apply(totals, step, adapt=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_continues_bit_by_bit(
    tmp_path, make_model, make_updater, make_groups, make_mini_batch, tied, dtype
):
    straight = make_updater(make_model(tied=tied), model={"dtype": dtype})
    train(straight, make_groups, make_mini_batch, range(2))
    folder = Checkpoints(tmp_path, 2).save(state_at(2), domain_of(straight), server_part)
    train(straight, make_groups, make_mini_batch, range(2, 5))

    assert folder == tmp_path / "checkpoints" / "step_2"
    assert read_state(folder, CONFIG) == state_at(2)
    resumed = make_updater(load_causal_lm(model_folder(folder), "float32", "cpu"), model={"dtype": dtype})
    load_tensors(folder, resumed)
    train(resumed, make_groups, make_mini_batch, range(2, 5))
    assert torch.equal(resumed.flat.data, straight.flat.data)
    assert all(
        torch.equal(a, b)
        for a, b in zip(resumed.optimizer.state().values(), straight.optimizer.state().values(), strict=True)
    )


def test_an_optimiser_that_has_not_stepped_is_saved_and_loaded_too(
    tmp_path, make_updater, make_groups, make_mini_batch
):
    fresh = make_updater()
    folder = Checkpoints(tmp_path, 2).save(state_at(0), domain_of(fresh), server_part)
    resumed = make_updater()
    load_tensors(folder, resumed)
    for updater in (fresh, resumed):
        train(updater, make_groups, make_mini_batch, range(2))
    assert torch.equal(resumed.flat.data, fresh.flat.data)


def test_only_the_newest_are_kept_and_the_newest_is_found(tmp_path, make_updater):
    checkpoints, updater = Checkpoints(tmp_path, 2), make_updater()
    for step in (2, 9, 10, 11):
        checkpoints.save(state_at(step), domain_of(updater), server_part)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_11"]
    assert RunFolder(tmp_path).latest_checkpoint() == tmp_path / "checkpoints" / "step_11"


def test_saving_a_step_again_replaces_it(tmp_path, make_updater):
    checkpoints, updater = Checkpoints(tmp_path, 2), make_updater()
    checkpoints.save(state_at(4), domain_of(updater), server_part)
    updater.flat.data.add_(1)
    folder = checkpoints.save(state_at(4), domain_of(updater), server_part)
    loaded = load_causal_lm(model_folder(folder), "float32", "cpu")
    assert torch.equal(loaded.lm_head.weight, updater.networks.policy.lm_head.weight)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_4"]


def test_a_death_while_a_step_is_saved_again_leaves_the_old_one_or_the_new_one(tmp_path, make_updater, monkeypatch):
    checkpoints, updater = Checkpoints(tmp_path, 1), make_updater()
    checkpoints.save(state_at(4), domain_of(updater), server_part)
    rename = Path.rename

    class Death(BaseException):
        """As if the process ended here."""

    def die_after(path, target):
        rename(path, target)
        raise Death

    def die(folder):
        raise Death

    monkeypatch.setattr(Path, "rename", die_after)
    updater.flat.data.add_(1)
    monkeypatch.setattr("shutil.rmtree", die)
    with pytest.raises(Death):
        checkpoints.save(state_at(4), domain_of(updater), server_part)
    found = RunFolder(tmp_path).latest_checkpoint()
    assert found == tmp_path / "checkpoints" / "step_4"
    loaded = load_causal_lm(model_folder(found), "float32", "cpu")
    assert torch.equal(loaded.lm_head.weight, updater.networks.policy.lm_head.weight)
    monkeypatch.undo()
    checkpoints.save(state_at(5), domain_of(updater), server_part)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_5"]


def test_where_names_cannot_be_exchanged_the_one_that_is_there_stays(tmp_path, make_updater, monkeypatch):
    checkpoints, updater = Checkpoints(tmp_path, 1), make_updater()
    checkpoints.save(state_at(4), domain_of(updater), server_part)
    before = (tmp_path / "checkpoints" / "step_4").stat().st_ino
    monkeypatch.setattr("learner.checkpoint._RENAME_EXCHANGE", 1 << 30)  # EINVAL, as on NFS
    assert checkpoints.save(state_at(4), domain_of(updater), server_part).stat().st_ino == before
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_4"]


def test_when_the_servers_part_fails_nothing_half_written_stays_and_the_old_one_does(tmp_path, make_updater):
    checkpoints, updater = Checkpoints(tmp_path, 1), make_updater()
    checkpoints.save(state_at(1), domain_of(updater), server_part)

    def refuse(folder):
        raise CheckpointError("the server could not")

    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="the server could not"):
        checkpoints.save(state_at(2), domain_of(updater), refuse)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left"):
        checkpoints.save(state_at(2), domain_of(updater), full)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_a_crash_in_the_middle_leaves_nothing_that_is_loaded_and_is_cleaned_up_by_the_next(tmp_path, make_updater):
    checkpoints, updater = Checkpoints(tmp_path, 2), make_updater()

    class Crash(BaseException):
        """As if the process ended here."""

    def crash(folder):
        raise Crash

    with pytest.raises(Crash):
        checkpoints.save(state_at(5), domain_of(updater), crash)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [".step_5"]
    assert RunFolder(tmp_path).latest_checkpoint() is None
    checkpoints.save(state_at(6), domain_of(updater), server_part)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_6"]


@pytest.mark.parametrize(("schedule", "expected"), [("constant", 5e-5), ("kl_adaptive", 2e-4)])
def test_a_rate_that_is_changed_on_resume_counts_unless_the_schedule_moved_it(
    tmp_path, make_updater, schedule, expected
):
    folder = Checkpoints(tmp_path, 2).save(state_at(3), domain_of(make_updater()), server_part)
    changed = make_updater(learner={"lr": 5e-5, "lr_schedule": schedule})
    domain_of(changed).set_numbers(read_state(folder, CONFIG).numbers)
    assert changed.lr == expected


def test_an_unusable_folder_is_a_clear_error(tmp_path, make_updater):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step 3 could not be written to .*checkpoints/step_3"):
        Checkpoints(tmp_path, 2).save(state_at(3), domain_of(make_updater()), server_part)


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path, make_updater):
    folder = Checkpoints(tmp_path, 2).save(state_at(3), domain_of(make_updater()), server_part)
    with pytest.raises(ConfigError, match="another model, adapter, task, sampling or seed"):
        read_state(folder, parse_config({"seed": 1}))
    os.truncate(folder / "optimizer.safetensors", 100)
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors does not fit"):
        load_tensors(folder, make_updater())
    (folder / "trainer.json").write_text(json.dumps({"step": 3}))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        read_state(folder, CONFIG)
