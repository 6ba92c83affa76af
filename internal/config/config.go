// Package config holds the settings, one table that is read in one place, and the version of gohvd.
//
// A setting carries Horovod's name where Horovod has it (HOROVOD_...) and ours where it has not (HVD_...). The table
// makes how values are read, hvdrun's flags and help, and the page docs/settings.md. Nothing else in this module
// reads the environment.
//
// A value comes from the highest of these that gives one: the program (API), a flag of hvdrun, the environment, the
// file named by HVD_CONFIG_FILE, the default. Config.Origin says which it was.
package config

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

//go:generate go test -run ^TestPageIsUpToDate$ -rewrite .

// Unset is the value of a topology setting that nothing gives.
const Unset = -1

// TimelineDynamic is the name of a timeline that is not started with the job.
const TimelineDynamic = "DYNAMIC"

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
	// HostID is the identity of this host's memory: ranks with equal ones may share memory. Empty means that it is made of
	// what the host says of itself.
	HostID string
	// SharedMemory says where tensors go through shared memory.
	SharedMemory SharedMemory
	// Secret is the text that proves that a process is of this job, and SecretFile a file that has it. Insecure lets a job
	// without one run on several hosts.
	Secret, SecretFile string
	Insecure           bool
	// TLS has every connection encrypted, which takes a secret. Turning it on costs speed.
	TLS bool
	// NetworkInterfaces choose the interfaces that this rank listens on (see package netif); empty means the one that leads to
	// where the ranks meet.
	NetworkInterfaces []string
	// MeetHost and MeetPort are where rank 0 serves the store of a job that another launcher has started, in place of what that
	// says; empty and 0 if not given.
	MeetHost string
	MeetPort int
	// InitMethod is the URL of an init method and UniqueID the text of an id, or several with commas between them, by which the
	// ranks meet if the program says nothing else; empty if not given.
	InitMethod, UniqueID string
	// JobID tells the processes of this job from those of another that reuses its addresses.
	JobID string
	// StartTimeout bounds Init: all ranks must have met by then.
	StartTimeout time.Duration
	// LivenessTimeout is the silence after which a rank is taken for dead. Raising it delays the verdict on a
	// host that vanished; a process that dies is noticed at once regardless.
	LivenessTimeout time.Duration
	// FusionThresholdBytes is the most that one fused response holds; 0 fuses nothing. A grouped allreduce is one response
	// whatever its size. Raising it saves round trips and costs cache misses.
	FusionThresholdBytes int64
	// CycleTime is the least time between two cycles of the coordinator. Raising it fuses more and answers later. 0
	// (the default, unlike Horovod's 1 ms) answers as soon as something can be answered.
	CycleTime time.Duration
	// CacheCapacity is the number of responses that a process set remembers; 0 remembers none, so every
	// request travels in full.
	CacheCapacity int
	// Lockstep selects the controller in which all ranks enter every cycle.
	Lockstep bool
	// DisableGroupFusion keeps a group's tensors out of responses with tensors that are not of the group.
	DisableGroupFusion bool
	// StallWarning is how long a tensor may wait for some ranks before they are named; 0 never names them.
	StallWarning time.Duration
	// StallShutdown is how long it may wait before the job is ended, at least StallWarning; 0 never ends it.
	StallShutdown time.Duration
	// DynamicProcessSets allows process sets to be added and removed after Init.
	DynamicProcessSets bool
	// Deterministic gives the same bits from run to run, whatever arrives first. It costs speed.
	Deterministic bool
	// OperationTimeout bounds every operation, from being submitted to its end; 0 does not.
	OperationTimeout time.Duration
	// Timeline is the file that rank 0 writes its timeline to, and the others beside it; TimelineDynamic starts none; empty is
	// the same, but for Horovod's Python API.
	Timeline string
	// TimelineMarkCycles has cycles marked.
	TimelineMarkCycles bool
	// TimelineMaxMiB is the most that the timeline of a rank takes on disk.
	TimelineMaxMiB int
	// TimelineLast keeps only so much of the timeline, in memory, until it is stopped; 0 writes it as it comes.
	TimelineLast time.Duration
	// TimelineSignal is the name of the signal that starts and stops it; empty for none.
	TimelineSignal string
	// MetricsAddr is where the rank shows its metrics; empty for nowhere.
	MetricsAddr string
	// FlightRecorder keeps the last operations in memory.
	FlightRecorder bool
	// DumpDir is where the flight recorder is left when the job stalls or fails; empty for nowhere.
	DumpDir string
	// LogLevel is the least severity that is logged.
	LogLevel string
	// LogHideTime leaves the time out of the log.
	LogHideTime bool
	// LogFormat is console, json, or auto: console on a terminal, json elsewhere.
	LogFormat string
	// ThreadAffinity is the core of each local rank's thread; empty pins none.
	ThreadAffinity []int
	// Warnings are sentences for people on settings that do not do what they may have been meant to, without those
	// that the launcher has shown already.
	Warnings []string

	stallCheckDisabled bool
	environ            map[string]string
	given              map[string]value // by the name of the setting; those not in it have the default
	warned             []string         // what Warnings and the launcher's warnings are about
}

