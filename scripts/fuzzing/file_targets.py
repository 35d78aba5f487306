"""What is read from disk: configurations, data, checkpoints, the journal, and the files of a run folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save as save_tensors

from async_rl.buffer import journal, journaled, replay
from async_rl.buffer.records import Rules
from async_rl.config import load_any, parse_config, preset_names, to_toml
from async_rl.control import spaces
from async_rl.control.checkpoint import CONFIG, POLICY, load_actor
from async_rl.control.networks import build_actor
from async_rl.errors import ConfigError
from async_rl.report.page import render
from async_rl.report.trace import trace_events
from async_rl.runfolder import RunFolder
from async_rl.summary import summarize
from async_rl.tasks import table
from fuzzing import samples, spoil
from fuzzing.choices import Choices
from fuzzing.wire_targets import Run, Target
from learner.checkpoint import fresh_state, read_state


def refused(act: Callable[[], object]) -> str:
    """The first words of the sentence with which it was refused; empty if it was not."""
    try:
        act()
    except ConfigError as error:
        words = [w for w in str(error).split() if w.isalpha()]
        return " ".join(words[:4]) or "refused"
    return ""


def _config_text(folder: Path) -> Run:
    files = [to_toml(load_any(name)).encode() for name in preset_names()]
    path = folder / "config.toml"
    pieces = (
        b"[[a]]\n",
        b"x = 0x" + b"f" * 5000,
        b"x = " + b"9" * 5000,
        b"a.b.c = 1\n",
        b"x = " + b"[" * 3000,
        b"1979-05-27",
    )

    def run(choices: Choices) -> list[str]:
        content = choices.pick(files)
        lines = content.split(b"\n")
        for _ in range(1 + choices.below(3)):
            at = choices.below(len(lines))
            match choices.below(5):
                case 0:
                    lines[at] = spoil.data(choices, lines[at])
                case 1:
                    lines[at] = lines[at].partition(b"=")[0] + b"= " + _toml(spoil.nasty(choices, binary=False))
                case 2:
                    lines[at : at + 1] = []
                case 3:
                    lines.insert(at, choices.pick(lines))
                case _:
                    lines.insert(at, choices.pick(pieces))
        path.write_bytes(b"\n".join(lines))
        return [refused(lambda: load_any(str(path)))]

    return run


def _toml(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"{" + b", ".join(json.dumps(k).encode() + b" = " + _toml(v) for k, v in value.items()) + b"}"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf").encode()


def _overrides(folder: Path) -> Run:
    names = preset_names()
    keys = ["steps", "algorithm.name", "algorithm", "learner.lr", "buffer.bind", "task.data", "domain", "learner.betas"]
    keys += ["policy.hidden", "name", "a.b.c", "", ".", "..", "steps.x", "buffer.heartbeat_s", "sampling.temperature"]

    def run(choices: Choices) -> list[str]:
        made = []
        for _ in range(1 + choices.below(3)):
            text = _toml(spoil.nasty(choices, binary=False)).decode()
            if choices.below(4) == 3:
                text = choices.blob(24).decode(errors="replace")
            made.append(choices.pick(keys) + choices.pick(("=", "=", "=", "", " = ")) + text)
        source = choices.pick(names) if choices.below(8) else choices.blob(16).decode(errors="replace")
        return [refused(lambda: load_any(source, made))]

    return run


def _data(folder: Path) -> Run:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    rows: list[Any] = [{"prompt": "1+1=", "answer": "2", "n": 1}, {"prompt": chat, "answer": 2, "n": None}]
    path = folder / "data.jsonl"

    def run(choices: Choices) -> list[str]:
        lines = [json.dumps(choices.pick(rows)).encode() for _ in range(choices.below(4))]
        lines.insert(choices.below(len(lines) + 1), spoil.text(choices, choices.pick(rows)))
        path.write_bytes(b"\n".join(lines))
        needs_answer, is_chat = bool(choices.below(2)), bool(choices.below(2))
        return [refused(lambda: list(table.problems(str(path), needs_answer=needs_answer, chat=is_chat)))]

    return run


def _saved(folder: Path) -> tuple[Rules, Path]:
    """A checkpoint's ledger in the middle of a run, with something in each of its places."""
    rules = Rules.from_config(samples.token_config(), samples.limits(samples.token_config()))
    ledger = journaled.JournaledLedger(rules, _task)
    for number in range(4):
        ticket = ledger.issue("a", 0, 0.0)
        if ticket is not None and number != 1:
            group = samples.token_group(ticket.ordinal, ticket.attempt, ticket.task_index)
            ledger.submit("a", group, 1.0)
    ledger.lose("a")
    ledger.issue("b", 0, 2.0)
    ledger.deliver()
    saved = folder / "saved"
    journal.save(journal.freeze(ledger), saved)
    return rules, saved


