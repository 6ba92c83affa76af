# CI runs make check. make help, the first target, lists the others.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c

GO       ?= go
# The tools are built in this folder. Their sources are in a module of their own, so that users of this module
# do not depend on them.
TOOLS    := $(CURDIR)/.tools
# The number of runs of each fuzz target. It is not a time, because go test reports a failure if a time limit
# ends in the middle of a run.
FUZZTIME ?= 1000000x
BENCH    ?= .
# The folder for the wheels, and the machines for which make wheel makes them, as Go names them.
DIST     ?= dist
WHEELS   ?= amd64 arm64
# The first interpreter that can import torch. The first one on the path may not find Debian's packages.
PYTHON   ?= $(or $(firstword $(foreach p,python3 /usr/bin/python3,$(shell $(p) -c 'import torch' 2>/dev/null && echo $(p)))),\
	$(error no interpreter imports torch; Debian has it in python3-torch))

# By default a program with the race detector sleeps for a second before it exits. Without that it waits only for
# reports that have begun.
export GORACE ?= atexit_sleep_ms=0

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The targets of check that only read the working tree, so that make -j may run them at the same time. The tests begin
# first, because they take longest, and wait most of that time.
.PHONY: readers
readers: test format vet race wheel-check test-openmpi nocgo noasm test-nccl image

.PHONY: check
check: readers ## everything CI runs; make -j3 overlaps the waits of the targets
	$(MAKE) --no-print-directory changed
	$(MAKE) --no-print-directory generated

.PHONY: nightly
nightly: check race-all test-mpi test-new-torch test-ray wheel-twice wheel wheel-arm64 arm64 asan pytorch-image slurm kubernetes nccl-libraries gpu-check-stand-ins fuzz conformance autotune scale deaths stress test-torch2 torch-own-tests test-frameworks test-ray-train test-spark ## the checks that take too long for each change: a few hours

# On a busy machine the tests of a package may take longer than the 10 minutes that go test allows by default. Some
# tests run programs and Python modules of this checkout, of whose changes the cache of go test does not know. The
# packages that take longest begin first, so that no processor is idle at the end. They mostly wait for processes and
# time limits, so two more packages are tested at a time than there are processors.
.PHONY: test
test: ## go test ./..., which also prints the tests that are skipped, and why, and the slowest ones
	$(GO) test $(VETTED) -json -p $$(($$(nproc) + 2)) -count 1 -timeout 45m ./internal/pythontest ./internal/e2e ./internal/conformance ./ps ./... | scripts/go-test.py

# Selects the packages that import sync or sync/atomic. In packages without synchronization the race detector
# finds nothing.
SYNCHRONIZES = {{range .Imports}}{{if or (eq . "sync") (eq . "sync/atomic")}}{{$$.ImportPath}}{{break}}{{end}}{{end}}

# The flag of go test for targets whose files are checked by the target vet or by go vet in the same target.
VETTED = -vet=off

# Lists the packages with files for which a build tag decides whether they are compiled. The target vet checks only what
# is compiled without tags.
TAGGED = git grep -lE '^//go:build .*\b($(1))\b' -- '*.go' | xargs dirname | sort -u | sed 's|^|./|'

# With the tag nccl, everything is compiled only once for the race detector, because the tests of CUDA devices need it.
# Of the jobs of several processes, only those run in which the ranks are the test program itself and die.
# Other jobs run programs that are built without the detector. Of hvdbench, only the tests of devices and of its own
# goroutines run. The others calculate, or measure in one process what the tests of other packages run under the
# detector. The tests of libgohvd build it without the detector, which does not know of the threads of C.
RACE = $(GO) test $(VETTED) -race -tags nccl -shuffle=on -timeout 30m

# The packages with the goroutines of ranks and nodes while they run, from the public functions to the connections. Their
# few files with the tag race are vetted in race-all, because go vet analyses all that they import again with -race.
RACED = ./hvd ./internal/cuda ./internal/engine ./internal/library ./internal/ps/van ./internal/sidecar \
	./internal/transport/mem ./internal/transport/shm ./internal/transport/tcp ./ops/nccl ./ops/shm

.PHONY: race
race: vet-tool ## test the packages of running ranks and nodes (with stand-ins for CUDA) under the race detector, with less data
	$(GO) vet $(VET) -tags nccl $$($(call TAGGED,nccl))
	$(RACE) -short $(RACED)

