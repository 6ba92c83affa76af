#!/usr/bin/env python3
"""Measures the cost of the timeline, the metrics, the flight recorder, the negotiation and the page of a running job,
in steps over ResNet-50's gradients.

    bench/watch-cost.py [ROUNDS [ITERATIONS [RANKS [WAY ...]]]]
    bench/watch-cost.py within [ROUNDS [SECONDS [RANKS]]]      the page, switched on and off within one job

In each round of the first form hvdbench runs once in each WAY, by default in all of them, in random order, and each run
is a job of its own. The time of a run is the median of its steps. In each round, it is divided by the time of the run
with no observation, if the state of the cores was the same (cores.py). For each state and way, the script prints the
median of these ratios over the rounds, and the 95 % confidence interval of their mean (Student's t on logarithms). In
the runs with metrics, the metrics of all ranks are read twice a second.

The times of whole jobs differ by some percent also without observation ("none again"). So with the word within, one job
runs all the time, and in each round the script measures for SECONDS in each of three windows: while a page follows the
job, while none does, and while none does again, in random order. It follows the job as an open page does: it reads the
stream of states, and the report and the pictures of each new one. A window without a page begins when the ranks do not
record any more, up to 13 s after the last page has gone. 20 rounds of 12 s take about 20 minutes. The script prints

  - the processor time of hvdrun, which serves the page, and of all processes of the job, which do not include the
    browser: for each window the median and the range over the rounds, and by how much it is more than in the window
    "none" of its round, as the mean of the differences with its 95 % confidence interval. Here the state of the cores
    does not matter.
  - the time of a step, in the form of the table above. It is the length of the window divided by the number of tensors
    that rank 0 has reduced in it, which its metrics have, times 161.

If the ranks take all processors, processor time of hvdrun makes a step longer by the same part.
"""

import contextlib
import csv
import gzip
import http.client
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from typing import NamedTuple

import cores

NONE = {"HVD_FLIGHT_RECORDER": "0"}
WAYS = {
    "none": NONE,
    "none again": NONE,
    "timeline": NONE | {"HOROVOD_TIMELINE": "t.json"},
    "metrics": NONE,
    "flight recorder": {},
    "backend only": NONE,
}
PORT = 19100


def scrape(ended):
    """Reads the metrics of all ranks twice a second until the event ended is set. Returns the number of successful
    reads.
    """
    times = 0
    while not ended.wait(0.5):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=2) as response:
                times += len(response.read()) > 0
        except OSError:
            pass  # the job has not started yet, or is ending
    return times


class Page:
    """An open page of a job: it requests what the page in a browser does, by connections that it keeps. errors is
    hvdrun's standard error, which has the address.
    """

    def __init__(self, errors):
        address = next(m[1] for line in errors if (m := re.match(r"open (http://\S+)", line)))
        self.at = urllib.parse.urlsplit(address)
        self.headers = {"Accept-Encoding": "gzip"}
        with self.connect() as connection, self.get(connection, f"/?{self.at.query}") as answer:
            self.headers["Cookie"] = answer.headers["Set-Cookie"].partition(";")[0]

    def connect(self):
        return contextlib.closing(http.client.HTTPConnection(self.at.netloc, timeout=10))

    def get(self, connection, path):
        connection.request("GET", path, headers=self.headers)
        return connection.getresponse()

    def follow(self, seen, ended):
        """Follows the job until the event ended is set. The number of operations in each report goes to the list seen."""
        last = None
        with self.connect() as stream, self.connect() as data, self.get(stream, "/live") as states:
            for line in states:
                if ended.is_set():
                    return
                if not line.startswith(b"data: "):
                    continue
                name = json.loads(line[6:])["run"]
                for part in PARTS if name != last else ():
                    with self.get(data, f"/data/{part}run={name}") as answer:
                        body = answer.read()
                        if answer.status == 200 and part == "report?":
                            packed = answer.headers["Content-Encoding"] == "gzip"
                            seen.append(json.loads(gzip.decompress(body) if packed else body)["operations"])
                last = name


# PARTS are the data of a state that the page shows while it follows a job.
PARTS = ("info?", "report?", "grid?name=caused&", "grid?name=waits&", "window?", "tile?rows=ranks&level=1&index=0&",
         "tile?rows=ranks&level=1&index=1&")
