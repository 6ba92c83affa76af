"""Where the sidecar comes from: one that others have started, at the path that HVD_SIDECAR names, or a process of one's own.

docs/sidecar.md is the protocol up to the greeting.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
from typing import Deque, Optional

from .exceptions import SidecarError

GREETING_SECONDS = 30.0
"""How long the other end may take for each step of the beginning."""

_LAST_WORDS = 20  # lines of a sidecar's log that are kept for the error when it dies


def receive(sock: socket.socket, n: int) -> bytes:
    """n bytes of a blocking socket; EOFError if it ends before."""
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data))
        if not more:
            raise EOFError("it has closed the connection")
        data += more
    return data


def _secret() -> Optional[bytes]:
    """The key of the job's secret, if there is one."""
    text = os.environ.get("HVD_SECRET", "").encode()
    path = os.environ.get("HVD_SECRET_FILE", "")
    if not text.strip() and path:
        with open(path, "rb") as f:
            text = f.read(1 << 16)
    return hashlib.sha256(b"gohvd secret\0" + text.strip()).digest() if text.strip() else None


def proof(key: bytes, speaker: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What shows that speaker ("gohvd server" or "gohvd client") has the key."""
    parts = (speaker, b"GHVD", client_nonce, server_nonce)
    return hmac.new(key, b"".join(bytes((len(p),)) + p for p in parts), hashlib.sha256).digest()


def connect(address: str) -> socket.socket:
    if not address.startswith("unix://") or len(address) == len("unix://"):
        raise ValueError(f"HVD_SIDECAR is {address!r}, want unix:///path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(GREETING_SECONDS)
        sock.connect(address[len("unix://") :])
        key = _secret()
        if key is not None:
            nonce = os.urandom(32)
            sock.sendall(b"GHVA\1\0\0\0" + nonce, socket.MSG_NOSIGNAL)
            head = receive(sock, 8)
            if head[:5] != b"GHVA\1":
                raise SidecarError(f"the sidecar at {address} has answered {head!r}: it knows no secret, or another version")
            if head[5]:
                raise SidecarError(f"the sidecar at {address} has refused this client, with status {head[5]}")
            rest = receive(sock, 64)
            if not hmac.compare_digest(rest[32:], proof(key, b"gohvd server", nonce, rest[:32])):
                raise SidecarError(f"the sidecar at {address} does not know the secret of the job")
            sock.sendall(proof(key, b"gohvd client", nonce, rest[:32]), socket.MSG_NOSIGNAL)
        return sock
    except (OSError, EOFError) as e:
        sock.close()
        raise SidecarError(f"no sidecar at {address}: {e}") from e
    except BaseException:
        sock.close()
        raise


def find_sidecar() -> str:
    """The path of hvdd: HVD_SIDECAR_BINARY, else that beside this package, else that on PATH."""
    named = os.environ.get("HVD_SIDECAR_BINARY", "")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise SidecarError(f"HVD_SIDECAR_BINARY is {named!r}, which is no program")
        return named
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "hvdd")
    if os.access(beside, os.X_OK) and not os.path.isdir(beside):
        return beside
    on_path = shutil.which("hvdd")
    if on_path:
        return on_path
    raise SidecarError(
        "the sidecar hvdd is not there: HVD_SIDECAR_BINARY is not set, there is no "
        f"{os.path.join('gohvd', 'bin', 'hvdd')} beside the package, and none on PATH; "
        "in a checkout, build it with `go build ./cmd/hvdd` and set HVD_SIDECAR_BINARY"
    )


def _pmi_socket() -> Optional[int]:
    """The connection to a launcher that speaks PMI. The number alone may have been inherited, from a process that did not
    hand on what it stands for."""
    number = os.environ.get("PMI_FD", "")
    if not number.isdecimal() or not (os.environ.get("PMI_RANK") or os.environ.get("PMI_SIZE")):
        return None
    try:
        return int(number) if stat.S_ISSOCK(os.fstat(int(number)).st_mode) else None
    except (OSError, OverflowError):
        return None


class Child:
    """A sidecar's process. Its standard error is passed on to this process's, and the last lines are kept."""

    def __init__(self) -> None:
        path = find_sidecar()
        pmi = _pmi_socket()  # before a descriptor of this one's takes a number that is free
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read, write = os.pipe()
        handed = [theirs.fileno()]
        # What this process alone needs to know.
        hidden = {"HVD_SIDECAR_BINARY", "HVD_SIDECAR"}
        if pmi is not None:
            handed.append(pmi)
        else:
            hidden.add("PMI_FD")  # its number may be another descriptor's there
        try:
            # A session of its own: the signals of a terminal or a launcher are for the program, with which it ends.
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
            raise SidecarError(f"the sidecar {path} does not start: {e}") from e
        finally:
            theirs.close()
            os.close(write)
        self.sock = ours
        self._stderr = read
        self._words: Deque[bytes] = collections.deque(maxlen=_LAST_WORDS)
        self._listener = threading.Thread(target=self._listen, name="gohvd sidecar's log", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        line = b""
        while True:
            data = os.read(self._stderr, 1 << 16)
            if not data:
                break
            try:
                os.write(2, data)
            except OSError:
                pass  # nobody hears it
            *lines, line = (line + data).split(b"\n")
            self._words.extend(lines)
            line = line[-4096:]
        if line:
            self._words.append(line)

    def obituary(self, reason: str) -> str:
        """How it has ended, as the end of a sentence. It waits some seconds for the end."""
        try:
            status = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return f"is of no use, though it lives: {reason}"
        self._listener.join(2)
        if status < 0:
            try:
                how = f"was killed by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was killed by signal {-status}"
        else:
            how = f"has ended with status {status}"
        words = b"\n".join(self._words).decode("utf-8", "replace").strip()
        return f"{how}: {reason}" + (f"; its last words:\n{words}" if words else "")

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives and is this process's child."""
        self.process.send_signal(number)

    def end(self, seconds: float) -> None:
        """Closes the socket, by which the process ends; if it does not within seconds, kills it."""
        if self._stderr < 0:
            return
        self.sock.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(2)
        if not self._listener.is_alive():
            os.close(self._stderr)
        self._stderr = -1

    def after_fork(self) -> None:
        """It is the parent's child, not this process's."""
        if self.process.returncode is None:
            self.process.returncode = 0
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
