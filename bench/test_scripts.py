#!/usr/bin/env python3
"""Tests the scripts in this folder. The Go tests of cmd/hvdbench run these tests."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

import cores
import elastic
import hosts
import mpi
import plot
import report

HERE = os.path.dirname(os.path.abspath(__file__))
SVG = "{http://www.w3.org/2000/svg}"


def golden(name):
    with open(os.path.join(HERE, "testdata", name), encoding="utf-8") as file:
        return file.read()


def run(script, *args):
    return subprocess.run([sys.executable, os.path.join(HERE, script), *args], capture_output=True, text=True, check=False)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
        return path

    def read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()


class Elastic(unittest.TestCase):
    def test_cost(self):
        """Rank 1 of 2 dies after step 3, of which the other rank loses the last two. Of two new processes
        one comes at step 6.
        """
        R = elastic.Record
        records = [R(step + pid / 100, pid, pid, 2, step) for step in (1, 2, 3) for pid in (0, 1)]
        records += [R(7, 0, 0, 1, 2), R(8, 0, 0, 1, 3), R(9, 0, 0, 1, 4), R(10, 0, 0, 1, 5), R(20, 0, 0, 2, 6), R(20.5, 9, 1, 2, 6)]
        records += [R(11, pid, -1, 0, 0) for pid in (8, 9)]
        self.assertEqual(elastic.done_times(records, 3.5), [9, 10, 20.5])
        want = {"stop": 5.5, "lost": 4.5 + 9.5, "all back": 17, "steps": 2, "processes": 2, "usual": 1}
        self.assertEqual(elastic.cost(records, 3.5, 2, 1), want)


class Plot(Folder):
    def test_drawing(self):
        # There are more lines than colours, and the legend is higher than the plot.
        many = [(f"s<{i}", [(4, 0.001), (1 << 10, 3), (256 << 20, i + 1)]) for i in range(40)]
        for logarithmic, series in ((False, many), (False, [("x", [(1024, 7)])]), (True, [("x", [(8, 0.3), (64 << 20, 44000)])]), (True, [("x", [(8, 1)])])):
            root = xml.etree.ElementTree.fromstring(plot.draw('a < b & "c"', "y", logarithmic, series))
            self.assertEqual(len(root.findall(f"{SVG}polyline")), len(series))
            self.assertEqual(len(root.findall(f"{SVG}circle")), sum(len(points) for _, points in series))
            texts = [e.text for e in root.iter(f"{SVG}text")]
            self.assertTrue({name for name, _ in series} <= set(texts))
            for e in root.iter():
                for attribute, limit in (("cx", plot.WIDTH), ("x1", plot.WIDTH), ("x2", plot.WIDTH), ("cy", plot.HEIGHT), ("y1", float(root.get("height")))):
                    self.assertTrue(0 <= float(e.get(attribute, 0)) <= limit, (attribute, e.attrib))
        self.assertEqual(plot.draw("t", "y", False, [("a", [(1 << 10, 1), (1 << 20, 4)]), ("b", [(1 << 10, 2.5)])]), golden("chart.svg"))

    def test_axes(self):
        x, ticks = plot.size_axis([4, 256 << 20])
        self.assertEqual((x(4), x(256 << 20)), (plot.LEFT, plot.RIGHT))
        self.assertEqual([text for _, text in ticks], ["16 B", "256 B", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"])
        y, ticks = plot.value_axis([0.5, 9], False)
        self.assertEqual((y(0), y(10)), (plot.BOTTOM, plot.TOP))
        self.assertEqual([text for _, text in ticks], ["0", "2", "4", "6", "8", "10"])

    def test_the_legend_names_what_differs(self):
        columns = "collective,path,memory,touch,ranks,bytes,count,type,redop,root,placement,iters,mean_us,p50_us,p99_us,min_us,max_us," \
                  "least_mean_us,greatest_mean_us,algbw_GBps,busbw_GBps,wrong\n"
        row = "allreduce,raw,{},false,2,{},1,float32,sum,-1,in-place,20,1,2,3,1,4,1,1,5,6,0\n"
        ours = self.write("a.csv", columns + row.format("slices", 8) + row.format("arena", 8) + row.format("arena", 64))
        peers = self.write("b.csv", "# x\nompi,allreduce,2,8,20,1.0,1.0,2.0,3.0\nompi,allreduce,2,8,20,1.0,1.0,2.0,5.0\n"
                           "ompi,allreduce,4,8,20,1.0,1.0,2.0,3.0\nompi,barrier,2,0,20,1.0,1.0,0,0\n")
        out = os.path.join(self.folder, "out.svg")
        done = run("plot.py", ours, peers, "-o", out, "--ranks", "2", "--op", "allreduce")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        titles = [e.text for e in xml.etree.ElementTree.parse(out).getroot().iter(f"{SVG}title")]
        # The median of 3 and 5 is 4.
        self.assertEqual(titles, ["allreduce, 2 ranks", "raw slices untouched float32 sum root -1 in-place a: 8 B, 6",
                                  "raw arena untouched float32 sum root -1 in-place a: 8 B, 6", "raw arena untouched float32 sum root -1 in-place a: 64 B, 6",
                                  "ompi: 8 B, 4"])

    def test_one_rank_has_no_bus(self):
        file, out = self.write("a.csv", "x,allreduce,1,8,20,1.0,1.0,2.0,0\n"), os.path.join(self.folder, "out.svg")
        self.assertEqual(run("plot.py", file, "-o", out).returncode, 0)
        self.assertIn(">algorithm bandwidth (algbw) in GB/s<", self.read("out.svg"))

    def test_errors_name_file_and_line(self):
        out = os.path.join(self.folder, "out.svg")
        for i, (text, want) in enumerate((("a,b\n", "line 1: 2 columns, want 9"), ("#\nompi,allreduce,2,x,1,1,1,1,1\n", "line 2: could not convert"),
                                          ("ompi,barrier,2,0,20,1.0,1.0,0,0\n", "no result with a size"))):
            done = run("plot.py", self.write(f"{i}.csv", text), "-o", out)
            self.assertEqual(done.returncode, 1)
            self.assertIn(want, done.stderr)
            self.assertFalse(os.path.exists(out))


class Hosts(Folder):
    def test_rows(self):
        """hosts.sh finds the row of hvdbench between its comments. The commands that make hosts have no effect here."""
        rows = {"cores": "state,round_trip_us,read_64KiB_us near,0.1,2.5", "allreduce": "collective,ranks,bytes,mean_us allreduce,2,100,1500"}
        cases = " ".join(f"{what}) set -- {lines} ;;" for what, lines in rows.items())
        for name, text in (
            ("hvdbench", f"case $1 in {cases} esac; printf '%s\\n' '# before' $1 $2 '# after'"),
            ("ip", 'case "$*" in "netns exec h0 cat "*) echo 0 ;; "netns exec "*) shift 3; exec "$@" ;; esac'),
            ("tc", ""), ("mount", ""), ("mkdir", ""),
        ):
            os.chmod(self.write(name, f"#!/bin/sh\n{text}\n"), 0o755)
        env = os.environ | {"HOSTS_DIR": self.folder, "PATH": f"{self.folder}:{os.environ['PATH']}", "ROUNDS": "1", "LAYOUTS": "1+1"}
        done = subprocess.run(["bash", os.path.join(HERE, "hosts.sh")], env=env, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, "round 1 of 1: 1+1\n"))
        self.assertIn("1+1     two-levels             1.5  1.5 to 1.5        1.00 (1.00 to 1.00)", done.stdout)


NEAR, FAR = (cores.State("near", 0.05, 2.5), cores.State("far", 0.4, 4.5))


class Cores(Folder):
    def program(self, *states):
        """Makes a program hvdbench that prints the given states, one in each call."""
        rows = [",".join(map(str, (s.name, 0, 1, s.round_trip_us, s.read_us))) for s in states]
        self.write("rows", "".join(row + "\n" for row in rows))
        head = "# hvdbench cores\\nstate,core,other_core,round_trip_us,read_64KiB_us\\n"
        path = self.write("hvdbench", f"""#!/bin/sh
