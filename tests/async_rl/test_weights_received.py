"""What the server knows of who sent the weights: counted once, whatever is said again or dies."""

from run_folder import make_run

from async_rl.buffer.roster import AWAY, Session
from async_rl.buffer.versions import Versions
from async_rl.config import parse_config
from async_rl.report.sections import weights
from async_rl.runfolder import RunFolder
from async_rl.summary import summarize
from async_rl.weights.pull import COUNTED


def session(pid=1, **fields):
    return Session(
        identity=b"a", name="a", role="actor", rank=0, world=1, pid=pid, host="h", heard=0.0, seq=0, **fields
    )


def test_what_is_said_again_counts_once():
    versions = Versions(parse_config({}))
    first, once = session(), {"relay_bytes": 100.0, "chunks": 2.0}
    for told in (once, once, {}, once, {"relay_bytes": 150.0, "chunks": 2.0}):  # {}: a version that was broadcast
        versions.receive(first.take_received(told))
    again = session()
    again.take_over(first)  # its connection broke
    versions.receive(again.take_received({"relay_bytes": 170.0, "learner_bytes": 5.0, "something": 7.0}))
    told = versions.to_plain()
    assert (told["relay_bytes"], told["learner_bytes"], told["chunks"]) == (170, 5, 2)
    assert set(COUNTED) <= set(told)
    assert "something" not in told


def test_the_next_process_of_a_name_begins_at_nothing():
    versions = Versions(parse_config({}))
    first, second = session(), session(pid=2)
    versions.receive(first.take_received({"relay_bytes": 100.0}))
    second.take_over(first)
    versions.receive(second.take_received({"relay_bytes": 30.0}))
    assert versions.to_plain()["relay_bytes"] == 130


def test_a_restarted_server_hears_all_that_those_who_live_have_received():
    before = session(gone=AWAY)  # as the notes have it
    again = session()
    again.take_over(before)
    assert again.take_received({"chunks": 9.0})["chunks"] == 9


def test_the_report_says_what_came_from_whom(tmp_path):
    page = weights(summarize(RunFolder(make_run(tmp_path)), None))
    assert "received from other actor hosts" in page
    assert "4.8 MB" in page
    assert "differences that were wrong, and sent whole" in page


def test_a_run_without_a_network_reports_nothing_of_it():
    page = weights({"weights": {"bytes": 1, "versions": 1, **dict.fromkeys(COUNTED, 0)}})
    assert "received" not in page
