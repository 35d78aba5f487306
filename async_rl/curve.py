"""Keys for addresses that other hosts can reach: ZeroMQ's CURVE (encrypted, both sides known), and who is let in.

    async-rl keys DIR ─► DIR/server.key, server.pub, client.key, client.pub          (.key: secret, mode 600)

    client socket ──handshake (X25519)──► server socket ──"is this key known?" (ZAP, RFC 27)──► Gate ──► 200 │ 400

Until the gate has said 200 no message passes in either direction. It fails closed: with no gate nobody is let in.
"""

from __future__ import annotations

import ipaddress
import os
import threading
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from async_rl.errors import ConfigError, DeadlineError

_SIDES = ("server", "client")
_KEY_LENGTH = 40
"""Characters of a key in Z85."""
_OVERHEAD_BYTES = 64
"""What encryption adds to a frame at most; without it the longest frames would pass the socket's limit."""
_DOMAIN = "async_rl"
_GATE = "inproc://zeromq.zap.01"
"""Where libzmq asks, in the context of the server's socket."""
_LOOK_MS = 1000
_CLOSE_S = 5.0
_NAMED_ADDRESSES = 16
"""Addresses of refused clients that are printed; the others are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """What a server needs."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]
    """Public keys of those who are let in."""

    @classmethod
    def of(cls, folder: str) -> ServerKeys | None:
        """Read ``server.key``, ``client.pub`` and ``clients/*.pub`` of a folder; ``None`` if none is named.

        Raises:
            ConfigError: a file is missing or damaged, others can read a secret, or no client is known.
        """
        if not folder:
            return None
        where = Path(folder).expanduser()
        public, secret = _read_secret(where / "server.key")
        known = sorted((where / "clients").glob("*.pub")) + [p for p in [where / "client.pub"] if p.is_file()]
        if not known:
            raise ConfigError(
                f"buffer.keys = {folder!r}: no client is known; put client.pub there, or more into {where / 'clients'}"
            )
        return cls(public=public, secret=secret, clients=frozenset(_read_public(path) for path in known))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """What a client needs."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    """Public key of the only server that it talks to."""

    @classmethod
    def of(cls, folder: str) -> ClientKeys | None:
        """Read ``client.key`` and ``server.pub`` of a folder; ``None`` if none is named.

        Raises:
            ConfigError: a file is missing or damaged, or others can read the secret.
        """
        if not folder:
            return None
        where = Path(folder).expanduser()
        public, secret = _read_secret(where / "client.key")
        return cls(public=public, secret=secret, server=_read_public(where / "server.pub"))

    def of_peer(self) -> ClientKeys:
        """What a client needs for a server of another client that has the same keys: a host that relays weights."""
        return ClientKeys(public=self.public, secret=self.secret, server=self.public)

    def to_serve(self) -> ServerKeys:
        """What such a server needs: it lets in those who have the same keys."""
        return ServerKeys(public=self.public, secret=self.secret, clients=frozenset({self.public}))


def make_keys(folder: Path) -> list[Path]:
    """Make what is missing of the two pairs; files that are there stay as they are. The files that were written.

    Raises:
        ConfigError: a ``.pub`` is there without its ``.key``, a ``.key`` is damaged, or the folder cannot be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for side in _SIDES:
            secret_file, public_file = folder / f"{side}.key", folder / f"{side}.pub"
            if secret_file.exists():
                public = _read_secret(secret_file)[0]
            elif public_file.exists():
                raise ConfigError(
                    f"{public_file} is there without {secret_file.name}: choose another folder for new keys"
                )
            else:
                public, secret = zmq.curve_keypair()
                text = f'# secret key of an async-rl {side}: never leaves its host\npublic = "{public.decode()}"\n'
                _write(secret_file, f'{text}secret = "{secret.decode()}"\n', 0o600)
                written.append(secret_file)
            if not public_file.exists():
                _write(public_file, f'# public key of an async-rl {side}\npublic = "{public.decode()}"\n', 0o644)
                written.append(public_file)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}") from None
    return written


