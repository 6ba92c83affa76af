# Reports whether a slow check has to run again: it has to if its input files have changed since it last passed.
#
#   scripts/tested.sh NAME         succeeds if check NAME has passed with the current files
#   scripts/tested.sh --note NAME  records that check NAME has passed with the current files
#
# .ci/tested/NAME has a hash of the input files and is part of the repository. After a change of the input files, run
# "make NAME". If you do not, CI runs the check.
set -euo pipefail
cd "$(dirname "$0")/.."

note=
if [ "$1" = --note ]; then
	note=1
	shift
fi
case $1 in
arm64) inputs=(internal/kernel half internal/tensor internal/shmem/pause_a* scripts/arm64-test.sh) ;;
asan) inputs=(internal/cuda ops/nccl internal/testcuda) ;;
*)
	echo "tested: $1: want arm64 or asan" >&2
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
