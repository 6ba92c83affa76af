package config_test

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
)

func environ(env map[string]string) []string {
	var list []string
	for name, text := range env {
		list = append(list, name+"="+text)
	}
	return list
}

func load(env map[string]string) (config.Config, error) {
	return config.Load(config.Sources{Environ: environ(env)})
}

// setting returns the row of the table for the setting of this name. It fails the test if there is no such
// row.
func setting(t *testing.T, name string) config.Setting {
	t.Helper()
	s, ok := config.Lookup(name)
	if !ok {
		t.Fatalf("there is no setting %s", name)
	}
	return s
}

// withoutOrigins returns a copy of c with only its exported fields.
func withoutOrigins(c config.Config) config.Config {
	var fields config.Config
	from, to := reflect.ValueOf(c), reflect.ValueOf(&fields).Elem()
	for i := range from.NumField() {
		if from.Type().Field(i).IsExported() {
			to.Field(i).Set(from.Field(i))
		}
	}
	return fields
}

// TestEmptyEnvironmentIsDefaults checks that Load without any source returns the same configuration as
// Defaults.
func TestEmptyEnvironmentIsDefaults(t *testing.T) {
	got, err := load(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Config{
		Rank: config.Unset, Size: config.Unset,
		LocalRank: config.Unset, LocalSize: config.Unset,
		CrossRank: config.Unset, CrossSize: config.Unset,
		JobID: "gohvd", StartTimeout: 30 * time.Second, ElasticTimeout: 600 * time.Second,
		LivenessTimeout:      10 * time.Second,
		FusionThresholdBytes: 128 << 20, CacheCapacity: 1024, LeadersAbove: 64,
		DynamicProcessSets:    true,
		HierarchicalAllreduce: true, HierarchicalAllgather: true, NCCLStreams: 1,
		StallWarning: time.Minute, TimelineMaxMiB: 1024, FlightRecorder: true, LogLevel: "warning",
		LogFormat: "auto", AutotuneWarmupSamples: 3, AutotuneStepsPerSample: 10, AutotuneMaxSamples: 20,
		AutotuneNoise: 0.8, BindTo: binding.None,
		PS: config.ParameterServer{NumWorkers: config.Unset, NumServers: config.Unset, Rank: config.Unset,
			Process: config.Unset, Staleness: config.Unset, WaterMark: 1000, HeartbeatInterval: time.Second,
			HeartbeatTimeout: 10 * time.Second, ResendTimeout: time.Second},
	}
	if got := withoutOrigins(got); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := withoutOrigins(config.Defaults()); !reflect.DeepEqual(got, want) {
		t.Errorf("Defaults() gives %+v\nwant %+v", got, want)
	}
}

// every holds, for every setting except HVD_SHOWN and HVD_CONFIG_FILE, a value that is not the default.
var every = map[string]string{
	"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4",
	"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2",
	"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2",
	"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
	"HOROVOD_HOSTNAME": "h1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2.5",
	"HOROVOD_FUSION_THRESHOLD": "65536", "HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_CACHE_CAPACITY": "2",
	"HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
	"HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "HOROVOD_HIERARCHICAL_ALLGATHER": "no",
	"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
	"HOROVOD_STALL_CHECK_DISABLE": "no",
	"HOROVOD_CONTROLLER":          "TCP", "HOROVOD_CPU_OPERATIONS": "SHM",
	"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_ALLREDUCE": "host", "HOROVOD_GPU_ALLGATHER": "Host",
	"HOROVOD_GPU_BROADCAST": "nccl", "HOROVOD_GPU_ALLTOALL": "host", "HOROVOD_GPU_REDUCESCATTER": "NCCL",
	"HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",
	"HVD_NCCL_LIBRARY": "nccl.so", "HVD_CUDART_LIBRARY": "cudart.so",
	"HOROVOD_THREAD_AFFINITY": "4, 2,0", "HVD_BIND_TO": "Core", "HOROVOD_MPI_THREADS_DISABLE": "1",
	"HOROVOD_LOG_LEVEL": "DEBUG", "HOROVOD_LOG_HIDE_TIME": "yes", "HVD_LOG_FORMAT": "json",
	"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HVD_TIMELINE_MAX_MB": "3",
	"HVD_METRICS_ADDR": ":9100", "HVD_FLIGHT_RECORDER": "0",
	"HOROVOD_ELASTIC": "1", "HOROVOD_ELASTIC_TIMEOUT": "20", "HVD_MEMBER": "h1:0/1",
	"HVD_DUMP_DIR": "dumps",
	"HVD_JOB_ID":   "j", "HVD_HOSTID": "rack", "HVD_LIVENESS_SECONDS": "3", "HVD_NEGOTIATION": "lockstep",
	"HVD_LEADERS_ABOVE":  "8",
	"HVD_SIDECAR_BINARY": "hvdd", "HVD_LIBRARY": "libgohvd.so",
	"HVD_RUN": "hvdrun", "HOROVOD_SPARK_START_TIMEOUT": "900", "HVD_SECRET": "shh", "HVD_SECRET_FILE": "s.txt",
	"HVD_INSECURE": "1", "HVD_TLS": "1",
	"HOROVOD_GLOO_IFACE": "eth0,10.0.0.0/8", "HVD_RENDEZVOUS_HOST": "h0", "HVD_RENDEZVOUS_PORT": "4712",
	"HVD_SIZE": "4", "HVD_SUBDOMAIN": "train",
	"HVD_INIT_METHOD": "env://", "HVD_UNIQUE_ID": "id", "HVD_LAUNCHER_RANKS": "3,1",
	"HVD_SIDECAR": "unix:///run/hvdd.sock", "HVD_DETERMINISTIC": "true",
	"HVD_ALGORITHM":                 "allreduce=ring",
	"HVD_OPERATION_TIMEOUT_SECONDS": "0.25",
	"HOROVOD_AUTOTUNE":              "1", "HOROVOD_AUTOTUNE_LOG": "t.csv", "HVD_AUTOTUNE_FILE": "tuned.json",
	"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
	"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "5", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
	"DMLC_ROLE": "Server", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "h2",
	"DMLC_PS_ROOT_PORT": "8000", "DMLC_RANK": "1", "HVD_NODE_PROCESS": "2", "DMLC_NODE_HOST": "h3", "DMLC_INTERFACE": "eth1",
	"PORT": "8001", "DMLC_LOCAL": "1", "DMLC_USE_KUBERNETES": "1", "DMLC_PS_WATER_MARK": "7", "HVD_STALENESS": "3",
	"HVD_RECOVERY_SECONDS":  "60",
	"HVD_PS_REPLICAS":       "1",
	"PS_HEARTBEAT_INTERVAL": "0.5", "PS_HEARTBEAT_TIMEOUT": "4", "PS_RESEND": "1",
	"PS_RESEND_TIMEOUT": "250", "PS_VERBOSE": "2",
}

// TestEverySettingIsHonoured checks that the value of every setting arrives in Config. It also checks that
// every row of the table has a description and a section, and that a row without a default has a text that
// tells users what applies instead.
func TestEverySettingIsHonoured(t *testing.T) {
	for _, s := range config.Settings() {
		_, ok := every[s.Name]
		if own := s.Name == config.FileVariable || s.Name == "HVD_SHOWN"; ok == own {
			t.Errorf("%s: is in the table of this test: %v, is exempt from it: %v", s.Name, ok, own)
		}
		if s.Doc == "" || s.Section == "" || s.Want() == "" || (s.Default == "") == (s.Otherwise == "") {
			t.Errorf("%s lacks a description, a section, or exactly one of default and otherwise", s.Name)
		}
	}
	got, err := load(every)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Config{
		Rank: 1, Size: 4, LocalRank: 0, LocalSize: 2, CrossRank: 1, CrossSize: 2,
		RendezvousAddr: "127.0.0.1", RendezvousPort: 4711, Hostname: "h1", HostID: "rack",
		SharedMemory: config.SharedAlways, NCCLLibrary: "nccl.so", CUDALibrary: "cudart.so",
		NCCLStreams: 2, AsyncCompletion: true,
		GPU: config.GPUOperations{Allreduce: config.GPUHost, Allgather: config.GPUHost,
			Broadcast: config.GPUNCCL, Alltoall: config.GPUHost, Reducescatter: config.GPUNCCL},
		MPIThreadsDisable: true, JobID: "j",
		Secret: "shh", SecretFile: "s.txt", Insecure: true, TLS: true,
		NetworkInterfaces: []string{"eth0", "10.0.0.0/8"}, MeetHost: "h0", MeetPort: 4712,
		InitMethod: "env://", UniqueID: "id", LauncherRanks: []int{3, 1},
		Member: "h1:0/1", ElasticTimeout: 20 * time.Second,
		StartTimeout: 2500 * time.Millisecond, LivenessTimeout: 3 * time.Second,
		FusionThresholdBytes: 65536, CycleTime: 500 * time.Microsecond, CacheCapacity: 2,
		Lockstep: true, LeadersAbove: 8, DisableGroupFusion: true,
		DynamicProcessSets: false, Deterministic: true,
		Algorithm:    "allreduce=ring",
		StallWarning: 5 * time.Second, StallShutdown: 5 * time.Second,
		OperationTimeout: 250 * time.Millisecond,
		Timeline:         "t.json", TimelineMarkCycles: true, TimelineMaxMiB: 3,
		MetricsAddr: ":9100", FlightRecorder: false, DumpDir: "dumps",
		Autotune: true, AutotuneLog: "t.csv", AutotuneFile: "tuned.json", AutotuneWarmupSamples: 1,
		AutotuneStepsPerSample: 2, AutotuneMaxSamples: 5, AutotuneNoise: 0.5,
		LogLevel: "debug", LogHideTime: true, LogFormat: "json", ThreadAffinity: []int{4, 2, 0}, BindTo: binding.Core,
		PS: config.ParameterServer{Role: "server", NumWorkers: 4, NumServers: 2, RootHost: "h2", RootPort: 8000,
			Rank: 1, Process: 2, NodeHost: "h3", Interfaces: []string{"eth1"}, Local: true, Kubernetes: true,
			WaterMark: 7, Staleness: 3, Replicas: 1, Recovery: time.Minute,
			HeartbeatInterval: 500 * time.Millisecond,
			HeartbeatTimeout:  4 * time.Second,
			Resend:            true, ResendTimeout: 250 * time.Millisecond, Verbose: 2},
		Warnings: got.Warnings, // the warnings are about settings that have no effect in lock-step
	}
	if got := withoutOrigins(got); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for name, text := range every {
		if o := got.Origin(name).String(); o != "environment" || got.Value(name) != text {
			t.Errorf("%s: got %q from %s, want %q from the environment", name, got.Value(name), o, text)
		}
	}
}

// TestBadValuesNameTheVariable checks that the error for an invalid value names the variable, its origin, the
// value and what is valid.
func TestBadValuesNameTheVariable(t *testing.T) {
	for _, c := range []struct{ name, value, want string }{
		{"HOROVOD_RANK", "-1", "at least 0"},
		{"HOROVOD_SIZE", "0", "at least 1"},
		{"HOROVOD_SIZE", "99999999999", "at least 1"},
		{"HOROVOD_GLOO_RENDEZVOUS_PORT", "70000", "a port"},
		{"HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "seconds, 0.001 to 1000000"},
		{"HOROVOD_GLOO_TIMEOUT_SECONDS", "NaN", "seconds, 0.001 to 1000000"},
		{"HOROVOD_FUSION_THRESHOLD", "64MB", "bytes"},
		{"HOROVOD_FUSION_THRESHOLD", "-1", "bytes"},
		{"HOROVOD_CYCLE_TIME", "-1", "milliseconds, 0 to 1000000"},
		{"HOROVOD_CYCLE_TIME", "1e300", "milliseconds, 0 to 1000000"},
		{"HOROVOD_CACHE_CAPACITY", "x", "at least 0"},
		{"HOROVOD_DISABLE_GROUP_FUSION", "maybe", "true, false"},
		{"HVD_DETERMINISTIC", "1x", "true, false"},
		{"HOROVOD_STALL_CHECK_TIME_SECONDS", "-1", "seconds"},
		{"HVD_OPERATION_TIMEOUT_SECONDS", "", ""},
		{"HOROVOD_CONTROLLER", "MPI", "built without MPI: build it with -tags mpi"},
		{"HOROVOD_CONTROLLER", "ccl", "does not have: want gloo, tcp or mpi"},
		{"HOROVOD_CPU_OPERATIONS", "mpi", "built without MPI"},
		{"HOROVOD_CPU_OPERATIONS", "ccl", "which gohvd does not have"},
		{"HOROVOD_GPU_OPERATIONS", "mpi", "which gohvd does not have: want none, nccl or host"},
		{"HOROVOD_GPU_OPERATIONS", "gloo", "want none, nccl or host"},
		{"HOROVOD_GPU_ALLREDUCE", "MPI", "which gohvd does not have: want nccl or host"},
		{"HOROVOD_GPU_BROADCAST", "ddl", "which gohvd does not have: want nccl or host"},
		{"HOROVOD_GPU_ALLTOALL", "none", "want nccl or host"},
		{"HOROVOD_NUM_NCCL_STREAMS", "0", "a whole number, 1 to 8"},
		{"HOROVOD_NUM_NCCL_STREAMS", "9", "a whole number, 1 to 8"},
		{"HOROVOD_THREAD_AFFINITY", "1,,2", "commas"},
		{"HOROVOD_THREAD_AFFINITY", "-1", "commas"},
		{"HOROVOD_LOG_LEVEL", "loud", "trace, debug"},
		{"HVD_LIVENESS_SECONDS", "2.9", "3 to 1000000"},
		{"HVD_NEGOTIATION", "mpi", "event or lockstep"},
		{"HVD_JOB_ID", strings.Repeat("j", 65), "at most 64 bytes"},
	} {
		_, err := load(map[string]string{c.name: c.value})
		if c.value == "" {
			if err != nil {
				t.Errorf("%s empty: got error %v, want none", c.name, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.name+" from environment: got \""+c.value+"\"") ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s=%q: got error %v, want one naming variable, origin, value and %q", c.name, c.value,
				err, c.want)
		}
	}
}

// TestBooleans checks that a number is true if it is greater than 0. Horovod has the same rule: strtol(value)
// > 0.
func TestBooleans(t *testing.T) {
	for text, want := range map[string]bool{
		"1": true, "2": true, "true": true, "True": true, "YES": true,
		"0": false, "-1": false, "false": false, "no": false,
	} {
		c, err := load(map[string]string{"HVD_DETERMINISTIC": text, "HOROVOD_DYNAMIC_PROCESS_SETS": text})
		if err != nil || c.Deterministic != want || c.DynamicProcessSets != want {
			t.Errorf("%q: got %v, %v and error %v, want %v", text, c.Deterministic, c.DynamicProcessSets, err,
				want)
		}
	}
}

// TestSettingsThatContradict checks that Load fails if rank, size and address contradict each other. In the
// launcher, Load must accept the same settings, because the launcher places the ranks itself.
func TestSettingsThatContradict(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"HOROVOD_RANK": "0"}, "size is unset"},
		{map[string]string{"HOROVOD_SIZE": "2"}, "rank is unset"},
		{map[string]string{"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"}, "want less than"},
		{map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "HOROVOD_GLOO_RENDEZVOUS_ADDR"},
	} {
		_, err := load(c.env)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: got error %v, want %q", c.env, err, c.want)
		}
		if _, err := config.Load(config.Sources{Environ: environ(c.env), Launcher: true}); err != nil {
			t.Errorf("%v: the launcher, which places the ranks itself, got error %v", c.env, err)
		}
	}
	if _, err := load(map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}); err != nil {
		t.Errorf("a job with one rank, which needs no store: got error %v", err)
	}
}

