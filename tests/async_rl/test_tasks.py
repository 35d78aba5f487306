"""Built-in tasks and JSONL data: what is held out, and what counts as a right answer."""

import json
import random
import subprocess
import sys
from fractions import Fraction
from typing import ClassVar

import pytest

from async_rl.config import TaskConfig
from async_rl.errors import ConfigError
from async_rl.tasks import Problem, countdown, exact, load_task
from async_rl.tasks.problem import hold_out
from async_rl.tasks.prompt import decode_completion, encode_prompt


def task(**fields):
    return TaskConfig(**fields)


def test_two_digit_sums_are_all_there_once_and_have_right_answers():
    data = load_task(task(), 0)
    seen = {p.prompt: p.columns["answer"] for p in [*data.train, *data.heldout]}
    assert len(data.train) + len(data.heldout) == 90 * 90 == len(seen)
    for prompt, answer in seen.items():
        a, b = prompt.removesuffix("=").split("+")
        assert 10 <= int(a) <= 99
        assert 10 <= int(b) <= 99
        assert answer == str(int(a) + int(b))


def test_held_out_sums_are_not_trained_with_operands_swapped_either():
    data = load_task(task(), 0)
    trained = {tuple(sorted(p.prompt.removesuffix("=").split("+"))) for p in data.train}
    assert len(data.heldout) == 500
    assert not trained & {tuple(sorted(p.prompt.removesuffix("=").split("+"))) for p in data.heldout}


