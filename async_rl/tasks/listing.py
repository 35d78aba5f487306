"""The problems of a user's class, listed by a process of its own: user code may hang, exit, print, or never end.

    list_problems ──► python -m async_rl.tasks.listing module:Class FILE ──problems()──► FILE, a line a problem ──► rows

Every process of a run lists them anew and must get the same ones, since tickets name them by number only. Hashes are
therefore not random there (sets keep their order), and :func:`check_repeats` finds what is random all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.process import die_with_parent
from async_rl.tasks.problem import Problem, is_plain

LIMIT_S = 30.0
"""Most time for the import and for ``problems()``; a server must be up within twice that."""
_KILLED_S = 10.0
"""A killed process is gone by then."""
MOST = 1_000_000
"""Most problems of a class."""


def list_problems(environment: str, env: Mapping[str, str] | None = None) -> list[tuple[object, Problem]]:
    """The problems of ``module:Class`` as ``(key, problem)``; keys are numbers, equal where the user's are.

    Args:
        environment: whose static method ``problems()`` is called.
        env: environment of the process that calls it; None: this one's, with its search path.

    Raises:
        ConfigError: the class cannot be imported, its problems cannot be had, or are not of this form.
    """
    rows = [json.loads(line) for line in _listed(environment, env).splitlines()]
    return [(key, Problem(prompt, columns, tuple(before))) for key, prompt, columns, before in rows]


def check_repeats(environment: str, env: Mapping[str, str] | None = None) -> None:
    """Check that ``problems()`` gives the same ones in another process.

    Raises:
        ConfigError: it does not; names the first that differs. Or as :func:`list_problems`.
    """
    one, other = (_listed(environment, env).splitlines() for _ in range(2))
    if one != other:
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        raise ConfigError(
            f"task.environment = {environment!r}: problems() gives others each time it is called (from problem {place} "
            "on), and every process of a run must get the same ones; draw them with random.Random(SEED)"
        )


def _listed(environment: str, env: Mapping[str, str] | None) -> bytes:
    """What the process has written."""
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if env is None else env
    with tempfile.TemporaryDirectory(prefix="async-rl-problems-") as folder:
        file = Path(folder) / "problems"
        command = [sys.executable, "-m", __name__, environment, str(file), str(os.getpid())]
        ended = _run(command, {**base, "PYTHONHASHSEED": "0"})
        try:
            if ended is None:
                raise ConfigError(f"they took longer than {LIMIT_S:g} s; make fewer, or set task.data")
            error = file.with_suffix(".error")
            if error.is_file():
                raise ConfigError(error.read_text())
            if ended or not file.is_file():
                raise ConfigError(f"the process ended with exit code {ended}")
            return file.read_bytes()
        except ConfigError as error:
            name = environment.partition(":")[2]
            raise ConfigError(f"task.environment = {environment!r}: {name}.problems() cannot be had: {error}") from None


def _run(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Exit code, or None when it took too long; kills all that it started."""
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILLED_S)


def rows_of(made: Any) -> Iterator[str]:
    """One line of JSON for each ``(key, problem)``: number of the key, prompt, columns, messages before.

    Raises:
        ConfigError: an entry is of another form; names it.
    """
    keys: dict[object, int] = {}
    for number, entry in enumerate(made):
        if number == MOST:
            raise ConfigError(f"there are more than {MOST:,}; an endless generator must be cut")
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Problem)):
            raise ConfigError(f"problems() must yield (key, async_rl.tasks.Problem), got {entry!r:.80}")
        key, problem = entry
        if not isinstance(problem.prompt, str):
            raise ConfigError(f"problem {number}: its prompt is {type(problem.prompt).__name__}, not text")
        if not isinstance(problem.columns, Mapping):
            raise ConfigError(f"problem {number}: its columns are {type(problem.columns).__name__}, not a dictionary")
        for name, value in problem.columns.items():
            if not isinstance(name, str) or not is_plain(value):
                raise ConfigError(
                    f"problem {number}: column {name!r} holds {value!r:.60}; keep text, numbers, lists and "
                    "dictionaries of them"
                )
        number_of_key = keys.setdefault(key, len(keys))
        yield json.dumps([number_of_key, problem.prompt, dict(problem.columns), list(problem.before)])


def main(environment: str, file: str, parent_pid: str) -> None:
    """List the problems into ``file``, or write why not beside it."""
    die_with_parent(int(parent_pid))
    module, _, name = environment.partition(":")
    try:
        made = getattr(importlib.import_module(module), name).problems()
        with Path(file).open("w") as sink:
            sink.writelines(f"{row}\n" for row in rows_of(made))
    except ConfigError as error:
        text = str(error)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        text = f"{type(error).__name__}: {error}; write it as a static method, or set task.data"
    else:
        return
    Path(file).with_suffix(".error").write_text(text, errors="backslashreplace")


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads that the user's module left behind must not keep the process
