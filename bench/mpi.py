#!/usr/bin/env python3
"""Measures gohvd over MPI beside C programs that use MPI directly, between two ranks, in turn.

Prints the tables of docs/mpi.md for each MPI library that is installed and each state of the cores (cores.py). A ratio
is one of two runs of the same round and state. Needs openmpi-bin and libopenmpi-dev, or mpich and libmpich-dev, and two
idle cores.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import cores

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
SMALLEST = 64 << 10  # the smallest size without negotiation
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


def measure(watch, number, library, largest):
    """Adds the medians of one round. The keys are (library, "lockstep", column) and (library, size, program)."""
    lines, state = watch.run(lambda: run(library, "lockstep"))
    # If the library has no persistent collectives, there is no time for them.
    times = zip(LOCKSTEP_COLUMNS, map(float, lines[-1].split()))
    watch.add(state, number, {(library, "lockstep", column): us for column, us in times})
    times, state = watch.run(lambda: hvdbench(library, "-b", "4", "-e", "4", "-n", "100000", "-w", "5000", **LOCKSTEP))
    watch.add(state, number, {(library, "lockstep", "ours"): times[4]})

    # Without negotiation, the tensors begin at this offset in a page.
    offset = str(OFFSETS[number % len(OFFSETS)])
    settings = {"BENCH_OPS": "allreduce", "BENCH_MAX_BYTES": str(largest), "BENCH_OFFSET": offset}
    lines, state = watch.run(lambda: run(library, "mpi_bench", **settings))
    rows = [r.split(",") for r in lines]
    watch.add(state, number, {(library, int(r[3]), "peer"): float(r[5]) for r in rows if int(r[3]) >= SMALLEST})
    options = ["--raw", "-b", str(SMALLEST), "-e", str(largest), "-f", "4", "--seconds", "0.3", "--offset", offset]
    times, state = watch.run(lambda: hvdbench(library, *options))
    watch.add(state, number, {(library, size, "ours"): us for size, us in times.items()})


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def time_text(times):
    """Returns the median and the range of times in us, as text."""
    if not times:
        return "-"
    median = statistics.median(times)
    unit, scale = ("us", 1) if median < 1000 else ("ms", 1000)
    text, low, high = (f"{t / scale:.2f}" if t / scale < 10 or scale > 1 else f"{t:.1f}" for t in (median, min(times), max(times)))
    return f"{text} {unit} ({low} to {high})"


def tables(results, libraries):
    """Yields the lines of the tables for all states."""
    yield f"Cores: {results.summary()}."
    for state in results.states():
        yield f"\n## {cores.STATES[state].capitalize()}\n"
        yield "| | C program, 3 calls | 2 calls | 2 persistent | gohvd | ratio to 3 calls | to 2 calls | to 2 persistent |"
        yield "|---|---|---|---|---|---|---|---|"
        for library in libraries:
            key = {column: (library, "lockstep", column) for column in [*LOCKSTEP_COLUMNS, "ours"]}
            times = [time_text(results.of(state, k)) for k in key.values()]
            ratios = [results.ratio_text(state, key["ours"], key[column]) for column in LOCKSTEP_COLUMNS]
            yield f"| {' | '.join([NAMES[library], *times, *ratios])} |"
        for library in libraries:
            yield f"\n| size | C program, {NAMES[library]} | gohvd, without negotiation | ratio |\n|---|---|---|---|"
            for size in sorted({key[1] for _, key in results.values if key[0] == library and key[1] != "lockstep"}):
                ours, peer = (library, size, "ours"), (library, size, "peer")
                times = [time_text(results.of(state, key)) for key in (peer, ours)]
                yield f"| {' | '.join([size_text(size), *times, results.ratio_text(state, ours, peer)])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; in each round every program runs once (default %(default)s)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size without negotiation (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 1 or args.max_bytes < SMALLEST:
        parser.error("want at least 1 round and at least 65536 bytes")
    libraries = [name for name in LAUNCH if shutil.which("mpicc." + name) and shutil.which("mpirun." + name)]
    if not libraries:
        sys.exit("bench/mpi.py: no MPI library is installed: apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev")
    for library in libraries:
        build(library)
    watch = cores.Watch()
    for number in range(args.rounds):
        for library in libraries:
            measure(watch, number, library, args.max_bytes)
            print(f"round {number + 1} of {args.rounds}: {NAMES[library]}", file=sys.stderr)
    print(*tables(watch, libraries), sep="\n")


if __name__ == "__main__":
    main()
