#!/usr/bin/env bash
# Builds deploy/pytorch.Dockerfile with buildah and runs its programs. Needs root, Debian's buildah and debootstrap, and
# the package registries. Debian's Python takes the place of the base image, the Go toolchain on PATH that of the builder
# image, and numpy that of PyTorch, which is larger by some GB.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
clean() {
	umount --recursive "$work/root/overlay" 2>/dev/null || true
	rm -rf "$work"
}
trap clean EXIT
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
b() { buildah --root "$work/root" --runroot "$work/run" "$@"; }

go=$(b from scratch)
b copy -q "$go" "$(go env GOROOT)" /usr/local/go
b commit -q "$go" gohvd-go >/dev/null
b rm "$go" >/dev/null

debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$work/debian" >/dev/null
cp /etc/ssl/certs/ca-certificates.crt "$work/debian/etc/ssl/certs/"
cp /etc/apt/apt.conf.d/* "$work/debian/etc/apt/apt.conf.d/"
printf '[global]\nbreak-system-packages = true\n' >"$work/debian/etc/pip.conf"
base=$(b from scratch)
b copy -q "$base" "$work/debian" /
b config --env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env GOPROXY="$(go env GOPROXY)" "$base"
b commit -q "$base" gohvd-base >/dev/null
b rm "$base" >/dev/null

b build -q --build-arg BUILDER=localhost/gohvd-go --build-arg BASE=localhost/gohvd-base --build-arg TORCH=numpy \
	-f deploy/pytorch.Dockerfile -t gohvd-pytorch . >/dev/null
image=$(b from localhost/gohvd-pytorch)
b run "$image" -- hvdrun -np 2 --tag-output=false hvdbench -b 8 -e 64 -f 8 | tee "$work/out"
grep -q 'Out of bounds values : 0 OK' "$work/out"
b run "$image" -- horovodrun --version
b run "$image" -- sh -euc 'sshd=$(command -v sshd); ssh-keygen -A; $sshd -t; test -f /opt/gohvd/optdigits/optdigits.csv.gz'
echo "pytorch-image-check: passed"
