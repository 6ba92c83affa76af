package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
)

// Bounds on what a rank says about itself.
const (
	MaxNameBytes = 256     // every text of a Record, JoinConfig.Job
	MaxSize      = 1 << 16 // JoinConfig.Size
	// MaxCapabilitiesBytes bounds the names and texts of Record.Capabilities.
	MaxCapabilitiesBytes = 4 << 10
	// MaxTermsBytes bounds the names and values of JoinConfig.Terms.
	MaxTermsBytes = 16 << 10
	// maxEpoch leaves room for later epochs. A greater LastEpoch comes from a bug or from a hostile peer.
	maxEpoch = 1 << 62
)

// Record is what one rank tells all others about itself.
type Record struct {
	Addr   string // host:port at which it accepts data connections
	Host   string // the name of its host, for messages
	HostID string // the identity of its host: equal for ranks that can share memory
	PID    int
	// Capabilities say why the rank cannot serve a backend, by the name of the backend. The text is empty if
	// the rank can serve it. A backend that is not in the map does not exist in the build of the rank.
	Capabilities map[string]string
	// Device is the accelerator that the rank uses, a name that is unique on its host, or empty. Ranks of one
	// host with the same device form no epoch, unless all of them have SharesDevice.
	Device       string
	SharesDevice bool
	// Memory is the rank's offer to share memory with the ranks of its host. Zero is none.
	Memory Memory
}

// Memory is a rank's offer to share memory (shm.Offer).
type Memory struct {
	UID            uint32
	Token          []byte
	Socket, Reason string
}

// String names the process in errors.
func (r Record) String() string { return fmt.Sprintf("pid %d on host %q at %s", r.PID, r.Host, r.Addr) }

// JoinConfig configures Join.
type JoinConfig struct {
	Store store.Store // may be nil if Size is 1
	Job   string      // 1 to MaxNameBytes bytes; the same at all ranks of a job
	Rank  topo.Rank
	Size  int
	// LastEpoch is the greatest epoch in which this process has been, 0 if none.
	LastEpoch uint64
	// ListenHost is the address on which rank 0 opens the root: one that the other hosts can dial, not a
	// wildcard. Default 127.0.0.1. Other ranks do not use it.
	ListenHost string
	// Secret is the secret of the job. A rank without it cannot join. Zero is none.
	Secret secret.Secret
	// Terms are values, by name, that must be the same at all ranks. Ranks that differ form no epoch, and the
	// error names the terms that differ.
	Terms map[string]string
	Self  Record // must not change until Join has returned
	// RingAbove is used by rank 0: in a job of more ranks the root gives each rank only the records of its
	// neighbours, and Session.Gather learns the rest from them. Default 128, at least 2.
	RingAbove int
	Log       *zap.Logger // may be nil

	suspicion time.Duration // 0 means suspicionTime
}

// Session is the part of a rank in an epoch.
type Session struct {
	Epoch uint64 // greater than the LastEpoch of every rank
	// Records are the records of the ranks, by rank, equal on all ranks. In a large job
	// (JoinConfig.RingAbove) this rank has only its own and those of the ranks before and after it until
	// Gather has returned.
	Records []Record

	rank   topo.Rank
	ring   bool    // whether Gather is needed
	root   *root   // set at rank 0, unless the job has size 1
	member *member // set unless the job has size 1
}

// Close ends the root of rank 0; until then it listens, to tell latecomers that the epoch is complete. Tables
// in flight are delivered first, for at most 5 s. Close waits for goroutines. If a rank closes before all are
// Ready, the others take it for failed. Later calls return the result of the first.
func (s *Session) Close() error {
	var err error
	if s.root != nil {
		err = s.root.close()
	}
	if s.member != nil {
		s.member.close()
	}
	return err
}

// Reason is why an epoch was not formed with this rank.
type Reason uint8

// The reasons. All but Late and GaveUp say that ranks contradict each other: starting again with the same
// configuration will not help.
const (
	NoReason Reason = iota
	SizeMismatch
	DuplicateRank // two processes have the same rank, for example 0
	RankOutOfRange
	WrongJob
	TermsDiffer
	DuplicateDevice
	Late       // the epoch was complete, and no newer one was formed in time
	GaveUp     // rank 0's ctx ended before all ranks had joined
	RootFailed // rank 0 could not go on
)

// RefusedError is the error of Join if the ranks found each other but formed no epoch, or formed it without
// this rank. All ranks that had joined have the same error, with two exceptions: only the latecomer gets
// Late, and rank 0 has an error of its own with GaveUp and RootFailed.
type RefusedError struct {
	Reason Reason
	Text   string
}

func (e *RefusedError) Error() string { return e.Text }

