#!/usr/bin/env python3
"""Prints the table of bench/hosts.sh.

    bench/hosts.py FILE ITERS

FILE has the rows of hvdbench, which made ITERS timed allreduces, with four columns in front: round, layout, case, and the
number of bytes that left the first host. Comments with the state of the cores are between them.
"""

import csv
import statistics
import sys

import cores


def table(lines, iters):
    """Yields the lines of the table."""
    results, sent = cores.Results(), {}
    for _, part, before, after in cores.runs_in(lines):
        for row in csv.DictReader(part):
            state, key = results.count(before, after), (row["layout"], row["case"])
            results.add(state, int(row["round"]), {key: float(row["mean_us"]) / 1000})
            # Each call sends the same, and so does the untimed one.
            sent.setdefault(key, []).append(int(row["sent"]) / int(row["bytes"]) / (iters + 1))
    yield f"Cores: {results.summary()}."
    for state in results.states():
        yield f"\n{cores.STATES[state]}\n{'layout':8}{'case':18}{'ms':>8}  {'range':18}{'ratio':24}{'sent':>6}"
        for key in sent:
            if times := results.of(state, key):
                layout, case = key
                spread, ratio = f"{min(times):.1f} to {max(times):.1f}", results.ratio_text(state, key, (layout, "one-level"))
                yield f"{layout:8}{case:18}{statistics.median(times):8.1f}  {spread:18}{ratio:24}{statistics.median(sent[key]):6.2f}"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(*table(file, int(sys.argv[2])), sep="\n")
