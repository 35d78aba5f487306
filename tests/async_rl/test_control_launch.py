"""A control run before and around its processes: checks, overview, display, summary, report, doctor."""

import io
import json
import os
import sys

import pytest
import torch
from buffer_helpers import ledger
from rich.console import Console
from run_folder import write_lines
from safetensors.torch import save_file
from typer.testing import CliRunner

from async_rl.buffer import journal
from async_rl.cli import app
from async_rl.config import load_control, parse_config, parse_control, preset_names, to_toml
from async_rl.control.networks import build_actor, build_critic
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import control_checks
from async_rl.launch.commands import Commands
from async_rl.launch.control_overview import describe_networks, rows
from async_rl.launch.crew import Crew
from async_rl.launch.interfaces import Outcome
from async_rl.launch.launcher import Launcher
from async_rl.launch.overview import print_overview
from async_rl.launch.progress import Glance, Pace, one_line, panel
from async_rl.launch.roles import check_role
from async_rl.launch.session import _configure
from async_rl.report.page import render
from async_rl.runfolder import CHECKPOINT_FILES, RunFolder
from async_rl.summary import summarize

GROUPS = {"policy": Observation((5,)), "extra": Observation((3,)), "image": Observation((2, 2), "uint8")}
ARM = Spaces(observations=GROUPS, action=Action(kind="continuous", size=2))
KEYS = Spaces(observations=GROUPS, action=Action(kind="discrete", size=2, choices=(3, 4)))


def control(**sections):
    return parse_control({"domain": "control", **sections})


# -- networks and overview


