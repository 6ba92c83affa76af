#!/usr/bin/env python3
"""Measures the cost of the timeline, the metrics, the flight recorder, the page of a running job and the negotiation,
in steps over ResNet-50's gradients. Steps with one of the first four, and steps of the backend without negotiation, are
compared with steps with none of them.

    bench/watch-cost.py [ROUNDS [ITERATIONS [RANKS [WAY ...]]]]
    bench/watch-cost.py within [ROUNDS [SECONDS [RANKS]]]      the page only, switched on and off within one job

In each round hvdbench runs once in each WAY, by default in all of them, in random order, and each run is a job of its own. The time of a run is
the median of its steps. In each round, it is divided by the time of the run with none of the three, if the state of the
cores was the same (cores.py). For each state and way, the script prints the median of these ratios over the rounds, and
the 95 % confidence interval of their mean (Student's t on logarithms). In the runs with metrics, the metrics of all ranks
are read twice a second. In the runs with a viewer, hvdrun serves the page (--view) and the script follows the job as an
open page does: it reads the stream of states, and the report and the pictures of each new one.

The times of whole jobs differ by some percent also without a page ("none again"). So with the word within, one job runs
all the time. In each round the time of a step is measured for SECONDS in each of three windows: with a page, without
one, and without one again, in random order. It is the length of the window divided by the number of tensors that rank 0
has reduced in it, which its metrics have, times 161. A window without a page begins when the ranks do not record any
more, up to 13 s after the last page has gone. 20 rounds of 12 s take about 20 minutes.
"""

import csv
import http.cookiejar
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import cores

