#!/usr/bin/env bash
# Builds libgohvd.so, the library for programs in other languages than Go: build-libgohvd.sh FILE [FLAG OF GO BUILD ...]
# CC, GOARCH and the other variables of go build apply. The library has NCCL, which it loads only if it is needed. With
# -tags nccl,mpi it also has MPI (docs/mpi.md). LDFLAGS are further flags of go tool link. With -trimpath, as for the
# wheels, the packages without C are compiled once for both.
set -euo pipefail
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
CGO_ENABLED=1 ${GO:-go} build -buildmode=c-shared -trimpath -tags nccl -o "$out" "$@" -ldflags "-s -w ${LDFLAGS-} -extldflags
	'-Wl,--version-script=$PWD/cmd/libgohvd/exports.map -Wl,-soname,libgohvd.so -Wl,-z,nodelete'" ./cmd/libgohvd
rm -f "${out%.so}.h" # of cgo; programs use gohvd.h
