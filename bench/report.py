#!/usr/bin/env python3
"""Writes a page that compares gohvd with other libraries, from the results in a folder that bench/compare.sh has filled."""

import argparse
import os
import re
import statistics
import sys
import textwrap
from collections import defaultdict
from typing import NamedTuple

import cores
import plot

# Ratios of collectives are relative to the best of these. Open MPI runs in two modes: yielding and spinning.
MPI = ["ompi", "ompi-spin", "mpich"]
PEERS = ["ompi", "ompi-spin", "ompi-tcp", "mpich", "gloo", "torch", "horovod"]  # the order of the columns
COLLECTIVES = ["allreduce", "allgather", "broadcast", "barrier"]
WORKLOADS = ["resnet50", "gpt2"]
MODES = ["pertensor", "async", "grouped", "bucket25"]

INTRODUCTION = """# Benchmarks

This page compares the performance of gohvd with that of other libraries. All programs ran on one machine, one
after the other, and summed float32 tensors in CPU memory, in place if the library allows it. `make
bench-peers` repeats the measurement and writes this page. [bench/peers](../bench/peers/README.md) contains
the programs and describes how they measure.
"""

LEGEND = """
In the column `ours`, gohvd reduces ordinary Go slices, with names, negotiation, cache and fusion. With
`-arena` the tensors are in shared memory, where the other ranks read them in place. With `-raw` only the
backend runs, without names and negotiation. A rank of `ompi` yields its core while it waits; a rank of
`ompi-spin` spins on a core of its own. `gloo` is the fastest of Gloo's algorithms at each size. In training
steps, `pertensor` runs one allreduce after the other, `async` starts all and then waits for all, and
`bucket25` reduces the gradients in buckets of 25 MiB.

## Ratios

The tables show gohvd's time divided by the time of the fastest library that the table's title names, so gohvd
is faster if the ratio is below 1. For each round, gohvd's median is divided by the least median of these
libraries in the same round. A cell has the median of these ratios over the rounds and, in parentheses, the
least and the greatest ratio. The column `best` has the median of these least medians, and the library that
was the fastest most often.

Times depend on how far apart the [cores](performance.md#near-and-far-cores) are, which may change on a
virtual machine. So there are tables for each state of the cores, and a round counts only if gohvd and all
libraries of the table ran in this state.
"""


class Run(NamedTuple):
    us: float  # the median
    state: str | None  # of the cores; None if it changed during the run


