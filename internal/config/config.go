// Package config holds the settings: one table, read in one place.
//
// A setting carries Horovod's name where Horovod has it (HOROVOD_...) and ours where it has not (HVD_...).
// Nothing else in this module reads the environment.
package config

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Unset is the value of a topology setting that the environment does not give.
const Unset = -1

// Config is the value of every setting.
type Config struct {
	// Rank and Size place this process in the job; both Unset means a job of one.
	Rank, Size int
	// LocalRank, LocalSize, CrossRank and CrossSize are computed from the ranks' hosts where Unset.
	LocalRank, LocalSize int
	CrossRank, CrossSize int
	// RendezvousAddr and RendezvousPort are where the launcher's store listens.
	RendezvousAddr string
	RendezvousPort int
	// Hostname is this host's identity: ranks with equal ones are local to each other.
	Hostname string
	// JobID tells the processes of this job from those of another that reuses its addresses.
	JobID string
	// StartTimeout bounds Init: all ranks must have met by then.
	StartTimeout time.Duration
	// LivenessTimeout is the silence after which a rank is taken for dead. Raising it delays the verdict on a
	// host that vanished; a process that dies is noticed at once regardless.
	LivenessTimeout time.Duration
	// FusionThresholdBytes is the most that one fused response holds; 0 fuses nothing. Raising it saves round trips
	// and costs cache misses.
	FusionThresholdBytes int64
	// CycleTime is the least time between two cycles of the coordinator. Raising it fuses more and answers later. 0
	// (the default, unlike Horovod's 1 ms) answers as soon as something can be answered.
	CycleTime time.Duration
	// CacheCapacity is the number of responses that a process set remembers; 0 remembers none, so every
	// request travels in full.
	CacheCapacity int
	// Lockstep selects the controller in which all ranks enter every cycle.
	Lockstep bool
	// LogLevel is the least severity that is logged.
	LogLevel string
}

// Setting is one row of the table.
type Setting struct {
	// Name is the environment variable.
	Name string
	// Default is what an unset variable means, as text.
	Default string
	// Doc is a sentence for people, with the unit.
	Doc string

	parse func(c *Config, text string) error
}

var settings = []Setting{
	{"HOROVOD_RANK", "none", "rank of this process, 0 to size-1; set by the launcher", intRow(func(c *Config) *int { return &c.Rank }, 0)},
	{"HOROVOD_SIZE", "none", "number of processes in the job; set by the launcher", intRow(func(c *Config) *int { return &c.Size }, 1)},
	{"HOROVOD_LOCAL_RANK", "by host", "rank among the processes of this host", intRow(func(c *Config) *int { return &c.LocalRank }, 0)},
	{"HOROVOD_LOCAL_SIZE", "by host", "number of processes on this host", intRow(func(c *Config) *int { return &c.LocalSize }, 1)},
	{"HOROVOD_CROSS_RANK", "by host", "index of this host among those that have this local rank", intRow(func(c *Config) *int { return &c.CrossRank }, 0)},
	{"HOROVOD_CROSS_SIZE", "by host", "number of hosts that have this local rank", intRow(func(c *Config) *int { return &c.CrossSize }, 1)},
	{"HOROVOD_GLOO_RENDEZVOUS_ADDR", "none", "host of the launcher's store", textRow(func(c *Config) *string { return &c.RendezvousAddr })},
	{"HOROVOD_GLOO_RENDEZVOUS_PORT", "none", "port of the launcher's store", portRow},
	{"HOROVOD_HOSTNAME", "the host's name", "identity of this host: ranks with equal ones are local to each other", textRow(func(c *Config) *string { return &c.Hostname })},
	{"HOROVOD_GLOO_TIMEOUT_SECONDS", "30", "seconds until Init gives up waiting for the other ranks", secondsRow(func(c *Config) *time.Duration { return &c.StartTimeout })},
	{"HOROVOD_FUSION_THRESHOLD", "134217728", "bytes that one fused response may hold; 0 fuses nothing", bytesRow},
	{"HOROVOD_CYCLE_TIME", "0", "least milliseconds between two negotiation cycles; 0 answers at once", cycleRow},
	{"HOROVOD_CACHE_CAPACITY", "1024", "responses that are remembered; 0 remembers none", intRow(func(c *Config) *int { return &c.CacheCapacity }, 0)},
	{"HOROVOD_LOG_LEVEL", "warning", "trace, debug, info, warning, error or fatal", levelRow},
	{"HVD_JOB_ID", "gohvd", "identity of the job, at most 64 bytes; connections from another job are refused; set by the launcher", jobRow},
	{"HVD_LIVENESS_SECONDS", "10", "seconds of silence after which a rank is taken for dead, at least 3; the same at all ranks", livenessRow},
	{"HVD_NEGOTIATION", "event", "event: ranks speak when they have news; lockstep: all ranks enter every cycle", negotiationRow},
}

// Settings lists the table in the order of the documentation. The caller may keep and change the slice.
func Settings() []Setting { return append([]Setting(nil), settings...) }

// Defaults is the configuration of an empty environment.
func Defaults() Config {
	return Config{
		Rank: Unset, Size: Unset,
		LocalRank: Unset, LocalSize: Unset,
		CrossRank: Unset, CrossSize: Unset,
		StartTimeout:         30 * time.Second,
		LivenessTimeout:      10 * time.Second,
		FusionThresholdBytes: 128 << 20,
		CacheCapacity:        1024,
		JobID:                "gohvd",
		LogLevel:             "warning",
	}
}

