"""Every call that can block has a deadline: the sources are walked, and a call without one fails the test.

A lock held for a few lines (``with lock:``) is not looked at; what is waited for inside is.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_rl", "actors", "learner")

DEADLINE_AT = {
    "join": 0,
    "wait": 0,
    "result": 0,
    "exception": 0,
    "acquire": 1,
    "communicate": 1,
    "wait_for": 1,
    "select": 3,
}
"""Position of the deadline in calls of methods that block without one."""
FUNCTIONS_WITH_TIMEOUT = {"run", "call", "check_call", "check_output", "urlopen", "create_connection", "getaddrinfo"}
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
}
ALLOWED = {
    "async_rl/connection.py send": "a DEALER without a high-water mark queues and never blocks",
    "async_rl/connection.py send_multipart": "a DEALER without a high-water mark queues and never blocks",
    "async_rl/cli.py run": "`play` is its child process: it ends with the episodes asked for, or by the user's Ctrl-C",
    "async_rl/buffer/learner_desk.py exception": "asked of futures that are done only",
    "actors/engines/vllm_thread.py wait": "whoever waits for this coroutine does so with a deadline",
    "actors/engines/vllm_thread.py result": "asked of a task that is done only",
    "actors/rewards/judge.py result": "every request has the deadline that the caller gave",
}
"""``FILE METHOD``: why it cannot block."""


def sources():
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def blocking_calls(tree: ast.AST, file: str):
    """Line and text of each call that may block for ever."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (why := fault(node, file)):
            yield node.lineno, f"{ast.unparse(node)[:100]}: {why}"


def fault(call: ast.Call, file: str) -> str:
    """Why this call may block for ever; empty if it cannot."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    keywords = {k.arg: k.value for k in call.keywords}
    if f"{file} {name}" in ALLOWED:
        return ""
    has_timeout = any(k and "timeout" in k for k in keywords) or None in keywords
    if owner == "dist" and name in COLLECTIVES:
        return "" if file == "learner/group.py" else "collectives belong into LearnerGroup, which has their deadline"
    if name == "init_process_group":
        return "" if "timeout" in keywords else "no timeout"
    if name == "create_connection" and len(call.args) > 1:
        return ""  # the second one is its limit
    if owner in ("subprocess", "urllib.request", "socket") and name in FUNCTIONS_WITH_TIMEOUT:
        return "" if has_timeout else "no timeout"
    if owner == "time" and name == "sleep":
        return "sleeps instead of waiting for something"
    if owner == "os" and name in ("waitpid", "wait4", "wait"):
        return "" if any("WNOHANG" in ast.unparse(a) for a in call.args) else "no WNOHANG"
    if (
        name in ("recv", "recv_multipart", "send", "send_multipart")
        and "socket" in owner.lower()
        and not owner.startswith("_")
    ):
        flags = " ".join(ast.unparse(a) for a in [*call.args, *keywords.values()])
        zmq_call = name.endswith("multipart")
        return "" if not zmq_call or "NOBLOCK" in flags else "no NOBLOCK"
    if name == "get" and "queue" in owner.lower() and not call.args:
        return "" if has_timeout else "no timeout"
    if name == "poll" and ("poller" in owner.lower() or owner.endswith("_poll")):
        return "" if call.args else "no timeout"
    if name == "select" and owner not in ("select",):
        return "" if call.args or has_timeout else "no timeout"
    if name in DEADLINE_AT and not isinstance(function, ast.Name):
        return judge_method(call, name, owner, has_timeout=has_timeout)
    return ""


def judge_method(call: ast.Call, name: str, owner: str, *, has_timeout: bool) -> str:
    """A method of a thread, process, future, event or condition."""
    if name == "join" and (owner.startswith(("os.path", "'", '"', "f'", 'f"')) or len(call.args) == 1):
        return ""  # of text, or of a thread with its limit
    if name == "exception" and not call.args:
        return "" if has_timeout else "no timeout: timeout=0 for a future that is done"
    return "" if has_timeout or len(call.args) > DEADLINE_AT[name] else "no timeout"


def test_no_call_of_the_sources_can_block_for_ever():
    found = []
    for path in sources():
        file = str(path.relative_to(ROOT))
        found += [f"{file}:{line}: {text}" for line, text in blocking_calls(ast.parse(path.read_text()), file)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "thread.join()",
        "event.wait()",
        "process.wait()",
        "process.communicate(data)",
        "future.result()",
        "condition.wait_for(ready)",
        "lock.acquire()",
        "subprocess.run(['ls'])",
        "self._queue.get()",
        "poller.poll()",
        "selector.select()",
        "select.select([a], [], [])",
        "os.waitpid(pid, 0)",
        "socket.recv_multipart()",
        "self._socket.send_multipart(parts)",
        "dist.all_reduce(tensor)",
        "dist.init_process_group('gloo')",
        "time.sleep(1)",
        "socket.create_connection(address)",
    ],
)
def test_a_call_without_a_deadline_is_found(source):
    assert list(blocking_calls(ast.parse(source), "somewhere.py"))


@pytest.mark.parametrize(
    "source",
    [
        "thread.join(5)",
        "', '.join(words)",
        "separator.join(words)",
        "event.wait(timeout=1)",
        "condition.wait_for(ready, 1.0)",
        "future.result(timeout=0)",
        "subprocess.run(['ls'], timeout=3)",
        "socket.create_connection(address, 3.0)",
        "settings.get('queue')",
        "poller.poll(10)",
        "selector.select(1.0)",
        "select.select([a], [], [], 1.0)",
        "os.waitpid(pid, os.WNOHANG)",
        "socket.recv_multipart(zmq.NOBLOCK)",
    ],
)
def test_a_call_with_a_deadline_passes(source):
    assert not list(blocking_calls(ast.parse(source), "somewhere.py"))
