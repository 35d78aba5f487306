"""Verifiers as a user would write them, good and bad."""

import os
import subprocess
import time


def digits(prompts, completions, **columns):
    """Share of digits in the first characters: an untrained model gets all sorts of rewards."""
    return [sum(c.isdigit() for c in text[:6]) / 6 for text in completions]


def raises(prompts, completions, **columns):
    raise KeyError("no such column")


def hangs(prompts, completions, **columns):
    time.sleep(3600)


def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)


def dies(prompts, completions, **columns):
    os._exit(3)


_started = []


def starts_a_process(prompts, completions, **columns):
    """Leaves a process behind that nobody waits for, in a session of its own."""
    if not _started:
        _started.append(subprocess.Popen(["sleep", "3600"], start_new_session=True))
    return digits(prompts, completions)
