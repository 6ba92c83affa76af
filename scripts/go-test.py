#!/usr/bin/env python3
"""Prints what ``go test -json`` writes as go test does, and also the tests that were skipped and why, and, for each
package that takes over a minute, its slowest tests.

Without -v, go test does not tell which tests of a package that passes were skipped, and how long each has taken.
"""

import collections
import json
import sys

SLOW_SECONDS = 60

outputs = collections.defaultdict(list)  # what each test has printed, and each package outside of tests
took = collections.defaultdict(dict)  # the seconds of each test of a package

for line in sys.stdin:
    try:
        event = json.loads(line)
    except ValueError:
        sys.stdout.write(line)
        continue
    action, package, test = event["Action"], event.get("Package"), event.get("Test")
    if action == "build-output":
        sys.stdout.write(event["Output"])
    elif action == "output":
        outputs[package, test].append(event["Output"])
    elif action in ("pass", "fail", "skip"):
        output = outputs.pop((package, test), [])
        if test:
            took[package][test] = event["Elapsed"]
        if action == "fail":
            sys.stdout.writelines(output)
        elif test and action == "skip":
            # The reason comes after the name of the file, and before the verdict.
            reason = "".join(o for o in output if not o.startswith("===") and "--- SKIP" not in o)
            print(f"skip\t{package} {test}: {' '.join(reason.split())}")
        elif not test and action == "pass":
            sys.stdout.writelines(o for o in output if o.startswith("ok"))
        tests = took.pop(package, {}) if not test else {}
        if tests and event["Elapsed"] > SLOW_SECONDS:
            # The time of a test does not include that of its parallel subtests.
            whole = {name.rpartition("/")[0] for name in tests}
            slowest = sorted(tests.keys() - whole, key=tests.get, reverse=True)[:3]
            print(f"slow\t{package}: " + ", ".join(f"{name} {tests[name]:.0f} s" for name in slowest))
        sys.stdout.flush()

# The tests that had no end, because go test was killed.
for output in outputs.values():
    sys.stdout.writelines(output)
