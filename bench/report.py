#!/usr/bin/env python3
"""Writes a page that compares gohvd with other libraries, from the results in a folder that bench/compare.sh has filled."""

import argparse
import os
import re
import statistics
import sys
from collections import defaultdict

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
libraries in the same round. A cell has the median of these ratios over all rounds and, in parentheses, the
least and the greatest ratio. The column `best` has the median of these least medians, and the library that
was the fastest most often.
"""


class Comparison:
    """The medians of all runs. times[op, ranks, bytes][peer][round] is a median in microseconds."""

    def __init__(self, folder):
        self.times = defaultdict(lambda: defaultdict(dict))
        self.failed = []
        rounds = set()
        for name in sorted(os.listdir(folder)):
            match = re.fullmatch(r".+-np\d+-round(\d+)\.csv", name)
            if not match:
                continue
            number = int(match[1])
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = file.readlines()
            self.failed += [f"round {number}: {line.removeprefix('# FAILED,').strip()}" for line in lines if line.startswith("# FAILED,")]
            for row in plot.read_results(name, lines):
                rounds.add(number)
                # Gloo's algorithms count as one peer, which has the best of their times, because a user of Gloo can
                # choose the algorithm.
                peer = "gloo" if row["peer"].startswith("gloo-") else row["peer"]
                of = self.times[row["collective"], row["ranks"], row["bytes"]][peer]
                of[number] = min(row["p50_us"], of.get(number, row["p50_us"]))
        if not rounds:
            raise plot.InputError(f"{folder} contains no results: no rows in files named PEER-npN-roundR.csv")
        self.rounds = len(rounds)
        self.ranks = sorted({ranks for _, ranks, _ in self.times})

    def peers(self, ranks):
        """Returns the names of gohvd's variants and the names of the other peers that have results for this number of
        ranks.
        """
        seen = {peer for case, by_peer in self.times.items() if case[1] == ranks for peer in by_peer}
        own = sorted(peer for peer in seen if peer.split("-")[0] == "ours")
        return own, [peer for peer in PEERS if peer in seen] + sorted(seen - set(own) - set(PEERS))

    def cases(self, op, ranks):
        return sorted(case for case in self.times if case[:2] == (op, ranks))

    def steps(self, workload, ranks):
        return [case for mode in MODES for case in self.cases(f"{workload}_{mode}", ranks)]

    def best(self, cases, peers):
        """Returns the least time in each round, over the given cases and peers, and the peer that has it most often."""
        times, winner = {}, {}
        for case in cases:
            for peer in peers:
                for number, us in self.times[case].get(peer, {}).items():
                    if us < times.get(number, float("inf")):
                        times[number], winner[number] = us, peer
        wins = list(winner.values())
        return times, max(peers, key=wins.count) if wins else ""

    def ratio_rows(self, cases, against, scale, own):
        """Yields rows of the table of ratios. For a workload, a ratio is relative to the best time of any other peer in
        any mode.
        """
        for case in cases:
            base, who = self.best(cases if scale == 1000 else [case], against)
            cells = []
            for peer in own:
                times = self.times[case].get(peer, {})
                ratios = [times[number] / base[number] for number in times if number in base]
                cells.append("–" if not ratios else f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"
                             + (f" of {len(ratios)}" if len(ratios) < self.rounds else ""))
            if base and any(cell != "–" for cell in cells):
                yield [name_of(case), f"{digits(statistics.median(base.values()) / scale)} {who}", *cells]

    def ratios(self, ranks):
        own, others = self.peers(ranks)
        against = [peer for peer in others if peer in MPI]
        if not own or not others:
            return
        if against:
            cases = [case for op in COLLECTIVES for case in self.cases(op, ranks)]
            rows = [row for case in cases for row in self.ratio_rows([case], against, 1, own)]
            yield from table(f"{ranks} ranks: collectives, relative to the faster of Open MPI and MPICH", ["case", "best, µs", *own], rows)
        rows = [row for workload in WORKLOADS for row in self.ratio_rows(self.steps(workload, ranks), others, 1000, own)]
        if rows:
            yield from table(f"{ranks} ranks: training steps, relative to the fastest other library in its fastest mode", ["case", "best, ms", *own], rows)

    def all_times(self, ranks):
        own, others = self.peers(ranks)
        cases = [(case, 1) for op in COLLECTIVES for case in self.cases(op, ranks)]
        cases += [(case, 1000) for workload in WORKLOADS for case in self.steps(workload, ranks)]
        rows = []
        for case, scale in cases:
            by_peer = self.times[case]
            rows.append([name_of(case), *(digits(statistics.median(by_peer[peer].values()) / scale) if peer in by_peer else "–" for peer in own + others)])
        yield from table(f"{ranks} ranks", ["case", *own, *others], rows)

    def chart(self):
        """Returns an SVG of the bus bandwidth of allreduce at the smallest number of ranks."""
        ranks = self.ranks[0]
        own, others = self.peers(ranks)
        series = []
        for peer in own + others:
            points = [(case[2], case[2] / statistics.median(self.times[case][peer].values()) / 1000 * 2 * (ranks - 1) / ranks)
                      for case in self.cases("allreduce", ranks) if peer in self.times[case]]
            if points:
                series.append((peer, points))
        if not series:
            raise plot.InputError(f"there is no allreduce at {ranks} ranks to draw")
        return plot.draw(f"allreduce, float32 sum, {ranks} ranks on one host", "bus bandwidth in GB/s", False, series)


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
    about = [f"- {line}\n" for line in read_if_there(folder, "about.txt").splitlines()]
    about.append(f"- Rounds: {comparison.rounds}; each program ran once in each round\n")
    command = read_if_there(folder, "commands.txt")
    parts = [INTRODUCTION, "\n", *about]
    if command:
        parts.append(f"\n```sh\n{command}\n```\n")
    parts += [f"\n![bus bandwidth of allreduce]({os.path.basename(chart)})\n", LEGEND]
    for ranks in comparison.ranks:
        parts += comparison.ratios(ranks)
    parts.append("\n## Times\n\nThe tables show the median of the rounds' medians, in µs for collectives and in ms for training steps.\n")
    for ranks in comparison.ranks:
        parts += comparison.all_times(ranks)
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