def _write(path: Path, text: str, mode: int) -> None:
    """Create a file; nobody else can read a secret at any moment, and a half-written one does not stay."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError:
        path.unlink()
        raise


def _read_secret(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a ``.key`` file."""
    fields = _read(path, secret=True)
    return _key(path, fields, "public"), _key(path, fields, "secret")


def _read_public(path: Path) -> bytes:
    return _key(path, _read(path, secret=False), "public")


def _read(path: Path, *, secret: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if secret and mode & 0o077:
                raise ConfigError(f"{path} can be read by other users (mode {mode:o}): chmod 600 {path}")
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"no key file {path}: async-rl keys {path.parent} makes them, see docs/operations.md"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # its message could quote the secret
        raise ConfigError(f"{path} is damaged: it is no key file of async-rl keys") from None


def _key(path: Path, fields: dict[str, Any], name: str) -> bytes:
    key = fields.get(name)
    if isinstance(key, str) and len(key) == _KEY_LENGTH and key.isascii():
        try:
            z85.decode(key)
        except (KeyError, ValueError):
            key = None
        else:
            return key.encode()
    raise ConfigError(f"{path} is damaged: its {name} key is not one of async-rl keys")


def check_open(address: str, keys: str, *, insecure: bool, what: str = "") -> None:
    """Refuse an address that other hosts can reach, unless there are keys or it is asked for.

    Args:
        address: ``tcp://HOST:PORT``.
        keys: folder, see ``buffer.keys``.
        insecure: see ``buffer.insecure``.
        what: says whose address it is; empty: the server's.

    Raises:
        ConfigError: it is refused.
    """
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not (is_loopback(host) or keys or insecure):
        raise ConfigError(
            f"{what or f'buffer.bind = {address!r}'}: other hosts could reach it and there are no keys; make some with "
            "async-rl keys DIR and name them with --keys DIR (buffer.keys), which lets in only those who have them, "
            "or set buffer.insecure = true (--insecure, of an actor --set buffer.insecure=true) in a network that you "
            "trust"
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Let only clients through whom a :class:`Gate` on the socket's context knows. Call it before ``bind``."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gate, no entry
    _allow_overhead(socket)


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Talk to the owner of ``keys.server`` only. Call it before ``connect``."""
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.CURVE_SERVERKEY, keys.server)
    _allow_overhead(socket)


def _allow_overhead(socket: zmq.Socket[bytes]) -> None:
    limit = int(socket.get(zmq.MAXMSGSIZE))
    if limit > 0:
        socket.set(zmq.MAXMSGSIZE, limit + _OVERHEAD_BYTES)


class Gate:
    """Answers for one context whether a client is let in; a thread of its own, so that a busy server delays nobody.

    A question is asked only after a handshake that proved the client's key, so noise never gets here.

    Args:
        context: of the server's sockets; :meth:`close` before it is destroyed.
        keys: of the server.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys) -> None:
        self.counts: Counter[str] = Counter()
        """``admitted`` and ``refused`` handshakes."""
        self._known = frozenset(z85.decode(key) for key in keys.clients)
        self._named: set[str] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        # made here, so that it is bound before any server socket is; from start() on it belongs to the thread
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_GATE)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; from now on nobody new is let in.

        Raises:
            DeadlineError: it did not end.
        """
        os.eventfd_write(self._stop, 1)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the gate did not close within {_CLOSE_S:.0f} s")
        os.close(self._stop)

    def _run(self) -> None:
        with self._socket:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._stop, zmq.POLLIN)
            while self._stop not in (ready := dict(poller.poll(_LOOK_MS))):
                if self._socket in ready:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart(zmq.NOBLOCK)), zmq.NOBLOCK)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """RFC 27: version, id, domain, address, routing id, mechanism, key ─► version, id, code, text, user, data."""
        version, request, _, address, _, mechanism, *credentials = question
        known = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._known
        self.counts["admitted" if known else "refused"] += 1
        if not known:
            self._name(address.decode(errors="replace"))
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [version, request, code, text, b"", b""]

    def _name(self, address: str) -> None:
        if address not in self._named and len(self._named) < _NAMED_ADDRESSES:
            self._named.add(address)
            print(f"refused a client at {address}: its key is not among the {len(self._known)} known ones", flush=True)
