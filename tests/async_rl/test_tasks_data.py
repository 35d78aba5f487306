"""Problems from users' data (JSONL files, folders of Hugging Face datasets, chats) and from reasoning-gym."""

import json
import random
from typing import ClassVar

import pytest

from async_rl.config import TaskConfig
from async_rl.errors import ConfigError
from async_rl.tasks import load_task, reasoning_gym
from async_rl.tasks.prompt import encode_prompt

ROWS = [{"prompt": f"q{i}", "answer": str(i), "steps": ["a", str(i)], "level": i % 3} for i in range(20)]
CHAT = [
    {
        "prompt": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": f"What is {i}?"},
        ],
        "answer": str(i),
    }
    for i in range(10)
]


def task(**fields):
    return TaskConfig(**fields)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_folder(path, rows, splits=()):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(str(path))
    return str(path)


def contents(data):
    return sorted((p.prompt, json.dumps(p.columns, sort_keys=True)) for p in [*data.train, *data.heldout])


@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_a_saved_folder_gives_the_same_problems_as_the_same_rows_in_jsonl(tmp_path, splits):
    folder = load_task(task(name="jsonl", data=write_folder(tmp_path / "folder", ROWS, splits)), 0)
    lines = load_task(task(name="jsonl", data=write_jsonl(tmp_path / "rows.jsonl", ROWS)), 0)
    assert len(folder.heldout) == 4
    assert contents(folder) == contents(lines)
    assert folder.verifier == "async_rl.tasks.exact:score"


def test_without_a_train_split_the_splits_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no split 'train' \(splits: test\)"):
        load_task(task(name="jsonl", data=write_folder(tmp_path / "folder", ROWS, ["test"])), 0)


def test_values_that_are_not_plain_are_refused_with_the_column(tmp_path):
    rows = [{**row, "picture": b"\x00"} for row in ROWS]
    with pytest.raises(ConfigError, match="row 0: column 'picture' holds bytes"):
        load_task(task(name="jsonl", data=write_folder(tmp_path / "folder", rows)), 0)


def test_folder_rows_are_checked_as_lines_are(tmp_path):
    with pytest.raises(ConfigError, match="no 'answer' column"):
        load_task(task(name="jsonl", data=write_folder(tmp_path / "a", [{"prompt": "q"}] * 9)), 0)
    with pytest.raises(ConfigError, match="no 'prompt' column"):
        load_task(task(name="jsonl", data=write_folder(tmp_path / "b", [{"answer": "q"}] * 9)), 0)
    with pytest.raises(ConfigError, match="row 1: 'prompt' must be text"):
        load_task(task(name="jsonl", data=write_folder(tmp_path / "c", [ROWS[0], {**ROWS[1], "prompt": ""}])), 0)


