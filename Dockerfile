# The launcher, the sidecar and the example as static binaries on nothing.
#
#   docker build -t gohvd .
#   docker run --rm gohvd -np 2 /usr/local/bin/digits
#
# BUILDER is any image with Go 1.26 and a shell.
ARG BUILDER=golang:1.26-bookworm
FROM ${BUILDER} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags=-s -o /out/ ./cmd/hvdrun ./cmd/hvdd ./examples/digits

FROM scratch
COPY --from=build /out/ /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/hvdrun"]
CMD ["--help"]
