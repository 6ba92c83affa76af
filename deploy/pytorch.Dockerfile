# Python, PyTorch and gohvd, for the manifests in this folder. ../Dockerfile makes a smaller image, without Python.
#
#   docker build -f deploy/pytorch.Dockerfile -t gohvd-pytorch .
#   docker run --rm --shm-size=1g gohvd-pytorch hvdrun -np 2 python3 /opt/gohvd/pytorch_digits.py
#
# BUILDER is any image with Go 1.26 in /usr/local/go. BASE is an image of Debian or Ubuntu with Python 3.11 or newer and
# pip. TORCH is what pip installs beside gohvd, for example "torch==2.9.1 torchvision".
ARG BUILDER=golang:1.26-bookworm
ARG BASE=python:3.12-slim-bookworm
FROM ${BUILDER} AS go

FROM ${BASE} AS build
COPY --from=go /usr/local/go /usr/local/go
WORKDIR /src
COPY . .
RUN PATH=$PATH:/usr/local/go/bin python3 -m pip wheel --no-deps --wheel-dir /wheels ./python ./python/horovod_shim

FROM ${BASE}
ARG TORCH=torch
# ssh is for jobs on several hosts that hvdrun starts, as with the MPI operator. The operator makes a key for each job, and
# pods get a new host key each time, which nobody could check.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd \
    && printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' >/etc/ssh/ssh_config.d/gohvd.conf \
    && printf 'StrictModes no\n' >/etc/ssh/sshd_config.d/gohvd.conf
RUN python3 -m pip install --no-cache-dir ${TORCH}
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-index /wheels/*.whl && rm -r /wheels
COPY examples/pytorch_digits.py /opt/gohvd/
COPY examples/optdigits/optdigits.csv.gz /opt/gohvd/optdigits/
