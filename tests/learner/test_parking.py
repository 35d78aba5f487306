"""Memory that is given back and taken again: the same values in the same tensors, views still views."""

import pytest
import torch
from server_part import server_part
from token_domains import counters, domain_of

from learner.checkpoint import Checkpoints
from learner.parking import Parkable
from learner.step import train_step

PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "critic": "model"}


def test_a_parked_tensor_has_no_storage_and_comes_back_to_its_views():
    tensor = torch.arange(6.0)
    view, parkable = tensor[2:4], Parkable(tensor)
    for values in ([0.0, 1, 2, 3, 4, 5], [9.0, 1, 2, 7, 4, 5]):
        parkable.offload()
        parkable.offload()
        assert tensor.untyped_storage().nbytes() == 0
        assert parkable.on_cpu().tolist() == values
        parkable.restore()
        parkable.restore()
        assert tensor.tolist() == values
        assert view.tolist() == values[2:4]
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        tensor[0], view[1] = 9.0, 7.0


def test_a_constant_tensor_is_copied_once():
    tensor = torch.ones(3)
    parkable = Parkable(tensor, constant=True)
    parkable.offload()
    host = parkable.on_cpu().data_ptr()
    parkable.restore()
    parkable.offload()
    assert parkable.on_cpu().data_ptr() == host
    parkable.restore()
    assert tensor.tolist() == [1, 1, 1]


def test_a_learner_that_gives_its_memory_back_after_each_step_trains_as_one_that_keeps_it(
    make_updater, make_groups, make_mini_batch, make_model
):
    for dtype in ("float32", "bfloat16"):
        sections = {"algorithm": PPO, "model": {"dtype": dtype}}
        updaters = kept, parked = [make_updater(reference_model=make_model(seed=7), **sections) for _ in range(2)]
        for step in range(3):
            for updater in updaters:
                batch = make_mini_batch(make_groups(3, seed=step))
                train_step(updater._config, updater, [batch], step)
            moments, tensors = parked.optimizer.state(), parked.flat.tensors("policy")
            for part in parked._parts:  # what Updater.offload() does on a GPU
                part.offload()
            assert parked.flat.data.untyped_storage().nbytes() == 0
            assert next(parked.networks.policy.parameters()).untyped_storage().nbytes() == 0
            assert next(parked.networks.reference._model.parameters()).untyped_storage().nbytes() == 0
            assert parked.flat.grad.untyped_storage().nbytes() == 0
            # a checkpoint can be written meanwhile
            assert parked.flat.checksum() == kept.flat.checksum()
            for name, tensor in parked.optimizer.state().items():
                assert torch.equal(tensor, moments[name])
            for name, tensor in parked.flat.tensors("policy").items():
                assert torch.equal(tensor, tensors[name])
            for part in parked._parts:
                part.restore()
            parked.flat.check_views()
            assert torch.equal(parked.flat.data, kept.flat.data)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_that_is_written_meanwhile_is_the_same(
    tmp_path, make_updater, make_groups, make_mini_batch, make_model, tied
):
    updater = make_updater(make_model(tied=tied), reference_model=make_model(seed=7), algorithm=PPO)
    train_step(updater._config, updater, [make_mini_batch(make_groups(3))], 0)
    state = counters(1)
    Checkpoints(tmp_path / "here", 1).save(state, domain_of(updater), server_part)
    for part in updater._parts:
        part.offload()
    Checkpoints(tmp_path / "away", 1).save(state, domain_of(updater), server_part)
    files = [p.relative_to(tmp_path / "here") for p in (tmp_path / "here").rglob("*") if p.is_file()]
    assert {"model.safetensors", "critic.safetensors", "optimizer.safetensors"} <= {p.name for p in files}
    for file in files:
        assert (tmp_path / "away" / file).read_bytes() == (tmp_path / "here" / file).read_bytes(), file


def test_on_the_cpu_there_is_nothing_to_give_back(make_updater):
    updater = make_updater()
    updater.offload()
    assert updater.flat.data.untyped_storage().nbytes() > 0
    updater.restore()
    updater.flat.check_views()