class Comparison:
    """The medians of all runs. runs[op, ranks, bytes][peer][round] is a Run."""

    def __init__(self, folder):
        self.runs = defaultdict(lambda: defaultdict(dict))
        self.cores = cores.Results()
        self.failed = []
        self.compared = self.not_compared = 0
        for name in sorted(os.listdir(folder)):
            match = re.fullmatch(r".+-np\d+-round(\d+)\.csv", name)
            if not match:
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = file.readlines()
            self.failed += [f"round {match[1]}: {line.removeprefix('# FAILED,').strip()}" for line in lines if line.startswith("# FAILED,")]
            try:
                for first, part, before, after in cores.runs_in(lines):
                    rows = plot.read_results(name, part, first)
                    if rows:
                        self.add(int(match[1]), rows, self.cores.count(before, after))
            except ValueError as err:
                raise plot.InputError(f"{name}: {err}") from err
        if not self.cores.num_runs:
            raise plot.InputError(f"{folder} contains no results: no rows in files named PEER-npN-roundR.csv")
        if not self.cores.states():
            raise plot.InputError(f"{folder} contains no results that can be compared: {self.cores.summary()}")
        self.rounds = len({number for by_peer in self.runs.values() for by_round in by_peer.values() for number in by_round})
        self.ranks = sorted({ranks for _, ranks, _ in self.runs})

    def add(self, number, rows, state):
        """Adds the rows of a run in a round."""
        for row in rows:
            # Gloo's algorithms count as one peer, which has the best of their times, because a user of Gloo can choose
            # the algorithm.
            peer = "gloo" if row["peer"].startswith("gloo-") else row["peer"]
            of = self.runs[row["collective"], row["ranks"], row["bytes"]][peer]
            of[number] = min(Run(row["p50_us"], state), of.get(number, Run(row["p50_us"], state)), key=lambda run: run.us)

    def times(self, state, case, peer):
        """Returns the times of a peer in a state, by round."""
        return {number: run.us for number, run in self.runs[case].get(peer, {}).items() if run.state == state}

    def peers(self, ranks):
        """Returns the names of gohvd's variants and the names of the other peers that have results for this number of
        ranks.
        """
        seen = {peer for case, by_peer in self.runs.items() if case[1] == ranks for peer in by_peer}
        own = sorted(peer for peer in seen if peer.split("-")[0] == "ours")
        return own, [peer for peer in PEERS if peer in seen] + sorted(seen - set(own) - set(PEERS))

    def cases(self, op, ranks):
        return sorted(case for case in self.runs if case[:2] == (op, ranks))

    def collectives(self, ranks):
        return [case for op in COLLECTIVES for case in self.cases(op, ranks)]

    def steps(self, workload, ranks):
        return [case for mode in MODES for case in self.cases(f"{workload}_{mode}", ranks)]

    def best(self, cases, peers):
        """Returns the least time in each round, over the given cases and peers, and the peer that has it. If the states
        of the peers differ in a round, its least time has no state.
        """
        best, winner = {}, {}
        for case in cases:
            for peer in peers:
                for number, run in self.runs[case].get(peer, {}).items():
                    least = best.setdefault(number, run)
                    if number not in winner or run.us < least.us:
                        winner[number] = peer
                    best[number] = Run(min(run.us, least.us), run.state if run.state == least.state else None)
        return best, winner

    def ratio_rows(self, state, cases, against, scale, own):
        """Yields rows of the table of ratios in a state. For a workload, a ratio is relative to the best time of any
        other peer in any mode.
        """
        for case in cases:
            best, winner = self.best(cases if scale == 1000 else [case], against)
            base = {number: run.us for number, run in best.items() if run.state == state}
            cells, counted = [], set()
            for peer in own:
                ours = self.times(state, case, peer)
                both = [number for number in ours if number in best]
                ratios = [ours[number] / base[number] for number in both if number in base]
                counted |= ours.keys() & base.keys()
                self.compared += len(ratios)
                self.not_compared += len(both) - len(ratios)
                cells.append("–" if not ratios else f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"
                             + (f" of {len(ratios)}" if len(ratios) < self.rounds else ""))
            if counted:
                wins = [winner[number] for number in counted]
                least = statistics.median(base[number] for number in counted)
                yield [name_of(case), f"{digits(least / scale)} {max(against, key=wins.count)}", *cells]

    def ratios(self, ranks, state):
        own, others = self.peers(ranks)
        against = [peer for peer in others if peer in MPI]
        where = f"{ranks} ranks, {cores.STATES[state]}"
        rows = [row for case in self.collectives(ranks) for row in self.ratio_rows(state, [case], against, 1, own)]
        if rows:
            yield from table(f"{where}: collectives, relative to the faster of Open MPI and MPICH", ["case", "best, µs", *own], rows)
        rows = [row for workload in WORKLOADS for row in self.ratio_rows(state, self.steps(workload, ranks), others, 1000, own)]
        if rows:
            yield from table(f"{where}: training steps, relative to the fastest other library in its fastest mode", ["case", "best, ms", *own], rows)

    def all_times(self, ranks, state):
        own, others = self.peers(ranks)
        cases = [(case, 1) for case in self.collectives(ranks)]
        cases += [(case, 1000) for workload in WORKLOADS for case in self.steps(workload, ranks)]
        rows = []
        for case, scale in cases:
            times = [[us / scale for us in self.times(state, case, peer).values()] for peer in own + others]
            if any(times):
                rows.append([name_of(case), *(f"{digits(statistics.median(t))} ({digits(min(t))}–{digits(max(t))})" if t else "–" for t in times)])
        if rows:
            yield from table(f"{ranks} ranks, {cores.STATES[state]}", ["case", *own, *others], rows)

    def chart(self):
        """Returns an SVG of the bus bandwidth of allreduce at the smallest number of ranks, in the first state that has
        results.
        """
        ranks = self.ranks[0]
        own, others = self.peers(ranks)
        for state in self.cores.states():
            series = []
            for peer in own + others:
                times = {case[2]: self.times(state, case, peer).values() for case in self.cases("allreduce", ranks)}
                points = [(size, size / statistics.median(t) / 1000 * 2 * (ranks - 1) / ranks) for size, t in times.items() if t]
                if points:
                    series.append((peer, points))
            if series:
                return plot.draw(f"allreduce, float32 sum, {ranks} ranks on one host, {cores.STATES[state]}", "bus bandwidth in GB/s", False, series)
        raise plot.InputError(f"there is no allreduce at {ranks} ranks to draw")


def name_of(case):
    op, _, size = case
    if not size:
        return op
    if op.split("_")[0] in WORKLOADS:
        return op.replace("_", " ")
    return f"{op} {plot.size_label(size)}"


def digits(value):
    """Formats a number with about three significant digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(title, head, rows):
    yield f"\n### {title}\n\n"
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    yield from (f"| {' | '.join(row)} |\n" for row in rows)


def read_if_there(folder, name):
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def page(folder, comparison, chart):
    """Returns the text of the page. chart is the path of the SVG file."""
    each = [(ranks, state) for ranks in comparison.ranks for state in comparison.cores.states()]
    ratios = [text for ranks, state in each for text in comparison.ratios(ranks, state)]
    about = [f"- {line}\n" for line in read_if_there(folder, "about.txt").splitlines()]
    about.append(f"- Rounds: {comparison.rounds}; each program ran once in each round\n")
    state = (f"- Cores: {comparison.cores.summary()}. {comparison.not_compared} of {comparison.compared + comparison.not_compared} ratios "
             "left out, because the state differed between the runs of a round")
    about.append(textwrap.fill(state, 110, subsequent_indent="  ") + "\n")
    command = read_if_there(folder, "commands.txt")
    parts = [INTRODUCTION, "\n", *about]
    if command:
        parts.append(f"\n```sh\n{command}\n```\n")
    parts += [f"\n![bus bandwidth of allreduce]({os.path.basename(chart)})\n", LEGEND, *ratios]
    parts.append("""
## Times

The tables show the median of the rounds' medians and, in parentheses, the least and the greatest of them, in
µs for collectives and in ms for training steps.
""")
    for ranks, state in each:
        parts += comparison.all_times(ranks, state)
    if comparison.failed:
        parts += ["\n## Not finished\n\n", *(f"- {line}\n" for line in comparison.failed)]
    return "".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.md", help="the page; its chart is written beside it, as FILE.svg")
    args = parser.parse_args()
    comparison = Comparison(args.folder)
    chart = args.output.removesuffix(".md") + ".svg"
    for name, text in ((chart, comparison.chart()), (args.output, page(args.folder, comparison, chart))):
        with open(name, "w", encoding="utf-8") as out:
            out.write(text)


if __name__ == "__main__":
    try:
        main()
    except (plot.InputError, OSError) as err:
        sys.exit(f"report.py: {err}")
