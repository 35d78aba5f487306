"""A checkpoint of a control run: read back strictly, exported to TorchScript and ONNX, compared with the policy."""

import importlib.util
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl import cli
from async_rl.config import parse_control, to_toml
from async_rl.control import export
from async_rl.control.checkpoint import load_actor
from async_rl.control.export import ExportError, export_policy
from async_rl.control.networks import build_actor
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError

CONTINUOUS = Action(kind="continuous", size=2, low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = Action(kind="discrete", size=2, choices=(3, 5))
D = 7


def write_checkpoint(folder, action=CONTINUOUS, seed=0, **policy):
    """A checkpoint as the learner writes it, of a policy whose normaliser has seen something."""
    if policy.get("network") in ("gru", "lstm"):
        policy = {"rnn_hidden": 6, "rnn_layers": 2, **policy}
    config = parse_control(
        {
            "domain": "control",
            "observations": {"actor": ["policy", "extra"]},
            "policy": {"hidden": [8], "normalize": True, **policy},
        }
    )
    spaces = Spaces(observations={"policy": Observation((4,)), "extra": Observation((3,))}, action=action)
    torch.manual_seed(seed)
    actor = build_actor(config, spaces)
    actor.normalizer.mean.copy_(torch.linspace(-2, 2, D))
    actor.normalizer.var.copy_(torch.linspace(0.2, 5, D))
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.ndim == 2:  # large ones, so that actions differ
                weight.mul_(4)
    folder.mkdir(parents=True)
    save_file(actor.state_dict(), folder / "policy.safetensors")
    (folder / "config.toml").write_text(to_toml(config))
    spaces.write(folder)
    return actor.eval()


def observations(steps, rows):
    return torch.randn(steps, rows, D, generator=torch.Generator().manual_seed(5)) * 2


def stepped(actor, x):
    """Most likely actions [T, B, A] of the policy itself, from the beginning of an episode."""
    state, actions = actor.initial_state(x.shape[1], x.device), []
    with torch.no_grad():
        for obs in x:
            features, state = actor.step(obs, state)
            actions.append(actor.distribution(features).mode())
    return torch.stack(actions)


def test_a_checkpoint_gives_back_configuration_spaces_and_policy(tmp_path):
    actor = write_checkpoint(tmp_path / "step_3", std="log")
    config, spaces, loaded = load_actor(tmp_path / "step_3")
    assert config.policy.std == "log"
    assert spaces.action == CONTINUOUS
    assert not loaded.training
    own, theirs = actor.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_a_run_folder_means_its_newest_checkpoint_by_number(tmp_path):
    for step in (9, 10):
        actor = write_checkpoint(tmp_path / "checkpoints" / f"step_{step}", seed=step)
    (tmp_path / "checkpoints" / "step_11").mkdir()  # of another kind: it holds no policy
    (tmp_path / "checkpoints" / "step_12.old").mkdir()
    _, _, loaded = load_actor(tmp_path)
    assert torch.equal(loaded.head.weight, actor.head.weight)


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither the folder of a control run with a checkpoint nor a checkpoint"):
        load_actor(tmp_path)


def _shorten(tensors):
    return tensors | {"head.bias": torch.zeros(5)}


def _drop(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "head.bias"}


def _poison(tensors):
    return tensors | {"head.bias": torch.tensor([1.0, float("nan")])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shorten, r"head.bias is \[5\] in the file and \[2\] in the network \(1 of"),
        (_drop, r"head.bias is missing in the file and \[2\] in the network"),
        (_poison, "head.bias holds numbers that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    write_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / "policy.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ConfigError, match=message):
        load_actor(tmp_path / "c")


def test_a_damaged_file_is_refused(tmp_path):
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "policy.safetensors").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"policy.safetensors cannot be read"):
        load_actor(tmp_path / "c")


