"""Connects to a sidecar. If HVD_SIDECAR is set, a sidecar is already running and listens at that path. Otherwise this
module starts a sidecar.

docs/sidecar.md describes the protocol. This module implements the protocol up to the greeting.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import os
import signal
import socket
import stat
import struct
import subprocess
import threading
from typing import Deque, Optional

from . import _programs
from .exceptions import SidecarError

GREETING_SECONDS = 30.0
"""The limit in seconds for each step of the handshake."""

_KEPT_LINES = 20  # if the sidecar exits, the error shows up to this many last lines of its log


def receive(sock: socket.socket, n: int) -> bytes:
    """Reads exactly n bytes from a blocking socket. Raises EOFError if the connection ends earlier."""
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise EOFError("the sidecar closed the connection")
        data += more
    return data


def _secret() -> Optional[bytes]:
    """Returns the key that is derived from the job's secret, or None if no secret is set in the environment."""
    text = os.environ.get("HVD_SECRET", "").encode()
    path = os.environ.get("HVD_SECRET_FILE", "")
    if not text.strip() and path:
        with open(path, "rb") as f:
            text = f.read(1 << 16)
    return hashlib.sha256(b"gohvd secret\0" + text.strip()).digest() if text.strip() else None


def proof(key: bytes, speaker: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Returns the proof that the speaker knows the key. The speaker is b"gohvd server" or b"gohvd client"."""
    parts = (speaker, b"GHVD", client_nonce, server_nonce)
    return hmac.new(key, b"".join(bytes((len(p),)) + p for p in parts), hashlib.sha256).digest()


def connect(address: str) -> socket.socket:
    if not address.startswith("unix://") or len(address) == len("unix://"):
        raise ValueError(f"HVD_SIDECAR is {address!r}, want unix:///path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(GREETING_SECONDS)
        sock.connect(address[len("unix://") :])
        # Another user may have taken the path. The sidecar sees all tensors, and what it returns may be unpickled.
        uid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in (0, os.geteuid()):
            raise SidecarError(
                f"the sidecar at {address} runs as user {uid}, want user {os.geteuid()}, as this process does, or root"
            )
        key = _secret()
        if key is not None:
            nonce = os.urandom(32)
            sock.sendall(b"GHVA\1\0\0\0" + nonce, socket.MSG_NOSIGNAL)
            head = receive(sock, 8)
            if head[:5] != b"GHVA\1":
                raise SidecarError(
                    f"the sidecar at {address} answered the challenge of the secret with {head!r}: "
                    "the sidecar has no secret, or its version differs from the version of this package"
                )
            if head[5]:
                raise SidecarError(f"the sidecar at {address} refused this client with status {head[5]}")
            rest = receive(sock, 64)
            if not hmac.compare_digest(rest[32:], proof(key, b"gohvd server", nonce, rest[:32])):
                raise SidecarError(
                    f"the secret of the sidecar at {address} differs from the secret of this process: "
                    "set the same HVD_SECRET or HVD_SECRET_FILE for both"
                )
            sock.sendall(proof(key, b"gohvd client", nonce, rest[:32]), socket.MSG_NOSIGNAL)
        return sock
    except (OSError, EOFError) as e:
        sock.close()
        raise SidecarError(f"cannot connect to the sidecar at {address}: {e}") from e
    except BaseException:
        sock.close()
        raise


def find_sidecar() -> str:
    """Returns the path of hvdd. It is the value of HVD_SIDECAR_BINARY if that is set, else the hvdd in this package,
    else the hvdd on PATH.
    """
    named = os.environ.get("HVD_SIDECAR_BINARY", "")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise SidecarError(f"HVD_SIDECAR_BINARY is {named!r}, want the path of an executable file")
        return named
    found = _programs.find("hvdd")
    if found:
        return found
    raise SidecarError(
        "hvdd was not found: HVD_SIDECAR_BINARY is not set, the Python package does not contain "
        f"{os.path.join('gohvd', 'bin', 'hvdd')}, and hvdd is not in PATH; "
        "install gohvd from a wheel; in a checkout, build it with `go build ./cmd/hvdd` and set HVD_SIDECAR_BINARY"
    )


def _pmi_socket() -> Optional[int]:
    """Returns the descriptor of the connection to a launcher that speaks PMI, or None if there is no such connection.

    The variable PMI_FD may come from a process that has passed on the variable but not the descriptor. So _pmi_socket
    checks that the descriptor is a socket.
    """
    number = os.environ.get("PMI_FD", "")
    if not number.isdecimal() or not (os.environ.get("PMI_RANK") or os.environ.get("PMI_SIZE")):
        return None
    try:
        return int(number) if stat.S_ISSOCK(os.fstat(int(number)).st_mode) else None
    except (OSError, OverflowError):
        return None


class Child:
    """A sidecar process that this process has started. Its standard error, which is its log, is copied to the standard
    error of this process. The last lines are kept for errors.
    """

    def __init__(self) -> None:
        path = find_sidecar()
        pmi = _pmi_socket()  # called before descriptors are opened here, because one of them might get the same number
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        handed = [theirs.fileno()]
        # The variables that the sidecar does not get.
        hidden = {"HVD_SIDECAR_BINARY", "HVD_SIDECAR"}
        if pmi is not None:
            handed.append(pmi)
        else:
            hidden.add("PMI_FD")  # in the child, the number may belong to another descriptor
        try:
            # The sidecar gets a session of its own, so that the signals of a terminal or launcher reach only the
            # program. The sidecar ends when the program ends, because its connection ends.
            self.process = subprocess.Popen(
                [path, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=write,
                pass_fds=handed,
                env={k: v for k, v in os.environ.items() if k not in hidden},
                start_new_session=True,
            )
        except OSError as e:
            ours.close()
            os.close(read)
            raise SidecarError(f"cannot start the sidecar {path}: {e}") from e
        finally:
            theirs.close()
            os.close(write)
        self.sock = ours
        self._stderr = read
        self._last_lines: Deque[bytes] = collections.deque(maxlen=_KEPT_LINES)
        self._log_reader = threading.Thread(target=self._read_log, name="gohvd sidecar's log", daemon=True)
        self._log_reader.start()

    def _read_log(self) -> None:
        line = b""
        while True:
            data = os.read(self._stderr, 1 << 16)
            if not data:
                break
            try:
                os.write(2, data)
            except OSError:
                pass  # standard error is closed
            *lines, line = (line + data).split(b"\n")
            self._last_lines.extend(lines)
            line = line[-4096:]
        if line:
            self._last_lines.append(line)

    def describe_exit(self, reason: str) -> str:
        """Waits up to 5 s for the process to end. Returns how it ended, as the second part of a sentence that begins
        with the name of the sidecar.
        """
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"is still running, but the connection to it has failed: {reason}"
        self._log_reader.join(2)
        if status < 0:
            try:
                how = f"was killed by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was killed by signal {-status}"
        else:
            how = f"exited with status {status}"
        log = b"\n".join(self._last_lines).decode("utf-8", "replace").strip()
        return f"{how}: {reason}" + (f"; the end of its log:\n{log}" if log else "")

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if the process is running and is a child of this process."""
        self.process.send_signal(number)

    def end(self, seconds: float) -> None:
        """Closes the socket, so that the process ends. If it has not ended after the given number of seconds, kills it.
        """
        if self._stderr < 0:
            return
        self.sock.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log_reader.join(2)
        if not self._log_reader.is_alive():
            os.close(self._stderr)
        self._stderr = -1

    def after_fork(self) -> None:
        """Marks the process as ended, so that a forked process does not wait for it. Only the parent process can wait
        for it.
        """
        if self.process.returncode is None:
            self.process.returncode = 0
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
