"""The tiny model: its tokenizer, its measure of accuracy, and how it is saved."""

import pytest
import torch

from async_rl.config import TaskConfig
from async_rl.models import load_tokenizer
from async_rl.tasks import Problem
from async_rl.tasks.prompt import decode_completion
from learner.warmup import demonstrations, supervision
from learner.warmup import main as warmup
from learner.warmup.demonstrations import Demonstration
from learner.warmup.supervision import Lesson

TASK = TaskConfig()
PROBLEMS = [Problem("12+34=", {"answer": "46"}), Problem("99+98=", {"answer": "197"})]


@pytest.fixture(scope="module")
def tokenizer():
    return warmup.build_tokenizer()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return warmup.build_model().eval()


def test_a_character_is_its_ascii_code_and_text_survives_the_round_trip(tokenizer):
    text = "12+34=\nUse a  b\tc? (~)"
    ids = tokenizer(text)["input_ids"]
    assert ids == [ord(c) for c in text]
    assert decode_completion(tokenizer, ids, {warmup.EOS}) == text
    assert tokenizer("é")["input_ids"] == [warmup.UNK]
    assert len(tokenizer) == warmup.VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (warmup.PAD, warmup.EOS)


def test_the_saved_tokenizer_is_the_same_one(tmp_path, tokenizer, model):
    warmup.save(model, tokenizer, tmp_path)
    text = "".join(chr(code) for code in range(4, 128))
    loaded = load_tokenizer(tmp_path)
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] == list(range(4, 128))
    assert loaded.decode(range(4, 128)) == text


def test_special_tokens_are_no_text(tokenizer):
    assert decode_completion(tokenizer, [ord("4"), warmup.PAD, ord("6"), warmup.EOS, ord("7")], {warmup.EOS}) == "46"


def test_only_the_answer_and_the_end_are_targets(tokenizer):
    inputs, targets = warmup.encode_problems(tokenizer, PROBLEMS, TASK)
    assert inputs.tolist() == [[*map(ord, "12+34=46"), 2], [*map(ord, "99+98=197")]]
    skip = [-100] * 5
    assert targets.tolist() == [[*skip, ord("4"), ord("6"), 2, -100], [*skip, *map(ord, "197"), 2]]


def test_the_model_has_about_0_6_million_parameters(model):
    assert 0.55e6 < sum(p.numel() for p in model.parameters()) < 0.65e6


def test_greedy_accuracy_is_what_decoding_token_by_token_gives(tokenizer, model):
    problems = [Problem(f"{a}+{b}=", {"answer": str(a + b)}) for a in (10, 55) for b in range(40, 60)]
    encoded = warmup.encode_problems(tokenizer, problems, TASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):  # until some are right and some are wrong
        logits = model(input_ids=encoded[0]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), encoded[1].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = supervision.greedy_accuracy(model, *encoded)
        if 0.2 < accuracy < 0.8:
            break
    right = 0
    for problem in problems:
        ids = tokenizer(problem.prompt)["input_ids"]
        for _ in range(5):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        right += decode_completion(tokenizer, ids[6:], {warmup.EOS}) == problem.columns["answer"] and warmup.EOS in ids
    assert 0.2 < accuracy < 0.8
    assert accuracy == pytest.approx(right / len(problems))


def lesson(name="sums", encoded=None, enough=0.45, too_much=0.58):
    encoded = encoded or (torch.empty(0), torch.empty(0))
    return Lesson(name=name, train=encoded, heldout=encoded, enough=enough, too_much=too_much)


def test_stepping_back_finds_weights_inside_the_window(monkeypatch, model):
    before = [torch.zeros_like(p) for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    first = next(model.parameters())
    monkeypatch.setattr(supervision, "greedy_accuracy", lambda *_: float(first.detach().mean()) ** 2)
    accuracy = supervision.step_back(model, before, lesson())
    assert 0.45 <= accuracy < 0.58
    assert float(first.detach().mean()) ** 2 == accuracy


def test_supervision_stops_as_soon_as_the_accuracy_is_enough(monkeypatch, tokenizer, model):
    monkeypatch.setattr(supervision, "EVAL_EVERY", 2)
    encoded = warmup.encode_problems(tokenizer, PROBLEMS, TASK)
    lines = []
    assert supervision.supervise(model, [lesson(encoded=encoded, enough=0.0)], lines.append) == [0.0]
    assert [line.split()[1] for line in lines] == ["2"]


def test_a_lesson_that_is_learnt_rests_until_it_is_forgotten(monkeypatch, tokenizer, model):
    monkeypatch.setattr(supervision, "EVAL_EVERY", 2)
    encoded = warmup.encode_problems(tokenizer, PROBLEMS, TASK)
    lessons = [lesson("one", (encoded[0], encoded[1])), lesson("two", (encoded[0].clone(), encoded[1]))]
    taught = []

    def accuracy(_, inputs, __):
        name = "one" if inputs is encoded[0] else "two"
        return {"one": [0.1, 0.5, 0.5, 0.2, 0.5], "two": [0.1, 0.1, 0.1, 0.5, 0.5]}[name][len(taught) // 2 - 1]

    monkeypatch.setattr(supervision, "greedy_accuracy", accuracy)
    monkeypatch.setattr(supervision, "_step", lambda model, optimizer, taken: taught.append(taken.name) or 0.0)
    assert supervision.supervise(model, lessons, lambda line: None) == [0.5, 0.5]
    assert taught == ["two", "one", "two", "one", "two", "two", "two", "two", "one", "one"]


def test_demonstrations_are_trained_on_the_models_turns_alone(tokenizer):
    shown = [
        Demonstration("1+1=", ("[1+1]", "2"), ("2",)),
        Demonstration("guess 4-6: ", ("5",), ()),
    ]
    inputs, targets = warmup.encode_demonstrations(tokenizer, shown)
    assert inputs[0].tolist() == [*map(ord, "1+1=[1+1]"), warmup.EOS, ord("2"), ord("2")]
    assert inputs[1].tolist() == [*map(ord, "guess 4-6: 5"), warmup.EOS][:12]
    skip = [-100]
    called = [*map(ord, "[1+1]"), warmup.EOS]
    assert targets[0].tolist() == [*skip * 3, *called, *skip, ord("2"), warmup.EOS]
    assert targets[1].tolist() == [*skip * 10, ord("5"), warmup.EOS]


def test_experts_halve_the_range_and_take_a_shortest_way():
    problem = Problem("guess 10-24: ", {"low": 10, "secret": 14})
    assert demonstrations.guess(problem) == Demonstration(
        "guess 10-24: ", ("17", "13", "15", "14"), ("lower", "higher", "lower")
    )
    lake = Problem("A.O/O../..G", {"make": {"desc": ["SFH", "HFF", "FFG"], "is_slippery": False}})
    assert demonstrations.frozenlake(lake) == Demonstration(
        "A.O/O../..G", ("2", "1", "1", "2"), (".AO/O../..G", "..O/OA./..G", "..O/O../.AG")
    )


def test_the_folder_is_whole_and_replaces_what_was_there(tmp_path, tokenizer, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "models" / "tiny"
    out.mkdir(parents=True)
    (out / "stale").write_text("")
    warmup.save(model, tokenizer, out)
    assert [p.name for p in out.parent.iterdir()] == ["tiny"]
    assert not (out / "stale").exists()
    assert AutoTokenizer.from_pretrained(out)("7")["input_ids"] == [ord("7")]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.generation_config.eos_token_id == warmup.EOS
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_failed_save_leaves_nothing_behind(monkeypatch, tmp_path, tokenizer, model):
    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        warmup.save(model, tokenizer, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []
