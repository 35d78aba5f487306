"""The engine's benchmark, small: the same work for all, and the figures are written."""

import json

import pytest
import torch
from engine_models import SIZES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from actors.bench.load import GROUP_SIZE, LONGEST, make_load
from actors.bench.sides import make_side, worst_error
from async_rl.bench.commands import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = Qwen2Config(**(SIZES | {"max_position_embeddings": 512}), num_attention_heads=4, num_key_value_heads=2)
    config.eos_token_id = 2
    Qwen2ForCausalLM(config).save_pretrained(path)
    words = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789+= ab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    return path


def test_lengths_are_log_normal_and_the_same_each_time(folder):
    load = make_load("lengths", folder, 2000)
    limits = sorted(r.max_new_tokens for r in load.requests)
    assert limits == sorted(r.max_new_tokens for r in make_load("lengths", folder, 2000).requests)
    assert 28 <= limits[1000] <= 36  # the median is 32
    assert (limits[0] >= 1, limits[-1]) == (True, LONGEST)
    assert len({r.prompt for r in load.requests}) == 2000
    assert load.stop_token_ids == ()
    assert load.seeded(1)[5].seed != load.seeded(2)[5].seed


def test_the_task_has_groups_and_ends_at_the_stop_token(folder):
    load = make_load("task", folder, 40)
    assert [r.num_samples for r in load.requests] == [GROUP_SIZE] * 3
    assert load.stop_token_ids == (2,)


@pytest.mark.parametrize("case", ["lengths", "task"])
def test_ours_and_the_loop_sample_what_the_model_says(folder, case):
    load = make_load(case, folder, 24)
    for side in ("ours", "loop"):
        sampled = list(make_side(side, folder, load, slots=8)(load.requests))
        assert worst_error(folder, load.requests, sampled) < 1e-4
        assert sorted(s.request_id for s in sampled) == sorted(
            r.id for r in load.requests for _ in range(r.num_samples)
        )
        limits = {r.id: r.max_new_tokens for r in load.requests}
        for s in sampled:
            ended = bool(s.tokens[-1] == 2) and case == "task"
            assert len(s.tokens) == limits[s.request_id] or ended


@pytest.mark.real
def test_the_command_measures_both_and_writes_json(folder, tmp_path):
    out = tmp_path / "engine.json"
    options = ["--case", "task", "--baseline", "loop", "--model", str(folder), "--slots", "8", "--sequences", "32"]
    result = CliRunner().invoke(app, ["engine", *options, "--repeats", "2", "--out", str(out)])
    assert result.exit_code == 0
    document = json.loads(out.read_text())
    assert document["bench"] == "engine"
    assert document["loads"]["task 8"]["sequences"] == 32
    assert max(document["loads"]["task 8"]["error"].values()) < 1e-4
    assert [f["unit"] for f in document["figures"]] == ["tokens/CPU s", "tokens/s"]
    for figure in document["figures"]:
        assert figure["baseline"] == "loop"
        assert len(figure["values"]) == len(figure["baseline_values"]) == 2
        assert min(figure["values"] + figure["baseline_values"]) > 0
        assert (figure["bar"], figure["met"]) == (None, None)