@pytest.mark.parametrize("spaces", [ARM, KEYS])
@pytest.mark.parametrize(
    "policy",
    [
        {"hidden": [7, 6]},
        {"hidden": [7], "critic_hidden": [4, 4], "normalize": True},
        {"hidden": [7], "encoder": "shared"},
        {"hidden": [7], "network": "gru", "rnn_hidden": 9, "rnn_layers": 2, "normalize": True},
        {"hidden": [7], "network": "lstm", "rnn_hidden": 9},
    ],
)
def test_the_networks_are_counted_as_they_are_built(spaces, policy):
    config = control(policy=policy, observations={"critic": ["policy", "extra"]} if "encoder" not in policy else {})
    described = describe_networks(config, spaces)
    actor = build_actor(config, spaces)
    critic = build_critic(config, spaces, actor)
    assert described.policy == sum(p.numel() for p in actor.parameters())
    assert described.critic == sum(p.numel() for p in critic.parameters())
    shipped = [*actor.state_dict().values(), *(critic.state_dict().values() if critic.is_recurrent else ())]
    assert described.published_bytes == 4 * sum(-(-t.numel() // 32) * 32 for t in shipped)  # each on 128 bytes


def test_a_deviation_that_depends_on_the_state_doubles_the_head():
    config = control(policy={"hidden": [7], "std": "state"})
    described = describe_networks(config, ARM)
    assert (described.outputs, described.policy) == (4, sum(p.numel() for p in build_actor(config, ARM).parameters()))


def test_the_overview_says_what_the_numbers_mean_together(tmp_path):
    config = control(
        name="hop",
        steps=5,
        env={"num_envs": 8, "horizon": 16},
        buffer={"groups_per_step": 3, "max_staleness": 2},
        actors={"count": 2},
        policy={"hidden": [7, 6], "normalize": True},
        rnd={"weight": 0.5},
    )
    found = dict(rows(config, ARM))
    assert found["environment"].startswith("gymnasium:CartPole-v1, policy [5], extra [3], image [2, 2], 2 continuous")
    assert found["effective batch"] == (
        "3 fragments × 8 environments × 16 steps = 384 environment steps, 20 updates a step (5 × 4)"
    )
    assert found["tickets in flight"] == "at most 9"
    assert found["staleness"] == "expected 1 while the learner waits, 2 while actors are ahead; largest possible 2"
    # 5·7+7 + 7·6+6 + 6·2+2 + 2 deviations; the critic has 6+1 in place of the last two
    assert found["policy"] == "5 × 7 × 6 × 2 elu, 106 parameters; critic 97, observations normalised"
    assert found["actors"] == "2 × 8 environments"
    assert found["learner"] == "1 rank, lr 0.001 (kl_adaptive), ppo + RND"
    screen = Console(file=io.StringIO(), width=160)
    print_overview(screen, config, ARM, tmp_path)
    assert "hop: 5 steps" in screen.file.getvalue()


def test_the_overview_of_episodes_counts_starts_and_episodes():
    config = control(algorithm={"name": "grpo"}, buffer={"groups_per_step": 4}, policy={"hidden": [4]})
    found = dict(rows(config, ARM))
    assert found["effective batch"].startswith("4 starts × 8 = 32 episodes of at most 64 steps")
    assert "critic" not in found["policy"]


# -- commands


def test_a_control_run_has_processes_of_its_own(tmp_path):
    commands = Commands(config=tmp_path / "c.toml", out=tmp_path, ranks=2, is_control=True)
    assert "learner.control.main" in commands.learner("tcp://h:1")
    assert commands.actor("tcp://h:1", "a")[1:3] == ["-m", "actors.control.main"]
    assert commands.evaluator("tcp://h:1")[1:3] == ["-m", "actors.control.evaluation"]
    assert commands.server()[1:3] == ["-m", "async_rl.buffer.server"]


def test_a_control_run_has_no_scorers():
    for role in ("reward", "reference"):
        with pytest.raises(ConfigError, match=f"--role {role}: environments give their rewards themselves"):
            check_role(control(), role)
    check_role(control(), "actor")


def test_a_host_that_cannot_make_the_environment_starts_no_evaluator(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(Crew, "add", lambda self, name, *_: started.append(name))
    for evaluates in (True, False):
        commands = Commands(config=tmp_path / "c.toml", out=tmp_path, ranks=1, is_control=True)
        parts = dict.fromkeys(("display", "interrupts", "monitor", "cleanup"))
        Launcher(commands=commands, env={}, gpus={}, actors=0, evaluates=evaluates, **parts)._start_others("tcp://h:1")
    assert started == ["learner", "evaluator", "learner"]


# -- checks before a start


def test_groups_that_the_environment_lacks_are_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no group 'feet'; the environment has policy, extra, image"):
        control_checks.check_groups(control(observations={"critic": ["policy", "feet"]}), ARM)
    with pytest.raises(ConfigError, match=r"group 'image' has shape \[2, 2\]; an MLP reads flat ones"):
        control_checks.check_groups(control(observations={"actor": ["image"]}), ARM)
    control_checks.check_groups(control(observations={"critic": ["policy", "extra"]}), ARM)


def test_a_deviation_is_refused_where_actions_are_choices():
    choices = Spaces(observations={"policy": Observation((4,))}, action=Action(kind="discrete", size=1, choices=(2,)))
    for setting in ({"std": "log"}, {"init_std": 0.5}):
        with pytest.raises(ConfigError, match=rf"policy\.{next(iter(setting))} = .* has no effect"):
            control_checks.check_deviation(control(policy=setting), choices)
    control_checks.check_deviation(control(), choices)


def test_files_that_are_not_there_are_found_before_a_process_starts(tmp_path):
    for config, named in (
        (control(amp={"style_weight": 1.0, "expert": "none.safetensors"}), "amp.expert = 'none.safetensors'"),
        (
            control(
                algorithm={"name": "distillation"},
                teacher={"path": "/nowhere"},
                learner={"lr_schedule": "constant"},
            ),
            "teacher.path = '/nowhere'",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            control_checks.check_run(config, os.environ, tmp_path, lambda: False, with_actors=True)


def test_a_learner_host_reads_the_spaces_instead_of_making_the_environment(tmp_path):
    ARM.write(tmp_path)
    config = control(env={"id": "no.such.module:Env", "spaces": str(tmp_path / "spaces.json")})
    found = control_checks.check_run(config, os.environ, tmp_path / "logs", lambda: False, with_actors=False)
    assert (found.action, found.observations["image"]) == (ARM.action, GROUPS["image"])
    (tmp_path / "spaces.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"spaces\.json describes no environment"):
        control_checks.check_run(config, os.environ, tmp_path / "logs", lambda: False, with_actors=False)


def stand_in(tmp_path, monkeypatch, body):
    """A probe that does something else: ``actors.control.probe`` of a folder that is searched first."""
    package = tmp_path / "stand_in" / "actors" / "control"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "probe.py").write_text(body)
    monkeypatch.chdir(tmp_path / "stand_in")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "stand_in")}


def test_a_probe_that_never_ends_is_ended_and_one_that_is_killed_is_described(tmp_path, monkeypatch):
    env = stand_in(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")
    monkeypatch.setattr(control_checks, "PROBE_TIMEOUT_S", 0.3)
    with pytest.raises(ConfigError, match=r"env\.id = 'gymnasium:CartPole-v1': making it took more than 0\.3 s; see"):
        control_checks.try_environment(control(), env, tmp_path / "logs", lambda: False)
    with pytest.raises(AsyncRLError, match="interrupted while the environment was tried"):
        control_checks.try_environment(control(), env, tmp_path / "logs", lambda: True)
    monkeypatch.setattr(control_checks, "PROBE_TIMEOUT_S", 30.0)
    probe = tmp_path / "stand_in" / "actors" / "control" / "probe.py"
    probe.write_text("import os, signal\nprint('loading', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(ConfigError, match=r"trying it failed: the probe was ended by SIGSEGV; last lines.*\n  loading"):
        control_checks.try_environment(control(), env, tmp_path / "logs", lambda: False)
    probe.write_text("import sys\nprint('async-rl: the arm is not plugged in', file=sys.stderr)\nsys.exit(2)\n")
    with pytest.raises(ConfigError, match=r"^the arm is not plugged in$"):
        control_checks.try_environment(control(), env, tmp_path / "logs", lambda: False)


def test_presets_of_both_domains_are_listed_and_checked():
    listed = CliRunner().invoke(app, ["presets"]).output.splitlines()
    assert len(listed) == len(preset_names())
    assert any(line.startswith("cartpole ") and "mlp on gymnasium:CartPole-v1, " in line for line in listed)
    assert load_control("cartpole").is_control


def test_faults_of_language_models_cannot_be_planted():
    from async_rl.doctor import run_doctor

    with pytest.raises(ConfigError, match="a control run has none"):
        run_doctor("cartpole", [], "shift")


# -- display

STATUS = {
    "step": 4,
    "stats": {"reward": 1.0},
    "control": {"episode/return": 123.456, "episode/length": 99.6, "episode/count": 12.0},
    "tokens": {"trained": 8000, "generated": 9000},
    "staleness": {"mean": 1.0, "max": 2},
    "utilization": {"learner": 0.5, "actors": 0.25},
    "evals": [{"version": 2, "metrics": {"return": 55.5, "length": 55.5}}],
}


def test_the_line_of_a_control_run_tells_return_and_steps_per_second():
    glance = Glance.from_status(STATUS)
    assert one_line(glance, 10, 65.0, 2000.0) == (
        "step 4/10  return 123.5  length 100  evaluated 55.5 at 2  2,000 steps/s  age 1.00/2  learner 50%  actors 25%  "
        "1 min 05 s left"
    )
    assert one_line(Glance.from_status({"control": {"episode/return": None}}), 10, None) == "step 0/10"
    screen = Console(file=io.StringIO(), width=120)
    screen.print(panel(glance, 10, None, 2000.0))
    drawn = screen.file.getvalue()
    assert all(part in drawn for part in ("123.5", "8,000", "2,000", "evaluated 55.5 at 2"))
    assert "accuracy" not in drawn


def test_the_pace_is_measured_from_the_first_step_that_was_seen():
    now = iter([0.0, 2.0, 4.0])
    pace = Pace(10, lambda: next(now))
    assert pace.left_s(1, 1000) is None
    assert pace.env_steps_per_s is None
    assert (pace.left_s(2, 3000), pace.env_steps_per_s) == (16.0, 1000.0)
    assert (pace.left_s(5, 9000), pace.env_steps_per_s) == (5.0, 2000.0)


# -- summary and report


@pytest.fixture
def finished(tmp_path):
    """Three steps at 10, 12 and 16 s with 100, 300 and 300 environment steps."""
    (tmp_path / "config.toml").write_text(to_toml(control(name="hop", steps=3)))
    steps = [
        {"time": 10.0, "env_steps/step": 100, "env_steps/trained": 100, "episode/return": None},
        {"time": 12.0, "env_steps/step": 300, "env_steps/trained": 400, "episode/return": 31.0},
        {"time": 16.0, "env_steps/step": 300, "env_steps/trained": 700, "episode/return": 41.0},
    ]
    write_lines(tmp_path / "metrics.jsonl", [{"step": i, "episode/length": 5, **row} for i, row in enumerate(steps)])
    evals = [{"version": v, "metrics": {"return": r, "length": 20.0}} for v, r in ((0, 9.0), (3, 480.0))]
    write_lines(tmp_path / "evals.jsonl", evals)
    episodes = {"episode/return": 41.0, "episode/length": 41.0, "episode/count": 6.0, "env_steps/generated": 800.0}
    books = {"step": 3, "status": "completed", "control": episodes, "tokens": {"generated": 800, "trained": 700}}
    books["staleness"] = {"histogram": {"0": 300, "1": 400}, "mean": 0.57, "max": 1, "bound": 1}
    (tmp_path / "books.json").write_text(json.dumps(books))
    return tmp_path


def test_the_summary_counts_environment_steps_and_no_tokens(finished):
    outcome = Outcome(status="completed", reason="", exit_code=0, wall_s=20.0, cpu_s={}, restarts={})
    summary = summarize(RunFolder(finished), outcome)
    assert summary["throughput"] == {
        "trained_tokens_per_s": None,
        "generated_tokens_per_s": None,
        "env_steps_per_s": 100.0,  # 600 steps in the 6 s behind the first step
    }
    assert summary["episodes"] == {"return": 41.0, "length": 41.0, "count": 6.0}
    assert (summary["eval"]["return"], summary["eval"]["return_start"]) == (480.0, 9.0)


def test_the_report_shows_curves_over_environment_steps_and_nothing_of_tokens(finished):
    page = render(RunFolder(finished))
    for title in ("Return of an episode", "Steps of an episode", "Staleness", "environment steps/s"):
        assert title in page
    assert "Trained environment steps by age" in page
    for absent in ("Accuracy", "accuracy", "tokens", "Rate of success", "<h2>Samples</h2>"):
        assert absent not in page.partition("<h2>Configuration</h2>")[0], absent


def test_a_language_models_report_has_no_episodes(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(parse_config({})))
    page = render(RunFolder(tmp_path))
    assert "Return of an episode" not in page


def test_the_launcher_of_a_control_run_needs_no_torch(tmp_path):
    code = (
        "import sys\nfrom async_rl.launch import control_checks, control_overview, session\n"
        "sys.exit(int('torch' in sys.modules))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


AMP = {"style_weight": 0.1, "expert": "halfcheetah_expert.safetensors", "hidden": [8]}


@pytest.mark.parametrize(
    ("sections", "override", "advice"),
    [
        ({}, "rnd.weight=0.1", "rnd.weight > 0 must stay False"),
        ({"rnd": {"weight": 0.1}}, "rnd.weight=0", "rnd.weight > 0 must stay True"),
        ({"rnd": {"weight": 0.1, "outputs": 8}}, "rnd.outputs=4", "rnd.outputs must stay 8"),
        ({"amp": AMP}, "amp.hidden=[9]", r"amp.hidden must stay \(8,\)"),
        ({"amp": AMP}, "amp.style_weight=0", "amp.style_weight > 0 must stay True|has no effect"),
    ],
)
def test_a_resume_with_other_networks_is_refused_before_anything_is_written(tmp_path, sections, override, advice):
    written = to_toml(parse_control({"domain": "control", "steps": 9, **sections}))
    (tmp_path / "config.toml").write_text(written)
    checkpoint = tmp_path / "checkpoints" / "step_4"
    checkpoint.mkdir(parents=True)
    for name in (*CHECKPOINT_FILES, "policy.safetensors"):
        (checkpoint / name).write_text("")
    journal.save(journal.freeze(ledger()), checkpoint)
    (checkpoint / "config.toml").write_text(written)
    save_file({"weight": torch.zeros(1)}, checkpoint / "policy.safetensors")
    save_file({"weight": torch.zeros(1)}, checkpoint / "optimizer.safetensors")
    assert _configure(None, ["learner.lr=1e-4", "env.num_envs=3"], None, tmp_path)[2] == checkpoint
    with pytest.raises(ConfigError, match=advice):
        _configure(None, [override], None, tmp_path)
    assert (tmp_path / "config.toml").read_text() == written
