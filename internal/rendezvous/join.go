package rendezvous

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/topo"
)

// Session is a rank's membership in an epoch.
type Session struct {
	Epoch uint64 // greater than the LastEpoch of every rank
	// Records has the records of all ranks, indexed by rank. It is the same at all ranks. In a large job
	// (JoinConfig.RingAbove), only this rank's record and those of its two neighbours are set until Gather
	// has returned.
	Records []Record

	rank   topo.Rank
	ring   bool    // whether Gather must be called to complete Records
	root   *root   // set only at rank 0 of a job of more than one rank
	member *member // set only in a job of more than one rank
}

// Close leaves the rendezvous and waits for its goroutines. At rank 0 it closes the root. Until Close is
// called, the root listens, to tell latecomers that the epoch is complete. Close first waits until tables in
// flight are delivered, for at most 5 s. If a rank calls Close before all ranks are ready, the others
// consider it failed. Further calls return the result of the first call.
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

// Join meets the other ranks of the job and returns when all Size ranks have joined.
//
// If ranks are missing, Join waits until ctx ends, so give ctx a deadline. The error then says what was
// missing (Awaited). At rank 0 it names the missing ranks. At any other rank it names what that rank was
// waiting for: the store, the root or the missing ranks. If ranks contradict each other (different sizes, two
// ranks with one number, a rank out of range, another job, different terms), Join fails at once and returns
// the same *RefusedError at all ranks. Before rank 0 returns, it answers for up to 2 s, so that ranks that
// arrive late get the error too. A process that finds the epoch complete waits for the next epoch (see the
// package comment).
//
// If ranks of several hosts have joined, Join makes ranks that listen on loopback listen elsewhere
// (JoinConfig.Move).
//
// Every rank except 0 watches one key of the store and opens one connection. Rank 0 sends all records to each
// rank, Size² records in total. In a large job rank 0 sends each rank two records, and Gather gets the
// others. A job of one rank uses neither store nor network, and its epoch is LastEpoch+1.
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
	// This process joins although its rank is wrong, so that the root reports the error to the other ranks,
	// which would otherwise wait.
	cfg.Log.Error("rendezvous: this rank cannot join, and reports the reason to rank 0", zap.Error(outOfRange))
	_, err := joinRoot(ctx, cfg)
	if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Reason != Late {
		return nil, err
	}
	return nil, fmt.Errorf("%w (reporting this to rank 0 failed: %w)", outOfRange, err)
}