// TestStallSettings checks the values that Load assigns to the settings of the stall check for each
// combination of them. It also checks the warnings about a shutdown time that has no effect.
func TestStallSettings(t *testing.T) {
	const warn, end, off = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
		"HOROVOD_STALL_CHECK_DISABLE"
	for _, c := range []struct {
		env         map[string]string
		warning     time.Duration
		shutdown    time.Duration
		wantWarning string
	}{
		{map[string]string{warn: "7"}, 7 * time.Second, 0, ""},
		{map[string]string{warn: "7", end: "7"}, 7 * time.Second, 7 * time.Second, ""},
		{map[string]string{warn: "7", end: "6.5"}, 7 * time.Second, 0,
			end + " has no effect: 6.5s is less than the 7s of " + warn},
		{map[string]string{end: "59"}, time.Minute, 0, end + " has no effect: 59s is less than the 1m0s of " +
			warn},
		{map[string]string{off: "1"}, 0, 0, ""},
		{map[string]string{off: "1", warn: "7", end: "8"}, 0, 0,
			end + " has no effect: the stall check is off"},
		{map[string]string{warn: "0", end: "8"}, 0, 0, end + " has no effect: the stall check is off"},
		{map[string]string{off: "0", end: "60"}, time.Minute, time.Minute, ""},
	} {
		got, err := load(c.env)
		if err != nil || got.StallWarning != c.warning || got.StallShutdown != c.shutdown ||
			strings.Join(got.Warnings, "\n") != c.wantWarning {
			t.Errorf("%v: got %v, %v, %q and error %v, want %v, %v, %q", c.env,
				got.StallWarning, got.StallShutdown, got.Warnings, err, c.warning, c.shutdown, c.wantWarning)
		}
	}
}

