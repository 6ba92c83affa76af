package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/config"
)

func load(env map[string]string) (config.Config, error) {
	return config.Load(func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	}, false)
}

func TestEmptyEnvironmentIsDefaults(t *testing.T) {
	got, err := load(nil)
	if err != nil {
		t.Fatal(err)
	}
	if got != config.Defaults() {
		t.Errorf("got %+v, want the defaults", got)
	}
}

func TestEverySettingIsHonoured(t *testing.T) {
	env := map[string]string{
		"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4",
		"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2",
		"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2",
		"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
		"HOROVOD_HOSTNAME": "h1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2.5",
		"HOROVOD_FUSION_THRESHOLD": "65536", "HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_CACHE_CAPACITY": "2",
		"HOROVOD_LOG_LEVEL": "DEBUG", "HVD_JOB_ID": "j", "HVD_LIVENESS_SECONDS": "3", "HVD_NEGOTIATION": "lockstep",
	}
	for _, s := range config.Settings() {
		if _, ok := env[s.Name]; !ok {
			t.Errorf("%s is in the table but not in this test", s.Name)
		}
		if s.Doc == "" || s.Default == "" {
			t.Errorf("%s has no documentation or no default", s.Name)
		}
	}
	got, err := load(env)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Config{
		Rank: 1, Size: 4, LocalRank: 0, LocalSize: 2, CrossRank: 1, CrossSize: 2,
		RendezvousAddr: "127.0.0.1", RendezvousPort: 4711, Hostname: "h1", JobID: "j",
		StartTimeout: 2500 * time.Millisecond, LivenessTimeout: 3 * time.Second,
		FusionThresholdBytes: 65536, CycleTime: 500 * time.Microsecond, CacheCapacity: 2,
		Lockstep: true, LogLevel: "debug",
	}
	if got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestBadValuesNameTheVariable(t *testing.T) {
	for _, c := range []struct{ name, value, want string }{
		{"HOROVOD_RANK", "-1", "at least 0"},
		{"HOROVOD_SIZE", "0", "at least 1"},
		{"HOROVOD_SIZE", "99999999999", "at least 1"},
		{"HOROVOD_GLOO_RENDEZVOUS_PORT", "70000", "a port"},
		{"HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "seconds above 0"},
		{"HOROVOD_GLOO_TIMEOUT_SECONDS", "NaN", "seconds above 0"},
		{"HOROVOD_FUSION_THRESHOLD", "64MB", "bytes"},
		{"HOROVOD_CYCLE_TIME", "-1", "milliseconds"},
		{"HOROVOD_CACHE_CAPACITY", "x", "at least 0"},
		{"HOROVOD_LOG_LEVEL", "loud", "trace, debug"},
		{"HVD_LIVENESS_SECONDS", "2.9", "3 to a million"},
		{"HVD_NEGOTIATION", "mpi", "event or lockstep"},
		{"HVD_JOB_ID", strings.Repeat("j", 65), "at most 64 bytes"},
	} {
		_, err := load(map[string]string{c.name: c.value})
		if err == nil || !strings.Contains(err.Error(), c.name) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s=%q: got error %v, want one naming the variable and %q", c.name, c.value, err, c.want)
		}
	}
}

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
	}
	if _, err := load(map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}); err != nil {
		t.Errorf("a job of one needs no store: %v", err)
	}
}

func TestOverridesWin(t *testing.T) {
	t.Setenv("HOROVOD_CACHE_CAPACITY", "7")
	t.Setenv("HOROVOD_HOSTNAME", "h")
	c, err := config.FromEnvironment(map[string]string{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_CACHE_CAPACITY": "9"}, true)
	if err != nil || c.CacheCapacity != 9 || c.Size != 2 || c.Hostname != "h" {
		t.Errorf("got %+v and error %v", c, err)
	}
	if _, err := config.FromEnvironment(map[string]string{"HOROVOD_RNAK": "0"}, false); err == nil || !strings.Contains(err.Error(), "HOROVOD_RNAK") {
		t.Errorf("a setting that does not exist: got error %v", err)
	}
}
