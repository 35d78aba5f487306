"""What stands between two turns of a chat: taken from the template, or refused with a reason."""

import pytest

from async_rl.errors import ConfigError
from async_rl.tasks.turns import Wrapping, observation_encoder, template_wrapping
from learner.warmup.main import EOS, build_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template=None):
    made = build_tokenizer()
    made.chat_template = template
    return made


def test_without_a_template_an_observation_is_its_own_tokens():
    encode = observation_encoder(tokenizer(), (EOS,), chat=False)
    assert encode("a 1") == (97, 32, 49)
    assert encode("") == ()


def test_with_a_template_it_is_wrapped_from_the_end_token_on():
    made = tokenizer(CHATML)
    assert template_wrapping(made, (EOS,)) == Wrapping("\n<user>", "<eos>\n<assistant>")
    encode = observation_encoder(made, (EOS,), chat=True)
    assert encode("46") == (*map(ord, "\n<user>46"), EOS, *map(ord, "\n<assistant>"))


def test_a_conversation_rendered_whole_is_what_the_pieces_make():
    made = tokenizer(CHATML)
    messages = [("user", "1+1="), ("assistant", "[1+1]"), ("user", "2"), ("assistant", "2")]
    whole = made.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)
    start = made.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True)
    sampled = [*map(ord, "[1+1]"), EOS]
    pieces = [*made(start)["input_ids"], *sampled, *observation_encoder(made, (EOS,), chat=True)("2"), ord("2"), EOS]
    assert [*pieces, ord("\n")] == made(whole)["input_ids"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # forgets what was said before
        ("{{ messages[-1].content }}<eos>{% if add_generation_prompt %}:{% endif %}", "does not begin with the one"),
        # the end of an answer is no token at which the model stops
        (
            "{% for m in messages %}{{ m.content }};{% endfor %}",
            "is followed by ';gamma;', and the model stops at <eos>",
        ),
        # shows the text twice
        (CHATML.replace("{{ m.content }}<eos>", "{{ m.content }}<eos>{{ m.content }}"), "exactly once"),
        # depends on what was said
        (CHATML.replace("\n", "{{ messages[0].content[0] }}"), "depends on their text"),
        ("{{ raise_exception('one turn only') if messages | length > 1 }}", "cannot be rendered: one turn only"),
    ],
)
def test_a_template_that_says_no_such_thing_is_refused_with_a_reason(template, message):
    with pytest.raises(ConfigError, match=r"task.chat = true: the model's chat template does not fit") as refusal:
        template_wrapping(tokenizer(template), (EOS,))
    assert message in str(refusal.value)
