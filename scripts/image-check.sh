#!/usr/bin/env bash
# Builds the Dockerfile with buildah and trains two ranks in the image it makes. Needs root, Debian's buildah and
# busybox-static, and Go. The builder image has only busybox, since no other image can be had without a registry. It uses
# the Go toolchain that is first on PATH, its modules and its build cache, as volumes, so that only the packages that have
# changed are compiled.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
b() { buildah --root "$work/root" --runroot "$work/run" "$@"; }

go mod download
builder=$(b from scratch)
for program in busybox sh mkdir; do
	b copy -q "$builder" /bin/busybox /bin/$program
done
b run "$builder" -- mkdir -p /tmp /root
b config --env PATH=/usr/local/go/bin:/bin --env HOME=/root --env TMPDIR=/tmp --env GOCACHE=/cache \
	--env GOTOOLCHAIN=local --env GOPROXY=file:///modules --env GOSUMDB=off "$builder"
b commit -q "$builder" gohvd-builder >/dev/null
b rm "$builder" >/dev/null

b build -q --build-arg BUILDER=localhost/gohvd-builder --volume "$(go env GOROOT):/usr/local/go:ro" \
	--volume "$(go env GOMODCACHE)/cache/download:/modules:ro" --volume "$(go env GOCACHE):/cache" -t gohvd . >/dev/null
image=$(b from localhost/gohvd)
# Nothing but our binaries is in it.
mounted=$(b mount "$image")
(cd "$mounted" && find . -type f | sort) | tee "$work/files"
diff "$work/files" <(printf './usr/local/bin/%s\n' digits hvdd hvdrun)
b umount "$image" >/dev/null
b run "$image" -- /usr/local/bin/hvdrun -np 2 /usr/local/bin/digits -epochs 2 | tee "$work/out"
grep -q '^\[0\]<stdout>:digits: ranks=2 ' "$work/out"
echo "image-check: passed"
