"""Reward sources: weighted sums, a reward model against a direct call of transformers, a judge against a server."""

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

from actors.rewards import RewardPool, make_reward_pool
from actors.rewards.judge import KEY_VARIABLE, MAX_TRIES, Judge, JudgeError, parse_grade
from actors.rewards.pool import weighted_sum
from actors.verifiers.pool import Verdict, VerifierPool
from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.tasks.template import fill, names_in
from learner.warmup.main import build_tokenizer

EXACT = "async_rl.tasks.exact:score"
COLUMNS = {"answer": ["2", "2"], "finish_reasons": ["stop", "stop"], "completion_ids": [[1], [2]]}


def ok(*rewards):
    return Verdict(key=7, rewards=list(rewards), outcome="ok", detail="")


def gather(pool, count, timeout_s=60.0):
    verdicts, deadline = [], time.monotonic() + timeout_s
    while len(verdicts) < count:
        assert time.monotonic() < deadline, f"{len(verdicts)} of {count} verdicts"
        verdicts += pool.wait(1.0)
    return {v.key: v for v in verdicts}


# -- the sum


def test_a_sum_weighs_each_source_and_a_nan_stays_one():
    verdict = weighted_sum(7, {"verifier": ok(1.0, 0.0), "judge": ok(0.5, math.nan)}, {"verifier": 1.0, "judge": -2.0})
    assert verdict.rewards[0] == 0.0  # 1·1 - 2·0.5
    assert math.isnan(verdict.rewards[1])
    assert verdict.fault[0] == "bad_reward"


def test_a_source_that_fails_fails_the_sum_by_its_name():
    failed = Verdict(key=7, rewards=None, outcome="timeout", detail="longer than 1 s")
    verdict = weighted_sum(7, {"verifier": ok(1.0), "model": failed}, {"verifier": 1.0, "model": 1.0})
    assert (verdict.outcome, verdict.rewards, verdict.key) == ("timeout", None, 7)
    assert verdict.detail == "reward.model: longer than 1 s"
    assert verdict.fault == ("timeout", "reward.model: longer than 1 s")


@pytest.mark.real
def test_the_verifier_alone_is_its_plain_pool_and_half_of_it_is_a_sum(tmp_path):
    plain = make_reward_pool(parse_config({}), EXACT, tmp_path)
    half = make_reward_pool(parse_config({"reward": {"verifier": 0.5}}), EXACT, tmp_path)
    try:
        assert isinstance(plain, VerifierPool)
        assert isinstance(half, RewardPool)
        half.submit(1, ["1+1="] * 2, ["2", "3"], COLUMNS)
        assert half.pending == 1
        assert half.next_deadline is not None
        assert gather(half, 1)[1].rewards == [0.5, 0.0]
        assert half.pending == 0
        assert len(half.filenos()) == 1
    finally:
        plain.close()
        half.close()


# -- the reward model


def classifier(folder, labels, **change):
    """A tiny Qwen2 with random weights that classifies, and the tiny tokenizer."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = build_tokenizer()
    torch.manual_seed(labels)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": tokenizer.pad_token_id,
        "num_labels": labels,
    }
    model = Qwen2ForSequenceClassification(Qwen2Config(**(settings | change))).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def direct(model, tokenizer, text):
    """The scores of one text alone, asked of transformers."""
    ids = tokenizer(text)["input_ids"][-16:]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.real
@pytest.mark.parametrize(("labels", "padded"), [(1, True), (3, True), (1, False)])
def test_a_reward_model_gives_what_transformers_gives_for_each_text_alone(tmp_path, capfd, labels, padded):
    model, tokenizer = classifier(tmp_path, labels, **({} if padded else {"pad_token_id": None}))
    config = parse_config(
        {"reward": {"verifier": 0.0, "model": 2.0, "model_path": str(tmp_path)}, "model": {"device": "cpu"}}
    )
    completions = ["2", "34", "5" * 30]
    pool = make_reward_pool(config, EXACT, tmp_path)
    try:
        pool.submit(0, ["1+1="] * 3, completions, {})
        found = gather(pool, 1)[0].rewards
    finally:
        pool.close()
    logits = [direct(model, tokenizer, "1+1=" + completion) for completion in completions]
    # exp(l_last) / Σ exp(l), written out
    expected = [float(x[0]) if labels == 1 else float(x[-1].exp() / x.exp().sum()) for x in logits]
    assert found == pytest.approx([2 * x for x in expected], abs=1e-5)
    assert max(found) - min(found) > 1e-3
    assert "1 of 3 texts were longer than 16 tokens" in capfd.readouterr().err


@pytest.mark.real
def test_a_folder_without_a_classifier_is_a_config_error_that_names_the_setting(tmp_path):
    from learner.warmup.main import build_model, save

    save(build_model(), build_tokenizer(), tmp_path)
    config = parse_config({"reward": {"model": 1.0, "model_path": str(tmp_path)}, "model": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"reward\.model_path: .*the weights lack \['score.weight'\]"):
        make_reward_pool(config, EXACT, tmp_path)


# -- the judge


@pytest.fixture
def server():
    """An OpenAI-like server; ``replies`` are given in turn: a status with a body, or the text of the message."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
                reply = server.replies.pop(0) if server.replies else server.always
            status, text = reply if isinstance(reply, tuple) else (200, reply)
            if status == 200 and not text.startswith("RAW"):
                text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
            data = text.removeprefix("RAW").encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.replies, server.always = [], [], '{"grade": 0.25}'
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def judge(server):
    with httpx.Client(trust_env=False) as client:
        server.pauses = []
        yield Judge(client, server.url, "grader", pause=server.pauses.append)


def soon():
    return time.monotonic() + 20.0