// Sources are where values come from. An empty value in the environment or from the program counts as none.
type Sources struct {
	// Environ is NAME=value, as of os.Environ.
	Environ []string
	// Flags are the launcher's, in the order of its command line. A file named by one overrides those before it and
	// is overridden by those after it.
	Flags []FlagValue
	// API is what the program sets, by name.
	API map[string]string
	// Launcher says that this is the launcher: what places a rank in the job is left alone.
	Launcher bool
	// HaveStore says that the program brings a rendezvous store of its own, so that none need be named.
	HaveStore bool
}

// FlagValue is one flag of the launcher's command line.
type FlagValue struct {
	// Flag is the flag as people write it, such as --cache-capacity.
	Flag string
	// Name is the setting and Value its value as in the environment (see Setting.FromFlag).
	Name, Value string
}

// SharedMemory is where tensors go through shared memory.
type SharedMemory uint8

const (
	// SharedByHost is in jobs of one host. That it cannot be had there is an error.
	SharedByHost SharedMemory = iota
	// SharedIfPossible is in jobs of one host whose ranks can have it.
	SharedIfPossible
	// SharedAlways is in every job. A job of several hosts is an error.
	SharedAlways
	// SharedNever is nowhere.
	SharedNever
)

// Defaults returns the configuration where nothing is given.
func Defaults() Config {
	c := Config{
		Rank: Unset, Size: Unset,
		LocalRank: Unset, LocalSize: Unset,
		CrossRank: Unset, CrossSize: Unset,
	}
	for _, s := range settings {
		if s.Default == "" {
			continue
		}
		if err := s.set(&c, s.Default); err != nil {
			panic(fmt.Sprintf("config: default of %s: %v", s.Name, err))
		}
	}
	return c
}

// FromEnvironment is Load for a process that runs an engine: from its environment, and from overrides, by name, which the
// program sets. haveStore says that the program brings a rendezvous store of its own. It refuses HVD_SIDECAR: with that, another
// process runs the engine of this rank.
func FromEnvironment(overrides map[string]string, haveStore bool) (Config, error) {
	c, err := Load(Sources{Environ: os.Environ(), API: overrides, HaveStore: haveStore})
	if err != nil {
		return Config{}, err
	}
	if at := c.Variable(SidecarVariable); at != "" {
		return Config{}, fmt.Errorf("config: %s is %q, and this program runs its engine itself: only clients of a sidecar, such as "+
			"gohvd in Python, use it; unset it", SidecarVariable, at)
	}
	if c.Hostname == "" {
		if c.Hostname, err = os.Hostname(); err != nil {
			return Config{}, fmt.Errorf("config: HOROVOD_HOSTNAME is not set and the host has no name: %w", err)
		}
	}
	return c, nil
}

// Variable returns the text of an environment variable, of another launcher say, or of a setting, wherever that was given. It is
// empty where there is none, also where a setting has a default.
func (c Config) Variable(name string) string {
	if v, ok := c.given[name]; ok {
		return v.text
	}
	return c.environ[name]
}

// Load reads every setting. The error names the setting, where its value came from, the value and what was wanted.
func Load(src Sources) (Config, error) {
	l, err := collect(src)
	if err != nil {
		return Config{}, err
	}
	c := Defaults()
	c.given, c.environ = l.given, l.environ
	for _, s := range settings {
		v, ok := c.given[s.Name]
		if !ok {
			continue
		}
		if err := s.set(&c, v.text); err != nil {
			return Config{}, fmt.Errorf("config: %s from %s: got %q, %w", s.Name, v.origin, v.text, err)
		}
	}
	l.warnings = append(l.warnings, c.settleStalls()...)
	c.warn(l.warnings, l.shown)
	if err := c.check(src.HaveStore); err != nil {
		return Config{}, err
	}
	return c, nil
}

// settleStalls applies Horovod's rules for the stall check's settings.
func (c *Config) settleStalls() []warning {
	const name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
	if c.stallCheckDisabled {
		c.StallWarning = 0
	}
	if c.StallShutdown == 0 || c.StallWarning != 0 && c.StallShutdown >= c.StallWarning {
		return nil
	}
	reason := "the stall check is off"
	if c.StallWarning != 0 {
		reason = fmt.Sprintf("%v is less than the %v of HOROVOD_STALL_CHECK_TIME_SECONDS", c.StallShutdown, c.StallWarning)
	}
	c.StallShutdown = 0
	return []warning{noEffect(name, reason)}
}

// check holds the settings against each other.
func (c *Config) check(haveStore bool) error {
	switch {
	case (c.Rank == Unset) != (c.Size == Unset):
		return fmt.Errorf("config: HOROVOD_RANK and HOROVOD_SIZE must be set together: rank is %s, size is %s", orUnset(c.Rank), orUnset(c.Size))
	case c.Rank != Unset && c.Rank >= c.Size:
		return fmt.Errorf("config: HOROVOD_RANK is %d, want less than HOROVOD_SIZE, which is %d", c.Rank, c.Size)
	case c.Size > 1 && !haveStore && c.InitMethod == "" && c.UniqueID == "" && (c.RendezvousAddr == "" || c.RendezvousPort == 0):
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
