"""The loop of a rank against a scripted server: versions, books, stop, checkpoints, resume, and what ends a run."""

import json
import uuid

import numpy as np
import pytest
import torch
from token_domains import Tokenizer

from async_rl.buffer.sharding import split
from async_rl.client import Stopped
from async_rl.config import parse_config
from async_rl.data import make_group, token_trajectory
from async_rl.errors import AsyncRLError
from async_rl.models import load_causal_lm
from async_rl.runfolder import RunFolder
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import unlink_run
from async_rl.wire import encode_groups, unpack_header
from learner import trainer as trainer_module
from learner.checkpoint import CheckpointError, fresh_state, read_state
from learner.group import LearnerGroup, LostRanksError, Placement
from learner.leader import Leader
from learner.mismatch import MismatchCheck
from learner.networks import Networks
from learner.rank import train
from learner.token_domain import TokenDomain, model_folder, warn
from learner.trainer import Trainer
from learner.updater import Updater

SECTIONS = {
    "steps": 4,
    "sampling": {"group_size": 4},
    "buffer": {"groups_per_step": 4},
    "learner": {"lr": 1e-3},
    "checkpoint": {"every": 2, "keep": 5},
    "log": {"wandb": False, "tensorboard": False},
}
ZERO = {"shard_optimizer": True}


class ScriptedServer:
    """Answers as the real one does; the groups of a step depend on the step alone."""

    def __init__(self, groups_of, stop_at=None, minibatches=1):
        self.groups_of = groups_of
        self.stop_at = stop_at
        self.minibatches = minibatches
        self.versions, self.sent, self.asked = [], [], []
        self.stopping_after = None
        self.snapshot_ok, self.failed = True, False

    def request(self, kind, answer, deadline_s=None, give_up=lambda: False, **fields):
        if give_up():
            raise Stopped("this process was asked to end", False)
        return getattr(self, kind)(**fields)

    def answer(self, kind, answer, deadline_s=None, give_up=lambda: False, **fields):
        return self.request(kind, answer, give_up=give_up, **fields)

    def next(self, step):
        if step == self.stop_at:
            raise Stopped("asked to stop", self.failed)
        parts = split(self.groups_of(step), self.minibatches, 1)
        stats = {
            "utilization": {"actors": 0.5, "learner": None},
            "lengths": {"lost": 7.5, "filtered": None},
            "evals": [],
        }
        if step == 1:
            stats["evals"] = [{"version": 0, "metrics": {"accuracy": 0.25}}]
        frames = encode_groups("shard", parts.shards[0].groups, step=step, stats=stats, **parts.header(0))
        return unpack_header(frames[0]), frames[1:]

    def trained(self, step, manifest, stats):
        manifest = Manifest.from_wire(manifest)
        with open(manifest.segment, "rb") as segment:
            manifest.verify(memoryview(segment.read()[: manifest.nbytes]))
        self.versions.append((step, manifest.version))
        assert stats["publish_s"] > 0
        books = {"issued": 4 * (step + 1), "trained": 4 * (step + 1)}
        return {"books": books, "stopping": step == self.stopping_after}, []

    def snapshot(self, path):
        if self.snapshot_ok:
            for name in ("ledger.json", "groups.bin"):
                with open(f"{path}/{name}", "w") as file:
                    file.write("{}")
        return {"ok": self.snapshot_ok, "detail": "disk full"}, []

    def send(self, kind, **fields):
        if kind == "next":
            self.asked.append((fields["step"], len(self.versions)))
        else:
            self.sent.append((kind, fields))

    def receive(self, timeout_s):
        return [({"type": "stop", "reason": "the end", "error": self.failed}, [])]


@pytest.fixture
def run_id():
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    unlink_run(name)


def start(tmp_path, server, model, run_id, resume=None, terminated=lambda: False, **changes):
    """Build a trainer with its leader as ``learner.rank`` does."""
    config = parse_config({**SECTIONS, **changes})
    timer, group = StateTimer(), LearnerGroup(Placement(0, 1, torch.device("cpu")), 60)
    state = read_state(resume, config) if resume else fresh_state(config)
    updater = Updater(config, Networks(model, temperature=config.sampling.temperature), group, timer)
    check = MismatchCheck(config, updater.networks, group.device, warns=True)
    domain = TokenDomain(config, updater, Tokenizer(), check)
    if resume:
        domain.load(resume)
        domain.set_numbers(state.numbers)
    leader = Leader(
        config=config,
        out=tmp_path,
        client=server,
        run_id=run_id,
        epoch=0,
        domain=domain,
        timer=timer,
        start=state.step,
    )
    trainer = Trainer(
        config=config,
        group=group,
        client=server,
        domain=domain,
        leader=leader,
        timer=timer,
        state=state,
        terminated=terminated,
    )
    return trainer, leader


