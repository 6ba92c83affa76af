package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// Limits on the values that a rank sends when it joins.
const (
	MaxNameBytes = 256     // bounds each text of a Record, and JoinConfig.Job
	MaxSize      = 1 << 16 // bounds JoinConfig.Size
	// MaxCapabilitiesBytes bounds the total length of the names and texts in Record.Capabilities.
	MaxCapabilitiesBytes = 4 << 10
	MaxProcessors        = 1 << 14 // bounds the numbers of processors in Record.Processors
	// MaxTermsBytes bounds the total length of the names and values in JoinConfig.Terms.
	MaxTermsBytes = 16 << 10
	// maxEpoch bounds LastEpoch, so that greater numbers remain for later epochs. A peer that sends a greater
	// value has a bug or is hostile.
	maxEpoch = 1 << 62
)

// Record describes a rank. Each rank sends its Record to all other ranks.
type Record struct {
	Addr   string // address, host:port, on which the rank accepts data connections
	Host   string // name of the rank's host, used only in messages
	HostID string // identity of the rank's host, equal for ranks that can share memory
	PID    int
	// Capabilities maps the name of each backend in the rank's build to the reason why the rank cannot use
	// that backend. An empty reason means that the rank can use it.
	Capabilities map[string]string
	// Device is the name of the accelerator that the rank uses, or empty if the rank uses none. No two
	// accelerators of a host have the same name. If ranks of one host have the same Device, Join fails,
	// unless all of these ranks have SharesDevice set.
	Device       string
	SharesDevice bool
	// Memory is the rank's offer to share memory with the ranks of its host. The zero Memory means that there
	// is no offer.
	Memory Memory
	// Processors is a bit set of the processors on which the rank may run. It is empty if they are unknown.
	Processors []uint64
}

// Memory is a rank's offer to share memory. It has the fields of shm.Offer.
type Memory struct {
	UID            uint32
	Token          []byte
	Socket, Reason string
}

// String returns a description of the process for errors.
func (r Record) String() string { return fmt.Sprintf("pid %d on host %q at %s", r.PID, r.Host, r.Addr) }

// share makes r use the memory of another record for what is equal in both. The ranks of a job have most in
// common.
func (r *Record) share(other *Record) {
	if r.Host == other.Host {
		r.Host = other.Host
	}
	if r.HostID == other.HostID {
		r.HostID = other.HostID
	}
	if maps.Equal(r.Capabilities, other.Capabilities) {
		r.Capabilities = other.Capabilities
	}
	if slices.Equal(r.Processors, other.Processors) {
		r.Processors = other.Processors
	}
}

// JoinConfig configures Join.
type JoinConfig struct {
	Store store.Store // may be nil if Size is 1
	Job   string      // 1 to MaxNameBytes bytes, the same at all ranks of the job
	Rank  topo.Rank
	Size  int
	// LastEpoch is the greatest epoch to which this process has belonged, or 0 if there is none.
	LastEpoch uint64
	// ListenHost is the address on which rank 0 opens the root. The default is 127.0.0.1. If it is
	// unspecified (0.0.0.0 or ::), the root listens on all addresses of its host, which must be the host of
	// Store, and the other ranks dial it at StoreHost. Only rank 0 uses ListenHost.
	ListenHost string
	// StoreHost is the address at which this rank has reached Store. It is the zero Addr if there is none.
	StoreHost netip.Addr
	// Move makes this rank listen on another address of its host, and returns that address with the port.
	// Join calls it if Self.Addr is on loopback and ranks of other hosts have joined. If Move is nil, the
	// rank stays where it is.
	Move func(host string) (addr string, err error)
	// Secret is the secret of the job. A rank without it cannot join. If Secret is zero, the job has no
	// secret.
	Secret secret.Secret
	// Terms maps names to values that must be the same at all ranks. If they differ, Join fails, and the
	// error names the terms that differ.
	Terms map[string]string
	Self  Record // the caller must not change it until Join has returned
	// RingAbove is the number of ranks above which a job is large. In a large job, the root sends each rank
	// only the records of its two neighbours, and Session.Gather gets the others. The default is 128, and the
	// minimum is 2. Only rank 0 uses RingAbove.
	RingAbove int
	Log       *zap.Logger // may be nil

	suspicion time.Duration // 0 means suspicionTime
	grace     time.Duration // 0 means answerGrace
}

// Reason says why Join has failed although the ranks have found each other.
type Reason uint8

// All reasons except Late, GaveUp, RootFailed and NoAddress mean that ranks contradict each other. A new
// start with the same configuration fails in the same way.
const (
	NoReason Reason = iota
	SizeMismatch
	DuplicateRank // two processes have the same rank, which may be 0
	RankOutOfRange
	WrongJob
	TermsDiffer
	DuplicateDevice
	Late       // the epoch was complete, and no newer one was formed in time
	GaveUp     // ctx of rank 0 ended before all ranks had joined
	RootFailed // rank 0 had an error of its own
	NoAddress  // a rank could not listen on an address that ranks of other hosts can dial
)