NONE = {"HVD_FLIGHT_RECORDER": "0"}
WAYS = {
    "none": NONE,
    "none again": NONE,
    "timeline": NONE | {"HOROVOD_TIMELINE": "t.json"},
    "metrics": NONE,
    "flight recorder": {},
    "viewer": NONE,
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


def enter(errors):
    """Opens the page of a job. errors is hvdrun's standard error, which has its address. Returns the address without the
    token, and an opener that has access.
    """
    address = next((m[1] for line in errors if (m := re.match(r"open (http://\S+)", line))), None)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    opener.open(address, timeout=10).close()
    return address.partition("?")[0], opener


def follow(base, opener, seen, ended):
    """Follows a job as its page does until the event ended is set. The number of operations in each report goes to the
    list seen.
    """
    last = None
    with opener.open(base + "live", timeout=10) as states:
        for line in states:
            if ended.is_set():
                return
            if not line.startswith(b"data: "):
                continue
            name = json.loads(line[6:])["run"]
            for part in ("report?", "grid?name=held&") if name != last else ():
                with opener.open(f"{base}data/{part}run={name}", timeout=10) as answer:
                    body = answer.read()
                if part == "report?":
                    seen.append(json.loads(body)["operations"])
            last = name


def look(errors, seen):
    """Follows a job as its page does until the job ends."""
    try:
        follow(*enter(errors), seen, threading.Event())
    except (OSError, AttributeError):
        pass  # the job has ended, and its page with it
    for _ in errors:
        pass


REST = 14  # the seconds after which the ranks do not record any more, when the last page has gone
GRADIENTS = 161  # of ResNet-50


def tensors():
    """Returns the number of tensors that rank 0 has reduced, and when it was read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r'^hvd_collective_tensors_total\{.*rank="0".*\} (\S+)$', text, re.MULTILINE)), time.monotonic()


def window(seconds):
    """Returns the time of a step in the next seconds, in us."""
    before, begun = tensors()
    time.sleep(seconds)
    after, ended = tensors()
    return (ended - begun) / (after - before) * GRADIENTS * 1e6


def within(rounds, seconds, ranks):
    """Measures steps of one job with and without a page that follows it. Returns the results."""
    with tempfile.TemporaryDirectory() as programs:
        subprocess.run(["go", "build", "-o", programs + "/", "./cmd/hvdrun", "./cmd/hvdbench"], cwd=cores.ROOT, check=True)
        command = [programs + "/hvdrun", "-np", str(ranks), "--view", "--metrics-addr", f"127.0.0.1:{PORT}",
                   programs + "/hvdbench", "--workload", "resnet50", "-n", "1000000", "-w", "10", "--format", "csv"]
        with subprocess.Popen(command, env=os.environ | NONE | {"XDG_RUNTIME_DIR": programs}, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True) as job:
            try:
                base, opener = enter(job.stderr)
                while tensors()[0] < 20 * GRADIENTS:
                    time.sleep(0.5)
                watch, gone = cores.Watch(), -math.inf
                for n in range(rounds):
                    for way in random.sample(["viewer", "none", "none again"], 3):
                        if way == "viewer":
                            seen, ended = [], threading.Event()
                            page = threading.Thread(target=follow, args=(base, opener, seen, ended))
                            page.start()
                            time.sleep(2)
                        else:
                            time.sleep(max(gone + REST - time.monotonic(), 0))
                        us, state = watch.run(lambda: window(seconds))
                        watch.add(state, n, {way: us})
                        if way == "viewer":
                            ended.set()
                            page.join()
                            gone = time.monotonic()
                            if len(seen) < 2:
                                sys.exit(f"watch-cost: the page has shown no operation: {seen}")
                    print(f"\rround {n + 1} of {rounds}", end="", file=sys.stderr, flush=True)
                print(file=sys.stderr)
                return watch
            finally:
                job.send_signal(signal.SIGINT)
                threading.Thread(target=job.stderr.read).start()  # so that hvdrun can write its last lines


def run(way, programs, iterations, ranks):
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(programs, "hvdrun"), "-np", str(ranks), "--tag-output=false"]
        if way == "viewer":
            command.append("--view")
        if way == "metrics":
            command += ["--metrics-addr", f"127.0.0.1:{PORT}"]
        command += [os.path.join(programs, "hvdbench"), "--workload", "resnet50", "-n", str(iterations), "-w", "10", "--format", "csv"]
        if way == "backend only":
            command.append("--raw")
        ended, scraped, seen = threading.Event(), [], []
        scraper = threading.Thread(target=lambda: scraped.append(scrape(ended)))
        if way == "metrics":
            scraper.start()
        try:
            with subprocess.Popen(command, cwd=folder, env=os.environ | WAYS[way] | {"XDG_RUNTIME_DIR": folder}, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) as job:
                if way == "viewer":
                    looker = threading.Thread(target=look, args=(job.stderr, seen))
                    looker.start()
                    out = job.stdout.read()
                    looker.join()
                else:
                    out, _ = job.communicate(timeout=300)
            if job.returncode:
                sys.exit(f"watch-cost: {way}: hvdrun ended with status {job.returncode}")
        finally:
            ended.set()
            if way == "metrics":
                scraper.join()
        if way == "metrics" and not scraped[0]:
            sys.exit("watch-cost: the metrics could not be read")
        if way == "viewer" and not any(seen):
            sys.exit(f"watch-cost: the page has shown no operation: {seen}")
        if way == "timeline" and len(os.listdir(folder)) != ranks:
            sys.exit(f"watch-cost: the timelines are {os.listdir(folder)}")
        rows = csv.DictReader(line for line in out.splitlines() if not line.startswith("#"))
        return float(next(rows)["p50_us"])


def t_quantile(df):
    """Returns the 97.5 % quantile of Student's t distribution (Cornish and Fisher's expansion)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


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
            half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
            yield (f"{way:16} median {100 * (math.exp(statistics.median(logs)) - 1):+6.2f} %   95 % interval "
                   f"{100 * (math.exp(mean - half) - 1):+6.2f} to {100 * (math.exp(mean + half) - 1):+6.2f} %, {len(logs)} rounds")


def main():
    given = sys.argv[1:]
    if given[:1] == ["within"]:
        rounds, seconds, ranks = (int(a) for a in (given[1:4] + ["20", "12", "2"][len(given[1:4]):]))
        watch = within(rounds, seconds, ranks)
        print(f"{ranks} ranks, one job, {rounds} rounds of three windows of {seconds} s")
        print(*table(watch, ["none", "none again", "viewer"]), sep="\n")
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
