"""What reward sources and the reference need is checked before a process is started."""

import json

import pytest

from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.launch.overview import _rows, overview
from async_rl.launch.roles import check_judge_url, check_reward, check_role, check_same_vocabulary, ensure_reference
from async_rl.launch.session import _scorers
from learner.warmup.main import build_tokenizer

JUDGE = {"judge": 1.0, "judge_url": "http://localhost:1/v1", "judge_model": "m"}


def nowhere(*_):
    raise AssertionError("nothing is to be built")


def folder(path, architecture="Qwen2ForSequenceClassification", **config):
    path.mkdir(exist_ok=True)
    build_tokenizer().save_pretrained(path)
    (path / "model.safetensors").touch()
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 512} | config))
    return path


def with_token(path, token):
    """One token of the tokenizer is another one."""
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[token] = vocabulary.pop("7")
    file.write_text(json.dumps(content))
    return path


def test_a_reward_model_must_be_a_sequence_classification_folder(tmp_path):
    good = folder(tmp_path / "good")
    check_reward(parse_config({"reward": {"model": 1.0, "model_path": str(good)}}))
    causal = folder(tmp_path / "causal", "Qwen2ForCausalLM")
    with pytest.raises(ConfigError, match=r"reward\.model_path = .*is no sequence classification model"):
        check_reward(parse_config({"reward": {"model": 1.0, "model_path": str(causal)}}))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h/v1", "http://", "http://h:99999/v1", "http://[::1/v1"])
def test_a_judges_address_must_be_one(url):
    with pytest.raises(ConfigError, match=r"reward\.judge_url"):
        check_judge_url(url)


def test_the_path_of_the_call_is_not_part_of_the_base_address():
    check_judge_url("https://h/v1/")
    with pytest.raises(ConfigError, match="leave /chat/completions away"):
        check_judge_url("https://h/v1/chat/completions")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("grade {prompt}", "has no {completion}"),
        ("{completion} is {anser}?", r"{anser} is not filled in; known are .*answer"),
    ],
)
def test_names_in_the_judges_prompt_must_be_columns(prompt, message):
    check_reward(parse_config({"reward": JUDGE}))
    check_reward(parse_config({"reward": {**JUDGE, "judge_prompt": '{completion} {answer} {"grade": 1}'}}))
    with pytest.raises(ConfigError, match=message):
        check_reward(parse_config({"reward": {**JUDGE, "judge_prompt": prompt}}))


def test_a_reference_is_the_model_itself_or_a_folder_with_the_same_tokens(tmp_path):
    model = folder(tmp_path / "model", "Qwen2ForCausalLM")
    other = folder(tmp_path / "other", "Qwen2ForCausalLM")
    same = parse_config({"algorithm": {"kl_coef": 0.1}})
    assert ensure_reference(same, model, {}, tmp_path / "log", nowhere, nowhere) == model
    given = parse_config({"algorithm": {"kl_coef": 0.1}, "reference": {"path": str(other)}})
    assert ensure_reference(given, model, {}, tmp_path / "log", nowhere, lambda: False) == other
    with_token(other, "seven")
    with pytest.raises(ConfigError, match=r"has another vocabulary.*must share the tokenizer"):
        ensure_reference(given, model, {}, tmp_path / "log", nowhere, lambda: False)


def test_a_reference_that_is_not_there_is_named_by_its_setting(tmp_path):
    config = parse_config({"algorithm": {"kl_coef": 0.1}, "reference": {"path": str(tmp_path / "absent")}})
    with pytest.raises(ConfigError, match=r"reference\.path = .*absent"):
        ensure_reference(config, tmp_path, {}, tmp_path / "log", nowhere, lambda: False)


def test_a_reference_with_fewer_rows_than_its_tokenizer_has_tokens_is_refused(tmp_path):
    model = folder(tmp_path / "model", "Qwen2ForCausalLM")
    small = folder(tmp_path / "small", "Qwen2ForCausalLM", vocab_size=4)
    with pytest.raises(ConfigError, match="has 4 tokens, but its tokenizer goes up to"):
        check_same_vocabulary(model, small)


FOUR_ROLES = {
    "algorithm": {"name": "ppo", "kl_coef": 0.1},
    "reward": {"placement": "scorer", "scorers": 2, "verifier": 0.5, **JUDGE},
    "reference": {"placement": "scorer"},
}


def test_a_scorer_needs_a_stage_that_the_run_leaves_to_scorers():
    config = parse_config(FOUR_ROLES)
    for role in ("actor", "reward", "reference"):
        check_role(config, role)
    inline = parse_config({"algorithm": {"kl_coef": 0.1}})
    check_role(inline, "actor")
    with pytest.raises(ConfigError, match=r"set reward\.placement = 'scorer'"):
        check_role(inline, "reward")
    with pytest.raises(ConfigError, match=r"set reference\.placement = 'scorer'"):
        check_role(inline, "reference")


def test_a_run_starts_the_scorers_of_the_stages_that_it_has():
    assert _scorers(parse_config(FOUR_ROLES)) == {"reward": 2, "reference": 1}
    assert _scorers(parse_config({})) == {}


def test_the_overview_says_which_role_is_where():
    def rows(raw):
        config = parse_config(raw)
        return dict(_rows(config, overview(config, None), None))

    four = rows(FOUR_ROLES)
    assert four["rewards"] == "0.5 × verifier + judge m, 2 scorers"
    assert four["reference"] == "the start model, KL 0.1 in the loss, 1 scorer"
    assert four["critic"] == "a value head on the policy"
    plain = rows({})
    assert plain["rewards"] == "verifier, in the actors"
    assert "reference" not in plain
    assert "critic" not in plain