@pytest.fixture
def _no_traces():
    """Pytest's log handler has torch write down every step of its export, which takes longer than the export."""
    loggers = [logging.getLogger(name) for name in ("torch.__trace", "torch.onnx", "onnxscript")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    yield
    for logger, disabled in zip(loggers, before, strict=True):
        logger.disabled = disabled


CASES = [("mlp", "state", CONTINUOUS), ("gru", "scalar", DISCRETE), ("lstm", "scalar", CONTINUOUS)]


@pytest.mark.usefixtures("_no_traces")
@pytest.mark.parametrize(("network", "std", "action"), CASES, ids=[case[0] for case in CASES])
def test_both_files_give_the_policys_own_actions(tmp_path, network, std, action):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    actor = write_checkpoint(tmp_path / "c", action, network=network, std=std)
    script, graph = export_policy(tmp_path / "c", tmp_path / "new" / "folder")
    assert sorted(path.name for path in script.parent.iterdir()) == ["policy.onnx", "policy.pt"]
    x = observations(5, 4)
    wanted = stepped(actor, x)
    assert wanted.unique().numel() > 2

    module = torch.jit.load(str(script))
    torch.testing.assert_close(torch.stack([module(obs) for obs in x]).detach(), wanted, rtol=1e-5, atol=1e-5)
    if network != "mlp":
        assert not torch.allclose(module(x[0]).float(), wanted[0].float()), "the state goes on"
    module.reset()
    torch.testing.assert_close(module(x[0]).detach(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module(x[0, :1]).detach(), wanted[0, :1], rtol=1e-5, atol=1e-5)  # new rows begin anew

    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    letters = {"mlp": "", "gru": "h", "lstm": "hc"}[network]
    assert [i.name for i in session.get_inputs()] == ["obs", *(f"{letter}_in" for letter in letters)]
    assert [o.name for o in session.get_outputs()] == ["actions", *(f"{letter}_out" for letter in letters)]
    state = {f"{letter}_in": torch.zeros(2, 4, 6).numpy() for letter in letters}
    for obs, action_B in zip(x, wanted, strict=True):
        got, *after = session.run(None, {"obs": obs.numpy(), **state})
        torch.testing.assert_close(torch.from_numpy(got), action_B, rtol=1e-4, atol=1e-4)
        state = dict(zip(state, after, strict=True))


def test_a_file_that_computes_something_else_is_an_error(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "c")
    other = write_checkpoint(tmp_path / "d", seed=1)
    honest = export._write_torchscript
    monkeypatch.setattr(export, "_write_torchscript", lambda actor, obs, file: honest(other, obs, file))
    with pytest.raises(ExportError, match=r"policy.pt does not give the policy's actions: step 0"):
        export_policy(tmp_path / "c", tmp_path)


def test_without_the_packages_of_onnx_the_other_file_is_written_and_the_remedy_told(tmp_path, monkeypatch):
    actor = write_checkpoint(tmp_path / "c")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with pytest.raises(ConfigError, match=r"needs onnxscript: pip install 'async-rl\[control\]'"):
        export_policy(tmp_path / "c", tmp_path)
    x = observations(1, 2)[0]
    wanted = (x - torch.linspace(-2, 2, D)) / (torch.linspace(0.2, 5, D).sqrt() + 0.01)
    wanted = actor.head(torch.nn.functional.elu(actor.encoder.mlp[0](wanted)))
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "policy.pt"))(x), wanted)


def test_a_transformer_is_refused_with_the_way_to_load_it(tmp_path):
    config = parse_control(
        {
            "domain": "control",
            "algorithm": {"name": "grpo"},
            "policy": {"network": "transformer", "hidden": [16]},
            "learner": {"lr_schedule": "constant"},
        }
    )
    spaces = Spaces(observations={"policy": Observation((4,))}, action=DISCRETE)
    save_file(build_actor(config, spaces).state_dict(), tmp_path / "policy.safetensors")
    (tmp_path / "config.toml").write_text(to_toml(config))
    spaces.write(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be exported; load it with async_rl.control.checkpoint.load_actor"):
        export_policy(tmp_path, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_the_command_says_in_one_sentence_what_is_no_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["async-rl", "export", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"async-rl: {tmp_path} is neither the folder of a control run")


def test_the_command_prints_the_files_that_it_wrote(tmp_path, monkeypatch, capsys):
    wrote = []

    def pretend(path, out):
        wrote.append((path, out))
        return out / "policy.pt", out / "policy.onnx"

    monkeypatch.setattr(export, "export_policy", pretend)
    monkeypatch.setattr(sys, "argv", ["async-rl", "export", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    assert wrote == [(tmp_path, tmp_path / "exported")]
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "exported" / name) for name in ("policy.pt", "policy.onnx")
    ]