// RefusedError is returned by Join if the ranks found each other, but no epoch was formed, or an epoch was
// formed without this rank. All ranks that have joined get the same error, with two exceptions: only a
// latecomer gets Late, and if the reason is GaveUp or RootFailed, rank 0 returns its own error.
type RefusedError struct {
	Reason Reason
	Text   string
	// Awaited has the ranks for which rank 0 waited when its time limit passed. It is nil for all other
	// reasons.
	Awaited []topo.Rank
}

func (e *RefusedError) Error() string { return e.Text }

func refuse(why Reason, format string, args ...any) *RefusedError {
	return &RefusedError{Reason: why, Text: fmt.Sprintf(format, args...)}
}

// WaitError is returned by Join if ctx has ended while this rank waited for other ranks.
type WaitError struct {
	// Ranks has the ranks for which this rank waited, at least one: the missing ranks or, if rank 0 did not
	// answer, rank 0.
	Ranks []topo.Rank
	what  string // what this rank waited for
	err   error
}

func (e *WaitError) Error() string { return fmt.Sprintf("%s: %v", e.what, e.err) }

func (e *WaitError) Unwrap() error { return e.err }

// Awaited returns the ranks for which a rank waited in Join until its time limit passed. err is the error of
// Join. If Join has failed for another reason, Awaited returns nil.
func Awaited(err error) []topo.Rank {
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		return refused.Awaited
	}
	if wait, ok := errors.AsType[*WaitError](err); ok && errors.Is(wait, context.DeadlineExceeded) {
		return wait.Ranks
	}
	return nil
}

func (cfg *JoinConfig) check() error {
	if err := checkName("job", cfg.Job); err != nil {
		return err
	}
	if cfg.Job == "" {
		return errors.New("the job has no name")
	}
	if cfg.Size < 1 || cfg.Size > MaxSize {
		return fmt.Errorf("the size of the job is %d, want 1 to %d", cfg.Size, MaxSize)
	}
	if cfg.Store == nil && cfg.Size > 1 {
		return errors.New("no store was given, but a job of more than 1 rank needs a store")
	}
	if cfg.LastEpoch > maxEpoch {
		return fmt.Errorf("the last epoch is %d, want at most %d", cfg.LastEpoch, uint64(maxEpoch))
	}
	if err := checkTexts("terms", cfg.Terms, MaxTermsBytes); err != nil {
		return err
	}
	return cfg.Self.check()
}

// checkTexts checks that the keys and values of texts are valid UTF-8, as protobuf requires, and that their
// total length does not exceed the limit most.
func checkTexts(what string, texts map[string]string, most int) error {
	n := 0
	for name, text := range texts {
		n += len(name) + len(text)
		if !utf8.ValidString(name) || !utf8.ValidString(text) {
			return fmt.Errorf("%s: got value %q for name %q, want valid UTF-8", what, text, name)
		}
	}
	if n > most {
		return fmt.Errorf("%s: got %d bytes in total, want at most %d", what, n, most)
	}
	return nil
}

func (r *Record) check() error {
	if err := checkName("data address", r.Addr); err != nil {
		return err
	}
	if err := checkName("host", r.Host); err != nil {
		return err
	}
	if err := checkName("host identity", r.HostID); err != nil {
		return err
	}
	if err := checkName("device", r.Device); err != nil {
		return err
	}
	if err := checkTexts("capabilities", r.Capabilities, MaxCapabilitiesBytes); err != nil {
		return err
	}
	if n := 64 * len(r.Processors); n > MaxProcessors {
		return fmt.Errorf("the set of processors has %d bits, want at most %d", n, MaxProcessors)
	}
	m := &r.Memory
	if len(m.Token) > MaxNameBytes {
		return fmt.Errorf("the memory token has %d bytes, want at most %d", len(m.Token), MaxNameBytes)
	}
	return errors.Join(checkName("memory socket", m.Socket), checkName("reason not to share memory",
		m.Reason))
}

// checkName checks that a string is not too long, and that it is valid UTF-8, as protobuf requires.
func checkName(what, name string) error {
	if len(name) > MaxNameBytes {
		return fmt.Errorf("%s has %d bytes, want at most %d", what, len(name), MaxNameBytes)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s is %q, want valid UTF-8", what, name)
	}
	return nil
}

func checkRank(rank int64, size int) error {
	if rank < 0 || rank >= int64(size) {
		return refuse(RankOutOfRange, "rank %d is out of range, want 0 to %d", rank, size-1)
	}
	return nil
}

func (cfg *JoinConfig) epochKey() string { return "gohvd/" + cfg.Job + "/epoch" }

func (cfg *JoinConfig) rootKey() string { return "gohvd/" + cfg.Job + "/root" }
