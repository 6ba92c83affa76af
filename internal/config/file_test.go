package config_test

import (
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/testnet"
)

// write writes a settings file and returns its path.
func write(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "settings.yaml")
	testnet.WriteFile(t, path, text)
	return path
}

func loadFile(t testing.TB, text string) (config.Config, string, error) {
	t.Helper()
	path := write(t, text)
	c, err := config.Load(config.Sources{Environ: []string{config.FileVariable + "=" + path}})
	return c, path, err
}

const fullFile = `# every key
controller: gloo
cpu_operations: tcp
gpu_operations: nccl
enable_async_completion: true
gpu_allreduce: host
gpu_allgather: nccl
gpu_broadcast: nccl
gpu_alltoall: nccl
gpu_reducescatter: host
params:
  fusion_threshold_mb: 1.5
  cycle_time_ms: 2
  cache_capacity: 3
  hierarchical_allreduce: no
  hierarchical_allgather: no
  disable_group_fusion: true
  negotiation: lockstep
  leaders_above: 8
stall_check:
  enabled: yes
  warning_time_seconds: 4
  shutdown_time_seconds: 5
library_options:
  thread_affinity: [6, 7]
  mpi_threads_disable: yes
  gloo_timeout_seconds: 8
  network_interfaces: eth0
  tls: yes
  deterministic: 1
  algorithm: allreduce=direct
  nccl_library: nccl.so
  num_nccl_streams: 3
  cudart_library: cudart.so
  dynamic_process_sets: false
  operation_timeout_seconds: 9
  liveness_seconds: 10.5
timeline:
  filename: t.json
  mark_cycles: yes
  max_mb: 11
metrics:
  addr: :9100
flight_recorder:
  enabled: no
  dump_dir: dumps
autotune:
  enabled: yes
  log_file: t.csv
  file: tuned.json
  warmup_samples: 1
  steps_per_sample: 2
  bayes_opt_max_samples: 5
  gaussian_process_noise: 0.5
logging:
  format: console
  level: error
  with_timestamp: false
`

// TestEveryKeyIsHonoured checks that the value of every key in a settings file arrives in Config, with the
// line of the key as its origin.
func TestEveryKeyIsHonoured(t *testing.T) {
	c, path, err := loadFile(t, fullFile)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Defaults()
	want.FusionThresholdBytes = 3 << 19
	want.CycleTime = 2 * time.Millisecond
	want.CacheCapacity = 3
	want.DisableGroupFusion = true
	want.HierarchicalAllreduce, want.HierarchicalAllgather = false, false
	want.Lockstep, want.LeadersAbove = true, 8
	want.StallWarning, want.StallShutdown = 4*time.Second, 5*time.Second
	want.ThreadAffinity = []int{6, 7}
	want.StartTimeout = 8 * time.Second
	want.NetworkInterfaces = []string{"eth0"}
	want.TLS = true
	want.Deterministic = true
	want.Algorithm = "allreduce=direct"
	want.DynamicProcessSets = false
	want.OperationTimeout = 9 * time.Second
	want.LivenessTimeout = 10500 * time.Millisecond
	want.SharedMemory = config.SharedNever
	want.Timeline, want.TimelineMarkCycles, want.TimelineMaxMiB = "t.json", true, 11
	want.MetricsAddr, want.FlightRecorder, want.DumpDir = ":9100", false, "dumps"
	want.LogLevel, want.LogFormat = "error", "console"
	want.LogHideTime = true
	want.Autotune, want.AutotuneLog, want.AutotuneFile = true, "t.csv", "tuned.json"
	want.AutotuneWarmupSamples, want.AutotuneStepsPerSample, want.AutotuneMaxSamples = 1, 2, 5
	want.AutotuneNoise = 0.5
	want.MPIThreadsDisable = true
	want.GPU = config.GPUOperations{Allreduce: config.GPUHost, Allgather: config.GPUNCCL,
		Broadcast: config.GPUNCCL, Alltoall: config.GPUNCCL, Reducescatter: config.GPUHost}
	want.NCCLLibrary, want.CUDALibrary, want.NCCLStreams, want.AsyncCompletion = "nccl.so", "cudart.so", 3, true
	want.Warnings = c.Warnings // the warnings are about settings that have no effect in lock-step
	if got := withoutOrigins(c); !reflect.DeepEqual(got, withoutOrigins(want)) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	lines := strings.Split(fullFile, "\n")
	for _, s := range config.Settings() {
		o := c.Origin(s.Name)
		if s.Key == "" {
			continue
		}
		if o.Source != config.FromFile || o.File != path || o.Line < 1 ||
			!strings.HasPrefix(strings.TrimSpace(lines[o.Line-1]), s.Key[strings.LastIndex(s.Key, ".")+1:]+
				":") {
			t.Errorf("%s: got %v, want the line of %s", s.Name, o, s.Key)
		}
	}
}

