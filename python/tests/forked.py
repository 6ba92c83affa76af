"""Runs programs in processes that are forked from one that has imported torch, because that import takes longer than most of
the programs.

``forked.py FILE`` is that process. It listens at the socket FILE until its standard input ends. ``forked.py FILE COMMAND...``
takes the place of the interpreter in a command, such as ``-c PROGRAM``, ``-m MODULE ARGUMENT...`` or ``SCRIPT ARGUMENT...``. The
new process has its environment, files, working directory, process group and network, and ends with it. It ends as the new
process ends, and passes on its signals, unless both are in one process group, which signals reach without it. All
processes have one hash seed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def take_the_place(file: str, command: list[str]) -> None:
    """Asks the process at the socket to run the command, and ends as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(file)
        request = json.dumps([os.getpid(), command, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [struct.pack("I", len(request))], [0, 1, 2])
        server.sendall(request)
        in_group = server.recv(1) == b"y"
        for number in _PASSED_ON:
            # A signal for the group reaches the other process by itself.
            signal.signal(number, lambda number, _: None if in_group else server.sendall(bytes([number])))
        end = server.recv(4, socket.MSG_WAITALL)
    if len(end) < 4:
        sys.exit("forked.py: the process that forks has ended")
    (status,) = struct.unpack("i", end)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _receive(client: socket.socket) -> tuple[list, list[int]]:
    """Returns the request of a client, and its files."""
    client.settimeout(60)  # one that was stopped must not stop the others
    length, files, _, _ = socket.recv_fds(client, 4, 3)
    try:
        request, rest = b"", struct.unpack("I", length)[0]
        while len(request) < rest:
            part = client.recv(rest - len(request))
            if not part:
                raise EOFError
            request += part
        client.settimeout(None)
        return json.loads(request), files
    except (OSError, EOFError, struct.error):
        for descriptor in files:
            os.close(descriptor)
        raise


def serve(file: str) -> list[str]:
    """Forks a process for each client. It returns only in these processes, each time with the command that it is to run."""
    import selectors

    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(file)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        clients: dict[int, socket.socket] = {}  # by the descriptors of their processes
        pids: dict[socket.socket, int] = {}
        print("listens", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for pid in pids.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is listener:
                    client, _ = listener.accept()
                    try:
                        (parent, command, env, folder), files = _receive(client)
                    except (OSError, EOFError, struct.error):  # the client was killed or stopped
                        client.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        for end in (client, *clients.values()):
                            end.close()
                        for descriptor in clients:
                            os.close(descriptor)
                        for number, descriptor in enumerate(files):
                            os.dup2(descriptor, number)
                            os.close(descriptor)
                        _enter(parent)
                        os.environ.clear()
                        os.environ.update(env)
                        os.chdir(folder)
                        # A process that runs in the background of a shell ignores SIGINT, but hvdrun's ranks do not.
                        signal.signal(signal.SIGINT, signal.default_int_handler)
                        return command
                    for descriptor in files:
                        os.close(descriptor)
                    try:
                        os.setpgid(pid, os.getpgid(parent))
                        in_group = b"y"
                    except OSError:  # the client is in another session
                        in_group = b"n"
                    _send(client, in_group)
                    process = os.pidfd_open(pid)
                    clients[process], pids[client] = client, pid
                    selector.register(process, selectors.EVENT_READ)
                    selector.register(client, selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):  # a process has ended
                    client = clients.pop(key.fileobj)
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    _, status = os.waitpid(pids.pop(client), 0)
                    _send(client, struct.pack("i", os.waitstatus_to_exitcode(status)))
                    if client.fileno() in selector.get_map():
                        selector.unregister(client)
                    client.close()
                elif key.fileobj in pids:
                    numbers = _signals(key.fileobj)
                    if numbers is None:
                        selector.unregister(key.fileobj)
                    for number in [signal.SIGKILL] if numbers is None else numbers:
                        os.kill(pids[key.fileobj], number)


def _send(client: socket.socket, what: bytes) -> None:
    try:
        client.sendall(what)
    except OSError:  # it was killed
        pass


def _signals(client: socket.socket) -> bytes | None:
    """Returns the signals that a client passes on, or None if it has ended."""
    try:
        return client.recv(100) or None
    except OSError:
        return None


def _enter(pid: int) -> None:
    """Enters the network and the host name of another process, unless they are those of this one. This process ends with
    its parent.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, kind in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
        if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            with open(f"/proc/{pid}/ns/{name}") as namespace:
                if libc.setns(namespace.fileno(), kind):
                    raise OSError(ctypes.get_errno(), f"entering the namespace {name} of process {pid}")


if __name__ == "__main__" and len(sys.argv) > 2:
    take_the_place(sys.argv[1], sys.argv[2:])

if __name__ == "__main__":
    import builtins
    import contextlib
    import runpy
    import types
    import warnings

    import torch

    with contextlib.suppress(ImportError):  # PyTorch 1.13 has none
        import torch._dynamo  # optimizers and DistributedDataParallel import it, which takes as long as the import of torch

    _command = serve(sys.argv[1])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.path[0] = ""
    while _command[0] == "-W":
        _action, _, _category = _command[1].partition("::")
        sys.warnoptions.append(_command[1])
        warnings.simplefilter(_action, getattr(builtins, _category))
        _command = _command[2:]
    if _command[0] == "-m":
        sys.argv = _command[1:]
        runpy.run_module(_command[1], run_name="__main__", alter_sys=True)
    else:
        if _command[0] == "-c":
            _code, sys.argv = compile(_command[1], "<string>", "exec", dont_inherit=True), ["-c", *_command[2:]]
        else:
            with open(_command[0], "rb") as _program:
                _code = compile(_program.read(), _command[0], "exec", dont_inherit=True)
            sys.argv, sys.path[0] = _command, os.path.dirname(os.path.abspath(_command[0]))
        # pickle finds the names of the program in the module __main__.
        _this, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        if _command[0] != "-c":
            sys.modules["__main__"].__file__ = _command[0]
        exec(_code, sys.modules["__main__"].__dict__)