// TestUnknownNames checks that Load warns about an unknown variable that begins with HOROVOD_ or HVD_. If
// there is a similar setting, the warning must suggest it.
func TestUnknownNames(t *testing.T) {
	for name, want := range map[string]string{
		"HOROVOD_FUSION_TRESHOLD": "HOROVOD_FUSION_TRESHOLD is not a setting; did you mean HOROVOD_FUSION_THRESHOLD?",
		"HOROVOD_CAHCE_CAPACITY":  "HOROVOD_CAHCE_CAPACITY is not a setting; did you mean HOROVOD_CACHE_CAPACITY?",
		"HVD_CACHE_CAPACITY":      "HVD_CACHE_CAPACITY is not a setting; did you mean HOROVOD_CACHE_CAPACITY?",
		"HOROVOD_DETERMINISTIC":   "HOROVOD_DETERMINISTIC is not a setting; did you mean HVD_DETERMINISTIC?",
		"HOROVOD_RNAK":            "HOROVOD_RNAK is not a setting; did you mean HOROVOD_RANK?",
		"HOROVOD_AUTOTUNES":       "HOROVOD_AUTOTUNES is not a setting; did you mean HOROVOD_AUTOTUNE?",
		"HVD_MY_OWN_VARIABLE":     "HVD_MY_OWN_VARIABLE is not a setting",
		"HOROVOD_":                "HOROVOD_ is not a setting",

		"HVD":        "",
		"OTHER_RANK": "",
	} {
		c, err := load(map[string]string{name: "1"})
		if err != nil || strings.Join(c.Warnings, "\n") != want {
			t.Errorf("got %q and error %v, want %q", c.Warnings, err, want)
		}
		if c, _ := load(map[string]string{name: ""}); len(c.Warnings) > 0 {
			t.Errorf("%s, empty: got %q, want no warning", name, c.Warnings)
		}
	}
	c, err := load(map[string]string{"HVD_ZZZZZZ": "1", "HVD_AAAAAA": "1"})
	if err != nil || len(c.Warnings) != 2 || !strings.HasPrefix(c.Warnings[0], "HVD_AAAAAA") {
		t.Errorf("got %q and error %v, want both, in order", c.Warnings, err)
	}
}