@pytest.mark.real
def test_a_judge_is_asked_with_the_filled_in_prompt_and_the_key_of_the_environment(server, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    prompt = 'Q {prompt} A {completion} right {answer}, say {"grade": NUMBER}'
    reward = {"verifier": 1.0, "judge": 4.0, "judge_url": server.url, "judge_model": "grader", "judge_prompt": prompt}
    pool = make_reward_pool(parse_config({"reward": reward}), EXACT, tmp_path)
    try:
        pool.submit(0, ["1+1="] * 2, ["2", "3"], COLUMNS)
        assert gather(pool, 1)[0].rewards == [2.0, 1.0]  # 1 + 4·0.25 and 0 + 4·0.25
        server.always = "well done"
        pool.submit(1, ["1+1="] * 2, ["2", "3"], COLUMNS)
        verdict = gather(pool, 1)[1]
    finally:
        pool.close()
    assert {a["path"] for a in server.asked} == {"/v1/chat/completions"}
    assert {a["key"] for a in server.asked} == {"Bearer secret"}
    assert {(a["model"], a["temperature"]) for a in server.asked} == {("grader", 0)}
    asked = [a["messages"][0]["content"] for a in server.asked[:2]]
    assert sorted(asked) == [f'Q 1+1= A {c} right 2, say {{"grade": NUMBER}}' for c in "23"]
    assert verdict.outcome == "error"
    assert verdict.detail.startswith("reward.judge: ")
    assert "2 of 2 answers have no grade; answer 0: the reply is no JSON: 'well done'" in verdict.detail


def test_grades_come_back_in_order_though_they_are_asked_for_at_the_same_time(server, judge):
    barrier = threading.Barrier(4, timeout=10)
    ask, judge._ask = judge._ask, lambda q, t: (barrier.wait(), ask(q, t))[1]  # passes only if four are on their way
    server.always = None
    replies = {str(i): f'{{"grade": {i / 4}}}' for i in range(4)}
    original = server.RequestHandlerClass.do_POST

    def echo(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = replies[body["messages"][0]["content"]]
        data = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    server.RequestHandlerClass.do_POST = echo
    assert judge.grades(["3", "1", "0", "2"], soon()) == [0.75, 0.25, 0.0, 0.5]
    server.RequestHandlerClass.do_POST = original


@pytest.mark.parametrize("first", [(500, "oops"), (429, "slow down"), (503, "")])
def test_a_busy_or_broken_server_is_asked_again_with_growing_pauses(server, judge, first):
    server.replies = [first, first]
    assert judge.grades(["q"], soon()) == [0.25]
    assert len(server.asked) == 3
    assert 0 < server.pauses[0] <= 0.25 < server.pauses[1] * 2 <= 1.0


def test_tries_are_bounded(server, judge):
    server.always = (500, "oops")
    with pytest.raises(JudgeError, match=r"answered 500: 'oops'"):
        judge.grades(["q"], soon())
    assert len(server.asked) == MAX_TRIES


def test_no_try_is_made_past_the_deadline(server, judge):
    server.always = (500, "oops")
    with pytest.raises(JudgeError):
        judge.grades(["q"], time.monotonic() + 0.1)  # the first pause would be at least 0.125 s
    assert len(server.asked) == 1
    assert server.pauses == []


def test_a_refusal_is_not_tried_again(server, judge):
    server.always = (401, "no key")
    with pytest.raises(JudgeError, match=r"answered 401: 'no key'"):
        judge.grades(["q"], soon())
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_said():
    with httpx.Client(trust_env=False) as client, pytest.raises(JudgeError, match="cannot be reached"):
        Judge(client, "http://127.0.0.1:9/v1", "m", pause=lambda _: None).grades(["q"], soon())


def test_one_answer_without_a_grade_fails_the_group_and_is_named(server, judge):
    judge._grade = lambda question, deadline: parse_grade(question)
    with pytest.raises(JudgeError, match=r"1 of 3 answers have no grade; answer 1: the grade is not between 0 and 1"):
        judge.grades(['{"grade": 1}', '{"grade": 1.5}', '{"grade": 0}'], soon())


@pytest.mark.parametrize(
    "body", ["RAW{", "RAW{}", 'RAW{"choices": []}', 'RAW{"choices": [{"message": {"content": 3}}]}']
)
def test_a_response_that_is_no_completion_is_no_grade(server, judge, body):
    server.always = body
    with pytest.raises(JudgeError, match=r"is no chat completion|has no text"):
        judge.grades(["q"], soon())


@pytest.mark.parametrize(("reply", "grade"), [('{"grade": 1}', 1.0), (' {"grade": 0.5}\n', 0.5), ('{"grade": 0}', 0.0)])
def test_a_grade_is_a_number_between_0_and_1(reply, grade):
    assert parse_grade(reply) == grade


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "0.5",
        "null",
        "[0.5]",
        '{"grade": "0.5"}',
        '{"grade": true}',
        '{"grade": null}',
        '{"grade": NaN}',
        '{"grade": 1.001}',
        '{"grade": -0.1}',
        '{"grade": 1e999}',
        '{"grade": 1, "why": "x"}',
        'grade: {"grade": 1}',
        '```json\n{"grade": 1}\n```',
    ],
)
def test_anything_else_is_no_grade(reply):
    with pytest.raises(JudgeError):
        parse_grade(reply)


def test_a_template_keeps_braces_that_are_no_names():
    template = '{prompt} {"grade": 1} {nothing} {}'
    assert fill(template, {"prompt": "{completion}", "completion": "x"}) == '{completion} {"grade": 1} {nothing} {}'
    assert names_in(template) == ["prompt", "nothing"]
