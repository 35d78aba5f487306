"""Where a life of the learner begins: the newest checkpoint that really loads; and a disk that takes no more of one."""

import json
import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from server_part import server_part
from token_domains import counters

from async_rl.buffer.journal import SCHEMA
from async_rl.config import parse_config
from async_rl.errors import ConfigError, SchemaError
from async_rl.timer import StateTimer
from learner.checkpoint import CheckpointError, Checkpoints, ContractError
from learner.group import LearnerGroup, Placement
from learner.rank import Rank
from learner.start import find_start
from learner.token_domain import build
from learner.warmup.main import build_model, build_tokenizer
from learner.warmup.main import save as save_model_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_model_folder(build_model(), build_tokenizer(), folder)
    return parse_config({"model": {"path": str(folder)}, "learner": {"lr": 2e-4}})


class Run:
    """A run folder with the checkpoints of one domain, whose parameters all equal the step."""

    def __init__(self, out, config):
        self.out, self.config = out, config
        self.group = LearnerGroup(Placement(0, 1, torch.device("cpu")), 60.0)
        self.rank = Rank(group=self.group, timer=StateTimer(), out=out)
        self.domain = self.build(None)
        self.checkpoints = Checkpoints(out, keep=5)

    def build(self, folder):
        return build(self.config, replace(self.rank, resume=folder))

    def save(self, step, snapshot=None):
        self.domain.flat.data.fill_(step)
        state = counters(step, self.config.contract_hash(), lr=2e-4, skipped_in_row=0.0)
        return self.checkpoints.save(state, self.domain, snapshot or server_part)

    def start(self, config=None):
        return find_start(config or self.config, self.out, self.group, self.build)

    def names(self):
        return sorted(p.name for p in (self.out / "checkpoints").iterdir())


@pytest.fixture
def made(tmp_path, config):
    return Run(tmp_path, config)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut(path):
    os.truncate(path, path.stat().st_size - 100)


def test_without_a_checkpoint_the_run_begins_and_every_life_has_another_name(made):
    first, second = made.start(), made.start()
    assert (first.state.step, first.checkpoint, first.loaded) == (0, None, None)
    assert first.life != second.life
    assert int(first.life, 16) < 1 << 52


def test_the_newest_checkpoint_is_loaded(made):
    for step in (2, 9, 10):
        made.save(step)
    start = made.start()
    assert (start.state.step, start.checkpoint) == (10, made.out / "checkpoints" / "step_10")
    assert (start.domain(made.build).flat.data == 10).all()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: cut(folder / "optimizer.safetensors"), "optimizer.safetensors does not fit"),
        (lambda folder: cut(folder / "hf" / "model.safetensors"), "no causal language model can be loaded"),
        (lambda folder: flip(folder / "optimizer.safetensors"), "optimizer.safetensors is not what was saved"),
        (lambda folder: flip(folder / "hf" / "model.safetensors"), "model.safetensors is not what was saved"),
        (lambda folder: (folder / "seal.json").write_text("{"), "seal.json is damaged"),
        (lambda folder: (folder / "ledger.json").unlink(), "no complete checkpoint: ledger.json missing"),
        (lambda folder: (folder / "groups.bin").write_bytes(b"\x01" * 9), "a file of the ledger is damaged"),
        (lambda folder: (folder / "trainer.json").write_text('{"step": 7'), "no complete checkpoint: trainer.json"),
        (lambda folder: (folder / "trainer.json").write_text('{"step": 7}'), "no complete checkpoint: trainer.json"),
    ],
)
def test_a_damaged_one_is_set_aside_with_a_warning_that_names_it_and_the_one_before_is_taken(
    made, capsys, damage, says
):
    made.save(3)
    damage(made.save(7))
    start = made.start()
    assert start.state.step == 3
    assert (start.domain(made.build).flat.data == 3).all()
    said = capsys.readouterr().err
    assert said.startswith("async-rl: warning: checkpoint skipped, it is now damaged_step_7_")
    assert says in said
    assert "step_7/" in said or "step_7 is" in said or "step_7:" in said
    assert made.names() == [f"damaged_step_7_{os.getpid()}", "step_3"]
    Checkpoints(made.out, keep=1).save(start.state, made.domain, server_part)
    assert "step_3" in made.names(), "what was set aside crowds out nothing"


def test_when_none_can_be_loaded_the_run_does_not_silently_begin_anew(made):
    for step in (3, 7):
        (made.save(step) / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be loaded; the newest: .*step_7/optimizer"):
        made.start()


def test_checkpoints_of_another_run_stay_where_they_are(made):
    made.save(3)
    with pytest.raises(ContractError, match="another model, adapter, task, sampling or seed"):
        made.start(parse_config({**made.config.model_dump(), "seed": 99}))
    assert made.names() == ["step_3"]


def test_where_not_even_a_new_run_could_begin_no_checkpoint_is_blamed(made):
    for step in (3, 7):
        made.save(step)

    def build(folder):
        raise ConfigError("a package is not installed")

    with pytest.raises(ConfigError, match=r"^a package is not installed$"):
        find_start(made.config, made.out, made.group, build)
    assert made.names() == ["step_3", "step_7"]


def test_what_was_being_written_is_no_checkpoint(made):
    made.save(3)

    class Killed(BaseException):
        """As if the process ended here."""

    def killed(folder):
        server_part(folder)
        raise Killed

    with pytest.raises(Killed):
        made.save(7, killed)
    assert made.names() == [".step_7", "step_3"]
    assert made.start().state.step == 3


@contextmanager
def disk_with_room_for(num_bytes):
    """Files cannot grow beyond that: what is behind it fails as on a full disk, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_any_file_is_a_clear_error_and_what_was_written_is_gone(made):
    folder = made.save(3)
    sizes = sorted({p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 0})
    assert len(sizes) > 5
    for size in sizes:
        with (
            disk_with_room_for(size - 1),
            pytest.raises(CheckpointError, match=r"step 7 could not be written to .*ste"),
        ):
            made.save(7)
        assert made.names() == ["step_3"], size
    made.save(7)
    assert made.start().state.step == 7


def test_one_of_another_version_of_this_package_is_neither_set_aside_nor_passed_over(made):
    made.save(3)
    made.save(7)
    ledger = made.out / "checkpoints" / "step_7" / "ledger.json"
    ledger.write_text(json.dumps({"schema": SCHEMA - 1}))
    with pytest.raises(SchemaError, match=f"schema {SCHEMA - 1}, this version reads {SCHEMA}: go on with the version"):
        made.start()
    assert made.names() == ["step_3", "step_7"]


def test_the_servers_part_on_a_full_disk_leaves_nothing_either(made):
    made.save(3)

    def full(folder):
        (folder / "ledger.json").write_text("{")
        raise CheckpointError("the server could not write its part of the checkpoint: No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        made.save(7, full)
    assert made.names() == ["step_3"]


def test_a_snapshot_that_lacks_a_file_makes_no_checkpoint(made):
    with pytest.raises(CheckpointError, match=r"groups\.bin"):
        made.save(7, lambda folder: (folder / "ledger.json").write_text(json.dumps({})))
    assert made.names() == []
