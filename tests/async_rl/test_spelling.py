"""What an environment or a user says never becomes a control token; only the template brings those."""

from async_rl.config import TaskConfig
from async_rl.tasks import Problem
from async_rl.tasks.prompt import encode_prompt
from async_rl.tasks.spelling import encode, guard
from async_rl.tasks.turns import observation_encoder
from learner.warmup.main import BOS, EOS, build_tokenizer
from tests.async_rl.test_turns import CHATML, tokenizer


def letters(text):
    return tuple(map(ord, text))


def test_a_control_token_in_an_observation_is_spelled_out():
    for chat, before, after in (
        (False, (), ()),
        (True, letters("\n<user>"), (EOS, *letters("\n<assistant>"))),
    ):
        observe = observation_encoder(tokenizer(CHATML), (EOS,), chat=chat)
        assert observe("a<eos>b<bos>") == (*before, *letters("a<eos>b<bos>"), *after)


def test_in_a_chat_only_the_template_brings_control_tokens():
    problem = Problem("say <eos>", {}, before=({"role": "system", "content": "no <bos>"},))
    ids = encode_prompt(tokenizer(CHATML), problem, TaskConfig(chat=True))
    expected = (*letters("<system>no <bos>"), EOS, *letters("\n<user>say <eos>"), EOS, *letters("\n<assistant>"))
    assert ids == expected


def test_the_first_observation_is_text_and_a_prompt_of_the_data_may_hold_control_tokens():
    made = build_tokenizer()
    problem = Problem("<eos>1", {})
    assert encode_prompt(made, problem, TaskConfig(environment="guess")) == letters("<eos>1")
    assert encode_prompt(made, problem, TaskConfig()) == (EOS, ord("1"))


def test_an_instruction_is_a_setting_and_may_hold_turns_that_were_solved_before():
    problem = Problem("2<eos>", {})
    ids = encode_prompt(tokenizer(CHATML), problem, TaskConfig(chat=True, instruction="1<eos>"))
    assert ids == (*letters("<user>1"), EOS, *letters("2<eos>"), EOS, *letters("\n<assistant>"))
    plain = encode_prompt(build_tokenizer(), problem, TaskConfig(environment="guess", instruction="1<eos>"))
    assert plain == (ord("1"), EOS, *letters("2<eos>"))


def test_marks_are_characters_that_the_text_does_not_hold():
    (text,), marks = guard(build_tokenizer(), ["\ue000<eos>"])
    assert marks == {"\ue001": "<eos>"}
    assert text == "\ue000\ue001"


def test_what_begins_a_sequence_comes_before_a_control_token_that_is_spelled_out():
    asked = []

    def fake(text, *, add_special_tokens, split_special_tokens=False):
        asked.append((text, add_special_tokens, split_special_tokens))
        return {"input_ids": ([BOS] if add_special_tokens else []) + list(letters(text))}

    assert encode(fake, "\ue000x", {"\ue000": "<eos>"}, add_special_tokens=True) == [BOS, *letters("<eos>x")]
    assert asked == [("", True, False), ("<eos>", False, True), ("x", False, False)]
