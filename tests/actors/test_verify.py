"""The verifier pool with real child processes: every way in which user code can go wrong becomes a verdict."""

import math
import os
import signal
import time

import pytest

from actors.verifiers import child
from actors.verifiers.child import Source
from actors.verifiers.pool import VerifierPool
from actors.verifiers.wire import Unpacker, pack
from actors.verifiers.worker import accepted_names, check_rewards
from async_rl.errors import ConfigError

USER_MODULE = '''
import os, subprocess, sys, time

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def strict(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def columns(prompts, completions, **columns):
    assert sorted(columns) == ["answer", "completion_ids", "finish_reasons"], sorted(columns)
    assert columns["completion_ids"] == [[1, 2], [3]], columns
    return [1, True]

def noisy(completions, **_):
    print("print" * 1000)
    os.write(1, b"raw bytes on descriptor 1\\n")
    subprocess.run(["echo", "from a grandchild"])
    return [0.5] * len(completions)

def by_text(completions, **_):
    """The first completion says what to do."""
    order, _, value = completions[0].partition(" ")
    if order == "raise":
        raise KeyError("no such " + value)
    if order == "exit":
        sys.exit(3)
    if order == "vanish":
        os._exit(3)
    if order == "hang":
        time.sleep(1000)
    if order == "orphan":
        child = subprocess.Popen(["sleep", "1000"])
        open(value, "w").write(str(child.pid))
        time.sleep(1000)
    if order == "return":
        return eval(value, {"nan": float("nan")})
    if order == "recurse":
        return by_text(completions)
    return [1.0] * len(completions)

not_a_function = 3

def scaled(factor, *, broken=False):
    """Called once, for the function that scores."""
    if broken:
        raise ValueError("no such scale")
    calls = []
    def score(completions):
        calls.append(1)
        return [factor * len(c) + len(calls) / 8 for c in completions]
    return score

def pid(completions, **_):
    time.sleep(0.05)
    return [float(os.getpid())] * len(completions)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "user_verifier.py").write_text(USER_MODULE)
    return tmp_path


@pytest.fixture
def make_pool(folder):
    pools = []

    def make(function, timeout_s=30.0, workers=1):
        pools.append(VerifierPool(f"user_verifier:{function}", timeout_s, workers, folder))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def gather(pool, count, timeout_s=30.0):
    verdicts = []
    deadline = time.monotonic() + timeout_s
    while len(verdicts) < count:
        assert time.monotonic() < deadline, f"{len(verdicts)} of {count} verdicts"
        verdicts += pool.wait(1.0)
    return {v.key: v for v in verdicts}


def judge(pool, text, count=1):
    pool.submit(text, [""] * count, [text] * count, {})
    return gather(pool, 1)[text]


@pytest.mark.real
def test_rewards_come_back_under_their_keys(make_pool):
    pool = make_pool("length")
    for i in range(20):
        pool.submit(("group", i), ["p"] * 3, ["", "a", "ab" * i], {})
    assert pool.pending == 20
    verdicts = gather(pool, 20)
    assert verdicts["group", 7].rewards == [0.0, 1.0, 14.0]
    assert {v.outcome for v in verdicts.values()} == {"ok"}
    assert pool.pending == 0
    assert pool.wait(10.0) == []


@pytest.mark.real
def test_built_in_verifiers_go_the_same_way():
    pool = VerifierPool("async_rl.tasks.exact:score", 30.0, 1)
    pool.submit(0, ["1+1="] * 3, ["2", "2", "3"], {"answer": ["2"] * 3, "finish_reasons": ["stop", "length", "stop"]})
    assert gather(pool, 1)[0].rewards == [1.0, 0.0, 0.0]
    pool.close()


@pytest.mark.real
def test_a_function_gets_all_columns_or_only_those_that_it_names(make_pool):
    given = {"answer": ["x", "y"], "completion_ids": [[1, 2], [3]], "finish_reasons": ["stop", "stop"]}
    everything, named = make_pool("columns"), make_pool("strict")
    everything.submit(0, ["p", "p"], ["x", "x"], given)
    named.submit(0, ["p", "p"], ["x", "x"], given)
    assert gather(everything, 1)[0].rewards == [1.0, 1.0]
    assert gather(named, 1)[0].rewards == [1.0, 0.0]


@pytest.mark.real
def test_output_of_user_code_does_not_disturb_the_messages(make_pool, capfd):
    assert judge(make_pool("noisy"), "a").rewards == [0.5]
    assert "raw bytes on descriptor 1" in capfd.readouterr().out


@pytest.mark.real
def test_an_exception_is_a_verdict_with_the_end_of_its_traceback_and_the_child_goes_on(make_pool):
    pool = make_pool("by_text")
    verdict = judge(pool, "raise thing")
    assert (verdict.outcome, verdict.rewards) == ("error", None)
    assert verdict.detail.endswith("KeyError: 'no such thing'")
    assert "user_verifier.py" in verdict.detail
    assert judge(pool, "exit").outcome == "error"
    assert "RecursionError" in judge(pool, "recurse").detail
    assert judge(pool, "fine").rewards == [1.0]


@pytest.mark.real
def test_a_call_that_hangs_is_killed_and_the_pool_regrows(make_pool):
    pool = make_pool("by_text", timeout_s=0.3)
    start = time.monotonic()
    pool.submit("bad", [""], ["hang"], {})
    pool.submit("good", [""], ["fine"], {})
    verdicts = gather(pool, 2)
    assert verdicts["bad"].outcome == "timeout"
    assert "0.3 s" in verdicts["bad"].detail
    assert verdicts["good"].rewards == [1.0]
    assert time.monotonic() - start < 10


@pytest.mark.real
def test_what_a_verifier_started_is_killed_with_it(make_pool, tmp_path):
    pool = make_pool("by_text", timeout_s=1.0)
    assert judge(pool, f"orphan {tmp_path / 'pid'}").outcome == "timeout"
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(grandchild):
        assert time.monotonic() < deadline, "the grandchild is still there"


@pytest.mark.real
def test_a_child_that_ends_itself_is_a_verdict_and_the_pool_regrows(make_pool):
    pool = make_pool("by_text")
    assert judge(pool, "vanish").outcome == "died"
    assert judge(pool, "fine").rewards == [1.0]


@pytest.mark.real
def test_poll_never_blocks_even_when_a_large_call_meets_a_stopped_child(make_pool):
    pool = make_pool("pid", timeout_s=1.0)
    pid = int(judge(pool, "who").rewards[0])
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    pool.submit("large", ["p"], ["x" * 5_000_000], {})
    assert pool.poll() == []
    assert time.monotonic() - start < 0.9
    assert gather(pool, 1)["large"].outcome == "timeout"
    pool.submit("large again", ["p"], ["x" * 5_000_000], {})
    assert gather(pool, 1)["large again"].outcome == "ok"


@pytest.mark.real
def test_calls_run_on_as_many_children_as_allowed(make_pool):
    pool = make_pool("pid", workers=2)
    for i in range(12):
        pool.submit(i, [""], [""], {})
    pids = {v.rewards[0] for v in gather(pool, 12).values()}
    assert len(pids) == 2
    assert len(pool.filenos()) == 2


@pytest.mark.real
@pytest.mark.parametrize(
    "value", ["3.0", "None", "'11'", "[1.0]", "[1.0, 'a']", "[1.0, [2.0]]", "{1, 2}", "[1.0, 1e39]"]
)
def test_a_result_that_is_no_list_of_numbers_is_a_bad_result(make_pool, value):
    pool = make_pool("by_text")
    verdict = judge(pool, f"return {value}", count=2)
    assert (verdict.outcome, verdict.rewards) == ("bad_result", None)
    assert verdict.detail


@pytest.mark.real
def test_nan_and_none_pass_through_as_nan(make_pool):
    rewards = judge(make_pool("by_text"), "return [nan, None, 1]", count=3).rewards
    assert math.isnan(rewards[0])
    assert math.isnan(rewards[1])
    assert rewards[2] == 1.0


@pytest.mark.real
def test_no_child_is_left_after_close(make_pool):
    pool = make_pool("pid")
    pid = int(judge(pool, "who").rewards[0])
    pool.submit("never answered", [""], [""], {})
    pool.close()
    assert not _runs(pid)


@pytest.mark.real
@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("user_verifier", "write it as module:function"),
        ("nowhere_at_all:f", "no module 'nowhere_at_all'"),
        ("user_verifier:lenght", "no function 'lenght'; did you mean 'length'"),
        ("user_verifier:not_a_function", "is int, not a function"),
        ("broken:f", "ZeroDivisionError"),
        ("needs:f", "No module named 'missing_dependency'"),
        ("exits:f", "SystemExit"),
        ("vanishes:f", "ended while it imported"),
    ],
)
def test_a_verifier_that_cannot_be_imported_is_a_config_error_at_once(folder, verifier, message):
    (folder / "broken.py").write_text("1 / 0")
    (folder / "needs.py").write_text("import missing_dependency")
    (folder / "exits.py").write_text("import sys; sys.exit(0)")
    (folder / "vanishes.py").write_text("import os; os._exit(0)")
    with pytest.raises(ConfigError, match=message):
        VerifierPool(verifier, 10.0, 1, folder)


@pytest.mark.real
@pytest.mark.parametrize(("deaths", "starts"), [(2, True), (3, False)])
def test_a_child_that_somebody_kills_while_it_imports_is_started_again_a_few_times(folder, deaths, starts):
    count = folder / "count"
    count.write_text("")
    lines = [
        "import os, signal",
        f"count = open({str(count)!r}, 'a+')",
        "count.write('.'); count.seek(0)",
        f"if len(count.read()) <= {deaths}: os.kill(os.getpid(), signal.SIGKILL)",
        "def f(prompts, completions): return [1.0] * len(prompts)",
    ]
    (folder / "killed.py").write_text("\n".join(lines) + "\n")
    if starts:
        VerifierPool("killed:f", 30.0, 1, folder).close()
    else:
        with pytest.raises(ConfigError, match="ended while it imported"):
            VerifierPool("killed:f", 30.0, 1, folder)
    assert len(count.read_text()) == 3


@pytest.mark.real
def test_a_source_with_parameters_is_made_once_and_then_scores_every_call(folder):
    pool = VerifierPool(Source(function="user_verifier:scaled", parameters={"factor": 2.0}), 30.0, 1, folder)
    try:
        assert judge(pool, "abc").rewards == [6.125]
        assert judge(pool, "a").rewards == [2.25]  # the second call of the same function
    finally:
        pool.close()


@pytest.mark.real
def test_a_source_that_cannot_be_made_names_its_setting_and_the_reason(folder):
    source = Source(
        function="user_verifier:scaled",
        parameters={"factor": 1, "broken": True},
        setting="reward.x",
        names_function=False,
    )
    with pytest.raises(ConfigError, match=r"(?s)^reward\.x: .*ValueError: no such scale"):
        VerifierPool(source, 30.0, 1, folder)


@pytest.mark.real
def test_an_import_that_hangs_is_a_config_error(folder):
    source = Source(function="sleepy:f", start_timeout_s=0.5)
    (folder / "sleepy.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(ConfigError, match="the import took longer"):
        VerifierPool(source, 10.0, 1, folder)


@pytest.mark.real
def test_when_no_new_child_can_start_each_waiting_call_fails_once(folder, make_pool):
    pool = make_pool("by_text")
    (folder / "user_verifier.py").write_text("1 / 0")
    for key in ("vanish", "second", "third"):
        pool.submit(key, [""], [key], {})
    verdicts = gather(pool, 3)
    assert [verdicts[k].outcome for k in ("vanish", "second", "third")] == ["died"] * 3
    assert "ZeroDivisionError" in verdicts["third"].detail


@pytest.mark.real
def test_the_module_is_found_in_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "socket.py").write_text("1 / 0  # must not take the place of the standard library's")
    pool = VerifierPool("user_verifier:length", 10.0, 1)
    assert judge(pool, "abc").rewards == [3.0]
    pool.close()


def test_messages_survive_any_split_and_odd_values():
    message = {"n": [2**200, -(2**70), None, 1.5], "text": "\ud800é", "raw": b"\x00"}
    data = pack(message) + pack([1])
    unpacker = Unpacker()
    assert [m for i in range(len(data)) for m in unpacker.feed(data[i : i + 1])] == [message, [1]]
    with pytest.raises(TypeError, match="object"):
        pack({"a": object()})


def test_names_that_a_function_accepts():
    def named(prompts, completions, *, answer): ...
    def anything(completions, **columns): ...

    assert accepted_names(named) == {"prompts", "completions", "answer"}
    assert accepted_names(anything) is None


def test_arrays_are_accepted_as_rewards():
    numpy = pytest.importorskip("numpy")
    assert check_rewards(numpy.array([1.0, 2.0], numpy.float32), 2) == [1.0, 2.0]
    assert check_rewards([numpy.float32(0.5), True], 2) == [0.5, 1.0]


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_children_find_our_packages_where_they_are_and_no_module_of_ours_by_a_bare_name():
    assert (child._ROOT / "actors" / "verifiers" / "worker.py").is_file()
    assert not list(child._ROOT.glob("*.py"))