.PHONY: race-all
race-all: vet-tool ## test all packages with goroutines and CUDA devices under the race detector
	$(GO) vet $(VET) -race -tags nccl $$($(call TAGGED,race|nccl))
	$(RACE) -short $$($(GO) list -f '$(SYNCHRONIZES)' ./... | grep -v -e cmd/hvdbench -e cmd/libgohvd) ./internal/conformance ./internal/cuda ./internal/testcuda ./ops/nccl
	$(RACE) -run 'Core|Signals|Interrupted|Device' ./cmd/hvdbench
	$(RACE) -run 'Kill$$|StoppedRank|LeaveWithout' ./internal/e2e

# Only the builds with the tags mpi and nccl contain C, a test of internal/lint checks the types of all packages without
# cgo, and wheel-check and image run jobs of programs without it. So only what differs without cgo is tested: how names
# are resolved. The flag is that of the wheels and of the image, whose packages are then in the build cache.
.PHONY: nocgo
nocgo: ## test without a C compiler that ranks find each other by name
	CGO_ENABLED=0 $(GO) test $(VETTED) -trimpath -run 'Loopback|Plain|Master' ./internal/bootstrap

# go list -export compiles into the build cache, and links nothing. The lines are: the programs that tests start, and most
# of what tests consist of, the race detector, most of libgohvd.so, and the programs of the wheels and of the image.
.PHONY: compile
compile: ## compile most of what the targets of check link, for .ci/run
	@$(GO) list -export ./... >/dev/null
	@$(GO) list -export -race -tags nccl $(RACED) >/dev/null
	@$(GO) list -export -buildmode=c-shared -trimpath -tags nccl ./internal/library >/dev/null
	@CGO_ENABLED=0 $(GO) list -export -trimpath -buildvcs=false ./cmd/hvdrun ./cmd/hvdd ./examples/digits >/dev/null

.PHONY: noasm
noasm: ## test the kernels without assembly
	$(GO) test $(VETTED) -tags noasm ./internal/kernel

.PHONY: changed
changed: ## arm64 and asan, each only if its files have changed since it passed
	@for target in arm64 asan; do scripts/tested.sh $$target || $(MAKE) --no-print-directory $$target; done

.PHONY: arm64
arm64: ## vet the assembly for arm64, and test the kernels under emulation
	scripts/arm64-test.sh
	scripts/tested.sh --note arm64

# The detector of leaks does not know which memory Go points to.
.PHONY: asan
asan: ## test the C code for NCCL and CUDA with the address sanitizer
	ASAN_OPTIONS=detect_leaks=0 $(GO) test -asan -tags nccl -count 1 ./internal/cuda ./ops/nccl
	scripts/tested.sh --note asan

.PHONY: deaths
deaths: ## test every death (in operations and in Init), fault, cut and ending five times; every fault in every kind of job three times; 20 random ones on two levels and of nodes; the death of one of 256 ranks
	$(GO) test -count 1 -timeout 0 -run 'Kill$$|Faults|DeathInInit|Endings|ConnectionIsCut' ./internal/e2e -args -whole 5
	$(GO) test -count 1 -timeout 0 -run FaultTable -v ./internal/e2e -args -whole 3 -mpi
	$(GO) test -count 1 -timeout 0 -run FailuresOnTwoLevels -v ./internal/e2e -args -whole 20
	$(GO) test -count 1 -timeout 0 -run KillOneOfMany -v ./internal/e2e -args -many 256
	$(GO) test -count 10 -run KillAndReturn -v ./ps

.PHONY: conformance
conformance: ## test every operation in every configuration against the reference; an hour
	$(GO) test ./internal/conformance -v -timeout 0 -args -full
	$(GO) test -tags nccl ./internal/conformance -run NCCL -v -timeout 0 -args -full

.PHONY: scale
scale: ## compare the simulation with engines in one process and with processes, and print the tables of docs/scale.md
	$(GO) test -count 1 -run 'TestSimulation$$' -v ./internal/engine -args -simulated-ranks 1024
	$(GO) test -count 1 -run 'TestValidation$$' -v -timeout 30m ./internal/engine -args -validate
	$(GO) test -count 1 -run 'TestScale$$' -v -timeout 30m ./internal/simulate -args -scale