def _task(ordinal: int) -> int:
    return ordinal % samples.NUM_TASKS


def _ledger_json(folder: Path) -> Run:
    rules, saved = _saved(folder)
    path = saved / "ledger.json"
    seed = json.loads(path.read_bytes())

    def run(choices: Choices) -> list[str]:
        path.write_bytes(spoil.text(choices, seed))

        def read() -> None:
            books = journal.thaw(journal.load(saved), rules, _task).books()
            assert books["issued"] == sum(books.values()) - books["issued"], books

        return [refused(read)]

    return run


def _groups_bin(folder: Path) -> Run:
    rules, saved = _saved(folder)
    path = saved / "groups.bin"
    seed = path.read_bytes()

    def run(choices: Choices) -> list[str]:
        path.write_bytes(spoil.data(choices, seed))
        return [refused(lambda: journal.thaw(journal.load(saved), rules, _task))]

    return run


def _events(folder: Path) -> Run:
    rules, _ = _saved(folder)
    first = folder / "journal"
    ledger = journaled.JournaledLedger(rules, _task)
    journaled.start(ledger, first)
    ticket = ledger.issue("a", 0, 0.0)
    assert ticket is not None
    ledger.submit("a", samples.token_group(ticket.ordinal, ticket.attempt, ticket.task_index), 1.0)
    ledger.note("phase", {"phase": "running"})
    ledger.issue("a", 0, 2.0)
    ledger.lose("a")
    ledger.detach(remove=False)
    (events,) = first.glob("events-*.bin")
    seed = events.read_bytes()

    def run(choices: Choices) -> list[str]:
        events.write_bytes(spoil.data(choices, seed))

        def recover() -> None:
            replay.recover(first, rules, _task, None, 3.0).detach(remove=False)

        return [refused(recover)]

    return run


def _trainer_json(folder: Path) -> Run:
    config = samples.token_config()
    state = fresh_state(config)
    seed = {"step": 3, "trained": 12.0, "contract": state.contract, "numbers": {"lr": 1e-3}}
    path = folder / "trainer.json"

    def run(choices: Choices) -> list[str]:
        path.write_bytes(spoil.text(choices, seed))

        def read() -> None:
            found = read_state(folder, config)
            assert found.step >= 0
            assert found.trained >= 0
            assert all(isinstance(value, float) for value in found.numbers.values())

        return [refused(read)]

    return run


def _policy(folder: Path) -> Run:
    """The tensors of a policy: a header that lies, or tensors of other types and shapes."""
    torch.set_num_threads(1)
    raw = {"domain": "control", "env": {"num_envs": 2}, "policy": {"hidden": [2]}, "algorithm": {"minibatches": 1}}
    config = _control(raw)
    (folder / CONFIG).write_text(to_toml(config))
    offered = spaces.Spaces(
        observations={"policy": spaces.Observation((2,))}, action=spaces.Action(kind="discrete", size=1, choices=(2,))
    )
    offered.write(folder)
    tensors = {k: v.numpy() for k, v in build_actor(config, offered).state_dict().items()}
    seed = save_tensors(tensors)
    length = int.from_bytes(seed[:8], "little")
    header, rest = json.loads(seed[8 : 8 + length]), seed[8 + length :]
    path = folder / POLICY

    def run(choices: Choices) -> list[str]:
        if choices.below(4) == 3:
            content = spoil.data(choices, seed)
        else:
            text = spoil.text(choices, header)
            size = len(text) if choices.below(8) else choices.pick((0, 1, len(text) + 1, 1 << 40, (1 << 64) - 1))
            content = size.to_bytes(8, "little") + text + (spoil.data(choices, rest) if choices.below(4) == 3 else rest)
        path.write_bytes(content)
        return [refused(lambda: load_actor(folder))]

    return run