@pytest.mark.parametrize("name", ["addition", "sorting", "countdown"])
@pytest.mark.parametrize("digits", [2, 3, 4])
def test_the_seed_orders_training_but_never_changes_what_is_held_out(name, digits):
    first, again, other = (load_task(task(name=name, digits=digits), seed) for seed in (0, 0, 1))
    assert first == again
    assert first.heldout == other.heldout
    assert first.train != other.train
    assert sorted(p.prompt for p in first.train) == sorted(p.prompt for p in other.train)
    assert not {p.prompt for p in first.train} & {p.prompt for p in first.heldout}
    assert len(first.heldout) == min(500, (len(first.train) + len(first.heldout)) // 5)


def test_the_holdout_is_capped_at_a_fifth():
    data = load_task(task(digits=1), 0)
    assert (len(data.train), len(data.heldout)) == (80, 20)


def test_sampled_sums_have_operands_of_exactly_that_many_digits():
    data = load_task(task(digits=4), 0)
    operands = {x for p in data.train for x in p.prompt.removesuffix("=").split("+")}
    assert {len(x) for x in operands} == {4}
    assert not any(x.startswith("0") for x in operands)


def test_families_stay_on_one_side():
    keyed = [(i // 3, Problem(f"{i}", {})) for i in range(30)]
    train, heldout = hold_out(keyed, 100)
    assert len(heldout) == 6  # a fifth of 30 is 6: two families of three
    assert not {int(p.prompt) // 3 for p in train} & {int(p.prompt) // 3 for p in heldout}


def exact_score(text, answer="46", reason="stop"):
    return exact.score(["12+34="], [text], answer=[answer], finish_reasons=[reason])[0]


def test_exact_match_accepts_the_answer_and_surrounding_space_only():
    assert exact_score("46") == 1.0
    assert exact_score(" 46\n") == 1.0
    assert exact_score("46", answer=46) == 1.0


@pytest.mark.parametrize(
    "text", ["", "46 or 47", "046", "46.", "+46", "4 6", "４６", "٤٦", "46" * 100_000, "46\x00", "answer"]
)
def test_exact_match_refuses_everything_else(text):
    assert exact_score(text) == 0.0


def test_a_truncated_answer_is_wrong():
    assert exact_score("46", reason="length") == 0.0


def test_sorting_answers_are_sorted():
    data = load_task(task(name="sorting", digits=4), 0)
    for problem in data.heldout:
        items = problem.prompt.removeprefix("sort ").removesuffix(": ").split(" ")
        assert len(items) == 4
        assert problem.columns["answer"].split(" ") == sorted(items)
    kinds = {problem.columns["answer"][0].isdigit() for problem in data.heldout}
    assert kinds == {True, False}


def test_countdown_expressions_are_evaluated_exactly():
    assert countdown.evaluate("1+2*3") == (Fraction(7), [1, 2, 3])
    assert countdown.evaluate("(1 + 2)*3") == (Fraction(9), [1, 2, 3])
    assert countdown.evaluate("8-3-2") == (Fraction(3), [8, 3, 2])
    assert countdown.evaluate("8/3*3") == (Fraction(8), [8, 3, 3])
    assert countdown.evaluate("1/3") == (Fraction(1, 3), [1, 3])


def test_countdown_agrees_with_python_on_random_expressions():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randint(1, 20))
        return f"({expression(depth - 1)}{rng.choice('+-*')}{expression(depth - 1)})"

    for _ in range(200):
        text = expression(3)
        assert countdown.evaluate(text)[0] == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3*",
        "3 5 7",
        "3*5+7=22",
        "3*5+7 or 7+3*5",
        "-3*5+7",
        "3**5",
        "3//5",
        "3*5+07",
        "３*5+7",
        "3×5+7",
        "7+5*3)",
        "(7+5*3",
        "()",
        "3*5+7\x00",
        "__import__('os')",
        "7+5/(3-3)",
        "(" * 10_000 + "7+5*3" + ")" * 10_000,
        "(" * 50 + "7+5*3" + ")" * 50,
        "9" * 10_000,
        "9999999999",
    ],
)
def test_countdown_refuses_what_is_not_in_its_grammar(text):
    with pytest.raises(countdown.ExpressionError):
        countdown.evaluate(text)
    assert not countdown.solves(text, [3, 5, 7], 22)


def test_countdown_needs_each_number_exactly_once_and_the_target():
    assert countdown.solves("3*5+7", [7, 3, 5], 22)
    assert countdown.solves("(3*5)+7", [7, 3, 5], 22)
    assert not countdown.solves("15+7", [7, 3, 5], 22)
    assert not countdown.solves("3*5+7+7-7", [7, 3, 5], 22)
    assert not countdown.solves("3*5+7", [7, 3, 5, 1], 22)
    assert not countdown.solves("3*5-7", [7, 3, 5], 22)
    assert not countdown.solves("7/3", [7, 3], 2)  # 2.33 is not 2
    assert countdown.score(
        ["", ""], ["3*5+7"] * 2, numbers=[[3, 5, 7]] * 2, target=[22] * 2, finish_reasons=["stop", "length"]
    ) == [1.0, 0.0]


def test_every_countdown_problem_with_two_numbers_has_an_answer():
    data = load_task(task(name="countdown", digits=2), 0)
    for problem in [*data.train, *data.heldout]:
        (a, b), target = problem.columns["numbers"], problem.columns["target"]
        tries = [f"{x}{o}{y}" for x, y in ((a, b), (b, a)) for o in "+-*/"]
        assert any(countdown.solves(text, [a, b], target) for text in tries), problem


def write_rows(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return str(path)


def load_rows(tmp_path, rows, **fields):
    return load_task(task(name="jsonl", data=write_rows(tmp_path / "data.jsonl", rows), **fields), 0)


def test_jsonl_rows_become_problems_with_their_columns(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": i, "source": ["a", None]} for i in range(10)] + [""]
    data = load_rows(tmp_path, rows, holdout=1)
    assert (len(data.train), len(data.heldout)) == (9, 1)
    assert {p.prompt for p in data.train} | {p.prompt for p in data.heldout} == {f"q{i}" for i in range(10)}
    assert data.train[0].columns == {"answer": int(data.train[0].prompt[1:]), "source": ["a", None]}
    assert data.verifier == "async_rl.tasks.exact:score"


def test_rows_of_one_prompt_are_never_split_between_training_and_held_out(tmp_path):
    data = load_rows(tmp_path, [{"prompt": f"q{i % 10}", "answer": i} for i in range(40)])
    assert len(data.heldout) == 8
    assert not {p.prompt for p in data.train} & {p.prompt for p in data.heldout}


def test_a_named_verifier_needs_no_answer_column(tmp_path):
    data = load_rows(tmp_path, [{"prompt": f"q{i}"} for i in range(5)], verifier="mine:score")
    assert data.verifier == "mine:score"


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no problems"),
        (["", "  "], "holds no problems"),
        ([GOOD, "{not json"], "line 2: not valid JSON"),
        ([GOOD, "", "[1]"], "line 3: expected a JSON object"),
        (["[" * 100_000], "line 1: not valid JSON"),
        (['{"prompt": "a", "answer": ' + "9" * 5_000 + "}"], "line 1: not valid JSON"),
        ([GOOD, {"answer": "b"}], "line 2: no 'prompt' column"),
        ([{"prompt": ["a"], "answer": "b"}], "line 1: 'prompt' is a list of messages; set task.chat"),
        ([{"prompt": 1, "answer": "b"}], "line 1: 'prompt' must be text"),
        ([{"prompt": "", "answer": "b"}], "line 1: 'prompt' must be text"),
        (['{"prompt": "\\ud800", "answer": "b"}'], "surrogate"),
        ([GOOD, {**GOOD, "level": 1}], r"line 2: columns differ from the first row's \(level\)"),
        ([{"prompt": "a", "solution": "b"}], "no 'answer' column"),
        ([{**GOOD, "completion_ids": []}], "rename the column 'completion_ids'"),
        ([{"prompt": f"q{i}", "answer": "b"} for i in range(4)], "4 problems are too few"),
        ([GOOD] * 50, "50 problems are too few"),
    ],
)
def test_bad_data_is_a_config_error_that_says_where(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        load_rows(tmp_path, rows)


def test_a_missing_file_a_folder_and_binary_data_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.jsonl' cannot be read: No such file"):
        load_task(task(name="jsonl", data=str(tmp_path / "nowhere.jsonl")), 0)
    with pytest.raises(ConfigError, match="no data set that Hugging Face datasets saved is there"):
        load_task(task(name="jsonl", data=str(tmp_path)), 0)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_task(task(name="jsonl", data=str(tmp_path / "b.jsonl")), 0)


@pytest.mark.parametrize("name", ["sorting", "countdown"])
def test_a_list_of_one_is_refused(name):
    with pytest.raises(ConfigError, match="at least 2"):
        load_task(task(name=name, digits=1), 0)


class CharacterTokenizer:
    """One id per character; 1 ends, 0 pads, both special."""

    added_tokens_decoder: ClassVar = {}
    all_special_tokens: ClassVar = []

    def __call__(self, text, add_special_tokens):
        return {"input_ids": ([2] if add_special_tokens else []) + [ord(c) for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(chr(i) for i in ids if i > 2)


def test_prompts_carry_the_instruction_and_the_chat_template_brings_its_own_special_tokens():
    problem = Problem("1+1=", {})
    plain = encode_prompt(CharacterTokenizer(), problem, task(instruction="Add: "))
    assert plain == (2, *map(ord, "Add: 1+1="))
    chat = encode_prompt(CharacterTokenizer(), problem, task(instruction="Add: ", chat=True))
    assert chat == tuple(map(ord, "<user>Add: 1+1=<assistant>"))


def test_a_completion_is_the_text_before_the_first_stop_token():
    assert decode_completion(CharacterTokenizer(), [52, 0, 54, 1, 55], {1}) == "46"
    assert decode_completion(CharacterTokenizer(), [52, 54], {1}) == "46"
    assert decode_completion(CharacterTokenizer(), [], {1}) == ""


def test_tasks_import_no_torch():
    code = "import sys, async_rl.tasks, async_rl.tasks.prompt; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