// Join meets the other ranks of the job and returns when all Size of them have joined.
//
// It does not return without them before ctx ends, so give ctx a deadline. The error then says what was
// missing: at rank 0 the ranks, at the others the store, the root or the other ranks. Contradictions between
// ranks (two sizes, two ranks with one number, a rank out of range, another job, other terms) end it at once
// at all ranks with the same *RefusedError. Rank 0 keeps answering for at most 2 s before it returns that, so
// that ranks that are still on their way get it too. A process that finds the epoch complete waits for the
// next one, see the package comment.
//
// Every rank except 0 watches one key and opens one connection. Rank 0 sends each of them all records, Size²
// in total, or in a large job two: Gather learns the others. A job of size 1 uses neither store nor network,
// and its epoch is LastEpoch+1.
func Join(ctx context.Context, cfg JoinConfig) (*Session, error) {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.ListenHost == "" {
		cfg.ListenHost = "127.0.0.1"
	}
	if cfg.RingAbove == 0 {
		cfg.RingAbove = ringAbove
	}
	s, err := join(ctx, &cfg)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: join %.64q as rank %d of %d: %w", cfg.Job, cfg.Rank, cfg.Size,
			err)
	}
	return s, nil
}

func join(ctx context.Context, cfg *JoinConfig) (*Session, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	outOfRange := checkRank(int64(cfg.Rank), cfg.Size)
	switch {
	case cfg.Size == 1 && outOfRange != nil:
		return nil, outOfRange
	case cfg.Size == 1:
		return &Session{Epoch: cfg.LastEpoch + 1, Records: []Record{cfg.Self}}, nil
	case cfg.Rank == 0:
		return joinAsRoot(ctx, cfg)
	case outOfRange == nil:
		return joinRoot(ctx, cfg)
	}
	// The other ranks would wait for the rank whose number is wrong, so the root has to learn of it.
	cfg.Log.Error("rendezvous: cannot join, telling rank 0", zap.Error(outOfRange))
	_, err := joinRoot(ctx, cfg)
	if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Reason != Late {
		return nil, err
	}
	return nil, fmt.Errorf("%w (reporting this to rank 0 failed: %w)", outOfRange, err)
}

func (cfg *JoinConfig) check() error {
	if err := checkName("job", cfg.Job); err != nil {
		return err
	}
	if cfg.Job == "" {
		return errors.New("the job has no name")
	}
	if cfg.Size < 1 || cfg.Size > MaxSize {
		return fmt.Errorf("size is %d, want 1 to %d", cfg.Size, MaxSize)
	}
	if cfg.Store == nil && cfg.Size > 1 {
		return errors.New("no store is given, which a job of more than 1 rank needs")
	}
	if cfg.LastEpoch > maxEpoch {
		return fmt.Errorf("last epoch is %d, want at most %d", cfg.LastEpoch, uint64(maxEpoch))
	}
	if ip := net.ParseIP(cfg.ListenHost); cfg.Rank == 0 && ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("listen host is %s, want an address that other ranks can dial", cfg.ListenHost)
	}
	if err := checkTexts("terms", cfg.Terms, MaxTermsBytes); err != nil {
		return err
	}
	return cfg.Self.check()
}

// checkTexts checks names and texts that travel as protobuf.
func checkTexts(what string, texts map[string]string, most int) error {
	n := 0
	for name, text := range texts {
		n += len(name) + len(text)
		if !utf8.ValidString(name) || !utf8.ValidString(text) {
			return fmt.Errorf("%s have %q for %q, want UTF-8", what, text, name)
		}
	}
	if n > most {
		return fmt.Errorf("%s have %d bytes, want at most %d", what, n, most)
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
	m := &r.Memory
	if len(m.Token) > MaxNameBytes {
		return fmt.Errorf("memory token has %d bytes, want at most %d", len(m.Token), MaxNameBytes)
	}
	return errors.Join(checkName("memory socket", m.Socket), checkName("reason not to share memory",
		m.Reason))
}

// checkName checks a string that is sent as protobuf, which requires UTF-8.
func checkName(what, name string) error {
	if len(name) > MaxNameBytes {
		return fmt.Errorf("%s has %d bytes, want at most %d", what, len(name), MaxNameBytes)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s is %q, want UTF-8", what, name)
	}
	return nil
}

func checkRank(rank int64, size int) error {
	if rank < 0 || rank >= int64(size) {
		return &RefusedError{RankOutOfRange, fmt.Sprintf("rank %d is out of range, want 0 to %d", rank,
			size-1)}
	}
	return nil
}

func (cfg *JoinConfig) epochKey() string { return "gohvd/" + cfg.Job + "/epoch" }

func (cfg *JoinConfig) rootKey() string { return "gohvd/" + cfg.Job + "/root" }