def honest_groups(model, version, seed=0):
    """Groups whose log-probabilities are the model's own."""
    generator = np.random.default_rng(seed)
    groups = []
    for ordinal in range(4):
        trajectories = []
        for _ in range(4):
            prompt, completion = generator.integers(3, 20, 3).tolist(), [*generator.integers(3, 20, 2).tolist(), 2]
            with torch.no_grad():
                table = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            logprobs = [float(table[2 + i, token]) for i, token in enumerate(completion)]
            trajectories.append(
                token_trajectory(
                    prompt=prompt,
                    completion=completion,
                    logprobs=logprobs,
                    versions=[version] * 3,
                    reward=float(generator.integers(0, 2)),
                )
            )
        groups.append(make_group(ordinal=ordinal, attempt=0, task_index=ordinal, trajectories=trajectories))
    return groups


def test_all_steps_are_trained_published_logged_and_checkpointed(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step, seed=step))
    trainer, leader = start(tmp_path, server, model, run_id)
    before = trainer._domain.updater.flat.checksum()
    assert train(trainer, leader)
    leader.close()

    assert server.versions == [(-1, 0), (0, 1), (1, 2), (2, 3), (3, 4)]
    assert server.sent == [("done", {"stopped": False})]
    assert trainer._domain.updater.flat.checksum() != before
    rows = RunFolder(tmp_path).metrics
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert [row["tokens/trained"] for row in rows] == [48, 96, 144, 192]  # 4 groups x 4 x 3 tokens a step
    assert rows[1]["eval/accuracy"] == 0.25
    assert rows[3]["books/issued"] == 16
    assert rows[0]["util/actors"] == 0.5
    assert rows[0]["length/lost"] == 7.5
    assert all(row["logp_diff/age0"] < 1e-5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_4"]


def test_a_resumed_run_ends_with_the_same_parameters(tmp_path, make_model, run_id):
    batches = {}  # what the straight run was given at each step
    model = make_model()

    def recorded(step):
        batches[step] = honest_groups(model, step, seed=step)
        return batches[step]

    straight, leader = start(tmp_path, ScriptedServer(recorded), model, run_id)
    train(straight, leader)
    leader.close()

    checkpoint = tmp_path / "checkpoints" / "step_2"
    again = load_causal_lm(model_folder(checkpoint), "float32", "cpu")
    server = ScriptedServer(batches.__getitem__)
    resumed, leader = start(tmp_path, server, again, run_id, resume=checkpoint)
    assert train(resumed, leader)
    leader.close()
    assert server.versions == [(-1, 2), (2, 3), (3, 4)]
    assert torch.equal(resumed._domain.flat.data, straight._domain.flat.data)
    assert resumed.state == straight.state
    assert [row["step"] for row in RunFolder(tmp_path).metrics] == [0, 1, 2, 3]


def test_a_resumed_run_that_stops_at_once_does_not_log_the_evaluations_of_the_session_before_again(
    tmp_path, make_model, run_id
):
    model = make_model()
    trainer, leader = start(tmp_path, ScriptedServer(lambda step: honest_groups(model, step)), model, run_id)
    train(trainer, leader)
    leader.close()
    (tmp_path / "evals.jsonl").write_text('{"version": 0, "metrics": {"accuracy": 0.25}}\n')
    checkpoint = tmp_path / "checkpoints" / "step_2"
    again = load_causal_lm(model_folder(checkpoint), "float32", "cpu")
    resumed, leader = start(tmp_path, ScriptedServer(None, stop_at=2), again, run_id, resume=checkpoint)
    assert not train(resumed, leader)
    leader.close()
    assert [row["step"] for row in RunFolder(tmp_path).metrics] == [0, 1]


def test_a_stop_ends_after_the_present_step_with_a_checkpoint(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step), stop_at=3)
    trainer, leader = start(tmp_path, server, model, run_id)
    assert not train(trainer, leader)
    leader.close()
    assert trainer.state.step == 3
    assert server.sent == [("done", {"stopped": True})]
    newest = RunFolder(tmp_path).latest_checkpoint()
    assert newest == tmp_path / "checkpoints" / "step_3"
    assert json.loads((newest / "trainer.json").read_text())["step"] == 3


