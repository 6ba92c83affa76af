package dial

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// budgetWait is how long Acquire waits until other connections release bytes.
const budgetWait = 10 * time.Second

// Budget limits the memory that all connections of a server hold together, for example for requests that they
// are reading. Its methods are safe for concurrent use.
type Budget struct {
	what string
	most int64

	mu    sync.Mutex
	held  int64
	freed chan struct{} // closed at the next Release; nil if no call of Acquire waits
}

// NewBudget returns a Budget of most bytes. Errors of Acquire say that the bytes are used for what.
func NewBudget(what string, most int64) *Budget { return &Budget{what: what, most: most} }

// Acquire takes n bytes. If fewer are left, it waits until other connections have released some. It returns
// an error if none releases any for 10 s, if ctx ends first, or at once if n is more than all bytes of b.
func (b *Budget) Acquire(ctx context.Context, n int64) error {
	for {
		b.mu.Lock()
		held := b.held
		if held+n <= b.most {
			b.held += n
			b.mu.Unlock()
			return nil
		}
		if n > b.most {
			b.mu.Unlock()
			return b.exceeded(held, n)
		}
		if b.freed == nil {
			b.freed = make(chan struct{})
		}
		freed := b.freed
		b.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(budgetWait):
			return b.exceeded(held, n)
		}
	}
}

// Most returns the number of bytes of b.
func (b *Budget) Most() int64 { return b.most }

// TryAcquire takes n bytes. If fewer are left, it returns an error at once.
func (b *Budget) TryAcquire(n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held+n > b.most {
		return b.exceeded(b.held, n)
	}
	b.held += n
	return nil
}

func (b *Budget) exceeded(held, n int64) error {
	return fmt.Errorf("all clients together hold %d bytes for %s, and this client needs %d more, want at most %d in all",
		held, b.what, n, b.most)
}

// Release returns n bytes that Acquire has taken, which may be none.
func (b *Budget) Release(n int64) {
	if n == 0 {
		return // otherwise requests that take no bytes would keep others waiting
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= n
	if b.freed != nil {
		close(b.freed)
		b.freed = nil
	}
}

// Descriptors returns the number of file descriptors that this process may have open (RLIMIT_NOFILE). If the
// limit is unknown, it returns a number that is greater than every limit that this program sets.
func Descriptors() int {
	const unknown = 1 << 30
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil || limit.Cur > unknown {
		return unknown
	}
	return int(limit.Cur)
}

// These are the file descriptors for which NeedDescriptors provides. The lowest rank of a host has up to four
// for each other rank of its host, rank 0 has two for each rank on another host, and a rank has about 32
// besides. The program has at least as many.
const (
	peerDescriptors = 8
	ownDescriptors  = 128
)

// NeedDescriptors raises the soft limit of file descriptors to the hard limit if this process, which will
// have connections with the given number of peers, may need more. The Go runtime raises the limit of a Go
// program in any case. libgohvd lowers it again, because select(2) does not work with great descriptors, and
// programs that the process starts may close all numbers up to the limit.
func NeedDescriptors(peers int) {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) == nil && limit.Cur < limit.Max-1 &&
		limit.Cur < uint64(ownDescriptors+peerDescriptors*peers) {
		limit.Cur = limit.Max
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit) // otherwise ExplainLimit tells what is missing
	}
}