[ "$*" = "cores --format csv" ] || exit 3
printf '{head}'
head -n 1 {self.folder}/rows
sed -i 1d {self.folder}/rows
""")
        os.chmod(path, 0o755)
        patched = unittest.mock.patch.dict(os.environ, {"HVD_PROGRAMS": self.folder})
        patched.start()
        cores.program.cache_clear()
        self.addCleanup(lambda: (patched.stop(), cores.program.cache_clear()))

    def test_measure(self):
        self.assertIn(cores.measure().name, cores.STATES)  # by the real hvdbench, on this machine

    def test_comment(self):
        self.program(FAR)
        done = run("cores.py")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "# cores,far,0.4000,4.5000\n", ""))
        self.program(cores.State("single", "", ""))
        self.assertEqual(cores.measure(), cores.State("single", 0, 0))
        self.program(cores.State("nearly", 1, 1))
        with self.assertRaisesRegex(ValueError, "'nearly', want one of near, far, single"):
            cores.measure()

    def test_runs_in(self):
        lines = ["a", NEAR.comment(), NEAR.comment() + "\n", "b", "c", FAR.comment(), "d"]
        self.assertEqual(list(cores.runs_in(lines)), [(1, ["a"], None, NEAR), (3, [], NEAR, NEAR), (4, ["b", "c"], NEAR, FAR), (7, ["d"], FAR, None)])

    def test_watch(self):
        # The third run and the last one change the state.
        self.program(NEAR, NEAR, cores.State("near", 0.07, 2.75), FAR, FAR, FAR, NEAR)
        watch = cores.Watch()
        for number, (ours, peer) in enumerate(((10, 20), (5, 20), (1, 2)), 1):
            for key, us in (("peer", peer), ("ours", ours)):
                result, state = watch.run(lambda us=us: us)
                self.assertEqual(result, us)
                watch.add(state, number, {key: us})
        self.assertEqual(watch.states(), ["near", "far"])
        self.assertEqual((watch.of("near", "peer"), watch.of("far", "peer"), watch.of("far", "ours")), ([20], [2], [5]))
        self.assertEqual(watch.ratios("near", "ours", "peer"), [0.5])
        # No round has a run of both in the far state: in round 2 only ours, and in round 3 only the peer.
        self.assertEqual((watch.ratio_text("near", "ours", "peer"), watch.ratio_text("far", "ours", "peer")), ("0.50 (0.50 to 0.50) of 1", "-"))
        self.assertEqual(watch.summary(), "near cores in 2 runs (round trip 0.05 to 0.07 us, read of 64 KiB 2.5 to 2.8 us); "
                         "far cores in 2 runs (round trip 0.40 to 0.40 us, read of 64 KiB 4.5 to 4.5 us); "
                         "2 of 6 runs left out, because the state of the cores changed meanwhile")

    def test_border(self):
        """Where round trips take about 0.2 us, all runs are counted in the state of the first one."""
        watch = cores.Watch(iter([cores.State("near" if us < 0.2 else "far", us, 3) for us in (0.19, 0.21, 0.26, 0.18, 0.2, 0.4, 0.28, 0.26)]).__next__)
        self.assertEqual([watch.run(lambda: 0)[1] for _ in range(7)], ["near", "near", "near", "near", None, "far", "far"])
        self.assertIn("near cores in 4 runs (round trip 0.18 to 0.26 us, read", watch.summary())
        with open(os.path.join(cores.ROOT, "cmd", "hvdbench", "cores.go"), encoding="utf-8") as file:
            self.assertIn(f"const sameRatio = {cores.RATIO}\n", file.read())


def results(*runs):
    """Returns the results of runs, each given as (round, state before, state after, values by key)."""
    r = cores.Results()
    for number, before, after, values in runs:
        r.add(r.count(before, after), number, values)
    return r


class Tables(unittest.TestCase):
    """Each table has two rounds in the near state, one in the far state, and a run during which the state changed."""

    def states(self, key, *values):
        """Returns runs of a key with the given values."""
        states = ((NEAR, NEAR), (NEAR, NEAR), (FAR, FAR), (FAR, NEAR))
        return [(number, *state, {key: value}) for (number, state), value in zip(enumerate(states), values)]

    def check(self, text, near, far):
        """Checks the lines of the two states."""
        self.assertIn("2 of 8 runs left out", text)
        before, between, after = re.split("near cores|far cores", text.lower().partition("\n")[2])
        self.assertEqual(before.strip("# \n"), "")
        for part, want in ((between, near), (after, far)):
            for line in want:
                self.assertIn(line, part)

    def test_table(self):
        r = results(*self.states("a", 1, 3, 50, 999), *self.states("b", 2, 2, 10, 999))
        self.check("\n".join(r.table(["a", "b"], "us", 1)), ["  2.0 us   (1.0 to 3.0), 2 rounds", "  2.0 us   (2.0 to 2.0), 2 rounds"],
                   ["50.0 us   (50.0 to 50.0), 1 round", "10.0 us   (10.0 to 10.0), 1 round"])

    def test_mpi(self):
        for ours, peer, near, far in ((("mpich", "lockstep", "ours"), ("mpich", "lockstep", "two"), "| mpich | - | 2.00 us (2.00 to 2.00) | - |", "10.0 us (10.0 to 10.0)"),
                                      (("mpich", 1 << 20, "ours"), ("mpich", 1 << 20, "peer"), "| 1 mib | 2.00 us (2.00 to 2.00) |", "| 1 mib | 10.0 us")):
            r = results(*self.states(ours, 1, 3, 50, 999), *self.states(peer, 2, 2, 10, 999))
            self.check("\n".join(mpi.tables(r, ["mpich"])), [near, "2.00 us (1.00 to 3.00)", " 1.00 (0.50 to 1.50) of 2 "],
                       [far, "50.0 us (50.0 to 50.0)", " 5.00 (5.00 to 5.00) of 1 "])

    def test_hosts(self):
        lines = []
        for case, times in (("two-levels", (1000, 3000, 50000, 999)), ("one-level", (2000, 2000, 10000, 999))):
            for number, before, after, values in self.states(case, *times):
                lines += [before.comment(), "round,layout,case,sent,bytes,mean_us", f"{number},2+2,{case},400,100,{values[case]}", after.comment()]
        self.check("\n".join(hosts.table(lines, 1)), ["2+2     two-levels             2.0  1.0 to 3.0        1.00 (0.50 to 1.50) of 2  2.00"],
                   ["2+2     two-levels            50.0  50.0 to 50.0      5.00 (5.00 to 5.00) of 1  2.00", "one-level             10.0"])

    def test_watch_cost(self):
        spec = importlib.util.spec_from_file_location("watch_cost", os.path.join(HERE, "watch-cost.py"))
        watch_cost = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(watch_cost)
        r = results(*self.states("metrics", 1100, 1210, 5000, 999), *self.states("none", 1000, 1100, 1000, 999))
        text = "\n".join(watch_cost.table(r, list(watch_cost.WAYS)))
        self.check(text, ["none: 1.05 ms a step (1.00 to 1.10)", "metrics          median +10.00 %", "+10.00 to +10.00 %, 2 rounds"], ["none: 1.00 ms a step"])
        self.assertEqual(text.count("median"), 1)  # one round has no interval
        reads, times = iter([(161.0, 10.0), (483.0, 10.5)]), iter([100, 200, 110, 600])
        with unittest.mock.patch.multiple(watch_cost, tensors=lambda: next(reads), used=lambda _: next(times)):
            w = watch_cost.window(0, [1, 2])  # two steps in half a second
        self.assertEqual((round(w.us), w.hvdrun, w.job, round(w.step)), (250_000, 20, 820, 205))
        rounds = [{"none": watch_cost.Window(1e6, 10 + n, 1000), "none again": watch_cost.Window(1e6, 10 + n, 990),
                   "viewer": watch_cost.Window(1e6, 50 + n, 1030)} for n in range(3)]
        text = "\n".join(watch_cost.processor_times(rounds, 2))
        for line in ("none             median    11.00 (10.00 to 12.00)\n",
                     "viewer           median    51.00 (50.00 to 52.00)   +2.00 % of 2 cores, 95 % interval +2.00 to +2.00 %",
                     "none again       median   990.00 (990.00 to 990.00)   -0.50 % of 2 cores",
                     "viewer           median  1030.00 (1030.00 to 1030.00)   +3.00 % of a step"):
            self.assertIn(line, text)
        child = subprocess.Popen(["sleep", "60"])
        try:
            self.assertIn(child.pid, watch_cost.family(os.getpid()))
            self.assertGreater(watch_cost.used(os.getpid()), 0)
        finally:
            child.kill()
            child.wait()


class Report(Folder):
    def add(self, file, peer, op, size, *times, first=1, before=NEAR, after=NEAR):
        for number, us in enumerate(times, first):
            self.write(f"{file}-np2-round{number}.csv", f"{before.comment()}\n{peer},{op},2,{size},20,{us:.3f},1.0,1.0,1.0\n{after.comment()}\n")

    def test_page(self):
        self.add("ours", "ours", "allreduce", 1024, 2, 3)
        self.add("ours", "ours-arena-raw", "allreduce", 1024, 1, 1)
        self.add("ompi", "ompi", "allreduce", 1024, 4, 10)
        self.add("ompi-spin", "ompi-spin", "allreduce", 1024, 5, 2)
        self.add("mpich", "mpich", "allreduce", 1024, 40, 100)
        self.add("gloo", "gloo-ring", "allreduce", 1024, 0.5, 0.25)  # ratios of collectives are not relative to gloo
        self.add("gloo", "gloo-hd", "allreduce", 1024, 0.125, 8)
        self.add("ours", "ours", "resnet50_async", 102228128, 10000, 10000)
        self.add("ompi", "ompi", "resnet50_pertensor", 102228128, 40000, 20000)
        self.add("ompi", "ompi", "resnet50_async", 102228128, 80000, 80000)
        self.add("gloo", "gloo-ring", "resnet50_pertensor", 102228128, 30000, 50000)
        self.add("ours", "ours", "barrier", 0, 1.5)  # only in the first round
        self.add("ompi", "ompi", "barrier", 0, 1, 1)
        for peer, us in (("ours", 10), ("ompi", 20), ("ompi-spin", 30), ("mpich", 40)):
            self.add(peer, peer, "allreduce", 1024, us, first=3, before=FAR, after=FAR)
        # These are not compared: in round 4 the slowest library ran in another state, in round 5 ours, and in round 6 the
        # state changed.
        for peer, us in (("ours", 700), ("ompi", 70), ("ompi-spin", 71)):
            self.add(peer, peer, "allreduce", 1024, us, first=4)
            self.add(peer, peer, "allreduce", 1024, us, first=5, after=NEAR if peer != "ours" else FAR, before=NEAR if peer != "ours" else FAR)
            self.add(peer, peer, "allreduce", 1024, us, first=6, after=FAR)
        self.add("mpich", "mpich", "allreduce", 1024, 400, first=4, before=FAR, after=FAR)
        self.write("mpich-np2-round2.csv", "# FAILED,mpich,2,status 124\n")
        self.write("about.txt", "Machine: a test\n")
        self.write("commands.txt", "make bench-peers\n")
        self.write("limits.csv", "memcpy,64KiB,median=1,best=1,worst=1,GB/s\n")
        done = run("report.py", self.folder, "-o", os.path.join(self.folder, "chart.md"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.read("chart.md"), golden("report.md"))
        for want in (
            # In round 1, the best of the others is ompi with 4, and ours have 2 and 1. In round 2, it is ompi-spin with
            # 2, and ours have 3 and 1.
            "| allreduce 1 KiB | 3.00 ompi | **1.00** (0.50–1.50) of 2 | **0.38** (0.25–0.50) of 2 |",
            # Each round is compared with the best time of all others in any mode: 30 ms of gloo in round 1, and 20 ms
            # of ompi in round 2.
            "| resnet50 async | 25.0 ompi | **0.42** (0.33–0.50) of 2 | – |",
            "| barrier | 1.00 ompi | **1.50** (1.50–1.50) of 1 | – |",
            # In the far state, only round 3 counts.
            "### 2 ranks, far cores: collectives, relative to the faster of Open MPI and MPICH",
            "| allreduce 1 KiB | 20.0 ompi | **0.50** (0.50–0.50) of 1 | – |",
            "3 of 39 runs left out",
            "2 of 10 ratios left",
            "- round 2: mpich,2,status 124",
        ):
            self.assertIn(want, self.read("chart.md"))
        svg = xml.etree.ElementTree.fromstring(self.read("chart.svg"))
        self.assertEqual(len(svg.findall(f"{SVG}polyline")), 6)  # gloo's algorithms form one line

    def test_errors(self):
        with self.assertRaisesRegex(plot.InputError, "no results"):
            report.Comparison(self.folder)
        self.write("ompi-np2-round1.csv", "ompi,allreduce\n")
        with self.assertRaisesRegex(plot.InputError, "ompi-np2-round1.csv, line 1"):
            report.Comparison(self.folder)

    def test_results_without_a_state(self):
        self.add("ours", "ours", "allreduce", 1024, 1, after=FAR)
        self.write("ours-np2-round2.csv", "ours,allreduce,2,1024,20,1.0,1.0,1.0,1.0\n")
        with self.assertRaisesRegex(plot.InputError, "2 of 2 runs left out"):
            report.Comparison(self.folder)
        self.write("ours-np2-round2.csv", "# cores,nearly,1,1\n")
        with self.assertRaisesRegex(plot.InputError, "ours-np2-round2.csv: .*'nearly'"):
            report.Comparison(self.folder)


if __name__ == "__main__":
    unittest.main()