.PHONY: autotune
autotune: ## tune on 100 random surfaces of each kind
	$(GO) test -count 1 -run FindsGoodSettings -v ./autotune -args -seeds 100

# The packages with tests that start MPI jobs. Their tests for ranks are in files with the tag mpi.
WITH_MPI = ./ops/mpi ./internal/rank ./internal/conformance ./internal/e2e

.PHONY: test-openmpi
test-openmpi: vet-tool ## test with Open MPI, as jobs of 1 to 4 processes, in Go
	$(GO) vet $(VET) -tags mpi $$($(call TAGGED,mpi))
	$(GO) test $(VETTED) -p 1 -count 1 -run MPI/openmpi -skip PythonWithMPI $(WITH_MPI) -args -mpi

.PHONY: test-mpi
test-mpi: ## test with Open MPI and MPICH, in Go and Python, and run bench/mpi.py
	$(GO) test $(VETTED) -p 1 -count 1 -run MPI $(WITH_MPI) -args -mpi -mpi-all
	bench/mpi.py --rounds 1 --max-bytes 65536

.PHONY: test-nccl
test-nccl: ## test hvdbench and all operations on CUDA devices, with stand-ins for NCCL and CUDA
	$(GO) test $(VETTED) -tags nccl -count 1 -run 'Device|NCCL' ./internal/conformance ./cmd/hvdbench
	$(GO) test $(VETTED) -tags nccl -count 1 -run RepeatedDevice ./hvd

.PHONY: nccl-libraries
nccl-libraries: ## check that PyPI's NCCL, and CUDA runtimes and NVTX for CUDA 12 and 13 (300 MB), have what gohvd calls; needs no GPU
	python3 -m venv "$(TOOLS)/nccl"
	"$(TOOLS)/nccl/bin/python" -m pip install --quiet --upgrade nvidia-nccl-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-runtime nvidia-nvtx-cu12 nvidia-nvtx
	for version in 12 13; do \
		$(GO) test -tags nccl -count 1 -run Real -v ./ops/nccl -args -nccl "$$(find "$(TOOLS)/nccl" -name libnccl.so.2)" \
			-cudart "$$(find "$(TOOLS)/nccl" -name libcudart.so.$$version)" \
			-nvtx "$$(find "$(TOOLS)/nccl" -name libnvtx3interop.so.1 | sort | sed -n "$$((version - 11))p")"; \
	done

.PHONY: libgohvd
libgohvd: ## build bin/libgohvd.so, the library for C and other languages; needs a C compiler
	scripts/build-libgohvd.sh bin/libgohvd.so

# The programs of scripts/gpu-check.sh and gpu-first.sh, which need no Go on the machine with the GPU. Those of
# gpu-first.sh are packed, because some machines get at most 64 MiB.
.PHONY: gpu-check-programs
gpu-check-programs: ## build what scripts/gpu-check.sh and gpu-first.sh run on a machine with a GPU, in bin/gpu-check and bin/gpu.tgz
	CGO_ENABLED=0 $(GO) build -ldflags='-s -w' -o bin/gpu-check/ ./cmd/hvdrun
	CGO_ENABLED=1 $(GO) build -ldflags='-s -w' -tags nccl -o bin/gpu-check/ ./cmd/hvdd ./cmd/hvdbench
	GO="$(GO)" scripts/build-libgohvd.sh bin/gpu-check/libgohvd.so
	CGO_ENABLED=1 $(GO) test -c -ldflags='-s -w' -tags nccl -o bin/gpu-check/ ./ops/nccl ./internal/conformance
	internal/testcuda/standin/build.sh bin/gpu-check/standins
	tar -czf bin/gpu.tgz -C bin/gpu-check hvdrun hvdbench libgohvd.so nccl.test conformance.test
	test "$$(stat -c %s bin/gpu.tgz)" -lt $$((64 << 20))

.PHONY: gpu-check-stand-ins
gpu-check-stand-ins: gpu-check-programs ## run scripts/gpu-check.sh with the stand-ins, also where it must fail; needs no GPU
	PYTHON="$(PYTHON)" scripts/gpu-check.sh --stand-ins --out bin/gpu-check/stand-ins.md
	! STANDIN_NCCL_FAULT=refuse:0:2 PYTHON="$(PYTHON)" scripts/gpu-check.sh --stand-ins --out bin/gpu-check/fault.md
	test "$$(grep -o '| FAIL |' bin/gpu-check/fault.md | wc -l)" = 10

