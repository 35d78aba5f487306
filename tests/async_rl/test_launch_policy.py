"""Who begins another life and when, with a clock that the test moves."""

import pytest

from async_rl.launch import ending
from async_rl.launch.children import sentence
from async_rl.launch.policy import MAX_RESTARTS, Lives, backoff_s, is_forsaken, is_hopeless
from async_rl.launch.silence import Silence, longest_server_silence_s
from async_rl.launch.torchrun import RankFailures
from async_rl.protocol import BEATS_PER_PERIOD, SERVER_GONE_S

FAILED = "E1129 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: {}) local_rank: {} (pid: 7) of x"


def test_the_wait_doubles_up_to_a_minute():
    assert [backoff_s(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(10_000) == 60


def test_lives_without_work_are_given_up_after_the_third_restart():
    lives, now, waits = Lives(), 100.0, []
    while lives.end(now):
        waits.append(lives.next_at - now)
        assert not lives.is_due(lives.next_at - 0.1)
        now = lives.next_at
        assert lives.is_due(now)
        lives.begin()
    assert waits == [1, 2, 4]
    assert (lives.restarts, lives.given_up, lives.next_at) == (MAX_RESTARTS, True, None)
    assert not lives.is_due(1e9)


def test_a_life_that_has_worked_forgives_those_before_it_but_the_count_of_restarts_goes_on():
    lives = Lives()
    for _ in range(50):
        assert lives.end(0.0)
        assert lives.next_at == 1.0
        lives.begin()
        lives.work()
    assert lives.restarts == 50


def test_what_says_itself_why_it_cannot_go_on_is_given_up_at_once():
    assert not Lives().end(0.0, hopeless=True)
    assert is_hopeless(1, "no such verifier")
    assert is_hopeless(2, "no such verifier")
    assert not is_hopeless(1, None)  # a traceback, or nothing
    assert not is_hopeless(75, "rank 0 has lost the others")  # told to come back
    assert not is_hopeless(-9, "the last words of an earlier thought")
    assert not is_hopeless(143, "the last words of an earlier thought")  # SIGTERM, caught
    assert not is_hopeless(0, "done")


def test_a_restart_that_cannot_begin_is_tried_again_when_an_earlier_life_has_worked():
    lives = Lives()
    lives.work()
    assert lives.end(0.0)
    for _ in range(MAX_RESTARTS):
        lives.begin()
        again = lives.end(0.0, hopeless=True)  # such as an engine that finds too little memory
    assert not again
    assert lives.restarts == MAX_RESTARTS


def test_a_life_that_has_worked_and_then_says_why_it_cannot_go_on_is_believed():
    lives = Lives()
    lives.end(0.0)
    lives.begin()
    lives.work()
    assert not lives.end(0.0, hopeless=True)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ready\nasync-rl: the data is empty\n", "the data is empty"),
        ("[rank1]:async-rl: the data is empty\n", "the data is empty"),
        ("async-rl: the data is empty\nTraceback (most recent call last):\n  x\nValueError: 3\n", None),
        ("async-rl: the server is back\n" + "more work\n" * 20, None),
        ("async-rl: warning: the disk is full\n", None),
        ("", None),
    ],
)
def test_its_sentence_is_the_last_thing_that_a_process_says(tmp_path, log, said):
    (tmp_path / "log").write_text(log)
    assert sentence(tmp_path / "log") == said


