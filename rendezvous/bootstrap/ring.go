package bootstrap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/serve"
)

// Ring is a rank's place in the ring of all ranks.
type Ring struct {
	rank, size int
	records    []Record

	// All nil if size is 1. The listener keeps prev, and closes it.
	listener   *serve.Listener
	prev, next *link
	close      func() error

	mu   sync.Mutex // one gathering at a time
	sent int        // messages to roots and ranks
	err  error      // why nothing more can be gathered
}

// link is a connection to a neighbour.
type link struct {
	net.Conn
	in *bufio.Reader
}

func newLink(conn net.Conn) *link { return &link{conn, bufio.NewReaderSize(conn, coalesceBytes)} }

// coalesceBytes is how much is read, and sent on, at once: if pieces come faster than they are handled, system calls are
// fewer than pieces.
const coalesceBytes = 16 << 10

// Records are those of all ranks by rank, equal on all of them. They are shared: not to be changed.
func (r *Ring) Records() []Record { return r.records }

// Close leaves the ring. Later calls return what the first did.
func (r *Ring) Close() error { return r.close() }

func (r *Ring) closeOnce() error {
	var errs []error
	if r.next != nil {
		errs = append(errs, r.next.Close())
	}
	if r.listener != nil {
		errs = append(errs, r.listener.Close())
	}
	return errors.Join(errs...)
}

// Allgather returns what every rank gave, by rank; all call it, in the same order. mine has at most MaxInfoBytes bytes. Each
// rank sends size-1 pieces, half of them each way round, in size/2 steps. If it fails, or ctx ends, the ring is of no use
// any more: the others fail too, here or in the next call.
func (r *Ring) Allgather(ctx context.Context, mine []byte) ([][]byte, error) {
	if len(mine) > MaxInfoBytes {
		return nil, fmt.Errorf("bootstrap: allgather at rank %d of %d: %d bytes, want at most %d",
			r.rank, r.size, len(mine), MaxInfoBytes)
	}
	all, err := r.gather(ctx, mine)
	if err != nil {
		r.Close() // so that the neighbours do not wait; its error would only hide err
		return nil, fmt.Errorf("bootstrap: allgather at rank %d of %d: %w", r.rank, r.size, err)
	}
	return all, nil
}

// gather is Allgather of a piece. Both directions run at once and do not touch each other; with an even size the last step
// goes one way only.
func (r *Ring) gather(ctx context.Context, mine []byte) ([][]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	all := make([][]byte, r.size)
	all[r.rank] = slices.Clone(mine)
	if r.size == 1 {
		return all, nil
	}
	// Whatever ends one direction ends the other, which would wait for nothing.
	abort := sync.OnceFunc(func() {
		r.prev.SetDeadline(time.Unix(1, 0))
		r.next.SetDeadline(time.Unix(1, 0))
	})
	stop := context.AfterFunc(ctx, abort)
	errs := make(chan error, 2)
	run := func(from, to *link, way, count int) {
		err := r.pass(from, to, way, count, all)
		errs <- err // before the other direction can fail of it
		if err != nil {
			abort()
		}
	}
	var back sync.WaitGroup
	back.Go(func() { run(r.next, r.prev, -1, (r.size-1)/2) })
	run(r.prev, r.next, 1, r.size/2)
	back.Wait()
	close(errs)
	for err := range errs {
		if r.err == nil {
			r.err = err
		}
	}
	if !stop() {
		r.err = context.Cause(ctx)
	}
	if r.err != nil {
		return nil, r.err
	}
	r.sent += r.size - 1
	return all, nil
}

// pass sends this rank's piece, and count-1 of those that come from the link from, to the link to. way is 1 towards higher
// ranks and -1 towards lower ones.
//
// It sends and receives in one goroutine and cannot deadlock: a direction holds one piece for each link at most on average,
// so not all links are full at once as long as the buffers of a connection hold a piece (maxPieceBytes).
func (r *Ring) pass(from, to *link, way, count int, all [][]byte) error {
	if count == 0 {
		return nil
	}
	source := r.at(-way)
	out := appendPiece(make([]byte, 0, coalesceBytes), r.rank, all[r.rank])
	flush := func() error {
		if _, err := to.Write(out); err != nil {
			return fmt.Errorf("sending pieces to rank %d: %w", r.at(way), err)
		}
		out = out[:0]
		return nil
	}
	for i := 1; i <= count; i++ {
		if len(out) > 0 && (from.in.Buffered() == 0 || len(out)+maxPieceBytes > coalesceBytes) {
			if err := flush(); err != nil {
				return err
			}
		}
		want := r.at(-way * i)
		rank, data, err := readPiece(from.in)
		if err != nil {
			return fmt.Errorf("receiving the piece of rank %d from rank %d: %w", want, source, err)
		}
		if rank != want {
			return fmt.Errorf("received the piece of rank %d from rank %d, want that of rank %d", rank, source, want)
		}
		all[rank] = data
		if i < count {
			out = appendPiece(out, rank, data)
		}
	}
	if len(out) > 0 {
		return flush()
	}
	return nil
}

// at is the rank so many places on.
func (r *Ring) at(places int) int { return ((r.rank+places)%r.size + r.size) % r.size }
