#!/usr/bin/env bash
# Builds the tests of internal/kernel, and of the packages given as arguments, for arm64 and runs them under
# emulation: scripts/arm64-test.sh [package]... Fuzz targets run their seeds alone. Needs Debian's qemu-user-static;
# what an emulator says of time, and of the order in which processors see memory, is worth nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

emulator=qemu-aarch64-static
if ! command -v "$emulator" >/dev/null; then
	echo "arm64-test: $emulator: not found, want Debian's package qemu-user-static" >&2
	exit 1
fi
# -exec, so that it does not matter whether the kernel hands foreign programs to the emulator. No cgo: it would need
# a C compiler for arm64.
GOOS=linux GOARCH=arm64 CGO_ENABLED=0 go test -exec "$emulator" -count=1 ./internal/kernel "$@"
