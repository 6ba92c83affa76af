# Vets the packages with assembly for arm64, builds the tests of internal/kernel and runs them under emulation:
# scripts/arm64-test.sh [package]... It runs the tests of the packages given as arguments too. Fuzz targets run only on
# their seeds. It needs Debian's qemu-user-static. Under emulation the tests show nothing about speed, nor about the
# order in which processors see writes to memory.
set -euo pipefail
cd "$(dirname "$0")/.."

emulator=qemu-aarch64-static
if ! command -v "$emulator" >/dev/null; then
	echo "arm64-test: $emulator: not found, want Debian's package qemu-user-static" >&2
	exit 1
fi
# cgo is off, because it would need a C compiler for arm64.
export GOOS=linux GOARCH=arm64 CGO_ENABLED=0
go vet ./internal/kernel ./internal/shmem
# -exec runs the emulator explicitly, so that the kernel need not be configured to run programs for arm64.
go test -exec "$emulator" -count=1 ./internal/kernel "$@"