def test_a_step_is_asked_for_before_the_one_before_is_trained(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    trainer, leader = start(tmp_path, server, model, run_id)
    assert train(trainer, leader)
    leader.close()
    assert server.asked == [(0, 1), (1, 1), (2, 2), (3, 3)]  # step, versions published by then


@pytest.mark.parametrize("buffer", [{"max_staleness": 0}, {"max_staleness": 1, "max_uses": 2}])
def test_a_step_is_not_asked_for_ahead_where_that_would_change_it(tmp_path, model, run_id, buffer):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    trainer, leader = start(tmp_path, server, model, run_id, buffer={"groups_per_step": 4, **buffer})
    assert train(trainer, leader)
    leader.close()
    assert server.asked == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_step_that_is_there_ahead_is_not_begun_when_the_run_winds_down(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    server.stopping_after = 1
    trainer, leader = start(tmp_path, server, model, run_id)
    assert not train(trainer, leader)
    leader.close()
    assert trainer.state.step == 2
    assert server.asked[-1] == (2, 2)
    assert server.sent == [("done", {"stopped": True})]


def test_a_run_that_fails_elsewhere_ends_here_without_a_goodbye(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step), stop_at=3)
    server.failed = True
    trainer, leader = start(tmp_path, server, model, run_id)
    with pytest.raises(Stopped):
        train(trainer, leader)
    with pytest.raises(AsyncRLError, match="the run failed: the end"):
        leader.finish(trainer.state, stopped=False)
    leader.close()


@pytest.mark.parametrize("is_ahead", [False, True], ids=["it waits", "the next shard has come already"])
def test_sigterm_is_a_stop(tmp_path, model, run_id, is_ahead):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    if is_ahead:
        server.answer = lambda kind, answer, give_up, step: server.next(step)
    trainer, leader = start(tmp_path, server, model, run_id, terminated=lambda: len(server.versions) >= 3)
    assert not train(trainer, leader)
    leader.close()
    assert trainer.state.step == 2


def test_an_actor_with_other_weights_ends_the_run_with_a_sentence(tmp_path, make_model, run_id):
    other = make_model(seed=5)
    server = ScriptedServer(lambda step: honest_groups(other, step))
    trainer, leader = start(tmp_path, server, make_model(), run_id)
    with pytest.raises(
        AsyncRLError, match=r"disagree about the same weights \(version 0\): .* over 48 tokens, limit 0\.01"
    ):
        train(trainer, leader)
    leader.close()


def test_the_check_waits_for_the_first_tokens_of_the_version_that_is_trained(tmp_path, make_model, run_id):
    model, other = make_model(), make_model(seed=5)
    versions = {0: -1, 1: 0, 2: 2}  # steps 0 and 1 have tokens of older versions alone
    server = ScriptedServer(lambda step: honest_groups(other, versions[step]))
    trainer, leader = start(tmp_path, server, model, run_id)
    with pytest.raises(AsyncRLError, match=r"same weights \(version 2\): .*do not have the same weights"):
        train(trainer, leader)
    leader.close()
    assert [row["logp_diff/age0"] for row in RunFolder(tmp_path).metrics] == [None, None]
    assert all(row["logp_diff/age1"] > 0.05 for row in RunFolder(tmp_path).metrics)


def test_the_sentence_names_a_temperature_that_an_actor_ignores(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    sampling = {"sampling": {"group_size": 4, "temperature": 0.5}}
    trainer, leader = start(tmp_path, server, model, run_id, **sampling)
    with pytest.raises(AsyncRLError, match=r"the engine's .* are those at temperature 1 instead of 0\.5"):
        train(trainer, leader)
    leader.close()


def test_colocated_the_memory_is_given_back_before_each_version_is_announced(tmp_path, model, run_id, monkeypatch):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    colocated = {"actors": {"placement": "colocated"}, "buffer": {"groups_per_step": 4, "max_staleness": 0}}
    trainer, leader = start(tmp_path, server, model, run_id, **colocated, steps=2, checkpoint={"every": 1})
    events = []
    monkeypatch.setattr(trainer._domain.updater, "offload", lambda: events.append("offload"))
    monkeypatch.setattr(trainer._domain.updater, "restore", lambda: events.append("restore"))
    for name in ("trained", "next", "snapshot"):
        answer = getattr(server, name)
        monkeypatch.setattr(server, name, lambda n=name, a=answer, **fields: (events.append(n), a(**fields))[1])
    assert train(trainer, leader)
    leader.close()
    handed = ["offload", "trained"]
    assert events == [*handed, "next", "restore", *handed, "snapshot", "next", "restore", *handed, "snapshot"]


def test_a_mismatch_later_in_the_run_is_a_warning(tmp_path, make_model, run_id, capsys):
    model, other = make_model(), make_model(seed=5)
    server = ScriptedServer(lambda step: honest_groups(other if step else model, step))
    trainer, leader = start(tmp_path, server, model, run_id)
    assert train(trainer, leader)
    leader.close()
    said = capsys.readouterr().err
    assert said.count("log-probabilities of the current version differ by") == 1  # once, not each step
    assert RunFolder(tmp_path).metrics[1]["logp_diff/age0"] > 0.05


def test_a_checkpoint_that_fails_on_the_way_is_a_warning_and_at_the_end_an_error(tmp_path, model, run_id, capsys):
    server = ScriptedServer(lambda step: honest_groups(model, step))
    server.snapshot_ok = False
    trainer, leader = start(tmp_path, server, model, run_id)
    with pytest.raises(AsyncRLError, match="the server could not write its part of the checkpoint: disk full"):
        train(trainer, leader)
    leader.close()
    assert trainer.state.step == 4
    assert "warning: the server could not write" in capsys.readouterr().err
    kind, fields = server.sent[0]
    assert (kind, "disk full" in fields["reason"]) == ("trouble", True)


def test_the_last_checkpoint_is_tried_again_while_the_disk_is_full(tmp_path, model, run_id, monkeypatch, capsys):
    monkeypatch.setattr("learner.leader._TRY_AGAIN_S", 0.01)
    server, waits = ScriptedServer(lambda step: honest_groups(model, step)), []

    def wait(timeout_s):
        waits.append(timeout_s)
        server.snapshot_ok = len(waits) > 1
        return [({"type": "stop", "reason": "the end", "error": False}, [])] if leader._trouble == "" else []

    server.snapshot_ok, server.receive = False, wait
    trainer, leader = start(tmp_path, server, model, run_id, steps=1)
    assert train(trainer, leader)
    leader.close()
    assert RunFolder(tmp_path).latest_checkpoint() == tmp_path / "checkpoints" / "step_1"
    assert [kind for kind, _ in server.sent] == ["trouble", "trouble", "done"]
    assert server.sent[1] == ("trouble", {"reason": ""})
    assert capsys.readouterr().err.count("disk full; trying for 120 s: the run ends with it") == 1


def test_a_last_checkpoint_that_stays_impossible_ends_the_run_and_names_the_newest(
    tmp_path, model, run_id, monkeypatch
):
    monkeypatch.setattr("learner.leader.LAST_TRIES_S", 0.0)
    server = ScriptedServer(lambda step: honest_groups(model, step))
    snapshot = server.snapshot
    server.snapshot = lambda path: (setattr(server, "snapshot_ok", "step_3" in path), snapshot(path))[1]
    trainer, leader = start(tmp_path, server, model, run_id, checkpoint={"every": 3})
    with pytest.raises(
        AsyncRLError, match=r"last checkpoint could not be written for 0 s; the newest one is .*step_3, "
    ):
        train(trainer, leader)
    leader.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [(CheckpointError("disk full"), True), (Stopped("the end", True), True), (LostRanksError("gone"), False)],
)
def test_who_helps_with_a_checkpoint_is_told_of_its_end_unless_ranks_are_lost(
    tmp_path, model, run_id, monkeypatch, error, told
):
    trainer, leader = start(tmp_path, ScriptedServer(lambda step: []), model, run_id, learner={"ranks": 2, **ZERO})
    ends = []
    monkeypatch.setattr(trainer_module, "stop_helping", ends.append)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(leader, "checkpoint", fails)
    with pytest.raises(type(error)):
        trainer.checkpoint(final=False)
    assert len(ends) == told
    leader.close()


def test_epochs_and_mini_batches_make_several_updates_and_count_tokens_once(tmp_path, model, run_id):
    server = ScriptedServer(lambda step: honest_groups(model, step), minibatches=2)
    trainer, leader = start(tmp_path, server, model, run_id, steps=1, algorithm={"minibatches": 2, "epochs": 3})
    assert train(trainer, leader)
    leader.close()
    (row,) = RunFolder(tmp_path).metrics
    assert row["tokens/trained"] == 48
    assert row["length/mean"] == 3
    assert float(trainer._domain.updater.optimizer.state()["step"]) == 6
    assert row["kl/behaviour"] > 0  # the later updates are off policy


def test_small_groups_are_warned_about_once_at_the_start(capsys):
    warn(parse_config({"sampling": {"group_size": 3}}))
    warn(parse_config({"sampling": {"group_size": 4}}))
    assert capsys.readouterr().err.count("sampling.group_size = 3: the mean of fewer than 4 rewards") == 1
