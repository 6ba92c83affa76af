# make check is what CI runs. The first target lists the others.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c

GO       ?= go
# Where the tools are built. They stand in a module of their own, out of the users' module graph.
TOOLS    := $(CURDIR)/.tools
# Runs, not seconds: when seconds end in the middle of a run, go test calls that a failure.
FUZZTIME ?= 60000x
BENCH    ?= .

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: check
check: format vet lint test race nocgo noasm arm64 fuzz generated ## everything CI runs but the image

.PHONY: test
test: ## all tests
	$(GO) test ./...

.PHONY: race
race: ## all tests under the race detector, in random order, fewer rounds of killing
	$(GO) test -race -shuffle=on -short ./...

.PHONY: nocgo
nocgo: ## all tests without a C compiler
	CGO_ENABLED=0 $(GO) test ./...

.PHONY: noasm
noasm: ## the tests of the kernels without assembly
	$(GO) test -tags noasm ./internal/kernel

.PHONY: arm64
arm64: ## the tests of the kernels for arm64, under emulation
	scripts/arm64-test.sh

.PHONY: conformance
conformance: ## every operation in every configuration against the reference; half an hour
	$(GO) test ./internal/conformance -v -timeout 0 -args -full

.PHONY: bench
bench: ## all benchmarks (BENCH=regexp chooses)
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

.PHONY: bench-peers
bench-peers: ## ours and other libraries in turn, most of an hour; writes docs/benchmarks.md
	scripts/bench-peers.sh

.PHONY: format
format: ## fail if gofmt would change something
	@out=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$out" || { echo "gofmt would change:"; echo "$$out"; exit 1; }

.PHONY: vet
vet:
	$(GO) vet ./...
	GOARCH=arm64 $(GO) vet ./...
	$(GO) vet -tags noasm ./internal/kernel

.PHONY: lint
lint: ## staticcheck
	cd tools && $(GO) build -o $(TOOLS)/ honnef.co/go/tools/cmd/staticcheck
	$(TOOLS)/staticcheck ./...

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME
	@for file in $$(git grep -l '^func Fuzz' -- '*_test.go'); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\).*/\1/p' $$file); do \
			echo "$$file $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./$$(dirname $$file); \
		done; \
	done

.PHONY: generate
generate: ## generate code anew
	cd tools && $(GO) build -o $(TOOLS)/ google.golang.org/protobuf/cmd/protoc-gen-go
	PATH="$(TOOLS):$$PATH" $(GO) generate ./...

.PHONY: generated
generated: generate ## fail if generated files are not up to date
	git diff --exit-code -- '*.pb.go' internal/kernel docs/settings.md

.PHONY: image
image: ## build the Dockerfile with buildah and run the example in it
	scripts/image-check.sh