def test_a_damaged_folder_is_a_config_error(tmp_path):
    folder = write_folder(tmp_path / "folder", ROWS)
    (tmp_path / "folder" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_task(task(name="jsonl", data=folder), 0)


class ChatTokenizer:
    """One id per character."""

    added_tokens_decoder: ClassVar = {}
    all_special_tokens: ClassVar = []

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@pytest.mark.parametrize("kind", ["jsonl", "folder"])
def test_a_list_of_messages_goes_through_the_chat_template_with_the_instruction_before_the_last(tmp_path, kind):
    path = (write_jsonl if kind == "jsonl" else write_folder)(tmp_path / f"chat.{kind}", CHAT)
    settings = task(name="jsonl", data=path, chat=True, instruction="Answer: ")
    data = load_task(settings, 0)
    problem = next(p for p in data.train if p.columns["answer"] in "67")
    number = problem.columns["answer"]
    assert problem.prompt == f"What is {number}?"
    text = "".join(map(chr, encode_prompt(ChatTokenizer(), problem, settings)))
    assert text == (f"<system>Be short.<user>Hello<assistant>Hi.<user>Answer: What is {number}?<assistant>")


def test_conversations_that_end_alike_but_begin_differently_are_different_problems(tmp_path):
    rows = [
        {"prompt": [{"role": "system", "content": f"Case {i}"}, {"role": "user", "content": "Go"}], "answer": "x"}
        for i in range(10)
    ]
    data = load_task(task(name="jsonl", data=write_jsonl(tmp_path / "c.jsonl", rows), chat=True), 0)
    assert (len(data.train), len(data.heldout)) == (8, 2)


@pytest.mark.parametrize(
    ("prompt", "chat", "message"),
    [
        (CHAT[0]["prompt"], False, "set task.chat = true"),
        ([], True, "last message of 'prompt' must be the user's"),
        (CHAT[0]["prompt"][:3], True, "last message of 'prompt' must be the user's"),
        ([{"role": "robot", "content": "a"}], True, "'role': one of system, user"),
        ([{"role": "user"}], True, "'role': one of system, user"),
        (["a"], True, "'role': one of system, user"),
        ([{"role": "user", "content": ""}], True, "must be text that is not empty"),
        ([{"role": "user", "content": ["a"]}], True, "must be text that is not empty"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(tmp_path, prompt, chat, message):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "x"}] * 6)
    with pytest.raises(ConfigError, match=message):
        load_task(task(name="jsonl", data=path, chat=chat), 0)


def gym(name):
    pytest.importorskip("reasoning_gym")
    return load_task(task(name="reasoning_gym", dataset=name), 0)


def test_reasoning_gym_problems_are_the_same_in_every_process_and_scored_by_exact_match():
    data = gym("chain_sum")
    assert len(data.train) + len(data.heldout) == 2_500
    assert len(data.heldout) <= 500
    assert data.verifier == "async_rl.tasks.exact:score"
    reasoning_gym._dataset.cache_clear()
    assert gym("chain_sum") == data
    problem = data.train[0]
    terms = problem.prompt.split(": ")[1].removesuffix(" =")
    assert eval(terms) == int(problem.columns["answer"])


def test_every_allowed_data_set_makes_problems_with_plain_columns():
    pytest.importorskip("reasoning_gym")
    for name in sorted(reasoning_gym.ONE_ANSWER | reasoning_gym.MANY_ANSWERS):
        entry = reasoning_gym._dataset(name)[random.Random(name).randrange(2_500)]
        assert entry["question"].strip()
        if name in reasoning_gym.ONE_ANSWER:
            assert isinstance(entry["answer"], str), name
            assert entry["answer"].strip(), name


def gym_score(name, index, text, reason="stop"):
    (reward,) = reasoning_gym.score([""], [text], dataset=[name], index=[index], finish_reasons=[reason])
    return reward


@pytest.mark.parametrize("name", sorted(reasoning_gym.MANY_ANSWERS - {"graph_color"}))
def test_right_answers_get_1_and_text_that_contains_them_gets_0(name):
    pytest.importorskip("reasoning_gym")
    for index in range(10):
        answer = reasoning_gym._dataset(name)[index]["answer"]
        assert gym_score(name, index, answer) == 1.0
        assert gym_score(name, index, f" {answer}\n") == 1.0
        for wrong in ("", f"The answer is {answer}", f"{answer} or so", answer * 2, "__import__('os')", "x" * 10_000):
            assert gym_score(name, index, wrong) == 0.0
        assert gym_score(name, index, answer, reason="length") == 0.0


def test_any_right_path_is_right_and_a_longer_one_is_not():
    pytest.importorskip("reasoning_gym")
    data = reasoning_gym._dataset("shortest_path")
    index = next(i for i in range(100) if data[i]["answer"] == "up right right")
    assert gym_score("shortest_path", index, "up right right") == 1.0
    assert gym_score("shortest_path", index, "up down up right right") == 0.0


def test_a_colouring_is_right_when_no_edge_joins_equal_colours():
    pytest.importorskip("reasoning_gym")
    puzzle = reasoning_gym._dataset("graph_color")[0]["metadata"]["puzzle"]
    vertices, colours = puzzle["vertices"], puzzle["color_options"]
    colouring = {}
    for _ in range(10_000):
        rng = random.Random(len(colouring) + _)
        colouring = {str(v): rng.choice(colours) for v in vertices}
        if all(colouring[str(a)] != colouring[str(b)] for a, b in puzzle["edges"]):
            break
    assert gym_score("graph_color", 0, json.dumps(colouring)) == 1.0
    assert gym_score("graph_color", 0, f"Sure: {json.dumps(colouring)}") == 0.0
    a, b = puzzle["edges"][0]
    assert gym_score("graph_color", 0, json.dumps({**colouring, str(a): colouring[str(b)]})) == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("countdown", r"evaluates text of the model; set task.name = 'countdown'"),
        ("puzzle24", r"not one of reasoning-gym's data sets that are scored strictly .*allowed: ab, acre"),
        ("game_of_life_halting", "scored strictly"),
        ("chain_sums", "did you mean 'chain_sum'?"),
    ],
)
def test_data_sets_that_were_not_found_strict_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        load_task(task(name="reasoning_gym", dataset=name), 0)


@pytest.mark.real
def test_a_reasoning_gym_answer_is_scored_in_the_verifier_child():
    from actors.verifiers.pool import VerifierPool

    data = gym("palindrome_generation")
    problem = data.train[0]
    answer = reasoning_gym._dataset("palindrome_generation")[problem.columns["index"]]["answer"]
    pool = VerifierPool(data.verifier, 10.0, 1)
    try:
        columns = {name: [value] * 2 for name, value in problem.columns.items()}
        pool.submit(0, [problem.prompt] * 2, [answer, f"it is {answer}"], columns | {"finish_reasons": ["stop"] * 2})
        verdicts = pool.wait(60.0)
    finally:
        pool.close()
    assert verdicts[0].rewards == [1.0, 0.0], verdicts[0]


@pytest.mark.parametrize("answer", [None, "", " ", ["a"], {"a": 1}, float("nan"), float("inf")])
def test_an_answer_that_nothing_can_match_on_purpose_is_refused_with_its_row(tmp_path, answer):
    lines = [{"prompt": f"p{i}", "answer": "x"} for i in range(10)] + [{"prompt": "p", "answer": answer}]
    path = write_jsonl(tmp_path / "data.jsonl", lines)
    with pytest.raises(ConfigError, match=r"line 11: 'answer' is .*exact match needs text that is not"):
        load_task(task(name="jsonl", data=path), 0)
    load_task(task(name="jsonl", data=path, verifier="mine:score"), 0)  # a verifier may know what to make of it
