"""Held-out prompts that the model cannot be asked are left out, and counted."""

import pytest

from actors.evaluation.exam import WrittenExam
from actors.players.factory import Setting
from async_rl.config import parse_config
from async_rl.tasks import Problem
from async_rl.tasks.exact import VERIFIER
from learner.warmup.main import build_model, build_tokenizer, save

pytestmark = pytest.mark.real

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


def test_a_prompt_that_the_chat_template_refuses_or_that_is_too_long_is_skipped(tmp_path, capsys):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    save(build_model(), tokenizer, tmp_path)
    setting = Setting(
        config=parse_config({"model": {"path": str(tmp_path)}, "task": {"chat": True}}),
        folder=tmp_path,
        verifier=VERIFIER,
        search=tmp_path,
    )
    columns = {"answer": "1"}
    problems = [
        Problem("1=", columns),
        Problem("x" * 600, columns),
        Problem("2=", columns, before=({"role": "system", "content": "s"},)),
    ]
    exam = WrittenExam(setting, None, problems)
    exam.close()
    assert (
        "2 held-out prompts are left out; the last: the model's chat template cannot render" in capsys.readouterr().out
    )
