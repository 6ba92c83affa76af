# make check is what CI runs. The first target lists the others.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c

GO       ?= go
# Where the tools are built. They stand in a module of their own, out of the users' module graph.
TOOLS    := $(CURDIR)/.tools
# Runs of each target, not seconds: when seconds end in the middle of a run, go test calls that a failure.
FUZZTIME ?= 1000000x
BENCH    ?= .
# The first that imports torch: the first on the path may not see Debian's packages.
PYTHON   ?= $(or $(firstword $(foreach p,python3 /usr/bin/python3,$(shell $(p) -c 'import torch' 2>/dev/null && echo $(p)))),\
	$(error no interpreter imports torch; Debian has it in python3-torch))

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: check
check: test others ## everything CI runs

.PHONY: others
others: format vet lint race nocgo noasm changed generated ## what CI runs beside the tests

.PHONY: nightly
nightly: check arm64 image fuzz conformance deaths test-python ## what takes too long for each change: some hours

.PHONY: test
test: ## all tests
	$(GO) test ./...

# The detector finds nothing where no package of ours synchronizes, which is what the imports of the product's packages say.
SYNCHRONIZES = {{range .Imports}}{{if or (eq . "sync") (eq . "sync/atomic")}}{{$$.ImportPath}}{{break}}{{end}}{{end}}

# Of the jobs of several processes come those whose ranks are this test program and die: others run programs without the detector.
.PHONY: race
race: ## the tests of what has goroutines under the race detector, in random order, with less data
	$(GO) test -race -shuffle=on -short -timeout 30m $$($(GO) list -f '$(SYNCHRONIZES)' ./...) ./internal/conformance
	$(GO) test -race -shuffle=on -timeout 30m -run 'Kill$$|StoppedRank|LeaveWithout' ./internal/e2e

# No package of ours has C in it, and go vet for arm64 has compiled all without. What differs is how names are resolved.
.PHONY: nocgo
nocgo: ## without a C compiler: ranks find each other by name, and jobs run
	CGO_ENABLED=0 $(GO) test ./internal/place
	CGO_ENABLED=0 $(GO) test -run InitAgain ./internal/e2e

.PHONY: noasm
noasm: ## the tests of the kernels without assembly
	$(GO) test -tags noasm ./internal/kernel

.PHONY: changed
changed: ## arm64 and image, unless they passed with the files as they are
	@for target in arm64 image; do scripts/tested.sh $$target || $(MAKE) --no-print-directory $$target; done

.PHONY: arm64
arm64: ## the tests of the kernels for arm64, under emulation
	scripts/arm64-test.sh
	scripts/tested.sh --note arm64

.PHONY: deaths
deaths: ## every death, at work and in Init, every fault and every ending, five times
	$(GO) test -count 1 -timeout 0 -run 'Kill$$|Faults|DeathInInit|Endings' ./internal/e2e -args -whole 5

.PHONY: conformance
conformance: ## every operation in every configuration against the reference; half an hour
	$(GO) test ./internal/conformance -v -timeout 0 -args -full

.PHONY: python
python: ## say which Python has torch, and will run the tests
	@echo $(PYTHON)

# What the Python tests run.
.PHONY: python-programs
python-programs:
	$(GO) build -o "$(TOOLS)/" ./cmd/hvdrun ./cmd/hvdd

TEST_PYTHON = HVD_RUN="$(TOOLS)/hvdrun" HVD_SIDECAR_BINARY="$(TOOLS)/hvdd" $(1) python/tests/all.py

.PHONY: test-python
test-python: python-programs ## the tests of the Python package at 1, 2 and 3 ranks
	$(call TEST_PYTHON,$(PYTHON)) $(PYTHON)

# The Go tests whose other half is a PyTorch.
TORCHRUN_TESTS = Torch|OtherLaunchers/python3-torch

.PHONY: test-torch2
test-torch2: python-programs ## the same with the newest torch of PyPI too, some GB, and with PYTHONS; writes docs/compatibility.md
	python3 -m venv "$(TOOLS)/torch2"
	"$(TOOLS)/torch2/bin/python" -m pip install --quiet --upgrade torch numpy
	TESTTORCH_PYTHON="$(TOOLS)/torch2/bin/python" $(GO) test -count 1 -run '$(TORCHRUN_TESTS)' ./store/c10d ./internal/place ./internal/pythontest ./internal/e2e
	$(call TEST_PYTHON,$(PYTHON)) --page docs/compatibility.md $(PYTHON) "$(TOOLS)/torch2/bin/python" $(PYTHONS)

.PHONY: bench
bench: ## all benchmarks (BENCH=regexp chooses)
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

.PHONY: bench-peers
bench-peers: ## ours and other libraries in turn, most of an hour; writes docs/benchmarks.md
	bench/compare.sh

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
	cd tools && $(GO) build -o "$(TOOLS)/" honnef.co/go/tools/cmd/staticcheck
	"$(TOOLS)/staticcheck" ./...

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME, an hour or so
	@for file in $$(git grep -l '^func Fuzz' -- '*_test.go'); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\).*/\1/p' $$file); do \
			echo "$$file $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./$$(dirname $$file); \
		done; \
	done

.PHONY: generate
generate: ## generate code anew
	cd tools && $(GO) build -o "$(TOOLS)/" google.golang.org/protobuf/cmd/protoc-gen-go
	PATH="$(TOOLS):$$PATH" $(GO) generate ./...

.PHONY: generated
generated: generate ## fail if generated files are not up to date
	git diff --exit-code -- '*.pb.go' internal/kernel docs/settings.md

.PHONY: image
image: ## build the Dockerfile with buildah and run the example in it
	scripts/image-check.sh
	scripts/tested.sh --note image
