"""Processes that die and join, a learner that is killed and resumed, and input that is the user's mistake."""

import dataclasses
import json
import os
import signal
import socket

import pytest

from async_rl.client import Client
from async_rl.config import load_config
from async_rl.data import Group, make_group, token_trajectory
from async_rl.protocol import Ticket
from tests.system.conftest import (
    assert_sound,
    books_of,
    child_pids,
    ordinals_of,
    overrides,
    processes_of,
    run,
    server_of,
    start,
    steps_of,
    summary_of,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_hosts_started_by_hand_lose_one_actor_and_gain_another(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 100, "buffer.heartbeat_s": 0.5, "actors.mock_speed": 53.0, "actors.engine": "mock"}
    settings = overrides(small)
    config = tmp_path / "config.toml"
    learner = start("learner", "arithmetic", *settings, "--out", str(out), log=tmp_path / "learner.log")
    actors = {}
    try:
        address = wait_until(lambda: server_of(out), "the server's start")["address"]
        config.write_text((out / "config.toml").read_text())

        def actor(name: str) -> None:
            arguments = ("actor", str(config), "--connect", address, "--name", name)
            actors[name] = start(*arguments, log=tmp_path / f"{name}.log")

        actor("first")
        actor("second")
        wait_until(lambda: steps_of(out) >= 2, "two steps")
        actors["first"].send_signal(signal.SIGKILL)
        wait_until(lambda: steps_of(out) >= 6, "four more steps with one actor")
        actor("late")
        assert learner.wait(120) == 0, (tmp_path / "learner.log").read_text()
        assert [actors[n].wait(20) for n in ("second", "late")] == [0, 0]
    finally:
        for process in (learner, *actors.values()):
            process.kill()
            process.wait(10)
    assert_sound(out, bound=2, steps=100)
    joined = (out / "logs" / "server.log").read_text()
    assert "first is gone" in joined
    assert "late (actor) joined" in joined


def test_a_server_and_a_learner_that_are_killed_twice_come_back_and_each_task_is_trained_once(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 120, "checkpoint.every": 4, "buffer.heartbeat_s": 1.0, "eval.every": 0}
    launcher = start("run", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "run.log")
    try:
        for role in ("learner.main", "buffer.server", "learner.main", "buffer.server"):
            # a learner whose server is gone makes the two steps that it has
            goal = steps_of(out) + 6
            wait_until(lambda goal=goal: steps_of(out) >= goal, "six more steps")
            (process,) = child_pids(role, out)
            os.kill(process, signal.SIGKILL)
        assert launcher.wait(150) == 0, (tmp_path / "run.log").read_text()
    finally:
        launcher.kill()
        launcher.wait(10)
    assert assert_sound(out, bound=2, steps=120)["restarts"] == {"server": 2, "learner": 2}
    assert ordinals_of(out) == list(range(120 * 8))  # nothing skipped, nothing repeated
    assert (tmp_path / "run.log").read_text().count("was ended by SIGKILL (out of memory?) and starts again") == 4


def test_after_sigkill_of_the_launcher_the_run_resumes_and_trains_each_task_once(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 40, "checkpoint.every": 4, "eval.every": 0}
    launcher = start("run", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "run.log")
    try:
        wait_until(lambda: books_of(out)["step"] >= 6, "six steps")
    finally:
        launcher.kill()
        launcher.wait(10)
    wait_until(lambda: not processes_of(out), "the end of all its processes", 10)
    done = run("run", "--resume", str(out), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=2, steps=40)
    assert ordinals_of(out) == list(range(40 * 8))


def test_an_actor_that_is_told_to_end_is_started_again(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 40, "checkpoint.every": 0, "eval.every": 0}
    launcher = start("run", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "run.log")
    try:
        wait_until(lambda: steps_of(out) >= 3, "three steps")
        (actor,) = child_pids("actors.main", out)
        os.kill(actor, signal.SIGTERM)
        assert launcher.wait(120) == 0, (tmp_path / "run.log").read_text()
    finally:
        launcher.kill()
        launcher.wait(10)
    assert assert_sound(out, bound=2, steps=40)["restarts"] == {"actor0": 1}


def hostile(group: Group, fault: str) -> Group:
    """The group with one array made wrong in a way that only the learner would notice."""
    arrays = {name: values.copy() for name, values in group.arrays.items()}
    if fault == "vocabulary":
        arrays["tokens"][:] = 1 << 30
    elif fault == "no prompt":
        arrays["loss_mask"][:], arrays["versions"][:] = 1, 0
    else:
        arrays["logprobs"][:] = -1e30
    return dataclasses.replace(group, arrays=arrays)


def test_no_group_of_an_actor_can_bring_the_learner_down(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 8, "eval.every": 0}
    faults = iter(("vocabulary", "no prompt", "logprobs"))
    launcher = start("run", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "run.log")
    try:
        address = wait_until(lambda: server_of(out), "the server")["address"]
        contract = load_config(str(out / "config.toml")).contract_hash()
        with Client(address, "actor", "hostile", contract) as client:
            manifest = client.connect(60)["manifest"]
            while manifest is None:
                manifest = next((h["manifest"] for h, _ in client.receive(5) if h["type"] == "version"), None)
            client.send("live", version=manifest["version"], checksum=manifest["checksum"])
            client.send("credit", count=3)
            answers = []
            while len(answers) < 3:
                for header, _ in client.receive(5):
                    for ticket in header.get("tickets", []) if header["type"] == "tickets" else []:
                        client.send_groups([hostile(group_for(Ticket.from_wire(ticket)), next(faults))])
                    answers += header["results"] if header["type"] == "ack" else []
        assert launcher.wait(120) == 0, (tmp_path / "run.log").read_text()
    finally:
        launcher.kill()
        launcher.wait(10)
    assert sorted(a[3] for a in answers) == ["bad_logprobs", "no_prompt", "token_outside_vocabulary"]
    assert_sound(out, bound=2, steps=8)


def group_for(ticket: Ticket) -> Group:
    """What an honest actor would submit."""
    trajectory = token_trajectory(
        prompt=[49, 43, 50], completion=[51, 2], logprobs=[-1.0, -1.0], versions=[ticket.version] * 2, reward=0.5
    )
    return make_group(
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        task_index=ticket.task_index,
        trajectories=[trajectory] * ticket.group_size,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"learner.lrr": 1}, "did you mean 'learner.lr'"),
        ({"model.path": "/no/such/model"}, "/no/such/model"),
        ({"task.data": "/no/such/file.jsonl"}, "/no/such/file.jsonl"),
        ({"sampling.group_size": 1}, "group_size = 1"),
        ({"sampling.top_p": 0.9}, "top_p"),
        ({"task.chat": True}, "chat template"),
        ({"task.verifier": "no_such_module:f"}, "no_such_module"),
        ({"task.verifier": "user_verifiers:missing"}, "missing"),
        ({"buffer.bind": "tcp://0.0.0.0:*"}, "insecure"),
        ({"actors.engine": "tpu"}, "actors.engine"),
        ({"sampling.max_new_tokens": 600}, "reads at most 512 tokens"),
        ({"learner.lr": "inf"}, "learner.lr = inf"),
    ],
)
def test_a_users_mistake_is_one_sentence(tmp_path, small, change, says):
    done = run("run", "arithmetic", *overrides(small | change), "--out", str(tmp_path / "run"), timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not processes_of(tmp_path / "run")


def test_empty_data_is_a_sentence(tmp_path, small):
    data = tmp_path / "empty.jsonl"
    data.write_text("")
    done = run("run", "arithmetic", *overrides(small | {"task.data": str(data)}), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert str(data) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_a_sentence(tmp_path, small):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run("run", "arithmetic", *overrides(small | {"buffer.bind": bind}), "--out", str(tmp_path / "run"))
    assert done.returncode in (1, 2)
    assert "Address already in use; choose another port" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not processes_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("verifier", "says"),
    [("raises", "no such column"), ("hangs", "timeout"), ("nan", "bad_reward"), ("dies", "died")],
)
def test_a_broken_verifier_ends_the_run_with_its_reason(tmp_path, small, verifier, says):
    out = tmp_path / "run"
    small |= {
        "actors.engine": "mock",
        "task.verifier": f"user_verifiers:{verifier}",
        "task.timeout_s": 0.3,
        "task.verifiers": 2,
        "eval.problems": 4,
    }
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "verifier failed 16 times in a row" in done.stderr
    assert says in done.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in done.stdout
    summary = summary_of(out)
    assert summary["status"] == "failed"
    ledger = summary["ledger"]
    assert ledger["issued"] == sum(v for k, v in ledger.items() if k != "issued")
    assert ledger["filtered"] >= 16
    assert not processes_of(out)


def test_own_data_is_trained_and_problems_that_do_not_fit_the_model_are_left_out_on_both_sides(tmp_path, small):
    out, data = tmp_path / "run", tmp_path / "problems.jsonl"
    prompts = [f"{n}=" if n % 3 else "9" * 600 + f"{n}" for n in range(100)]
    data.write_text("".join(json.dumps({"prompt": p, "answer": str(n)}) + "\n" for n, p in enumerate(prompts)))
    done = run("run", "arithmetic", *overrides(small | {"task.data": str(data)}), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    evaluation = assert_sound(out, bound=2, steps=4)["eval"]
    assert evaluation["problems"] + evaluation["skipped"] == 20
    assert 0 < evaluation["skipped"] < 20
    assert json.loads((out / "books.json").read_text())["filtered"]["prompt_refused"] > 0


def test_data_of_which_nothing_fits_the_model_ends_the_run_at_once(tmp_path, small):
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"prompt": "9" * 600 + str(n)}) + "\n" for n in range(50)))
    done = run("run", "arithmetic", *overrides(small | {"task.data": str(data)}), "--out", str(tmp_path / "run"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "256 prompts in a row were refused; the last: request" in done.stderr
    assert not processes_of(tmp_path / "run")