.PHONY: python
python: ## print which Python has torch and will run the tests
	@echo $(PYTHON)

.PHONY: wheel
wheel: ## write wheels and archives for x86_64 and aarch64 to dist/; needs PyPI, and no C compiler
	python=$$(scripts/wheel-python.sh); \
	for goarch in $(WHEELS); do \
		GO="$(GO)" GOARCH=$$goarch "$$python" -m pip --quiet wheel --no-deps --no-build-isolation \
			--wheel-dir "$(DIST)" ./python ./python/horovod_shim; \
	done; \
	"$$python" scripts/archive.py "$(DIST)"

.PHONY: wheel-check
wheel-check: ## build the wheels, follow docs/quickstart.md with them and uninstall them
	GO="$(GO)" PYTHON="$(PYTHON)" scripts/wheel-check.sh

.PHONY: wheel-twice
wheel-twice: ## check that another folder, with other times and modes, gives the same wheels
	GO="$(GO)" PYTHON="$(PYTHON)" scripts/wheel-check.sh --twice

.PHONY: wheel-arm64
wheel-arm64: ## test the library of the wheel for aarch64 under emulation; needs qemu-user-static and libc6-arm64-cross
	rm -rf "$(TOOLS)/arm64"
	$(MAKE) --no-print-directory wheel WHEELS=arm64 DIST="$(TOOLS)/arm64"
	tar -x -f "$(TOOLS)"/arm64/gohvd-*-linux-aarch64.tar.gz -C "$(TOOLS)/arm64" --strip-components=1
	zig=$$("$$(scripts/wheel-python.sh)" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig; \
	$(GO) test $(VETTED) -count 1 -run 'Glibc|StaticTLS|Example' -v ./cmd/libgohvd -args \
		-library "$(TOOLS)/arm64/lib/libgohvd.so" -cc "$$zig cc -target aarch64-linux-gnu.2.17" \
		-exec "qemu-aarch64-static -L /usr/aarch64-linux-gnu"

# The programs that the Python tests run.
.PHONY: python-programs
python-programs:
	$(GO) build -o "$(TOOLS)/" ./cmd/hvdrun ./cmd/hvdd
	GO="$(GO)" scripts/build-libgohvd.sh "$(TOOLS)/libgohvd.so"

TEST_PYTHON = HVD_RUN="$(TOOLS)/hvdrun" HVD_LIBRARY="$(TOOLS)/libgohvd.so" HVD_SIDECAR_BINARY="$(TOOLS)/hvdd" $(1) python/tests/all.py

.PHONY: test-python
test-python: python-programs ## test the Python package at 1, 2 and 3 ranks
	$(call TEST_PYTHON,$(PYTHON)) $(PYTHON)

.PHONY: stress
stress: python-programs ## test threads, joins, signals, crashes and workers of a DataLoader in Python with more rounds
	for ranks in 1 2 3; do \
		(cd python/tests && STRESS=1 PYTHONPATH=.. HVD_RUN="$(TOOLS)/hvdrun" HVD_LIBRARY="$(TOOLS)/libgohvd.so" \
			HVD_SIDECAR_BINARY="$(TOOLS)/hvdd" "$(TOOLS)/hvdrun" -np $$ranks "$(PYTHON)" -X dev \
			-W error::ResourceWarning -m unittest -v test_core_library test_core_process); \
	done

# The Go tests that communicate with PyTorch, and their packages. TestTorchDistributed needs PyTorch 2 in any case, so
# go test ./... has run it. Unless the variable TESTTORCH_FORKED is "no", the processes of launchers are forked from one that has
# imported PyTorch. Those of jobs without a launcher always are.
TORCH_TESTS    = Torch|ElasticDDP|DDPProgram|Programs|OtherLaunchers/torchrun
TORCH_PACKAGES = ./store ./store/c10d ./internal/bootstrap ./internal/pythontest ./internal/e2e

.PHONY: test-new-torch
test-new-torch: ## the Go tests with PyTorch, with that of scripts/new-torch.sh
	python=$$(scripts/new-torch.sh); \
	TESTTORCH_FORKED=no TESTTORCH_PYTHON="$$python" $(GO) test $(VETTED) -count 1 -run '$(TORCH_TESTS)' -skip TorchDistributed $(TORCH_PACKAGES)

.PHONY: test-torch2
test-torch2: python-programs ## test-python also with PyPI's newest torch (some GB) and PYTHONS; writes a part of docs/compatibility.md
	python3 -m venv "$(TOOLS)/torch2"
	"$(TOOLS)/torch2/bin/python" -m pip install --quiet --upgrade torch numpy
	TESTTORCH_FORKED=no TESTTORCH_PYTHON="$(TOOLS)/torch2/bin/python" $(GO) test -count 1 -run '$(TORCH_TESTS)' $(TORCH_PACKAGES)
	$(call TEST_PYTHON,$(PYTHON)) --page docs/compatibility.md $(PYTHON) "$(TOOLS)/torch2/bin/python" $(PYTHONS)

.PHONY: torch-own-tests
torch-own-tests: python-programs ## torch's own tests of backends with PyPI's newest torch (some GB) and PYTHONS; writes a part of docs/compatibility.md
	python3 -m venv "$(TOOLS)/torch2"
	"$(TOOLS)/torch2/bin/python" -m pip install --quiet --upgrade torch numpy expecttest
	HVD_LIBRARY="$(TOOLS)/libgohvd.so" HVD_SIDECAR_BINARY="$(TOOLS)/hvdd" PYTHONPATH=python "$(TOOLS)/torch2/bin/python" python/tests/torch_own_tests.py --page docs/compatibility.md "$(TOOLS)/torch2/bin/python" $(PYTHONS)

.PHONY: test-frameworks
test-frameworks: python-programs ## train with Lightning and run Accelerate's own tests with PyPI's newest torch (some GB)
	python3 -m venv "$(TOOLS)/torch2"
	"$(TOOLS)/torch2/bin/python" -m pip install --quiet --upgrade torch numpy lightning accelerate
	HVD_LIBRARY="$(TOOLS)/libgohvd.so" HVD_SIDECAR_BINARY="$(TOOLS)/hvdd" PYTHONPATH=python "$(TOOLS)/torch2/bin/python" python/tests/frameworks.py

# The tests of a module of python/tests that needs a cluster, in a network namespace that has only loopback. The first
# argument is the interpreter, and the third has folders with further modules.
TEST_CLUSTER = cd python/tests && HVD_RUN="$(TOOLS)/hvdrun" HVD_LIBRARY="$(TOOLS)/libgohvd.so" OMP_NUM_THREADS=1 \
	PYTHONPATH="$(CURDIR)/python:$(CURDIR)/python/horovod_shim:$(3)" unshare --net --pid --fork --kill-child --mount-proc sh -c 'ip link set lo up && exec "$$@"' sh "$(1)" -m unittest -v $(2)

RAY_PYTHON = $$(scripts/venv.sh ray /usr/bin/python3 'ray[train]==2.60.0' numpy==2.4.6)

.PHONY: test-ray
test-ray: python-programs ## test jobs on Ray, on a cluster of two nodes on this machine; needs root and PyPI
	python=$(RAY_PYTHON); $(call TEST_CLUSTER,$$python,ray_jobs.RayTest)

.PHONY: test-ray-train
test-ray-train: python-programs ## train with Ray Train, and lose a node in an elastic job; needs root and PyPI
	python=$(RAY_PYTHON); torch=$$("$$(scripts/new-torch.sh)" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	$(call TEST_CLUSTER,$$python,ray_jobs.RayLongTest,$$torch)

.PHONY: test-spark
test-spark: python-programs ## test jobs on Spark, on a cluster of two workers on this machine; needs root, Java and PyPI
	python=$$(scripts/venv.sh spark /usr/bin/python3 pyspark==4.3.0 numpy==2.4.6); $(call TEST_CLUSTER,$$python,spark_jobs)

.PHONY: bench
bench: ## run all benchmarks, or those that match BENCH=regexp
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

.PHONY: bench-peers
bench-peers: ## benchmark gohvd and other libraries in turn, nearly an hour; writes docs/benchmarks.md
	bench/compare.sh

.PHONY: bench-hosts
bench-hosts: ## measure allreduces between hosts over links of 1 Gbit/s, on two levels and on one; five minutes, needs root
	bench/hosts.sh

.PHONY: bench-mpi
bench-mpi: ## measure gohvd over Open MPI and MPICH beside C programs that use them directly; one minute
	bench/mpi.py

.PHONY: format
format: ## fail if gofmt would change something
	@out=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$out" || { echo "gofmt would change:"; echo "$$out"; exit 1; }

# The flag of go vet with the analyzers of tools/vet, which are those of go vet and of staticcheck.
VET = -vettool="$(TOOLS)/vet"

# go vet keeps the results of packages for each file of the tool. So it must not contain the folder and the commit of the
# checkout: else each commit analyses the standard library again.
.PHONY: vet-tool
vet-tool:
	cd tools && $(GO) build -trimpath -buildvcs=false -o "$(TOOLS)/" ./vet

# With -trimpath, the packages that the tools import are those of vet-tool in the build cache.
.PHONY: vet
vet: vet-tool ## run the analyzers of go vet and of staticcheck; test the tools
	$(GO) vet $(VET) ./...
	cd tools && $(GO) vet -trimpath $(VET) ./... && $(GO) test -trimpath $(VETTED) ./...
	$(GO) vet $(VET) -tags noasm ./internal/kernel

.PHONY: arrows
arrows: ## count methods and arrows between files of PACKAGES="./hvd ./ps", and the code lines of the tree
	@cd tools && $(GO) run ./arrows $(PACKAGES)

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME, about an hour
	@for file in $$(git grep -l '^func Fuzz' -- '*_test.go'); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\).*/\1/p' $$file); do \
			echo "$$file $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x ./$$(dirname $$file); \
		done; \
	done

.PHONY: generate
generate: ## generate all generated files again
	cd tools && $(GO) build -o "$(TOOLS)/" google.golang.org/protobuf/cmd/protoc-gen-go
	PATH="$(TOOLS):$$PATH" $(GO) generate ./...

.PHONY: generated
generated: generate ## fail if generated files are not up to date
	git diff --exit-code -- '*.pb.go' internal/kernel docs/settings.md

.PHONY: pytorch-image
pytorch-image: ## build deploy/pytorch.Dockerfile with buildah and run its programs; needs root, debootstrap and registries
	scripts/pytorch-image-check.sh

.PHONY: slurm
slurm: ## run the scripts of deploy/slurm under a real Slurm; needs root, slurm-wlm and munge
	GO="$(GO)" PYTHON="$(PYTHON)" scripts/slurm-check.sh

# Files of Go modules with the schemas of Kubernetes and of the operators.
KUBERNETES_SCHEMAS = k8s.io/kubernetes@v1.37.2/api/openapi-spec/swagger.json \
	sigs.k8s.io/jobset@v0.8.2/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml \
	sigs.k8s.io/lws@v0.6.1/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml \
	github.com/kubeflow/trainer/v2@v2.0.0/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml \
	github.com/kubeflow/training-operator@v1.8.1/manifests/base/crds/kubeflow.org_pytorchjobs.yaml \
	github.com/kubeflow/mpi-operator@v0.6.0/manifests/base/kubeflow.org_mpijobs.yaml

.PHONY: kubernetes
kubernetes: python-programs ## check the manifests by the schemas of Kubernetes and its operators, and run their pods; needs root, PyPI and a Go proxy
	for file in $(KUBERNETES_SCHEMAS); do echo "$${file%%@*}@$$(cut -d/ -f1 <<<"$${file#*@}")"; done | xargs $(GO) mod download
	cd "$$($(GO) env GOMODCACHE)"; PYTHON="$$($(CURDIR)/scripts/new-torch.sh)" PYTHONPATH="$(CURDIR)/python:$(CURDIR)/python/tests" \
		HVD_RUN="$(TOOLS)/hvdrun" HVD_LIBRARY="$(TOOLS)/libgohvd.so" "$(PYTHON)" -B "$(CURDIR)/scripts/kubernetes-check.py" $(KUBERNETES_SCHEMAS)

.PHONY: image
image: ## build the Dockerfile with buildah and run the example in it
	scripts/image-check.sh
