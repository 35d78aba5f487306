"""Which models a configuration loads, and which it refuses."""

import pytest
import torch

from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.models import load_causal_lm
from learner.networks import load_networks
from learner.warmup.main import VOCAB_SIZE, build_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def folders(tmp_path):
    """The same small model twice, the second with other weights, and one whose tokenizer says other things."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=VOCAB_SIZE, num_key_value_heads=1, eos_token_id=2, **sizes)
    for seed, name in enumerate(("start", "teacher", "foreign")):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(tmp_path / name)
        tokenizer = build_tokenizer()
        if name == "foreign":
            tokenizer.add_tokens(["<another>"])
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def load(folders, **sections):
    config = parse_config({"model": {"path": str(folders / "start")}, **sections})
    return load_networks(config, folders / "start", CPU)


def test_only_what_is_needed_is_loaded(folders):
    networks = load(folders)
    assert networks.critic is networks.reference is None
    assert list(networks.trained) == ["policy"]
    networks = load(folders, algorithm={"kl_coef": 0.1}, reference={"placement": "scorer"})
    assert networks.reference is None


def test_a_critic_of_its_own_begins_as_a_copy_of_the_start_model(folders):
    networks = load(folders, algorithm={"name": "ppo", "critic": "model"})
    assert list(networks.trained) == ["policy", "critic"]
    ours, theirs = networks.critic.trunk.state_dict(), networks.policy.base_model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["embed_tokens.weight"].data_ptr() != theirs["embed_tokens.weight"].data_ptr()
    assert not any("lm_head" in name for name, _ in networks.critic.named_parameters())
    assert load(folders, algorithm={"name": "ppo"}).critic.trunk is None


def test_the_reference_is_the_configured_model_and_frozen(folders):
    for path, seed_of in (("", "start"), (str(folders / "teacher"), "teacher")):
        reference = load(folders, algorithm={"kl_coef": 0.1}, reference={"path": path}).reference
        expected = load_causal_lm(folders / seed_of, "float32", CPU)
        assert torch.equal(reference._model.lm_head.weight, expected.lm_head.weight)
        assert not any(p.requires_grad for p in reference._model.parameters())


def test_a_teacher_with_another_vocabulary_is_refused(folders):
    foreign = {"path": str(folders / "foreign")}
    with pytest.raises(ConfigError, match=r"reference\.path = .*foreign' has another vocabulary than the policy's"):
        load(folders, algorithm={"name": "distillation"}, reference=foreign)