// TestFormsOfFiles checks that Load accepts the different forms of YAML: empty documents, flow style, JSON
// and aliases.
func TestFormsOfFiles(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       int // the capacity of the cache
	}{
		{"empty", "", 1024},
		{"comment", "# nothing\n", 1024},
		{"empty document", "---\n", 1024},
		{"null section", "params:\n", 1024},
		{"null value", "params:\n  cache_capacity:\n", 1024},
		{"flow", "{params: {cache_capacity: 5}}", 5},
		{"text", "params: {cache_capacity: '5'}", 5},
		{"JSON", `{"params": {"cache_capacity": 5}}`, 5},
		{"alias of nothing", "logging: &x\nstall_check: *x\nparams: {cache_capacity: 5}\n", 5},
		{"alias", "logging: &x {level: info}\nparams: {cache_capacity: &n 5, cycle_time_ms: *n}\n", 5},
	} {
		if got, _, err := loadFile(t, c.text); err != nil || got.CacheCapacity != c.want {
			t.Errorf("%s: got %d and error %v, want %d", c.name, got.CacheCapacity, err, c.want)
		}
	}
}

// TestFileErrors checks that the error for an invalid settings file names the file, the line, the problem and
// what is valid.
func TestFileErrors(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"params:\n  cache_capcity: 1\n",
			"line 2: unknown key params.cache_capcity; did you mean params.cache_capacity?"},
		{"\ncache_capacity: 1\n", "line 2: unknown key cache_capacity; did you mean params.cache_capacity?"},
		{"stal_check:\n  enabled: 1\n", "line 1: unknown key stal_check"},
		{"nonsense: 1\n", "line 1: unknown key nonsense"},
		{"'': 1\n", "line 1: unknown key "},
		{"params: {'': 1}\n", "line 1: unknown key params."},
		{"<<: {params: {cache_capacity: 1}}\n", "line 1: unknown key <<"},
		{"params:\n  cache_capacity: 1\n  cache_capacity: 2\n",
			"line 3: duplicate key params.cache_capacity, already set in line 2"},
		{"params:\n  cache_capacity: -1\n",
			`line 2: params.cache_capacity: got "-1", want a whole number of at least 0`},
		{"params:\n  fusion_threshold_mb: x\n",
			`line 2: params.fusion_threshold_mb: got "x", want a number of MiB`},
		{"stall_check:\n  enabled: perhaps\n", `line 2: stall_check.enabled: got "perhaps", want a boolean`},
		{"params:\n  cache_capacity: [1, 2]\n", `line 2: params.cache_capacity: got "1,2"`},
		{"params:\n  cache_capacity: {a: 1}\n", "line 2: params.cache_capacity: got nested values, want a value or a list of values"},
		{"params:\n  cache_capacity: [[1]]\n", "line 2: params.cache_capacity: got nested values, want a value or a list of values"},
		{"params: 7\n", "line 1: got a single value or a list in params, want keys and values"},
		{"- params\n", "line 1: got a single value or a list, want keys and values"},
		{"params: &x\n  cache_capacity: *x\n", "line 2: params.cache_capacity: got nested values, want a value or a list of values"},
		{"controller: mpi\n", `line 1: controller: got "mpi", but this program was built without MPI`},
		{"params:\n\tcache_capacity: 1\n", "line 2"},
		{"a: [\n", "line "},
		{"logging: {level: info}\n---\nlogging: {level: error}\n", "got several YAML documents, want one"},
		{strings.Repeat("#", 1<<20) + "\n", "more than 1048576 bytes"},
	} {
		_, path, err := loadFile(t, c.text)
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60q: got error %v, want one naming the file and %q", c.text, err, c.want)
		}
	}
	missing := filepath.Join(t.TempDir(), "missing.yaml")
	if _, err := load(map[string]string{config.FileVariable: missing}); err == nil ||
		!strings.Contains(err.Error(), missing) {
		t.Errorf("got error %v, want one that names %s", err, missing)
	}
}

// TestKeysWithoutEffect checks that a key that only Horovod has causes a warning, unless its value is
// Horovod's default.
func TestKeysWithoutEffect(t *testing.T) {
	for value, warns := range map[string]bool{"yes": true, "no": false} {
		c, path, err := loadFile(t, "params:\n  torus_allreduce: "+value+"\n")
		want := ""
		if warns {
			want = "file " + path + " line 2: params.torus_allreduce has no effect: " +
				"this version has no torus algorithm"
		}
		if err != nil || strings.Join(c.Warnings, "\n") != want {
			t.Errorf("%s: got %q and error %v, want %q", value, c.Warnings, err, want)
		}
	}
}

// FuzzFile checks that Load accepts or refuses any settings file without a crash. An error must name the
// file.
func FuzzFile(f *testing.F) {
	f.Add(fullFile)
	f.Add("params: &x {cache_capacity: *x}\n")
	f.Add("{a: &a [*a], '': {}, ? [b] : c, <<: {}}")
	f.Fuzz(func(t *testing.T, text string) {
		_, path, err := loadFile(t, text)
		if err != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("the error does not name the file: %v", err)
		}
	})
}
