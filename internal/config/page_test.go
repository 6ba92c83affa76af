package config_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/testnet"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the page")

// TestPageIsUpToDate checks that docs/settings.md equals the text that Page returns.
func TestPageIsUpToDate(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "settings.md")
	if *rewrite {
		if err := os.WriteFile(path, []byte(config.Page()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := testnet.ReadFile(t, path)
	if string(got) != config.Page() {
		t.Error("docs/settings.md differs from the table: run go generate ./internal/config")
	}
}

// horovodRuntime lists the variables that Horovod's core reads.
const horovodRuntime = `
FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE
BATCH_D2D_MEMCOPIES NUM_NCCL_STREAMS DISABLE_GROUP_FUSION ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS AUTOTUNE AUTOTUNE_LOG
AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE
TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS CONTROLLER
CPU_OPERATIONS THREAD_AFFINITY MPI_THREADS_DISABLE ADASUM_MPI_CHUNK_SIZE CCL_CACHE DYNAMIC_PROCESS_SETS ELASTIC
DISABLE_NVTX_RANGES LOG_LEVEL LOG_HIDE_TIME GLOO_IFACE GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT GLOO_TIMEOUT_SECONDS
HOSTNAME RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE`

// horovodKeys lists the keys of Horovod's settings file.
const horovodKeys = `
controller params.fusion_threshold_mb params.cycle_time_ms params.cache_capacity params.hierarchical_allreduce
params.hierarchical_allgather params.torus_allreduce autotune.enabled autotune.log_file autotune.warmup_samples
autotune.steps_per_sample autotune.bayes_opt_max_samples autotune.gaussian_process_noise timeline.filename
timeline.mark_cycles stall_check.enabled stall_check.warning_time_seconds stall_check.shutdown_time_seconds
library_options.mpi_threads_disable library_options.num_nccl_streams library_options.thread_affinity
library_options.gloo_timeout_seconds logging.level logging.with_timestamp`

// TestPageHasHorovodsNames checks that the page mentions every variable and every key of Horovod.
func TestPageHasHorovodsNames(t *testing.T) {
	page := config.Page()
	for _, name := range strings.Fields(horovodRuntime) {
		if !strings.Contains(page, "`HOROVOD_"+name+"`") {
			t.Errorf("HOROVOD_%s is missing", name)
		}
	}
	for _, key := range strings.Fields(horovodKeys) {
		if !strings.Contains(page, "`"+key+"`") {
			t.Errorf("the key %s is missing", key)
		}
	}
}
