"""Model folders: what the names mean, what is read from them, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from async_rl import models
from async_rl.errors import ConfigError

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, eos_token_id=2)).save_pretrained(tmp_path)
    return tmp_path


def test_short_names_mean_folders_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
    folder = models.cached_model("tiny")
    assert folder.parent == tmp_path
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert models.resolve_model("tiny") == folder
    with pytest.raises(ConfigError, match="async-rl fetch smollm2"):
        models.resolve_model("smollm2")


def test_without_the_variable_the_cache_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ASYNC_RL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "async_rl"


def test_a_folder_needs_a_config(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config\.json does not exist; expected a Hugging Face model folder"):
        models.resolve_model(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": 0}, (0,)),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(tmp_path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("text", ["{}", '{"eos_token_id": []}', "not json", "[1]"])
def test_a_model_that_never_stops_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        models.stop_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 64),
        ({"sliding_window": 16}, 16),  # Mistral: every layer slides
        ({"sliding_window": 16, "use_sliding_window": False}, 64),
        ({"sliding_window": 16, "layer_types": ["full_attention"]}, 64),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 16),
    ],
)
def test_the_context_stays_inside_a_sliding_window(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **config}))
    assert models.context_length(tmp_path) == expected


def test_layers_without_a_kv_cache_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "layer_types": ["linear_attention"]}')
    with pytest.raises(ConfigError, match="linear_attention"):
        models.context_length(tmp_path)


def test_auto_takes_cuda_only_where_each_process_has_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert models.device_for("auto", 1, 2) == torch.device("cuda", 1)
    assert models.device_for("cuda", 0) == torch.device("cuda", 0)
    assert [models.device_for("auto", rank, 3).type for rank in range(3)] == ["cpu"] * 3
    assert models.device_for("cpu", 0).type == "cpu"
    with pytest.raises(ConfigError, match="local rank 2 of 3 processes, but 2 CUDA devices"):
        models.device_for("cuda", 2, 3)


def test_a_saved_model_is_loaded_as_it_was(folder):
    model = models.load_causal_lm(folder, "float32", "cpu")
    torch.manual_seed(0)
    expected = Qwen2ForCausalLM(Qwen2Config(**SIZES)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("tied", [False, True])
def test_an_empty_model_has_the_parameters_of_a_loaded_one(tmp_path, tied):
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    loaded, empty = (models.load_causal_lm(tmp_path, "bfloat16", "cpu", weights=w) for w in (True, False))
    shapes = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (loaded, empty)]
    assert shapes[0] == shapes[1]
    assert ("lm_head.weight" not in shapes[0]) == tied


def test_missing_weights_are_an_error_and_not_random(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        models.load_causal_lm(folder, "float32", "cpu")
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match="no causal language model"):
        models.load_causal_lm(folder, "float32", "cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no causal language model"):
        models.load_causal_lm(folder, "float32", "cpu")


def test_a_folder_without_a_tokenizer_is_refused(folder):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        models.load_tokenizer(folder)


def test_a_tokenizer_that_transformers_would_replace_by_the_scheme_of_the_family_keeps_its_spaces(folder):
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    vocab = {"<unk>": 0} | {chr(code): code for code in range(1, 128)}
    characters = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>").save_pretrained(folder)
    Qwen2Config().save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [97, 98]  # the fault that is worked around
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer("a b")["input_ids"] == [97, 32, 98]
    assert tokenizer.decode([97, 32, 98]) == "a b"


def test_logits_are_the_head_of_the_last_hidden_states(folder):
    model = models.load_causal_lm(folder, "float32", "cpu")
    models.check_head(model)
    ids = torch.tensor([[3, 1, 4]])
    logits = model.get_output_embeddings()(models.last_hidden(model, ids))
    torch.testing.assert_close(logits, model(ids).logits)


def test_an_architecture_that_transforms_its_logits_is_refused(folder):
    with pytest.raises(ConfigError, match="logits_scaling"):
        models.check_head(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)))
    model = models.load_causal_lm(folder, "float32", "cpu")
    plain = model.forward

    def doubled(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = doubled
    with pytest.raises(ConfigError, match="logits differ"):
        models.check_head(model)


def test_importing_the_module_loads_neither_torch_nor_transformers():
    code = "import sys, async_rl.models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