def _control(raw: dict[str, Any]) -> Any:
    from async_rl.config import parse_control

    return parse_control(raw)


_ROWS: dict[str, Any] = {
    "books.json": {
        "status": "running",
        "reason": "",
        "step": 2,
        "books": {"issued": 3, "open": 1, "ready": 1, "trained": 1},
        "filtered": {"zero_variance": 1},
        "failed": {},
        "refused": {"bad_shape": 2},
        "staleness": {"max": 2, "mean": 0.7, "bound": 2, "histogram": {"0": 500, "1": 20}},
        "tokens": {"trained": 10, "generated": 15},
        "control": {"episode/return": 1.0, "episode/count": 3.0},
        "stages": {"reward": {"annotated": 4, "seconds": 1.0, "failed": 0, "returned": 0}},
        "weights": {"bytes": 100, "publish_s": 0.1, "paused_s": 0.1, "versions": 2, "commit_s": None},
    },
    "metrics.jsonl": {"step": 1, "time": 110.0, "session": 0, "tokens/step": 9.0, "reward/mean": 0.1, "accuracy": None,
                      "env_steps/step": 5.0, "env_steps/trained": 5.0, "episode/return": 1.0},
    "evals.jsonl": {"version": 1, "metrics": {"accuracy": 0.5, "return": 1.0}, "wall_s": 1.0, "samples": []},
    "timeline.jsonl": {"name": "a", "role": "actor", "spans": [["starting", 90.0, 100.0], ["scoring", 100.0, 101.0]]},
    "samples.jsonl": {"ordinal": 0, "version": 0, "prompt": "1+1=", "completions": ["2", "3"], "rewards": [1.0, 0.0]},
    "server.json": {"address": "tcp://127.0.0.1:1", "pid": 1, "run_id": "r"},
    "summary.json": {
        "status": "completed",
        "reason": "",
        "steps": 3,
        "wall_s": 1.0,
        "eval": {"accuracy": 0.5, "version": 3},
        "throughput": {"trained_tokens_per_s": 1.0},
        "episodes": {},
        "utilization": {"learner": 0.5},
        "staleness": {"max": 2, "mean": 0.7, "bound": 2, "histogram": {"0": 5}},
        "ledger": {"issued": 1, "trained": 1},
        "stages": {"reward": {"annotated": 4, "groups_per_s": 1.0, "failed": 0, "returned": 0}},
        "weights": {"bytes": 100, "versions": 2},
        "cpu_s": {"a": 1.0},
        "restarts": {"a": 1},
    },
}  # fmt: skip


def _run_folder(folder: Path) -> Run:
    """Report, trace and summary of a run folder in which one file is spoilt."""
    (folder / "config.toml").write_text(to_toml(parse_config({})))

    def write(name: str, content: bytes) -> None:
        lines = name.endswith("l")
        (folder / name).write_bytes(content + b"\n" + json.dumps(_ROWS[name]).encode() if lines else content)

    for name, row in _ROWS.items():
        write(name, json.dumps(row).encode())

    def run(choices: Choices) -> list[str]:
        has_summary = bool(choices.below(2))
        if not has_summary:
            (folder / "summary.json").unlink(missing_ok=True)
        name = choices.pick([n for n in _ROWS if has_summary or n != "summary.json"])
        write(name, spoil.text(choices, _ROWS[name]))
        found = RunFolder(folder)
        render(found)
        json.dumps(trace_events(found.timeline), allow_nan=False)
        json.dumps(summarize(found, None), allow_nan=False)
        assert isinstance(found.server.get("address", ""), str)
        write(name, json.dumps(_ROWS[name]).encode())
        write("summary.json", json.dumps(_ROWS["summary.json"]).encode())
        return [""]

    return run


TARGETS = (
    Target("config: text", _config_text),
    Target("config: overrides", _overrides),
    Target("data: JSONL", _data),
    Target("checkpoint: ledger.json", _ledger_json),
    Target("checkpoint: groups.bin", _groups_bin),
    Target("checkpoint: trainer.json", _trainer_json),
    Target("checkpoint: policy", _policy),
    Target("journal: events", _events),
    Target("run folder: report", _run_folder),
)
