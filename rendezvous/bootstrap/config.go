package bootstrap

import (
	"fmt"
	"net"
	"os"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/topo"
)

// Bounds on what a rank says about itself.
const (
	MaxInfoBytes = 4 << 10 // Record.Info, and what one rank gives to Ring.Allgather
	MaxNameBytes = 256     // Record.Addr, HostHash, Device and Host
	MaxSize      = 1 << 16 // Config.Size
)

// maxPID is the greatest pid that any system has.
const maxPID = 1<<31 - 1

// defaultTimeout is how long a root waits for all ranks unless it is told.
const defaultTimeout = 10 * time.Minute

// Record is what one rank tells all others about itself.
type Record struct {
	Addr     string // where it takes data connections, host:port
	HostHash string // identity of its host: equal for ranks that share memory and devices
	Device   string // the accelerator that it uses, a name that is unique on its host; empty if none
	Info     []byte // the caller's own, not looked at here

	// Host and PID name the process in errors. Join fills in those that are empty.
	Host string
	PID  int
}

// Config says who joins what. NewID uses ListenHost, Encrypt, Timeout and Log of it, Join all but Encrypt and Timeout.
type Config struct {
	Rank topo.Rank
	Size int
	Self Record // must not change until Join has returned

	// ListenHost is the address on which to listen: one that the other hosts can dial, not a wildcard. The default is
	// 127.0.0.1 for a root, and for a rank the address from which it reaches its root.
	ListenHost string
	// ShareDevices allows this rank to have the Device of another one that allows it too.
	ShareDevices bool
	// Encrypt has all connections encrypted (package secret), which the id says: to the root, and between the ranks.
	Encrypt bool
	// Timeout is how long a root waits for all ranks, 0 is 10 minutes.
	Timeout time.Duration
	Log     *zap.Logger // may be nil
}

// Reason is why ranks did not come together.
type Reason uint8

// The reasons. Up to DuplicateDevice they say that ranks contradict each other: starting again with the same
// configuration will not help.
const (
	NoReason Reason = iota
	SizeMismatch
	DuplicateRank
	RankOutOfRange
	IDMismatch // ranks have different lists of ids
	DuplicateDevice
	Late      // all ranks of the root were there; the error of the latecomer alone
	RankLost  // a rank that had reported went away, or another rank cannot reach it
	GaveUp    // the context of a rank ended
	RootEnded // the root was closed, or its context or time ended, before all ranks were done
	numReasons
)

// RefusedError is the error of Join when a root or a rank was reached and it came to nothing. All ranks that had reported
// have the same one, but those who gave up have their own.
type RefusedError struct {
	Reason Reason
	Text   string
}

func (e *RefusedError) Error() string { return e.Text }

func (cfg *Config) check() error {
	if cfg.Size < 1 || cfg.Size > MaxSize {
		return fmt.Errorf("size is %d, want 1 to %d", cfg.Size, MaxSize)
	}
	if err := cfg.checkListenHost(); err != nil {
		return err
	}
	return cfg.Self.check()
}

func (cfg *Config) checkListenHost() error {
	if ip := net.ParseIP(cfg.ListenHost); ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("listen host is %s, want an address that other ranks can dial", cfg.ListenHost)
	}
	return nil
}

// fill is cfg with its defaults.
func (cfg Config) fill() Config {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.Self.PID == 0 {
		cfg.Self.PID = os.Getpid()
	}
	if cfg.Self.Host == "" {
		// It only names the process in errors; without a name they have its pid.
		cfg.Self.Host, _ = os.Hostname()
	}
	return cfg
}

func (r *Record) check() error {
	for _, f := range []struct{ what, text string }{
		{"data address", r.Addr}, {"host hash", r.HostHash}, {"device", r.Device}, {"host", r.Host},
	} {
		if len(f.text) > MaxNameBytes {
			return fmt.Errorf("%s has %d bytes, want at most %d", f.what, len(f.text), MaxNameBytes)
		}
		if !utf8.ValidString(f.text) {
			return fmt.Errorf("%s is %q, want UTF-8", f.what, f.text)
		}
	}
	if len(r.Info) > MaxInfoBytes {
		return fmt.Errorf("info has %d bytes, want at most %d", len(r.Info), MaxInfoBytes)
	}
	if r.PID < 0 || r.PID > maxPID {
		return fmt.Errorf("pid is %d, want 0 to %d", r.PID, maxPID)
	}
	return nil
}
