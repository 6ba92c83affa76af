#!/usr/bin/env python3
"""Measures how far apart the cores of this host are, by hvdbench cores, and groups results by this state.

On a virtual machine the state changes when the host moves the virtual processors, and all times between two ranks
change with it. So all benchmarks use this file: they measure the state before and after each run, compare only runs of
the same state, and count the runs that they leave out because the state changed meanwhile. The state has not changed
if one round trip takes less than RATIO times as long as the other, though one is near and the other far.

    bench/cores.py    # prints the state as a comment for files with results: "# cores,near,0.0551,2.5140"

hvdbench is the one in the folder HVD_PROGRAMS. If this variable is not set, it is built.
"""

import csv
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STATES = {"near": "near cores", "far": "far cores", "single": "one core"}  # in the order of all tables
COMMENT = "# cores,"
RATIO = 1.6  # that of cmd/hvdbench/cores.go


class State(NamedTuple):
    """A measurement. Its times are 0 if there is only one core."""

    name: str
    round_trip_us: float
    read_us: float  # of 64 KiB

    def same(self, other):
        """Returns whether another measurement was in the same state."""
        trips = self.round_trip_us, other.round_trip_us
        return self.name == other.name or max(trips) < RATIO * min(trips)

    def comment(self):
        return f"{COMMENT}{self.name},{self.round_trip_us:.4f},{self.read_us:.4f}"


def state_of(fields):
    """Returns the state with the name and the times in a list of texts."""
    name, *times = fields
    if name not in STATES:
        raise ValueError(f"the state of the cores is {name!r}, want one of {', '.join(STATES)}")
    round_trip, read = (float(t or 0) for t in times)
    return State(name, round_trip, read)


def plural(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


@functools.cache
def program():
    """Returns the path of hvdbench."""
    folder = os.environ.get("HVD_PROGRAMS")
    if not folder:
        folder = os.environ.get("PEERS_BUILD") or os.path.join(tempfile.gettempdir(), "gohvd-peers")
        os.makedirs(folder, exist_ok=True)
        subprocess.run(["go", "build", "-o", folder + "/", "./cmd/hvdbench"], cwd=ROOT, check=True)
    return os.path.join(folder, "hvdbench")


def measure():
    """Measures the state of this host."""
    done = subprocess.run([program(), "cores", "--format", "csv"], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    row = next(csv.DictReader(line for line in done.stdout.splitlines() if not line.startswith("#")))
    return state_of([row["state"], row["round_trip_us"], row["read_64KiB_us"]])


def runs_in(lines):
    """Splits the lines of a file at its comments with states. Yields for each part the number of its first line, its
    lines, and the states before and after it. A state is None if the file has none there.
    """
    before, first, part = None, 1, []
    for number, line in enumerate(lines, 1):
        if line.startswith(COMMENT):
            after = state_of(line.removeprefix(COMMENT).strip().split(","))
            yield first, part, before, after
            before, first, part = after, number + 1, []
        else:
            part.append(line)
    yield first, part, before, None


class Results:
    """The results of runs, by state. The runs of a round are those that may be compared with each other."""

    def __init__(self):
        self.num_runs = self.left_out = 0
        self.first = None  # the first measurement since the state has changed
        self.seen = {}  # by the name of a state, the measurements before and after all runs in this state
        self.values = {}  # by state and key, {round: value}
        self.rounds = set()

    def count(self, before, after):
        """Counts a run. Returns the name of the state in which it ran, or None if the state changed or is not known."""
        self.num_runs += 1
        if before is None or after is None or (name := self.name(before)) != self.name(after):
            self.left_out += 1
            return None
        self.seen.setdefault(name, []).append((before, after))
        return name

    def name(self, state):
        """Returns the name of the state of a measurement, which is that of the first one unless the state has changed."""
        if not self.first or not self.first.same(state):
            self.first = state
        return self.first.name

    def add(self, state, number, values):
        """Adds values by key of a run in a round. Those of a run without a state are not used."""
        self.rounds.add(number)
        for key, value in values.items():
            self.values.setdefault((state, key), {})[number] = value

    def states(self):
        return [name for name in STATES if name in self.seen]

    def of(self, state, key):
        """Returns the values of a key in a state, in the order of the rounds."""
        by_round = self.values.get((state, key), {})
        return [by_round[number] for number in sorted(by_round)]

    def ratios(self, state, key, base):
        """Returns the ratios of a key to another one, in the rounds in which both were measured in this state."""
        of, to = self.values.get((state, key), {}), self.values.get((state, base), {})
        return [of[number] / to[number] for number in sorted(of.keys() & to.keys())]

    def ratio_text(self, state, key, base):
        """Returns the median and the range of the ratios, and their number if it is not that of all rounds."""
        ratios = self.ratios(state, key, base)
        if not ratios:
            return "-"
        number = f" of {len(ratios)}" if len(ratios) < len(self.rounds) else ""
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}){number}"

    def table(self, keys, unit, decimals):
        """Yields lines with the median and the range of each key in each state."""
        yield f"cores: {self.summary()}"
        for state in self.states():
            yield STATES[state]
            for key in keys:
                if values := self.of(state, key):
                    middle, low, high = (f"{v:.{decimals}f}" for v in (statistics.median(values), min(values), max(values)))
                    yield f"{key:40} {middle:>9} {unit}   ({low} to {high}), {plural(len(values), 'round')}"

    def summary(self):
        """Returns a sentence with the number of the runs in each state, and of those that are left out."""
        texts = []
        for name in self.states():
            states = [state for run in self.seen[name] for state in run]
            trips, reads = [s.round_trip_us for s in states], [s.read_us for s in states]
            texts.append(f"{STATES[name]} in {plural(len(self.seen[name]), 'run')}" + ("" if name == "single" else
                         f" (round trip {min(trips):.2f} to {max(trips):.2f} us, read of 64 KiB {min(reads):.1f} to {max(reads):.1f} us)"))
        texts.append(f"{self.left_out} of {plural(self.num_runs, 'run')} left out, because the state of the cores changed meanwhile")
        return "; ".join(texts)


class Watch(Results):
    """The results of runs, if this process measures the state. The state after a run is the one before the next."""

    def __init__(self, measure=measure):
        super().__init__()
        self.measure = measure
        self.last = measure()

    def run(self, call):
        """Calls a function. Returns its result and the name of the state in which it ran, or None."""
        before, result = self.last, call()
        self.last = self.measure()
        return result, self.count(before, self.last)


if __name__ == "__main__":
    print(measure().comment())
    sys.stdout.flush()
