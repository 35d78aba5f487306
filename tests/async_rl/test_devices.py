"""Each process of a host has a device of its own, and a second command is told who has it."""

import os
import subprocess
import sys

import pytest

from async_rl.errors import ConfigError
from async_rl.launch.devices import claimed, one_each


def test_devices_are_given_out_in_order_and_never_twice():
    assert one_each(["3", "5", "7"], 2, "--engines 2") == ["3", "5"]
    assert one_each([], 4, "--engines 4") == []
    with pytest.raises(ConfigError, match=r"--engines 3: 3 processes here, but 2 devices \(0, 1\), and each"):
        one_each(["0", "1"], 3, "--engines 3")


def test_a_device_that_another_command_has_is_refused_with_its_process():
    names = [f"test-{os.getpid()}-{i}" for i in range(2)]
    with claimed(names, "actor"):
        with (
            pytest.raises(ConfigError, match=rf"device {names[1]} is used by another .*{os.getpid()}\)"),
            claimed([names[1]], "actor"),
        ):
            pass
        with claimed(names, "learner"):  # may share it with an actor
            pass
    with claimed(names, "actor"):  # it is free again
        pass


def test_the_device_of_a_command_that_was_killed_is_free():
    name = f"test-{os.getpid()}-killed"
    code = "import os\nfrom async_rl.launch.devices import claimed\n"
    code += f"with claimed([{name!r}], 'actor'): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with claimed([name], "actor"):
        pass
