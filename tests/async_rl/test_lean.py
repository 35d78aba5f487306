"""The quick start: transformers without the compiler, and models that are read without its loader."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from async_rl.model_reading import read_any, read_plain
from async_rl.models import load_causal_lm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, eos_token_id=2, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=2, tie_word_embeddings=True)),
    "other names": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_plain_file_gives_the_model_that_transformers_makes_of_it(tmp_path, kind):
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    plain, whole = read_plain(tmp_path, config, torch.float32), read_any(tmp_path, torch.float32)
    assert plain is not None
    ours, theirs = plain.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(plain.eval()(input_ids=ids).logits, whole.eval()(input_ids=ids).logits)
    assert plain.generation_config.to_dict() == whole.generation_config.to_dict()
    folders = tmp_path / "plain", tmp_path / "whole"
    for model, folder in zip((plain, whole), folders, strict=True):
        model.save_pretrained(folder)
    assert {f.name: f.read_bytes() for f in folders[0].iterdir()} == {
        f.name: f.read_bytes() for f in folders[1].iterdir()
    }


@pytest.mark.parametrize("change", ["another tensor", "one too few", "another shape", "bfloat16", "quantised"])
def test_what_is_not_plain_is_left_to_transformers(tmp_path, change):
    model = MODELS["untied"]()
    model.save_pretrained(tmp_path)
    config, dtype, file = model.config, torch.float32, tmp_path / "model.safetensors"
    tensors = load_file(file)
    if change == "another tensor":
        tensors["extra"] = torch.zeros(1)
    elif change == "one too few":
        del tensors["lm_head.weight"]
    elif change == "another shape":
        tensors["lm_head.weight"] = torch.zeros(41, 16)
    elif change == "bfloat16":
        dtype = torch.bfloat16
    else:
        config.quantization_config = {"quant_method": "fp8"}
    save_file(tensors, file, {"format": "pt"})
    assert read_plain(tmp_path, config, dtype) is None
    if change == "another tensor":
        loaded = load_causal_lm(tmp_path, "float32", "cpu")
        assert torch.equal(loaded.get_output_embeddings().weight, model.get_output_embeddings().weight)


_LIFE = """
import sys, torch
from pathlib import Path
from async_rl import lean
from async_rl.lean import import_transformers, no_distributed_tensors
from async_rl.models import load_causal_lm
from learner.flat import FlatParameters
from learner.networks import Networks
from learner.optimizer import FlatAdamW

folder, heavy = Path(sys.argv[1]), {"torch._dynamo", "torch.distributed.tensor", "accelerate", "peft", "sympy"}

# a version of transformers that asks for more is left to be imported whole
before, core = (torch.compiler.disable, torch.distributed.is_available), lean._CORE
lean._CORE = ("transformers.utils", "transformers.no_such_module")
import_transformers()
assert not any(name.partition(".")[0] == "transformers" for name in sys.modules)
assert (torch.compiler.disable, torch.distributed.is_available) == before and not heavy & set(sys.modules)
lean._CORE = core

import_transformers()
model = load_causal_lm(folder, "float32", "cpu")
flat = FlatParameters({"policy": model}, torch.device("cpu"), 1)
ids = torch.arange(6)[None]
model(input_ids=ids, use_cache=False).logits.square().mean().backward()
FlatAdamW(flat, (0.9, 0.95), 0.0).step({"policy": 1e-3})
with no_distributed_tensors():
    model.save_pretrained(folder / "saved")
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    assert hasattr(sys.modules["torch._dynamo"], "eval_frame"), "the real one"
"""


def test_a_learners_life_imports_no_compiler_until_it_compiles(tmp_path):
    MODELS["untied"]().save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", _LIFE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
