#!/usr/bin/env bash
# Says which of the slow checks need not run, because what they depend on is as it was when they passed last.
#
#   scripts/tested.sh NAME         succeeds if NAME has passed with the files as they are
#   scripts/tested.sh --note NAME  notes that it has
#
# .ci/tested/NAME has a hash of the files. It is part of the repository: whoever changes them runs make NAME, or CI does.
set -euo pipefail
cd "$(dirname "$0")/.."

note=
if [ "$1" = --note ]; then
	note=1
	shift
fi
case $1 in
arm64) inputs=(internal/kernel half internal/tensor scripts/arm64-test.sh) ;;
image) inputs=(Dockerfile .dockerignore go.mod go.sum scripts/image-check.sh) ;;
*)
	echo "tested: $1: want arm64 or image" >&2
	exit 2
	;;
esac
hash=$(find "${inputs[@]}" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
stamp=.ci/tested/$1
if [ -n "$note" ]; then
	mkdir -p .ci/tested
	echo "$hash" >"$stamp"
else
	[ "$hash" = "$(cat "$stamp" 2>/dev/null)" ]
fi
