"""``learner.compile``: compiled layers give the same losses and gradients, and a missing compiler is said at once."""

import pytest
import torch
from conftest import build_groups, build_model, build_updater, mini_batch

from async_rl.compiler import find_compiler
from async_rl.config import parse_config
from async_rl.errors import ConfigError
from learner import networks
from learner.networks import Networks, load_networks


def gradients(compiled):
    """Gradient and loss of two batches of different sizes, the second with what was compiled for the first."""
    updater = build_updater(buffer={"max_staleness": 4})
    if compiled:
        updater.networks.compile()
    found = []
    for count in (3, 5):
        (batch,) = updater.prepare([mini_batch(build_groups(count, seed=count))], version=3)
        totals = updater.gradient(batch)
        found.append((updater.flat.grad.clone(), float(totals["loss_policy"])))
    return found


@pytest.mark.real
def test_compiled_layers_give_the_same_losses_and_gradients():
    try:
        find_compiler()
    except ConfigError as error:
        print(error)
        pytest.skip(str(error))
    # what is traced, not the C++ that is made of it: that takes most of a minute
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    try:
        compiled = gradients(True)
    finally:
        torch.compiler.set_default_backend(before)
        torch.compiler.reset()
    for (plain, loss), (gradient, compiled_loss) in zip(gradients(False), compiled, strict=True):
        assert plain.abs().max() > 0.1
        assert torch.allclose(plain, gradient, atol=1e-5)
        assert loss == pytest.approx(compiled_loss, abs=1e-5)


def test_only_the_option_compiles_and_names_stay(tmp_path, monkeypatch):
    build_model().save_pretrained(tmp_path)
    monkeypatch.setattr(networks, "check_head", lambda _: None)
    for wanted in (False, True):
        config = parse_config({"model": {"path": str(tmp_path)}, "learner": {"compile": wanted}})
        loaded = load_networks(config, tmp_path, torch.device("cpu"))
        assert (loaded.policy.base_model._compiled_call_impl is not None) == wanted
        assert loaded.policy.state_dict().keys() == build_model().state_dict().keys()


def test_without_a_compiler_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler 'g\+\+'.*learner.compile = false"):
        Networks(build_model()).compile()
    with pytest.raises(ConfigError, match=r"'my-g\+\+'"):
        find_compiler({"CXX": "my-g++", "PATH": str(tmp_path)})