REST = 14  # the seconds after which the ranks do not record any more, when the last page has gone
GRADIENTS = 161  # of ResNet-50


def tensors():
    """Returns the number of tensors that rank 0 has reduced, and when it was read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r'^hvd_collective_tensors_total\{.*rank="0".*\} (\S+)$', text, re.MULTILINE)), time.monotonic()


class Window(NamedTuple):
    """What was measured in a window. The processor times are in ms a second."""

    us: float  # of a step
    hvdrun: float
    job: float  # all processes, with hvdrun

    @property
    def step(self):
        """The processor time of all processes in a step, in ms."""
        return self.job * self.us / 1e6


def family(pid):
    """Returns the number of a process and those of all processes that it has started. Its threads may end meanwhile."""
    found = [pid]
    for at in found:
        for task in os.listdir(f"/proc/{at}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{at}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def used(pid):
    """Returns the processor time of a process, in ms."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")


def window(seconds, processes):
    """Measures a job for a time. hvdrun is the first of its processes."""
    before, begun = tensors()
    times = [used(p) for p in processes]
    time.sleep(seconds)
    after, ended = tensors()
    times = [(used(p) - t) / (ended - begun) for p, t in zip(processes, times)]
    return Window((ended - begun) / (after - before) * GRADIENTS * 1e6, times[0], sum(times))


WINDOWS = ["none", "none again", "viewer"]


def within(rounds, seconds, ranks):
    """Measures one job with and without a page that follows it. Returns the times of a step, and for each round the
    windows by their names.
    """
    with tempfile.TemporaryDirectory() as programs:
        subprocess.run(["go", "build", "-o", programs + "/", "./cmd/hvdrun", "./cmd/hvdbench"], cwd=cores.ROOT, check=True)
        command = [programs + "/hvdrun", "-np", str(ranks), "--view", "--metrics-addr", f"127.0.0.1:{PORT}",
                   programs + "/hvdbench", "--workload", "resnet50", "-n", "1000000", "-w", "10", "--format", "csv"]
        with subprocess.Popen(command, env=os.environ | {"XDG_RUNTIME_DIR": programs}, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True) as job:
            try:
                page = Page(job.stderr)
                while tensors()[0] < 20 * GRADIENTS:
                    time.sleep(0.5)
                processes = family(job.pid)
                watch, gone, all_windows = cores.Watch(), -math.inf, []
                for n in range(rounds):
                    all_windows.append({})
                    for way in random.sample(WINDOWS, 3):
                        if way == "viewer":
                            seen, ended = [], threading.Event()
                            follower = threading.Thread(target=page.follow, args=(seen, ended))
                            follower.start()
                            time.sleep(2)
                        else:
                            time.sleep(max(gone + REST - time.monotonic(), 0))
                        measured, state = watch.run(lambda: window(seconds, processes))
                        all_windows[n][way] = measured
                        watch.add(state, n, {way: measured.us})
                        if way == "viewer":
                            ended.set()
                            follower.join()
                            gone = time.monotonic()
                            if len(seen) < 2 or not any(seen):
                                sys.exit(f"watch-cost: the page has shown no operation: {seen}")
                    print(f"\rround {n + 1} of {rounds}", end="", file=sys.stderr, flush=True)
                print(file=sys.stderr)
                return watch, all_windows
            finally:
                job.terminate()  # a script in the background may ignore SIGINT, and then hvdrun does too
                threading.Thread(target=job.stderr.read).start()  # so that hvdrun can write its last lines


def processor_times(rounds, num_cores):
    """Yields the lines with the processor times of all rounds."""
    for what, unit, value, relative in (
            ("hvdrun", "ms a second", lambda w: w.hvdrun, f"of {cores.plural(num_cores, 'core')}"),
            ("all processes of the job", "ms a second", lambda w: w.job, f"of {cores.plural(num_cores, 'core')}"),
            ("all processes of the job", "ms a step", lambda w: w.step, "of a step")):
        yield f"processor time of {what}, {unit}"
        whole = statistics.fmean(value(r["none"]) for r in rounds) if relative == "of a step" else num_cores * 1000
        for way in WINDOWS:
            values = [value(r[way]) for r in rounds]
            line = f"{way:16} median {statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"
            if way != "none" and len(rounds) > 1:
                more = [100 * (value(r[way]) - value(r["none"])) / whole for r in rounds]
                mean, half = statistics.fmean(more), half_interval(more)
                line += f"   {mean:+.2f} % {relative}, 95 % interval {mean - half:+.2f} to {mean + half:+.2f} %"
            yield line


