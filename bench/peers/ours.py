#!/usr/bin/env python3
"""Runs hvdbench for all cases in README.md, and prints the results in the format of the programs for the other
libraries. Before and after the rows of each call of hvdbench, it prints the state of the cores.

The variable HVD_PROGRAMS is the folder with hvdrun and hvdbench. The settings are the variables that begin with BENCH_.
"""

import csv
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import cores

VARIANTS = {"slices": [], "arena": ["--arena"], "raw": ["--raw"], "arena-raw": ["--arena", "--raw"]}
OPS = ["barrier", "allreduce", "allgather", "broadcast", "resnet50", "gpt2"]
MIB = 1 << 20
# Each range is the first size, the last size, and the factor between successive sizes. No range crosses 1 MiB, because
# larger sizes are measured for another time.
RANGES = {
    "allreduce": [(4, 16 << 10, 16), (64 << 10, MIB, 4), (4 * MIB, 256 * MIB, 4)],
    "allgather": [(64 << 10, 64 << 10, 2), (4 * MIB, 64 * MIB, 16)],
    "broadcast": [(64 << 10, 64 << 10, 2), (4 * MIB, 64 * MIB, 16)],
}


def settings():
    """Returns the settings in the BENCH_ variables. Ends the program if one of them is wrong."""
    def listed(name, known):
        words = [word for word in os.environ.get(name, "").split(",") if word] or list(known)
        wrong = set(words) - set(known)
        if wrong:
            sys.exit(f"ours.py: {name} has {', '.join(sorted(wrong))}, want some of {', '.join(known)}")
        return words

    def number(name, default):
        text = os.environ.get(name) or default
        try:
            return float(text)
        except ValueError:
            sys.exit(f"ours.py: {name} is {text!r}, want a number")

    return {
        "ops": listed("BENCH_OPS", OPS), "variants": listed("BENCH_VARIANTS", VARIANTS),
        "max": int(number("BENCH_MAX_BYTES", 256 * MIB)),
        "small": number("BENCH_SMALL_S", 0.4), "large": number("BENCH_LARGE_S", 0.8), "hard": number("BENCH_HARD_S", 3),
    }


def calls(s, variant):
    """Yields the arguments of each call of hvdbench for a variant."""
    def timed(seconds):
        return ["--seconds", str(seconds), "--max-seconds", str(s["hard"])]

    if "barrier" in s["ops"] and "arena" not in variant:  # a barrier has no tensor
        yield ["barrier", *timed(s["small"])]
    for op, ranges in RANGES.items():
        for low, high, factor in ranges if op in s["ops"] else []:
            if op == "allreduce":
                high = min(high, s["max"])
            if low <= high:
                yield [op, "-b", str(low), "-e", str(high), "-f", str(factor), *timed(s["small"] if low < 4 * MIB else s["large"])]
    for workload in ("resnet50", "gpt2"):
        if workload in s["ops"]:
            shapes = os.environ.get("BENCH_SHAPES")
            mode = "pertensor,async" if "raw" in variant else "pertensor,async,bucket25"
            yield ["--workload", f"{shapes}/{workload}.txt" if shapes else workload, "--mode", mode, *timed(s["large"])]


def bus_factor(op, ranks):
    return {"barrier": 0, "broadcast": 1, "allgather": (ranks - 1) / ranks}.get(op, 2 * (ranks - 1) / ranks)


def main():
    s = settings()
    ranks, peer = os.environ.get("BENCH_NP", "2"), os.environ.get("BENCH_PEER", "ours")
    programs = os.environ["HVD_PROGRAMS"]
    launch = [os.path.join(programs, "hvdrun"), "-np", ranks, "--tag-output=false", os.path.join(programs, "hvdbench")]
    print(cores.measure().comment(), flush=True)
    for variant in s["variants"]:
        name = peer if variant == "slices" else f"{peer}-{variant}"
        for arguments in calls(s, variant):
            # The times of rank 0 are used. For a broadcast, the longest time of all ranks is used, which is hvdbench's
            # default.
            average = [] if arguments[0] == "broadcast" else ["--average", "0"]
            command = launch + arguments + average + VARIANTS[variant] + ["--out-of-place=false", "--format", "csv"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(f"ours.py: status {done.returncode} of {' '.join(command)}")
            for row in csv.DictReader(line for line in done.stdout.splitlines() if not line.startswith("#")):
                op, size, median = row["collective"], int(row["bytes"]), float(row["p50_us"])
                bandwidth = size / median / 1000
                print(f"{name},{op},{row['ranks']},{size},{row['iters']},{median:.3f},{float(row['min_us']):.3f},"
                      f"{bandwidth:.4f},{bandwidth * bus_factor(op, int(row['ranks'])):.4f}", flush=True)
            print(cores.measure().comment(), flush=True)


if __name__ == "__main__":
    main()
