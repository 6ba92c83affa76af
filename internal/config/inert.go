package config

import (
	"slices"
	"strconv"
	"strings"
)

// Inert is a row of the second table of this package. That table lists the settings that Horovod or ps-lite
// has but that have no effect in gohvd.
type Inert struct {
	// Name is an environment variable, or empty. If Name ends in *, the row applies to all variables that
	// begin with the part before the *.
	Name string
	// Key is the key in Horovod's settings file, or empty.
	Key string
	// Default is Horovod's default value. A variable or key with this value causes no warning.
	Default string
	// Flags holds the flags of horovodrun, separated by spaces. hvdrun accepts the flags that begin with no-
	// or disable-, because they only turn a feature off. It rejects the other flags.
	Flags string
	// Reason says why the setting has no effect.
	Reason string
}

const (
	noTorus     = "this version has no torus algorithm"
	noJsrun     = "hvdrun does not run jsrun; --mpi runs mpirun (docs/mpi.md)"
	noSpark     = "the arguments of gohvd.spark.run take its place (docs/clusters.md)"
	noPreflight = "hvdrun does not check the network before the start; HOROVOD_GLOO_TIMEOUT_SECONDS limits Init"
	noSecret    = "each job has a secret of its own: see HVD_SECRET_FILE"
	testOnly    = "only Horovod's own tests use it"
	buildOnly   = "only the build of Horovod uses it; gohvd is built by the go command"
)

var inerts = []Inert{
	{"HOROVOD_TORUS_ALLREDUCE", "params.torus_allreduce", "0", "torus-allreduce no-torus-allreduce",
		noTorus},
	{"HOROVOD_BATCH_D2D_MEMCOPIES", "", "1", "",
		"gohvd has no CUDA kernels; one call of CUDA enqueues the copies of a fused operation, if the driver and the " +
			"runtime are 12.8 or newer (docs/nccl.md)"},
	{"HOROVOD_DISABLE_NVTX_RANGES", "", "0", "",
		"NVTX ranges are recorded only for a tool, which can leave out the domain gohvd (docs/nccl.md)"},
	{"HOROVOD_ENABLE_XLA_OPS", "", "0", "", "gohvd does not run inside TensorFlow"},
	{"HOROVOD_ADASUM_MPI_CHUNK_SIZE", "", "1073741824", "", "gohvd has no Adasum over MPI"},
	{"", "", "", "jsrun", noJsrun},
	{"HOROVOD_CCL_CACHE", "", "0", "", "this version has no oneCCL"},
	// disable-cache turns off the cache in which horovodrun keeps the results of network checks
	{"HOROVOD_START_TIMEOUT", "", "30", "disable-cache", noPreflight},
	{"HOROVOD_SECRET_KEY", "", "", "", noSecret},
	{"_HOROVOD_SECRET_KEY", "", "", "", noSecret},
	{"DMLC_PS_VAN_TYPE", "", "zmq", "",
		"nodes of one host use Unix sockets and shared memory, others TCP (docs/ps.md); the priority of a request, as of the van p3, always counts"},
	{"PS_DROP_MSG", "", "0", "",
		"tests of this module inject faults by rule and seed (internal/transport/faulty)"},
	{"HOROVOD_SPARK_*", "", "", "", noSpark},
	{"HOROVOD_TEST_GPU", "", "0", "", testOnly},
	{"HOROVOD_MIXED_INSTALL", "", "0", "", testOnly},
	{"HOROVOD_WITH_*", "", "", "", buildOnly},
	{"HOROVOD_WITHOUT_*", "", "", "", buildOnly},
	{"HOROVOD_GPU", "", "", "", buildOnly},
	{"HOROVOD_NCCL_*", "", "", "", buildOnly},
	{"HOROVOD_NVTX_INCLUDE", "", "", "", buildOnly},
	{"HOROVOD_CUDA_HOME", "", "", "", buildOnly},
	{"HOROVOD_ROCM_HOME", "", "", "", buildOnly},
	{"HOROVOD_BUILD_*", "", "", "", buildOnly},
	{"HOROVOD_CMAKE", "", "", "", buildOnly},
	{"HOROVOD_DEBUG", "", "", "", buildOnly},
	{"HOROVOD_SKIP_COMPILE", "", "", "", buildOnly},
	{"HOROVOD_LOCAL_VERSION", "", "", "", buildOnly},
	{"HOROVOD_ALLOW_MIXED_GPU_IMPL", "", "", "", buildOnly},
}

// Inerts returns the table. The caller may change the slice.
func Inerts() []Inert { return slices.Clone(inerts) }

// inertByName returns the row for an environment variable. If several rows match, it returns the first.
func inertByName(name string) (Inert, bool) {
	return findInert(func(i Inert) bool {
		prefix, many := strings.CutSuffix(i.Name, "*")
		return i.Name == name || many && strings.HasPrefix(name, prefix)
	})
}

func inertByKey(key string) (Inert, bool) {
	return findInert(func(i Inert) bool { return key != "" && i.Key == key })
}

func findInert(is func(Inert) bool) (Inert, bool) {
	i := slices.IndexFunc(inerts, is)
	if i < 0 {
		return Inert{}, false
	}
	return inerts[i], true
}

// same reports whether two texts mean the same value: equal words in upper or lower case, equal numbers, or
// equal booleans.
func same(a, b string) bool {
	if strings.EqualFold(a, b) {
		return true
	}
	x, errX := strconv.ParseFloat(a, 64)
	y, errY := strconv.ParseFloat(b, 64)
	if errX == nil && errY == nil {
		return x == y
	}
	v, okV := boolean(a)
	w, okW := boolean(b)
	return okV && okW && v == w
}
