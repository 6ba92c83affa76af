package rendezvous

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// ErrStoreEnded is in the error of Join at a rank other than 0 if the store has ended, and this rank has
// found there no root, or only one that did not accept it: the root of an epoch without this rank, or one
// that does not answer. If a rank 0 serves the store, it may have been that of an earlier program, and this
// program may have another store at the same place.
var ErrStoreEnded = errors.New("the store has ended, and no root in it accepted this rank")

// errNewerRoot is returned when an attempt to join a root ends because the store has a newer root.
var errNewerRoot = errors.New("rank 0 has published a newer root in the store")

// joinRoot implements Join for every rank except 0. It asks the root in the store. If this root does not
// accept this rank, joinRoot waits until the store has another root and asks that root. It repeats this until
// a root accepts this rank.
func joinRoot(ctx context.Context, cfg *JoinConfig) (*Session, error) {
	c := &client{cfg: cfg, nonce: newToken()}
	var (
		seen []byte // the newest value of the root key whose root has not accepted this rank
		why  error  // why the root in seen has not accepted this rank
	)
	for {
		value, err := cfg.Store.Watch(ctx, cfg.rootKey(), seen)
		switch {
		case err != nil && why == nil:
			if ctx.Err() == nil {
				err = fmt.Errorf("%w: %w", ErrStoreEnded, err)
			}
			return nil, waitForRoot("waiting until rank 0 serves its root, at which the ranks check in", err)
		case err != nil:
			if ctx.Err() == nil && !c.accepted {
				err = fmt.Errorf("%w: %w", ErrStoreEnded, err)
			}
			return nil, waitForRoot("waiting for a newer root",
				fmt.Errorf("%w (joining at the previous root failed: %w)", err, why))
		}
		seen = value
		root, err := decodeRoot(value)
		if err == nil {
			var s *Session
			if s, err = c.askUntilNewer(ctx, root, value); err == nil {
				return s, nil
			}
		}
		if complete, ok := errors.AsType[*completeError](err); ok {
			if cfg.LastEpoch < complete.epoch {
				// This process is a latecomer or a replacement. Only a newer root can accept it.
				err = refuse(Late, "epoch %d is complete at root %s without this process", complete.epoch,
					root.GetAddr())
				cfg.Log.Warn("rendezvous: the epoch is complete without this process, waiting for a newer root",
					zap.String("job", cfg.Job), zap.Error(err))
			}
		} else if isAnswer(err) && !errors.Is(err, errStale) || isVersion(err) || dial.IsExhausted(err) ||
			ctx.Err() != nil {
			return nil, err
		}
		why = err
		cfg.Log.Debug("rendezvous: waiting for a newer root",
			zap.String("job", cfg.Job), zap.Error(err))
	}
}

// waitForRoot returns the error of a rank that stops waiting for rank 0. what is what the rank waited for,
// and err says why it has stopped.
func waitForRoot(what string, err error) error { return &WaitError{[]topo.Rank{0}, what, err} }

func isVersion(err error) bool {
	_, ok := errors.AsType[*dial.VersionError](err)
	return ok
}

// askUntilNewer asks root to accept this rank. value is root as encoded in the store. If askUntilNewer cannot
// reach the root, it tries again until the root answers or the store has a newer root.
func (c *client) askUntilNewer(ctx context.Context, root *rendezvouspb.Root, value []byte) (*Session, error) {
	newest, cancel := context.WithCancel(ctx) // ends when there is a newer root
	var lost error                            // why the store was lost; set before watched is closed
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if _, lost = c.cfg.Store.Watch(newest, c.cfg.rootKey(), value); lost == nil {
			cancel()
		}
	}()
	defer func() {
		cancel()
		<-watched
	}()
	var (
		wait dial.Backoff
		last error // why the previous attempt failed
	)
	for {
		s, err := c.ask(ctx, newest, root)
		if err == nil || isAnswer(err) || isVersion(err) || dial.IsExhausted(err) {
			return s, err
		}
		if newest.Err() == nil {
			last = err
			// A rank that waits for the answer of a root does not need the store. A rank that cannot reach
			// the root needs the store to find a newer root, so the pause ends when the store is lost.
			dial.Pause(newest, wait.Next(), watched)
			select {
			case <-watched:
				if lost != nil && newest.Err() == nil {
					return nil, fmt.Errorf("%w (and the store failed: %w)", last, lost)
				}
			default:
			}
		}
		switch {
		case newest.Err() == nil:
			continue
		case ctx.Err() == nil:
			return nil, errNewerRoot
		case err == last: // ctx ended between two attempts
			err = fmt.Errorf("%w (last attempt: %w)", ctx.Err(), last)
		case last != nil:
			err = fmt.Errorf("%w (previous attempt: %w)", err, last)
		}
		if _, answered := errors.AsType[*WaitError](err); answered {
			return nil, err
		}
		return nil, waitForRoot("waiting for an answer of rank 0", err)
	}
}