// FromEnvironment reads every setting from the process environment, but those in overrides, by name, from
// there. haveStore says that the program brings a rendezvous store of its own, so that none need be named.
func FromEnvironment(overrides map[string]string, haveStore bool) (Config, error) {
	for name := range overrides {
		if !slices.ContainsFunc(settings, func(s Setting) bool { return s.Name == name }) {
			return Config{}, fmt.Errorf("config: there is no setting %q", name)
		}
	}
	c, err := Load(func(name string) (string, bool) {
		if v, ok := overrides[name]; ok {
			return v, true
		}
		return os.LookupEnv(name)
	}, haveStore)
	if err != nil {
		return c, err
	}
	if c.Hostname == "" {
		if c.Hostname, err = os.Hostname(); err != nil {
			return c, fmt.Errorf("config: HOROVOD_HOSTNAME is not set and the host has no name: %w", err)
		}
	}
	return c, nil
}

// Load reads every setting through lookup, which answers like os.LookupEnv. An empty value counts as
// unset. The error names the variable, its value and what was wanted.
func Load(lookup func(name string) (string, bool), haveStore bool) (Config, error) {
	c := Defaults()
	for _, s := range settings {
		text, ok := lookup(s.Name)
		if !ok || text == "" {
			continue
		}
		if err := s.parse(&c, text); err != nil {
			return c, fmt.Errorf("config: %s=%q: %w", s.Name, text, err)
		}
	}
	return c, c.check(haveStore)
}

// check holds the settings against each other.
func (c *Config) check(haveStore bool) error {
	switch {
	case (c.Rank == Unset) != (c.Size == Unset):
		return fmt.Errorf("config: HOROVOD_RANK and HOROVOD_SIZE must be set together: rank is %s, size is %s", orUnset(c.Rank), orUnset(c.Size))
	case c.Rank != Unset && c.Rank >= c.Size:
		return fmt.Errorf("config: HOROVOD_RANK is %d, want less than HOROVOD_SIZE, which is %d", c.Rank, c.Size)
	case c.Size > 1 && !haveStore && (c.RendezvousAddr == "" || c.RendezvousPort == 0):
		return fmt.Errorf("config: a job of %d ranks needs HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT, which hvdrun sets", c.Size)
	}
	return nil
}

func orUnset(v int) string {
	if v == Unset {
		return "unset"
	}
	return strconv.Itoa(v)
}

func textRow(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, text string) error {
		*field(c) = text
		return nil
	}
}

func intRow(field func(*Config) *int, least int) func(*Config, string) error {
	return func(c *Config, text string) error {
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil || v < int64(least) {
			return fmt.Errorf("want a whole number of at least %d", least)
		}
		*field(c) = int(v)
		return nil
	}
}

func jobRow(c *Config, text string) error {
	if len(text) > 64 {
		return fmt.Errorf("want at most 64 bytes, got %d", len(text))
	}
	c.JobID = text
	return nil
}

func portRow(c *Config, text string) error {
	v, err := strconv.ParseUint(text, 10, 16)
	if err != nil || v == 0 {
		return fmt.Errorf("want a port, 1 to 65535")
	}
	c.RendezvousPort = int(v)
	return nil
}

func bytesRow(c *Config, text string) error {
	v, err := strconv.ParseInt(text, 10, 64)
	if err != nil || v < 0 {
		return fmt.Errorf("want a number of bytes, 0 or more")
	}
	c.FusionThresholdBytes = v
	return nil
}

func secondsRow(field func(*Config) *time.Duration) func(*Config, string) error {
	return func(c *Config, text string) error {
		d, err := duration(text, time.Second)
		if err != nil || d == 0 {
			return fmt.Errorf("want a number of seconds above 0 and at most a million")
		}
		*field(c) = d
		return nil
	}
}

// livenessRow leaves room for a few heartbeats, which come each second.
func livenessRow(c *Config, text string) error {
	d, err := duration(text, time.Second)
	if err != nil || d < 3*time.Second {
		return fmt.Errorf("want a number of seconds, 3 to a million")
	}
	c.LivenessTimeout = d
	return nil
}

func cycleRow(c *Config, text string) error {
	d, err := duration(text, time.Millisecond)
	if err != nil {
		return fmt.Errorf("want a number of milliseconds, 0 to a million")
	}
	c.CycleTime = d
	return nil
}

func duration(text string, unit time.Duration) (time.Duration, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || v < 0 || v > 1e6 {
		return 0, strconv.ErrRange
	}
	return time.Duration(v * float64(unit)), nil
}

func levelRow(c *Config, text string) error {
	switch l := strings.ToLower(text); l {
	case "trace", "debug", "info", "warning", "error", "fatal":
		c.LogLevel = l
		return nil
	}
	return fmt.Errorf("want trace, debug, info, warning, error or fatal")
}

func negotiationRow(c *Config, text string) error {
	switch text {
	case "event":
		c.Lockstep = false
	case "lockstep":
		c.Lockstep = true
	default:
		return fmt.Errorf("want event or lockstep")
	}
	return nil
}
