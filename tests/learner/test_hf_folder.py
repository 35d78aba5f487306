"""``checkpoints/step_N/hf`` is a plain Hugging Face folder: to transformers and vLLM it is the learner's model."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from server_part import server_part
from token_domains import counters, domain_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from learner.checkpoint import Checkpoints
from learner.token_domain import model_folder
from learner.warmup.main import build_model, build_tokenizer

PROMPT, NEW = "What is 12+7?", 12
BY_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    prompt, new, *folders = sys.argv[1:]
    sampling = SamplingParams(temperature=0, max_tokens=int(new), logprobs=0, ignore_eos=True)
    size = dict(max_model_len=64, max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=64 << 20)
    for folder in folders:
        (out,) = LLM(model=folder, dtype="float32", **size).generate([prompt], sampling)
        tokens = list(out.outputs[0].token_ids)
        logprobs = [step[token].logprob for step, token in zip(out.outputs[0].logprobs, tokens)]
        print("RESULT", json.dumps([list(out.prompt_token_ids), tokens, logprobs]), flush=True)
"""

pytestmark = pytest.mark.real


def saved(tmp_path, make_updater, tied):
    """A checkpoint's model folder, and the learner's own model: moved away from every model that is on disk."""
    torch.manual_seed(3)
    model = build_model()
    if tied:
        model = Qwen2ForCausalLM(type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": True}))
    updater = make_updater(model.eval())
    with torch.no_grad():
        updater.flat.data.mul_(2.5).add_(torch.randn_like(updater.flat.data), alpha=0.02)
    domain = domain_of(updater, build_tokenizer())
    folder = Checkpoints(tmp_path, 1).save(counters(7), domain, server_part)
    return model_folder(folder), model


@torch.no_grad()
def greedy(model, prompt):
    """Tokens [NEW] and their log-probabilities, by whole forwards without any cache."""
    ids, logprobs = list(prompt), []
    for _ in range(NEW):
        table = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
        ids.append(int(table.argmax()))
        logprobs.append(float(table.max()))
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_folder_and_gives_what_the_learner_gives(tmp_path, make_updater, tied):
    folder, model = saved(tmp_path, make_updater, tied)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    assert prompt == [ord(c) for c in PROMPT]
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, logprobs = greedy(model, prompt)
    assert len(set(tokens)) > 2  # no constant answer, which any model could give
    assert greedy(loaded, prompt) == (tokens, pytest.approx(logprobs, abs=1e-6))
    assert loaded.dtype == torch.float32
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_loads_the_folder_and_gives_what_the_learner_gives(tmp_path, make_updater):
    folders, models = zip(*(saved(tmp_path / f"{tied}", make_updater, tied) for tied in (False, True)), strict=True)
    script = tmp_path / "by_vllm.py"
    script.write_text(BY_VLLM)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), PROMPT, str(NEW), *map(str, folders)],
        env={**os.environ, **settings, **quiet},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    for (prompt, tokens, logprobs), model in zip(results, models, strict=True):
        assert prompt == [ord(c) for c in PROMPT]
        expected_tokens, expected = greedy(model, prompt)
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected, abs=1e-3)
