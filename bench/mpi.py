#!/usr/bin/env python3
"""Measures gohvd over MPI beside C programs that use MPI directly, between two ranks, in turn.

Prints the tables of docs/mpi.md for each MPI library that is installed. Needs openmpi-bin and libopenmpi-dev, or mpich
and libmpich-dev, and two idle cores.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
BUILT = os.environ.get("PEERS_BUILD") or os.path.join(tempfile.gettempdir(), "gohvd-peers")
LAUNCH = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "core:overload-allowed", "-np", "2"],
    "mpich": ["mpirun.mpich", "-bind-to", "core", "-np", "2"],
}
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}
# The times that the C program prints: those of 3 calls, of 2 calls, and of 2 persistent requests.
LOCKSTEP_COLUMNS = ["three", "two", "persistent"]
# Where in a page the tensors begin, by round. MPI copies slower if its buffer and the tensor begin at certain places.
OFFSETS = [64, 2112, 1088, 3136, 576, 2624, 1600, 3648]
LOCKSTEP = {"HOROVOD_CONTROLLER": "mpi", "HVD_NEGOTIATION": "lockstep"}


def build(library):
    """Builds hvdbench and the C programs with a library."""
    os.makedirs(BUILT, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PKG_CONFIG_PATH", "CGO_CFLAGS")} | {"CGO_ENABLED": "1"}
    if library == "mpich":
        env |= {"PKG_CONFIG_PATH": os.path.join(ROOT, "ops/mpi/mpich"), "CGO_CFLAGS": "-O2 -g -DMPICH"}
    subprocess.run(["go", "build", "-tags", "mpi", "-o", program(library, "hvdbench"), "./cmd/hvdbench"], cwd=ROOT, env=env, check=True)
    for name in ("lockstep", "mpi_bench"):
        source = os.path.join(HERE, "peers", name + ".c")
        subprocess.run(["mpicc." + library, "-O3", "-march=native", "-w", source, "-o", program(library, name)], check=True)


def program(library, name):
    return os.path.join(BUILT, f"{name}-{library}")


def run(library, name, *args, **env):
    """Runs a program with two ranks and returns the lines that it prints, without comments."""
    command = [*LAUNCH[library], program(library, name), *args]
    done = subprocess.run(command, env=os.environ | env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return [line for line in done.stdout.splitlines() if line and not line.startswith("#")]


def hvdbench(library, *args, **env):
    """Returns the medians that hvdbench measures for allreduces in place, by size."""
    options = ["allreduce", "--out-of-place=false", "--format", "csv", *args]
    header, *rows = run(library, "hvdbench", *options, HOROVOD_CPU_OPERATIONS="mpi", **env)
    at = {name: i for i, name in enumerate(header.split(","))}
    return {int(r[at["bytes"]]): float(r[at["p50_us"]]) for r in (row.split(",") for row in rows)}


def measure(library, largest, offset):
    """Returns the medians of one round: those in lock-step as {column: us}, and those without negotiation by size.

    Without negotiation, the tensors begin at the given offset in a page.
    """
    # If the library has no persistent collectives, there is no time for them.
    lockstep = dict(zip(LOCKSTEP_COLUMNS, map(float, run(library, "lockstep")[-1].split())))
    lockstep["ours"] = hvdbench(library, "-b", "4", "-e", "4", "-n", "100000", "-w", "5000", **LOCKSTEP)[4]
    settings = {"BENCH_OPS": "allreduce", "BENCH_MAX_BYTES": str(largest), "BENCH_OFFSET": str(offset)}
    rows = [r.split(",") for r in run(library, "mpi_bench", **settings)]
    peer = {int(r[3]): float(r[5]) for r in rows if int(r[3]) >= 64 << 10}
    raw = hvdbench(library, "--raw", "-b", "64K", "-e", str(largest), "-f", "4", "--seconds", "0.3", "--offset", str(offset))
    return lockstep, {size: (peer[size], raw[size]) for size in peer}


def ratio(pairs):
    """Returns the median and the range of the ratios of pairs, as text."""
    ratios = [ours / peer for peer, ours in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def time_text(times):
    t = statistics.median(times)
    return f"{t:.2f} us" if t < 10 else f"{t:.1f} us" if t < 1000 else f"{t / 1000:.2f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; in each round every program runs once (default %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size without negotiation (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 1 or args.max_bytes < 64 << 10:
        parser.error("want at least 1 round and at least 65536 bytes")
    libraries = [name for name in LAUNCH if shutil.which("mpicc." + name) and shutil.which("mpirun." + name)]
    if not libraries:
        sys.exit("bench/mpi.py: no MPI library is installed: apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev")
    rounds = {library: [] for library in libraries}
    for library in libraries:
        build(library)
    for number in range(args.rounds):
        for library in libraries:
            rounds[library].append(measure(library, args.max_bytes, OFFSETS[number % len(OFFSETS)]))
            print(f"round {number + 1} of {args.rounds}: {NAMES[library]}", file=sys.stderr)

    print("| | C program, 3 calls | 2 calls | 2 persistent | gohvd | ratio to 3 calls | to 2 calls | to 2 persistent |")
    print("|---|---|---|---|---|---|---|---|")
    for library, results in rounds.items():
        of = {column: [lockstep[column] for lockstep, _ in results] for column in results[0][0]}
        columns = [*LOCKSTEP_COLUMNS, "ours"]
        times = [time_text(of[column]) if column in of else "-" for column in columns]
        ratios = [ratio(zip(of[column], of["ours"])) if column in of else "-" for column in LOCKSTEP_COLUMNS]
        print("|", " | ".join([NAMES[library], *times, *ratios]), "|")
    for library, results in rounds.items():
        print(f"\n| size | C program, {NAMES[library]} | gohvd, without negotiation | ratio |\n|---|---|---|---|")
        for size in results[0][1]:
            pairs = [raw[size] for _, raw in results]
            peer, ours = zip(*pairs)
            print("|", " | ".join([size_text(size), time_text(peer), time_text(ours), ratio(pairs)]), "|")


if __name__ == "__main__":
    main()
