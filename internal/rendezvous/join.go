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
	MaxNameBytes = 256     // every text of a Record, and JoinConfig.Job
	MaxSize      = 1 << 16 // JoinConfig.Size
	// MaxCapabilitiesBytes bounds the total length of the names and texts in Record.Capabilities.
	MaxCapabilitiesBytes = 4 << 10
	// MaxTermsBytes bounds the total length of the names and values in JoinConfig.Terms.
	MaxTermsBytes = 16 << 10
	// maxEpoch bounds LastEpoch, so that there is room for later epochs. A greater value comes from a bug or
	// a hostile peer.
	maxEpoch = 1 << 62
)

// Record is what a rank tells all other ranks about itself.
type Record struct {
	Addr   string // where the rank accepts data connections, host:port
	Host   string // name of the rank's host, for people
	HostID string // identity of the rank's host, equal for ranks that can share memory
	PID    int
	// Capabilities maps the name of each backend in the rank's build to the reason why the rank cannot use
	// that backend. An empty reason means that the rank can use it.
	Capabilities map[string]string
	// Device is the accelerator that the rank uses. The name is unique on the rank's host, and empty if the
	// rank uses none. If ranks of one host have the same device, no epoch is formed, unless all of them have
	// SharesDevice set.
	Device       string
	SharesDevice bool
	// Memory is the rank's offer to share memory with the ranks of its host. The zero Memory is no offer.
	Memory Memory
}

// Memory is a rank's offer to share memory, in the form of shm.Offer.
type Memory struct {
	UID            uint32
	Token          []byte
	Socket, Reason string
}

// String returns a description of the process for errors.
func (r Record) String() string { return fmt.Sprintf("pid %d on host %q at %s", r.PID, r.Host, r.Addr) }

// JoinConfig configures Join.
type JoinConfig struct {
	Store store.Store // may be nil if Size is 1
	Job   string      // 1 to MaxNameBytes bytes, the same at all ranks of the job
	Rank  topo.Rank
	Size  int
	// LastEpoch is the greatest epoch to which this process has belonged, or 0 if there is none.
	LastEpoch uint64
	// ListenHost is the address on which rank 0 opens the root. Other hosts must be able to dial it, so it
	// must not be a wildcard. The default is 127.0.0.1. Other ranks do not use it.
	ListenHost string
	// Secret is the secret of the job. A rank without it cannot join. A zero Secret means that the job has
	// none.
	Secret secret.Secret
	// Terms are values, by name, that must be the same at all ranks. If they differ, no epoch is formed, and
	// the error names the terms that differ.
	Terms map[string]string
	Self  Record // must not change until Join has returned
	// RingAbove is the number of ranks above which a job is large. In a large job, the root gives each rank
	// only the records of its two neighbours, and Session.Gather gets the others. The default is 128, the
	// minimum 2. Only rank 0 uses it.
	RingAbove int
	Log       *zap.Logger // may be nil

	suspicion time.Duration // 0 means suspicionTime
}

// Session is a rank's membership in an epoch.
type Session struct {
	Epoch uint64 // greater than the LastEpoch of every rank
	// Records has the records of all ranks, indexed by rank and equal at all ranks. In a large job
	// (JoinConfig.RingAbove), only this rank's record and those of its two neighbours are set until Gather
	// has returned.
	Records []Record

	rank   topo.Rank
	ring   bool    // whether Gather is needed
	root   *root   // set only at rank 0 of a job of more than one rank
	member *member // set only in a job of more than one rank
}

// Close leaves the rendezvous and waits for its goroutines. At rank 0 it closes the root. Until then the root
// listens, to tell latecomers that the epoch is complete. Close first delivers tables that are in flight,
// which takes at most 5 s. If a rank calls Close before all ranks are ready, the others consider it failed.
// Further calls return the result of the first.
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

// Reason is why no epoch was formed with this rank.
type Reason uint8

// Reasons. All except Late, GaveUp and RootFailed say that ranks contradict each other, so a new start with
// the same configuration does not help.
const (
	NoReason Reason = iota
	SizeMismatch
	DuplicateRank // or a second rank 0
	RankOutOfRange
	WrongJob
	TermsDiffer
	DuplicateDevice
	Late       // the epoch was complete, and no newer one was formed in time
	GaveUp     // ctx of rank 0 ended before all ranks had joined
	RootFailed // rank 0 had an error of its own
)

// RefusedError is the error of Join if the ranks found each other, but formed no epoch or formed it without
// this rank. All ranks that have joined get the same error, with two exceptions: only a latecomer gets Late,
// and with GaveUp and RootFailed rank 0 itself returns the original error.
type RefusedError struct {
	Reason Reason
	Text   string
}

func (e *RefusedError) Error() string { return e.Text }

// Join meets the other ranks of the job and returns when all Size ranks have joined.
//
// If ranks are missing, Join waits until ctx ends, so give ctx a deadline. Then the error says what was
// missing: at rank 0 the missing ranks, at the others the store, the root or the missing ranks. If ranks
// contradict each other (different sizes, two ranks with one number, a rank out of range, another job,
// different terms), Join fails at once, at all ranks with the same *RefusedError. In that case, rank 0 first
// answers for up to 2 s, so that ranks that arrive late get the error too. A process that finds the epoch
// complete waits for the next epoch (see the package comment).
//
// Every rank except 0 watches one key and opens one connection. Rank 0 sends each rank all records, Size² in
// total. In a large job it sends each rank two records, and Gather gets the others. A job of size 1 uses
// neither store nor network, and its epoch is LastEpoch+1.
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
	// The other ranks would wait for the rank whose number is wrong, so this process tells the root.
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
		return errors.New("no store is given, but a job of more than 1 rank needs one")
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

// checkTexts checks that names and texts are valid UTF-8, as protobuf requires, and have at most most bytes
// together.
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

// checkName checks that a string is not too long, and that it is valid UTF-8, as protobuf requires.
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
