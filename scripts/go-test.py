#!/usr/bin/env python3
"""Prints what ``go test -json`` writes as go test does, and also the tests that were skipped and why.

Without -v, go test does not tell which tests of a package that passes were skipped.
"""

import collections
import json
import sys

outputs = collections.defaultdict(list)  # what each test has printed, and each package outside of tests

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
        if action == "fail":
            sys.stdout.writelines(output)
        elif test and action == "skip":
            # The reason comes after the name of the file, and before the verdict.
            reason = "".join(o for o in output if not o.startswith("===") and "--- SKIP" not in o)
            print(f"skip\t{package} {test}: {' '.join(reason.split())}")
        elif not test and action == "pass":
            sys.stdout.writelines(o for o in output if o.startswith("ok"))
        sys.stdout.flush()

# The tests that had no end, because go test was killed.
for output in outputs.values():
    sys.stdout.writelines(output)
