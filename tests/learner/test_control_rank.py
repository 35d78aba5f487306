"""The learner's loop with a domain that is neither: what it asks of it, logs, saves and continues with."""

import json
import shutil
import uuid
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.buffer.journal import SCHEMA
from async_rl.config import parse_control
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.runfolder import RunFolder
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import unlink_run
from learner.checkpoint import read_state
from learner.domain import Trained
from learner.flat import FlatParameters
from learner.group import LearnerGroup, Placement
from learner.rank import Rank, run
from learner.start import find_start

RUN_ID = f"test-{uuid.uuid4().hex[:8]}"
STATS = {"utilization": {"actors": 0.5, "learner": None}, "lengths": {}, "evals": []}
EPISODES = {"episode/return": None, "episode/length": None, "episode/count": 0.0, "env_steps/generated": 64.0}


class Counting:
    """A domain whose one parameter grows by the size of its batch, and whose rate halves with each step."""

    def __init__(self, config, rank):
        torch.manual_seed(len(str(rank.out)))
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.model.register_buffer("count", torch.zeros(()))
        self.flat = FlatParameters({"policy": self.model}, rank.group.device, 1, with_state=True)
        self.rate = 8.0
        self.calls = []

    @property
    def published(self):
        return self.flat.slots("policy")

    def train(self, header, frames, step):
        self.calls.append(step)
        self.rate /= 2
        with torch.no_grad():
            self.model.weight += header["size"]
            self.model.count += 1
        return Trained({"reward/mean": 0.5}, float(header["size"]))

    def numbers(self):
        return {"rate": self.rate}

    def set_numbers(self, numbers):
        self.rate = numbers["rate"]

    def save(self, folder):
        save_file(self.flat.tensors("policy"), folder / "policy.safetensors")
        (folder / "optimizer.safetensors").write_bytes(b"")

    def load(self, folder):
        with torch.no_grad():
            for name, tensor in load_file(folder / "policy.safetensors").items():
                self.model.state_dict()[name].copy_(tensor)

    def offload(self):
        raise AssertionError("nobody takes turns on the device")

    def restore(self):
        return None


class Server:
    """Deals ``16 + step`` and remembers what it is told."""

    def __init__(self, next_step=0):
        self.welcome = {"next_step": next_step, "run_id": RUN_ID, "epoch": 0}
        self.published, self.sent = [], []

    def request(self, kind, answer, deadline_s=None, give_up=lambda: False, **fields):
        return getattr(self, kind)(**fields), []

    def answer(self, kind, answer, deadline_s=None, give_up=lambda: False, **fields):
        return self.request(kind, answer, **fields)

    def next(self, step):
        return {"type": "shard", "size": 16 + step, "stats": {**STATS, "control": EPISODES}}

    def trained(self, step, manifest, stats):
        manifest = Manifest.from_wire(manifest)
        with open(manifest.segment, "rb") as segment:
            weights = torch.frombuffer(bytearray(segment.read()[: manifest.nbytes]), dtype=torch.float32)
        self.published.append((manifest.version, [t.name for t in manifest.tensors], float(weights[0])))
        return {"books": {"issued": step + 1}, "stopping": False}

    def snapshot(self, path):
        for name in ("ledger.json", "groups.bin"):
            with open(f"{path}/{name}", "w") as file:
                file.write(json.dumps({"schema": SCHEMA}) if name == "ledger.json" else "")
        return {"ok": True, "detail": ""}

    def send(self, kind, **fields):
        if kind != "next":
            self.sent.append((kind, fields))

    def receive(self, timeout_s):
        return [({"type": "stop", "reason": "the end", "error": False}, [])]


@pytest.fixture
def play(tmp_path):
    """Run a rank to its end; the domain and the server."""
    made = []

    def build(config, rank):
        made.append(Counting(config, rank))
        return made[-1]

    def run_rank(server=None, **changes):
        sections = {"steps": 4, "checkpoint": {"every": 2, "keep": 9}, "log": {"wandb": False, "tensorboard": False}}
        config = parse_control({"domain": "control", **sections, **changes})
        group = LearnerGroup(Placement(0, 1, torch.device("cpu")), 60.0)
        rank = Rank(group=group, timer=StateTimer(), out=tmp_path)
        server = server or Server()
        start = find_start(config, tmp_path, group, lambda folder: build(config, replace(rank, resume=folder)))
        run(config, rank, build, start, server, server.welcome, lambda: False)
        return made[-1], server

    yield run_rank
    unlink_run(RUN_ID)


def test_a_domain_is_trained_published_logged_and_saved(tmp_path, play):
    domain, server = play()
    assert domain.calls == [0, 1, 2, 3]
    versions, names, weights = zip(*server.published, strict=True)
    assert versions == (0, 1, 2, 3, 4)
    assert names[0] == ["weight", "count"]  # running statistics travel with the parameters
    assert weights[-1] - weights[0] == pytest.approx(16 + 17 + 18 + 19)
    rows = RunFolder(tmp_path).metrics
    assert [row["env_steps/trained"] for row in rows] == [16, 33, 51, 70]
    assert [row["env_steps/step"] for row in rows] == [16, 17, 18, 19]
    assert all(row["fps/total"] > 0 and row["time/learn_s"] >= 0 for row in rows)
    assert rows[0]["episode/return"] is None  # no episode has ended: the name is there all the same
    assert (rows[0]["episode/count"], rows[0]["env_steps/generated"]) == (0.0, 64.0)
    assert "util/learner" not in rows[0]
    assert not any(name.startswith("tokens") for name in rows[0])
    state = json.loads((tmp_path / "checkpoints" / "step_2" / "trainer.json").read_text())
    assert state == {**state, "step": 2, "trained": 33.0, "numbers": {"rate": 2.0}}
    assert RunFolder(tmp_path).latest_checkpoint() == tmp_path / "checkpoints" / "step_4"


def test_a_resumed_rank_ends_with_the_same_numbers(tmp_path, play):
    straight, _ = play()
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    resumed, server = play(server=Server(next_step=2))
    assert resumed.calls == [2, 3]
    assert torch.equal(resumed.flat.data, straight.flat.data)
    assert resumed.rate == straight.rate == 0.5
    assert [version for version, _, _ in server.published] == [2, 3, 4]
    assert [row["env_steps/trained"] for row in RunFolder(tmp_path).metrics] == [16, 33, 51, 70]


def test_a_checkpoint_of_another_environment_is_refused(tmp_path, play):
    play()
    other = parse_control({"domain": "control", "env": {"id": "gymnasium:Other-v0"}})
    with pytest.raises(
        ConfigError, match="a run with another environment, observations, networks or seed; resume with"
    ):
        read_state(tmp_path / "checkpoints" / "step_4", other)


def test_server_and_learner_must_continue_at_the_same_step(play):
    with pytest.raises(AsyncRLError, match="the server continues with step 3, this learner with step 0"):
        play(server=Server(next_step=3))
