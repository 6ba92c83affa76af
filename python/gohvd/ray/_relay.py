"""Connects hvdrun with the program that has started it (elastic.py): ``_relay.py SOCKET [HOST WORD...]``.

hvdrun runs it as its agent, with the host and the words of the agent's command, and as its script for host discovery,
without them. It runs without gohvd's package and without site, so that it starts fast.
"""

import json
import os
import socket
import sys
import threading


def main() -> int:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(sys.argv[1])
    peer.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")

    def send() -> None:
        while data := os.read(0, 65536):
            peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)

    answers = peer.makefile("rb")
    line = answers.readline()
    error = json.loads(line) if line else "the program that has started hvdrun is gone"
    if error is not None:
        print(error, file=sys.stderr)
        return 1
    threading.Thread(target=send, daemon=True).start()
    while data := answers.read1(65536):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the other thread may still wait for standard input