func TestNearest(t *testing.T) {
	candidates := []string{"params.cache_capacity", "timeline.enabled", "stall_check.enabled",
		"logging.level"}
	for name, want := range map[string]string{
		"params.cache_capcity":           "params.cache_capacity",
		"cache_capacity":                 "params.cache_capacity",
		"stall_check.cache_capacity":     "params.cache_capacity",
		"stal_check.enabled":             "stall_check.enabled",
		"LOGGING.LEVLE":                  "logging.level",
		"logging.loud":                   "",
		"":                               "",
		strings.Repeat("x", 1000) + ".y": "",
	} {
		if got := config.Nearest(name, candidates, "."); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
	if got := config.Nearest("rnak", []string{"snap", "rank"}, ""); got != "rank" {
		t.Errorf("letters that changed places: got %q, want rank", got)
	}
	if got := config.Nearest("a.b", []string{"a.c", "x.b"}, ""); got != "a.c" {
		t.Errorf("without a separator and with two as near: got %q, want the first", got)
	}
}

// TestWithoutEffect checks that each setting that only Horovod has causes a warning, unless it is empty or
// has Horovod's default.
func TestWithoutEffect(t *testing.T) {
	seen := make(map[string]bool)
	for _, i := range config.Inerts() {
		if i.Reason == "" || seen[i.Name] {
			t.Errorf("%s has no reason, or is in the table twice", i.Name)
		}
		if i.Name == "" { // the row is only for flags
			continue
		}
		i.Name = strings.Replace(i.Name, "*", "OTHER", 1)
		seen[i.Name] = true
		if _, ok := config.Lookup(i.Name); ok {
			t.Errorf("%s is a setting as well", i.Name)
		}
		want := i.Name + " has no effect: " + i.Reason
		if c, err := load(map[string]string{i.Name: "7"}); err != nil ||
			!slices.Equal(c.Warnings, []string{want}) {
			t.Errorf("%s=7: got %q and error %v, want %q", i.Name, c.Warnings, err, want)
		}
		if c, err := load(map[string]string{i.Name: i.Default}); err != nil || len(c.Warnings) > 0 {
			t.Errorf("%s has Horovod's default: got %q and error %v, want no warning", i.Name, c.Warnings,
				err)
		}
	}
	for name, texts := range map[string][]string{
		"HOROVOD_TORUS_ALLREDUCE":     {"0", "false", "no", "00"},
		"HOROVOD_ELASTIC_TIMEOUT":     {"600.0"},
		"HOROVOD_BATCH_D2D_MEMCOPIES": {"1", "true"},
	} {
		for _, text := range texts {
			if c, err := load(map[string]string{name: text}); err != nil || len(c.Warnings) > 0 {
				t.Errorf("%s=%s: got %q and error %v, want no warning", name, text, c.Warnings, err)
			}
		}
	}
}

// TestOverridesWin checks that values from the program override the environment, and that Load fails if the
// program sets a name that is not a setting.
func TestOverridesWin(t *testing.T) {
	t.Setenv("HOROVOD_CACHE_CAPACITY", "7")
	t.Setenv("HOROVOD_CYCLE_TIME", "8")
	t.Setenv("HOROVOD_HOSTNAME", "h")
	c, err := config.FromEnvironment(map[string]string{
		"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_CACHE_CAPACITY": "9", "HOROVOD_CYCLE_TIME": "",
	}, true)
	if err != nil || c.CacheCapacity != 9 || c.CycleTime != 8*time.Millisecond || c.Size != 2 ||
		c.Hostname != "h" {
		t.Errorf("got %+v and error %v", c, err)
	}
	for name, want := range map[string]string{
		"HOROVOD_RNAK":  `unknown setting "HOROVOD_RNAK"; did you mean HOROVOD_RANK?`,
		"HOROVOD_CMAKE": "HOROVOD_CMAKE has no effect: only the build of Horovod uses it",
	} {
		if _, err := config.FromEnvironment(map[string]string{name: "0"}, false); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
	_, err = config.FromEnvironment(map[string]string{"HOROVOD_CACHE_CAPACITY": "x"}, false)
	if err == nil || !strings.Contains(err.Error(), "HOROVOD_CACHE_CAPACITY from API: got") {
		t.Errorf("got error %v, want one that names the API", err)
	}
}

// TestSidecarIsRefused checks that FromEnvironment fails if HVD_SIDECAR is set, because then the sidecar is
// the rank.
func TestSidecarIsRefused(t *testing.T) {
	t.Setenv(config.SidecarVariable, "unix:///run/hvdd.sock")
	const want = `HVD_SIDECAR is "unix:///run/hvdd.sock", but this program runs its own engine`
	if _, err := config.FromEnvironment(nil, true); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want %q", err, want)
	}
}

func TestHostNameIsTheDefault(t *testing.T) {
	t.Setenv("HOROVOD_HOSTNAME", "")
	if c, err := config.FromEnvironment(nil, true); err != nil || c.Hostname == "" {
		t.Errorf("got %q and error %v, want this host's name", c.Hostname, err)
	}
}

// TestPrecedence sets one setting in several sources. The value must come from the source with the highest
// precedence.
func TestPrecedence(t *testing.T) {
	const capacity = "HOROVOD_CACHE_CAPACITY"
	file := write(t, "params:\n  cache_capacity: 1\n")
	flag := func(value string) config.FlagValue {
		return config.FlagValue{Flag: "--cache-capacity", Name: capacity, Value: value}
	}
	fileFlag := config.FlagValue{Flag: "--config-file", Name: config.FileVariable, Value: file}
	byEnviron := config.FileVariable + "=" + file
	for _, c := range []struct {
		src        config.Sources
		want       int
		wantOrigin string
	}{
		{config.Sources{}, 1024, "default"},
		{config.Sources{Environ: []string{byEnviron}}, 1, "file " + file + " line 2"},
		{config.Sources{API: map[string]string{config.FileVariable: file}}, 1, "file " + file + " line 2"},
		{config.Sources{Environ: []string{capacity + "=2"}}, 2, "environment"},
		{config.Sources{Environ: []string{capacity + "=2", capacity + "=3"}}, 3, "environment"},
		{config.Sources{Environ: []string{capacity + "=2", capacity + "="}}, 1024, "default"},
		{config.Sources{Environ: []string{byEnviron, capacity + "=2"}}, 2, "environment"},
		{config.Sources{Environ: []string{byEnviron}, Flags: []config.FlagValue{flag("3")}}, 3,
			"flag --cache-capacity"},
		{config.Sources{Environ: []string{capacity + "=2"}, Flags: []config.FlagValue{flag("3")}}, 3,
			"flag --cache-capacity"},
		{config.Sources{Flags: []config.FlagValue{flag("3"), flag("4")}}, 4, "flag --cache-capacity"},
		{config.Sources{Flags: []config.FlagValue{flag("3"), fileFlag}}, 1, "file " + file + " line 2"},
		{config.Sources{Flags: []config.FlagValue{fileFlag, flag("3")}}, 3, "flag --cache-capacity"},
		{config.Sources{Flags: []config.FlagValue{flag("3"), fileFlag}, Environ: []string{capacity + "=2"}},
			2, "environment"},
		{config.Sources{Flags: []config.FlagValue{flag("3")}, API: map[string]string{capacity: "4"}}, 4,
			"API"},
	} {
		got, err := config.Load(c.src)
		if o := got.Origin(capacity).String(); err != nil || got.CacheCapacity != c.want ||
			o != c.wantOrigin {
			t.Errorf("%+v: got %d from %s and error %v, want %d from %s", c.src, got.CacheCapacity, o, err,
				c.want, c.wantOrigin)
		}
	}
	if o := (config.Config{}).Origin("NO_SUCH").String(); o != "default" {
		t.Errorf("a name that is not a setting: got %s, want default", o)
	}
}

// TestFlagThatAdds checks that --network-interface adds to the flags before it, as in Horovod, and that it
// warns once. The flags before a settings file with the setting do not count.
func TestFlagThatAdds(t *testing.T) {
	const name = "HOROVOD_GLOO_IFACE"
	file := write(t, "library_options: {network_interfaces: eth9}")
	one := func(value string) config.FlagValue {
		return config.FlagValue{Flag: "--network-interface", Name: name, Value: value}
	}
	list := config.FlagValue{Flag: "--network-interfaces", Name: name, Value: "eth0,eth1"}
	other := config.FlagValue{Flag: "--config-file", Name: config.FileVariable, Value: file}
	for _, c := range []struct {
		flags []config.FlagValue
		want  string
	}{
		{[]config.FlagValue{one("ib0")}, "ib0"},
		{[]config.FlagValue{one("ib0"), one("ib1,ib2"), one("10.0.0.0/8")}, "ib0,ib1,ib2,10.0.0.0/8"},
		{[]config.FlagValue{list, one("ib0")}, "eth0,eth1,ib0"},
		{[]config.FlagValue{one("ib0"), list}, "eth0,eth1"},
		{[]config.FlagValue{one("ib0"), other}, "eth9"},
		{[]config.FlagValue{one("ib0"), other, one("ib1"), one("ib2")}, "ib1,ib2"},
	} {
		src := config.Sources{Environ: []string{name + "=lo"}, Flags: c.flags, Launcher: true}
		if slices.Contains(c.flags, other) {
			src.Environ = nil // it would take precedence over the file
		}
		got, err := config.Load(src)
		if err != nil || strings.Join(got.NetworkInterfaces, ",") != c.want {
			t.Errorf("%v: got %q and error %v, want %s", c.flags, got.NetworkInterfaces, err, c.want)
		}
		if len(got.Warnings) != 1 {
			t.Errorf("%v: got warnings %q, want one", c.flags, got.Warnings)
		}
	}
}

// TestForRanks checks that the ranks get the values of hvdrun's flags, and that they do not repeat warnings
// that hvdrun has printed.
func TestForRanks(t *testing.T) {
	env := []string{"HOROVOD_CYCLE_TIME=2", "HOROVOD_TORUS_ALLREDUCE=1", "HVD_TYPO=1",
		"HOROVOD_NUM_NCCL_STREAMS=2", "HOROVOD_RANK=77"}
	file := write(t, "params: {torus_allreduce: 1}\nlogging: {level: info}")
	launcher, err := config.Load(config.Sources{Environ: env, Launcher: true, Flags: []config.FlagValue{
		{Flag: "--config-file", Name: config.FileVariable, Value: file},
		{Flag: "-x", Name: "HOROVOD_THREAD_AFFINITY", Value: "0,1"},
		{Flag: "--log-hide-timestamp", Name: "HOROVOD_LOG_HIDE_TIME", Value: "1"},
		{Flag: "--stall-check-shutdown-time-seconds", Name: "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
			Value: "3"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"HOROVOD_TORUS_ALLREDUCE has no effect", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS has no effect",
		"HVD_TYPO is not a setting", "file " + file + " line 1: params.torus_allreduce has no effect",
		"--log-hide-timestamp is deprecated: use --log-without-timestamp",
	}
	if len(launcher.Warnings) != len(want) {
		t.Errorf("got %q, want %d warnings", launcher.Warnings, len(want))
	}
	for _, w := range want {
		if !slices.ContainsFunc(launcher.Warnings, func(got string) bool {
			return strings.HasPrefix(got, w)
		}) {
			t.Errorf("got %q, want %q", launcher.Warnings, w)
		}
	}

	env = slices.Concat(env[:4], launcher.ForRanks())
	rank, err := config.Load(config.Sources{Environ: env})
	if err != nil || len(rank.Warnings) > 0 {
		t.Errorf("the rank got %q and error %v, want no warning again", rank.Warnings, err)
	}
	for name, want := range map[string]string{
		"HOROVOD_CYCLE_TIME": "environment", "HOROVOD_THREAD_AFFINITY": "environment",
		"HOROVOD_LOG_HIDE_TIME": "environment",
		config.FileVariable:     "environment", "HOROVOD_LOG_LEVEL": "file " + file + " line 2",
		"HVD_DETERMINISTIC": "default",
	} {
		if got := rank.Origin(name).String(); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}

	// A script between hvdrun and the rank sets a misspelled variable. hvdrun cannot have warned about it, so
	// the rank must warn.
	between, err := config.Load(config.Sources{Environ: append(env, "HVD_TYPOS=1")})
	if err != nil || len(between.Warnings) != 1 {
		t.Errorf("got %q and error %v, want one warning", between.Warnings, err)
	}

	// An hvdrun inside the job passes on the names that the outer hvdrun has warned about.
	inner, err := config.Load(config.Sources{Environ: env, Launcher: true})
	if shown := launcher.ForRanks(); err != nil || !slices.Equal(inner.ForRanks(), shown[len(shown)-1:]) {
		t.Errorf("got %q and error %v, want the last of %q", inner.ForRanks(), err, shown)
	}
	if got := config.Defaults().ForRanks(); len(got) > 0 {
		t.Errorf("without flags and warnings: got %q, want nothing", got)
	}
}

// TestFromFlag checks that FromFlag converts the value of a flag to that of the environment variable, and
// that its errors for invalid values say which values are valid.
func TestFromFlag(t *testing.T) {
	for _, c := range []struct {
		name       string
		flag       string
		text, want string
	}{
		{"HOROVOD_FUSION_THRESHOLD", "fusion-threshold-mb", "32", "33554432"},
		{"HOROVOD_FUSION_THRESHOLD", "fusion-threshold-mb", "0.5", "524288"},
		{"HOROVOD_FUSION_THRESHOLD", "fusion-threshold-mb", "-1", "want a number of MiB, 0 to 1000000"},
		{"HOROVOD_CYCLE_TIME", "cycle-time-ms", "3.5", "3.5"},
		{"HOROVOD_CYCLE_TIME", "cycle-time-ms", "", "want a number of milliseconds, 0 to 1000000"},
		{"HOROVOD_STALL_CHECK_DISABLE", "stall-check", "true", "0"},
		{"HOROVOD_STALL_CHECK_DISABLE", "no-stall-check", "true", "1"},
		{"HOROVOD_STALL_CHECK_DISABLE", "no-stall-check", "false", "0"},
		{"HOROVOD_LOG_HIDE_TIME", "log-with-timestamp", "true", "0"},
		{"HOROVOD_LOG_HIDE_TIME", "no-log-hide-timestamp", "true", "0"},
		{"HVD_DETERMINISTIC", "deterministic", "false", "0"},
		{"HVD_DETERMINISTIC", "deterministic", "x",
			"want the flag without a value, or with a boolean: 1, 0, true, false, yes or no"},
		{"HOROVOD_CONTROLLER", "gloo", "true", "gloo"},
		{"HOROVOD_CONTROLLER", "gloo", "false", "want the flag without a value"},
	} {
		s := setting(t, c.name)
		i := slices.IndexFunc(s.Flags, func(f config.Flag) bool { return f.Name == c.flag })
		if i < 0 {
			t.Errorf("%s has no flag --%s", c.name, c.flag)
			continue
		}
		got, err := s.FromFlag(s.Flags[i], c.text)
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("--%s=%s: got %q, want %q", c.flag, c.text, got, c.want)
		}
	}
}

// TestTableIsSound checks that all names, keys and flags in the table are unique, and that the values that
// switches set are valid.
func TestTableIsSound(t *testing.T) {
	seen := make(map[string]bool)
	once := func(name string) {
		if seen[name] {
			t.Errorf("%s is in the table twice", name)
		}
		seen[name] = true
	}
	for _, s := range config.Settings() {
		once(s.Name)
		if s.Key != "" {
			once(s.Key)
		}
		for _, f := range s.Flags {
			once("--" + f.Name)
			if (f.Arg == "") == (f.Means == "") {
				t.Errorf("--%s: want a value or a meaning, got %+v", f.Name, f)
			}
			if f.Arg != "" {
				continue
			}
			env, err := s.FromFlag(f, "true")
			if err == nil {
				_, err = load(map[string]string{s.Name: env})
			}
			if err != nil {
				t.Errorf("--%s: %v", f.Name, err)
			}
		}
	}
	for _, i := range config.Inerts() {
		if i.Key != "" {
			once(i.Key)
		}
	}
}

// FuzzValues sets settings to arbitrary values. If Load accepts a value, the field of Config must be in its
// range.
func FuzzValues(f *testing.F) {
	for name, text := range every {
		f.Add(name, text)
	}
	f.Fuzz(func(t *testing.T, name, text string) {
		if name == config.FileVariable {
			return // not tested, because reading the named file could block
		}
		c, err := config.Load(config.Sources{Environ: []string{name + "=" + text}, HaveStore: true})
		if err != nil {
			return
		}
		for _, d := range []time.Duration{c.StartTimeout, c.LivenessTimeout, c.CycleTime, c.StallWarning,
			c.StallShutdown, c.OperationTimeout} {
			if d < 0 || d > math.MaxInt64/2 {
				t.Errorf("%s=%q gives %v", name, text, d)
			}
		}
		if c.StartTimeout == 0 || c.LivenessTimeout < 3*time.Second || c.CacheCapacity < 0 ||
			c.FusionThresholdBytes < 0 || len(c.JobID) > 64 {
			t.Errorf("%s=%q gives %+v", name, text, c)
		}
		for _, core := range c.ThreadAffinity {
			if core < 0 {
				t.Errorf("%s=%q gives core %d", name, text, core)
			}
		}
	})
}

// TestGPUOperations checks which backend each kind of operation on devices has if only some settings are set,
// and which setting chooses it.
func TestGPUOperations(t *testing.T) {
	const none, nccl, host = config.GPUNone, config.GPUNCCL, config.GPUHost
	for _, c := range []struct {
		all, allreduce, alltoall string
		want                     config.GPUOperations
		nccl                     string // the setting that chooses NCCL
	}{
		{"", "", "", config.GPUOperations{}, ""},
		{"none", "", "", config.GPUOperations{}, ""},
		{"nccl", "", "", config.GPUOperations{nccl, nccl, nccl, nccl, nccl}, "HOROVOD_GPU_OPERATIONS=nccl"},
		{"NCCL", "host", "", config.GPUOperations{host, nccl, nccl, nccl, nccl}, "HOROVOD_GPU_OPERATIONS=nccl"},
		{"host", "", "nccl", config.GPUOperations{host, host, host, nccl, host}, "HOROVOD_GPU_ALLTOALL=nccl"},
		{"", "NCCL", "", config.GPUOperations{nccl, host, host, host, host}, "HOROVOD_GPU_ALLREDUCE=nccl"},
		{"none", "host", "", config.GPUOperations{host, host, host, host, host}, ""},
	} {
		got, err := load(map[string]string{"HOROVOD_GPU_OPERATIONS": c.all, "HOROVOD_GPU_ALLREDUCE": c.allreduce,
			"HOROVOD_GPU_ALLTOALL": c.alltoall})
		if err != nil || got.GPU != c.want || got.GPUChoice(nccl) != c.nccl {
			t.Errorf("%+v: got %v, chosen by %q, and %v", c, got.GPU, got.GPUChoice(nccl), err)
		}
		used := c.want != config.GPUOperations{}
		if got.GPU.Use(none) == used || got.GPU.Use(nccl) != (c.nccl != "") {
			t.Errorf("%+v: Use gives %v for none, %v for nccl", c, got.GPU.Use(none), got.GPU.Use(nccl))
		}
	}
}

// TestLevelsOfNCCL checks the warning of a user who turns on two levels, as in Horovod, for tensors that NCCL
// moves.
func TestLevelsOfNCCL(t *testing.T) {
	const reduce, gather = "HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER"
	const text = " has no effect on tensors that NCCL moves"
	for _, c := range []struct {
		set  map[string]string
		want string // the settings with a warning
	}{
		{map[string]string{"HOROVOD_GPU_OPERATIONS": "nccl"}, ""},
		{map[string]string{"HOROVOD_GPU_OPERATIONS": "nccl", reduce: "1", gather: "1"}, reduce + " " + gather},
		{map[string]string{"HOROVOD_GPU_OPERATIONS": "nccl", reduce: "0"}, ""},
		{map[string]string{"HOROVOD_GPU_OPERATIONS": "host", reduce: "1"}, ""},
		{map[string]string{"HOROVOD_GPU_ALLGATHER": "nccl", reduce: "1", gather: "1"}, gather},
	} {
		got, err := load(c.set)
		var names []string
		for _, w := range got.Warnings {
			name, _, _ := strings.Cut(w, text)
			names = append(names, name)
		}
		if err != nil || strings.Join(names, " ") != c.want {
			t.Errorf("%v: got warnings %q and %v, want those of %q", c.set, got.Warnings, err, c.want)
		}
	}
}
