"""``python -m gohvd`` prints the flags with which programs in C are compiled and linked with ``libgohvd.so``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from . import __version__, _library
from .exceptions import LibraryError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gohvd",
        description="Print the flags of a C compiler for programs that use libgohvd.so, for example: "
        "cc $(python -m gohvd --cflags) -o program program.c $(python -m gohvd --libs). "
        "python -m gohvd.doctor checks this machine.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--cflags", action="store_true", help="print the flags that find gohvd.h")
    parser.add_argument("--libs", action="store_true", help="print the flags that link a program with libgohvd.so")
    asked = parser.parse_args()
    flags = []
    if asked.cflags:
        package = os.path.dirname(os.path.abspath(__file__))
        include = os.path.join(package, "include")
        if not os.path.isdir(include):  # not in a wheel
            include = os.path.join(os.path.dirname(os.path.dirname(package)), "cmd", "libgohvd")
        flags.append("-I" + include)
    if asked.libs:
        try:
            folder = os.path.dirname(os.path.abspath(_library.path()))
        except LibraryError as e:
            sys.exit(f"{parser.prog}: {e}")
        flags += ["-L" + folder, "-Wl,-rpath," + folder, "-lgohvd"]
    if not flags:
        parser.error("want --cflags, --libs or --version")
    print(shlex.join(flags))


if __name__ == "__main__":
    main()
