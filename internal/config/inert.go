package config

import (
	"slices"
	"strconv"
	"strings"
)

// Inert is a setting of Horovod that has no effect here.
type Inert struct {
	// Name is the environment variable.
	Name string
	// Key is where it stands in Horovod's file, or empty.
	Key string
	// Default is Horovod's; giving that is no cause for a warning.
	Default string
	// Reason says why it has no effect.
	Reason string
}

const (
	noAutotune     = "this version does not tune itself"
	noElastic      = "this version has no elastic jobs"
	noHierarchical = "this version has no hierarchical or torus algorithms"
	noMPI          = "this version has no MPI"
	noGPU          = "this version moves tensors in host memory only"
	noXLA          = "gohvd is no part of TensorFlow"
	noSpark        = "gohvd has no Spark integration"
	noPreflight    = "hvdrun makes no checks over the network before the start; HOROVOD_GLOO_TIMEOUT_SECONDS bounds Init"
	noSecret       = "each job has a secret of its own: see HVD_SECRET_FILE"
	testOnly       = "it is for Horovod's own tests"
	buildOnly      = "it is for building Horovod; gohvd is built by the go command"
)

var inerts = slices.Concat(
	[]Inert{
		{"HOROVOD_HIERARCHICAL_ALLREDUCE", "params.hierarchical_allreduce", "0", noHierarchical},
		{"HOROVOD_HIERARCHICAL_ALLGATHER", "params.hierarchical_allgather", "0", noHierarchical},
		{"HOROVOD_TORUS_ALLREDUCE", "params.torus_allreduce", "0", noHierarchical},
		{"HOROVOD_AUTOTUNE", "autotune.enabled", "0", noAutotune},
		{"HOROVOD_AUTOTUNE_LOG", "autotune.log_file", "", noAutotune},
		{"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples", "3", noAutotune},
		{"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample", "10", noAutotune},
		{"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune.bayes_opt_max_samples", "20", noAutotune},
		{"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune.gaussian_process_noise", "0.8", noAutotune},
		{"HOROVOD_BATCH_D2D_MEMCOPIES", "", "1", noGPU},
		{"HOROVOD_NUM_NCCL_STREAMS", "library_options.num_nccl_streams", "1", noGPU},
		{"HOROVOD_ENABLE_ASYNC_COMPLETION", "", "0", noGPU},
		{"HOROVOD_DISABLE_NVTX_RANGES", "", "0", noGPU},
		{"HOROVOD_ENABLE_XLA_OPS", "", "0", noXLA},
		{"HOROVOD_MPI_THREADS_DISABLE", "library_options.mpi_threads_disable", "0", noMPI},
		{"HOROVOD_ADASUM_MPI_CHUNK_SIZE", "", "1073741824", noMPI},
		{"HOROVOD_CCL_CACHE", "", "0", "this version has no oneCCL"},
		{"HOROVOD_ELASTIC", "", "0", noElastic},
		{"HOROVOD_START_TIMEOUT", "", "30", noPreflight},
		{"HOROVOD_ELASTIC_TIMEOUT", "", "600", noElastic},
		{"_HOROVOD_SECRET_KEY", "", "", noSecret},
		{"HOROVOD_SECRET_KEY", "", "", noSecret},
		{"HOROVOD_SPARK_START_TIMEOUT", "", "600", noSpark},
		{"HOROVOD_SPARK_WORK_DIR", "", "", noSpark},
		{"HOROVOD_SPARK_PYTHONPATH", "", "", noSpark},
		{"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "", "0", noSpark},
		{"HOROVOD_TEST_GPU", "", "0", testOnly},
		{"HOROVOD_MIXED_INSTALL", "", "0", testOnly},
	},
	builds("WITH_", "TENSORFLOW", "PYTORCH", "MXNET", "MPI", "GLOO", "NVTX"),
	builds("WITHOUT_", "TENSORFLOW", "PYTORCH", "MXNET", "MPI", "GLOO", "NVTX"),
	builds("GPU", "", "_OPERATIONS", "_ALLREDUCE", "_ALLGATHER", "_BROADCAST", "_ALLTOALL", "_REDUCESCATTER"),
	builds("NCCL_", "HOME", "INCLUDE", "LIB", "LINK"),
	builds("", "CUDA_HOME", "ROCM_HOME", "NVTX_INCLUDE", "BUILD_ARCH_FLAGS", "BUILD_CUDA_CC_LIST", "CMAKE", "DEBUG",
		"SKIP_COMPILE", "LOCAL_VERSION", "ALLOW_MIXED_GPU_IMPL"),
)

// builds are variables that only Horovod's build reads.
func builds(prefix string, names ...string) []Inert {
	list := make([]Inert, len(names))
	for i, name := range names {
		list[i] = Inert{Name: "HOROVOD_" + prefix + name, Reason: buildOnly}
	}
	return list
}

// Inerts lists Horovod's settings that have no effect. The caller may keep and change the slice.
func Inerts() []Inert { return slices.Clone(inerts) }

func inertByName(name string) (Inert, bool) {
	return findInert(func(i Inert) bool { return i.Name == name })
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

// same reports whether two texts are one value: the same words, numbers or booleans.
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
