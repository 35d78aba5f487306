"""What holds for all tests: signals mean what they mean in a terminal, however the tests themselves were started."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal():
    """``nohup`` and background shells leave SIGHUP and SIGINT ignored, which every process of a test would inherit."""
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