def test_ranks_that_die_inside_torchrun_are_read_from_its_growing_log(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text(FAILED.format(-9, 0) + "\n")  # an earlier life
    failures = RankFailures(log, log.stat().st_size)
    assert failures.read() == []
    with log.open("a") as file:
        file.write(f"step 1\n{FAILED.format(-9, 1)}\nasync-rl: rank 0 has los")
    (first,) = failures.read()
    assert (first.rank, first.exit_code, first.describe()) == (1, -9, "rank 1 was ended by SIGKILL")
    with log.open("a") as file:
        file.write(f"t the others\n{FAILED.format(75, 0)}\n[rank1]:async-rl: no GPU\n{FAILED.format(1, 1)}\n")
    told_to_come_back, hopeless = failures.read()
    assert (told_to_come_back.exit_code, told_to_come_back.said) == (75, "rank 0 has lost the others")
    assert (hopeless.describe(), hopeless.said) == ("rank 1 ended with exit code 1: no GPU", "no GPU")
    assert failures.read() == []


def test_who_is_silent_for_too_long_is_named_once_in_each_silence():
    silence = Silence(6.0)
    assert silence.look(["actor0"], 0.0) == []
    assert silence.look(["actor0"], 3.0) == []
    assert silence.look([], 5.0) == []  # it woke up
    assert silence.look(["actor0"], 7.0) == []
    assert silence.look(["actor0"], 10.0) == []
    assert silence.look(["actor0"], 13.0) == []
    assert silence.look(["actor0", "actor1"], 13.1) == ["actor0"]
    assert silence.look(["actor0", "actor1"], 16.0) == []  # its next life is only starting
    assert silence.look(["actor1"], 18.0) == []
    for now in (20.0, 22.0, 24.0, 26.0):
        assert silence.look(["actor0"], now) == []
    assert silence.look(["actor0"], 26.1) == ["actor0"]


@pytest.mark.parametrize("heartbeat_s", [0.5, 5.0, 10.0, 30.0, 120.0])
def test_a_frozen_server_is_ended_while_its_clients_still_wait_for_it(heartbeat_s):
    patience_s = max(SERVER_GONE_S, heartbeat_s)  # of a client
    beat_s = heartbeat_s / BEATS_PER_PERIOD  # in which the server answers the launcher
    assert beat_s < longest_server_silence_s(heartbeat_s) <= patience_s / 2


def test_a_gap_in_the_looks_is_our_own_sleep_and_a_new_life_has_time_to_start():
    silence = Silence(6.0)
    silence.look(["actor0"], 0.0)
    assert silence.look(["actor0"], 100.0) == []
    silence.forgive("actor0")
    for now in range(101, 140):
        assert silence.look(["actor0"], float(now)) == []


@pytest.mark.parametrize(
    ("books", "asked", "verdict"),
    [
        ({"status": "completed", "reason": "all steps are trained"}, True, ("completed", "all steps are trained")),
        ({"status": "stopped", "reason": "asked to stop"}, False, ("stopped", "asked to stop")),
        ({"status": "failed", "reason": "watchdog"}, True, ("failed", "watchdog")),
        ({}, True, ("stopped", "asked to stop")),
    ],
)
def test_a_server_that_left_in_order_has_said_how_the_run_ended(books, asked, verdict):
    assert ending.orderly_end(None, books, asked=asked) == verdict


class Ended:
    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


@pytest.mark.parametrize(
    ("code", "books", "died"),
    [
        (None, {}, False),
        (0, {}, True),  # before the first version nobody has a reason to leave
        (0, {"status": "running", "step": 3, "steps": 9}, True),
        (0, {"status": "running", "step": 9, "steps": 9}, False),
        (0, {"status": "stopped", "step": 3, "steps": 9}, False),
        (1, {"status": "completed"}, True),
        (-9, {}, True),
    ],
)
def test_leaving_while_there_are_steps_to_train_is_a_death(code, books, died):
    assert ending.has_died_early(Ended(code), books) is died


def test_on_a_further_learner_host_the_end_of_others_counts_against_nobody_but_accidents_of_its_own_do():
    lives = Lives(is_guest=True)
    for _ in range(50):
        assert lives.end(0.0, forsaken=True)
        lives.begin()
    for _ in range(MAX_RESTARTS - 1):  # the life that was begun last is the first of them
        assert lives.end(0.0)
        lives.begin()
    assert not lives.end(0.0)
    at_home = Lives()  # on the first host a group that never gets anywhere is given up
    for _ in range(MAX_RESTARTS):
        assert at_home.end(0.0, forsaken=True)
        at_home.begin()
    assert not at_home.end(0.0, forsaken=True)
    assert [is_forsaken(code) for code in (75, 1, 0, -9)] == [True, False, False, False]
