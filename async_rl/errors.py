"""The exceptions that users of the package may meet, in one tree.

AsyncRLError
├── ConfigError       a setting is wrong: names the field, the value and the remedy
│   └── SchemaError   files of a run are whole, but another version of this package wrote them
├── WireError         a message is malformed, too large or of another schema version
├── HandshakeError    the other side speaks another protocol or runs another config
├── WeightsError      bytes of a weight version do not match what was published
├── DeadlineError     a wait ran past its deadline: names what was awaited and from whom
└── StartAgainError   nothing is wrong with this process: started again it goes on
"""


class AsyncRLError(Exception):
    """Base of every error that this package raises on purpose; the command line prints it without a traceback."""

    exit_code = 1
    """Of a process that ends with it."""


class ConfigError(AsyncRLError):
    """A setting is wrong. The message names the field, the value and what to do."""


class SchemaError(ConfigError):
    """Files of a run are whole, but in the form of another version of this package: nothing is to be set aside."""


class WireError(AsyncRLError):
    """A message from the network is refused. ``reason`` is a short slug that is counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class HandshakeError(AsyncRLError):
    """The peer refused us, or we refuse the peer: another protocol version, config or role.

    ``code`` is the server's (``hello``, ``replaced``, ``ahead``, ``over``), empty where the decision was ours. That the
    run is over is no failure of a process which has only come too late.
    """

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.exit_code = 0 if code == "over" else 1


class WeightsError(AsyncRLError):
    """The bytes of a weight version are not those that were published."""


class DeadlineError(AsyncRLError):
    """A blocking wait ran past its deadline."""


class StartAgainError(AsyncRLError):
    """Nothing is wrong with this process, but its partners are gone or elsewhere: started again it goes on."""

    exit_code = 75
    """EX_TEMPFAIL."""
