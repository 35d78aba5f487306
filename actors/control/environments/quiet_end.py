"""Foreign code that ends the process with exit code 0 must not look as if all work were done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from async_rl.errors import AsyncRLError


@contextlib.contextmanager
def no_quiet_end(env_id: str) -> Iterator[None]:
    """Around all that an environment may do.

    Raises:
        AsyncRLError: it called ``sys.exit``, and not with an error.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise AsyncRLError(f"env.id = {env_id!r}: the environment ended its process with sys.exit()") from error