def run(way, programs, iterations, ranks):
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(programs, "hvdrun"), "-np", str(ranks), "--tag-output=false"]
        if way == "metrics":
            command += ["--metrics-addr", f"127.0.0.1:{PORT}"]
        command += [os.path.join(programs, "hvdbench"), "--workload", "resnet50", "-n", str(iterations), "-w", "10", "--format", "csv"]
        if way == "backend only":
            command.append("--raw")
        ended, scraped = threading.Event(), []
        scraper = threading.Thread(target=lambda: scraped.append(scrape(ended)))
        if way == "metrics":
            scraper.start()
        try:
            out = subprocess.run(command, cwd=folder, env=os.environ | WAYS[way] | {"XDG_RUNTIME_DIR": folder},
                                 stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout
        finally:
            ended.set()
            if way == "metrics":
                scraper.join()
        if way == "metrics" and not scraped[0]:
            sys.exit("watch-cost: the metrics could not be read")
        if way == "timeline" and len(os.listdir(folder)) != ranks:
            sys.exit(f"watch-cost: the timelines are {os.listdir(folder)}")
        rows = csv.DictReader(line for line in out.splitlines() if not line.startswith("#"))
        return float(next(rows)["p50_us"])


def t_quantile(df):
    """Returns the 97.5 % quantile of Student's t distribution (Cornish and Fisher's expansion)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def half_interval(values):
    """Returns half the width of the 95 % confidence interval of a mean."""
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def table(results, ways):
    """Yields the lines with the results in each state."""
    yield f"cores: {results.summary()}"
    for state in results.states():
        times = results.of(state, "none")
        if not times:
            continue
        yield f"{cores.STATES[state]}; none: {statistics.median(times) / 1000:.2f} ms a step ({min(times) / 1000:.2f} to {max(times) / 1000:.2f})"
        for way in ways:
            logs = [math.log(ratio) for ratio in results.ratios(state, way, "none")]
            if way == "none" or len(logs) < 2:
                continue
            mean = statistics.fmean(logs)
            half = half_interval(logs)
            yield (f"{way:16} median {100 * (math.exp(statistics.median(logs)) - 1):+6.2f} %   95 % interval "
                   f"{100 * (math.exp(mean - half) - 1):+6.2f} to {100 * (math.exp(mean + half) - 1):+6.2f} %, {len(logs)} rounds")


def main():
    given = sys.argv[1:]
    if given[:1] == ["within"]:
        rounds, seconds, ranks = (int(a) for a in (given[1:4] + ["20", "12", "2"][len(given[1:4]):]))
        watch, windows = within(rounds, seconds, ranks)
        print(f"{ranks} ranks, one job, {rounds} rounds of three windows of {seconds} s")
        print(*processor_times(windows, len(os.sched_getaffinity(0))), *table(watch, WINDOWS), sep="\n")
        return
    rounds, iterations, ranks = (int(a) for a in (given[:3] + ["30", "60", "2"][len(given[:3]):]))
    ways = ["none"] + [w for w in given[3:] or WAYS if w != "none"]
    if unknown := set(ways) - set(WAYS):
        sys.exit(f"watch-cost: got the ways {', '.join(sorted(unknown))}, want some of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as programs:
        subprocess.run(["go", "build", "-o", programs + "/", "./cmd/hvdrun", "./cmd/hvdbench"], cwd=cores.ROOT, check=True)
        watch = cores.Watch()
        for n in range(rounds):
            for way in random.sample(ways, len(ways)):
                us, state = watch.run(lambda way=way: run(way, programs, iterations, ranks))
                watch.add(state, n, {way: us})
            print(f"\rround {n + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{ranks} ranks, {rounds} rounds of {iterations} steps")
    print(*table(watch, ways), sep="\n")


if __name__ == "__main__":
    main()
