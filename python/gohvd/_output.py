"""Sends the standard output and standard error of the ranks of a job on Spark to the program that has started the job.

The program listens on a port of its own. A rank makes one connection for each stream, proves that it knows the key, and
sends bytes. A process without the key can send nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

# How long a connection, a handshake, and the last bytes may take.
_LIMIT_SECONDS = 10.0
_LONGEST_LINE = 65536
_HELLO = struct.Struct("!IB")  # rank and file descriptor
_NAMES = {1: "stdout", 2: "stderr"}

Place = tuple[str, int, bytes]
"""The address, the port and the key."""


class Receiver(socketserver.ThreadingTCPServer):
    """A context in which lines of the ranks are written to streams, as hvdrun writes them. IPv6 addresses may have
    brackets.
    """

    daemon_threads = True

    def __init__(self, host: str, bind: str, stdout: IO[str], stderr: IO[str], timestamps: bool) -> None:
        host, bind = host.strip("[]"), bind.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        super().__init__((bind, 0), _Connection)
        self.key = secrets.token_bytes(32)
        self.place: Place = (host, self.server_address[1], self.key)
        self._streams, self._timestamps = {1: stdout, 2: stderr}, timestamps
        self._lock = threading.Lock()
        self.active: set[threading.Thread] = set()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def write(self, rank: int, descriptor: int, line: bytes) -> None:
        text = line.decode(errors="backslashreplace")
        clock = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        end = "" if text.endswith("\n") else "\n"
        with self._lock, contextlib.suppress(ValueError):  # the stream is closed
            self._streams[descriptor].write(f"{clock}[{rank}]<{_NAMES[descriptor]}>:{text}{end}")
            self._streams[descriptor].flush()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the connection has ended, and the rank's output is still in the executor's log."""

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        deadline = time.monotonic() + _LIMIT_SECONDS
        for thread in list(self.active):
            thread.join(max(0.0, deadline - time.monotonic()))
        super().__exit__(*args)


class _Connection(socketserver.StreamRequestHandler):
    timeout = _LIMIT_SECONDS
    server: Receiver

    def handle(self) -> None:
        nonce = secrets.token_bytes(32)
        self.wfile.write(nonce)
        hello, proof = self.rfile.read(_HELLO.size), self.rfile.read(32)
        if not hmac.compare_digest(proof, _proof(self.server.key, nonce, hello)):
            return
        rank, descriptor = _HELLO.unpack(hello)
        self.connection.settimeout(None)
        self.server.active.add(threading.current_thread())
        while line := self.rfile.readline(_LONGEST_LINE):
            self.server.write(rank, descriptor, line)
        self.server.active.discard(threading.current_thread())


def _proof(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.digest(key, b"gohvd output" + nonce + hello, "sha256")


@contextlib.contextmanager
def sent(place: Place, rank: int) -> Iterator[None]:
    """Is a context in which what this process writes to standard output and standard error also goes to a receiver. If
    the receiver cannot be reached, it goes only where it went before.
    """
    with contextlib.ExitStack() as stack:
        for descriptor in _NAMES:
            try:
                peer = stack.enter_context(_connect(place, rank, descriptor))
            except OSError as e:
                print(f"gohvd: the output of rank {rank} is only here: cannot reach the driver at {place[:2]}: {e}", file=sys.stderr)
                break
            stack.enter_context(_copied(descriptor, peer))
        yield


def _connect(place: Place, rank: int, descriptor: int) -> socket.socket:
    host, port, key = place
    peer = socket.create_connection((host, port), _LIMIT_SECONDS)
    hello = _HELLO.pack(rank, descriptor)
    peer.sendall(hello + _proof(key, peer.recv(32, socket.MSG_WAITALL), hello))
    peer.settimeout(None)
    return peer


@contextlib.contextmanager
def _copied(descriptor: int, peer: socket.socket) -> Iterator[None]:
    before = os.dup(descriptor)
    source, end = os.pipe()
    os.dup2(end, descriptor)
    os.close(end)

    def copy() -> None:
        sending = True
        while data := os.read(source, _LONGEST_LINE):
            os.write(before, data)
            try:
                if sending:
                    peer.sendall(data)
            except OSError:
                sending = False  # the driver has ended

    thread = threading.Thread(target=copy, name="gohvd.output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        os.dup2(before, descriptor)  # the pipe ends, unless a child process has it
        thread.join(_LIMIT_SECONDS)
        if not thread.is_alive():
            os.close(before)
            os.close(source)
