// Package bootstrap finds out where the ranks of a job meet, and which rank this process is. [Open] uses
// one of three ways, which the program or the settings can choose. It asks the launcher that has started
// the process ([Detect], [Env.Meet]), opens the URL of an init method ([Methods]), or connects to the
// store of a unique id ([OpenIDs]). It also finds the address of this host on which the rank listens at
// first ([Addresses]).
//
// [Detect] looks for the kinds of launchers in the order of docs/launchers.md, and the first match wins. So
// if mpirun runs inside a job of Slurm or Kubernetes, mpirun wins. If it has started a job of one rank, but
// Slurm has started this process as one of several, Detect returns an error.
//
// Launchers differ in how their ranks meet. There are six ways, each in a file: hvdrun.go (at hvdrun's
// store), torchrun.go (at the TCPStore of torchrun's agent), master.go (at MASTER_ADDR and MASTER_PORT),
// host.go (at the host of rank 0), file.go (in the job's directory), and pmi.go (in the key-value space of
// PMI).
//
// If the user gives a secret, rank 0 makes none. If a secret has to be given by the user and is not, Meet
// fails with ErrNoSecret, unless MeetOptions.Insecure permits a job without a secret.
//
// If variables are missing or contradict each other, the error names them with their values. It never makes
// the process a job of one rank, because several such processes would train separately without anybody
// noticing.
package bootstrap

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// Place tells one rank where the ranks of its job meet.
type Place struct {
	// Store is the store in which rank 0 publishes the address of its root, at which the ranks check in.
	// Either all ranks use the same store, or there are several stores and rank 0 publishes that address in
	// each of them.
	Store      store.Store
	Rank, Size int
	// Addr is the address, host:port, at which this rank reaches the store. It is empty at the rank that
	// serves the store.
	Addr string
	// Served is the address on which this rank serves the store. It is unspecified (0.0.0.0 or ::) if the
	// store listens on all addresses of this host, and the zero Addr if this rank serves no store.
	Served netip.Addr
	// NoAddr is true if the store has no network address, for example because it is a file.
	NoAddr bool
	// Reused is true if rank 0 serves the store, and a later program of the same processes meets in the same
	// way at a store of its own.
	Reused bool
	// Secret is the secret of the job. It is the same at all ranks. If the place provides no secret, it is
	// zero.
	Secret secret.Secret
	// JobID is the name of the job. It is the same at all ranks of a job and differs between jobs. If the
	// place provides no name, it is empty.
	JobID string
	// Terms holds further values that must be the same at all ranks. The keys are their names in error
	// messages.
	Terms map[string]string

	mu      sync.Mutex
	closers []func() error                    // called by Close in reverse order
	atMet   []func(ctx context.Context) error // called by Met in the order of the slice
}

// Met cleans up after the meeting. Each rank calls it when all ranks have met. At rank 0, Met removes what
// the other ranks needed to find rank 0, such as the file with the secret, and frees a port that another
// program may use later. At the other ranks, Met waits until rank 0 has freed that port. Further calls do
// nothing. If Met is not called, Close cleans up.
func (p *Place) Met(ctx context.Context) error {
	p.mu.Lock()
	todo := p.atMet
	p.atMet = nil
	p.mu.Unlock()
	var errs []error
	for _, f := range todo {
		errs = append(errs, f(ctx))
	}
	return errors.Join(errs...)
}

// Close closes the store and the resources that were opened for it. If this rank serves the store, Close ends
// the store for all ranks. So it must be called after all other ranks have used the store for the last time.
// Further calls do nothing.
func (p *Place) Close() error {
	p.mu.Lock()
	todo := p.closers
	p.closers = nil
	p.mu.Unlock()
	var errs []error
	for _, c := range slices.Backward(todo) {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// serve serves h at addr, and makes it the store of p until Close. This rank itself uses h without a
// connection.
func (p *Place) serve(addr string, h *store.HashStore, cfg store.Config) (*store.Server, error) {
	p.Store = h
	p.onClose(h.Close)
	server, err := store.Serve(addr, h, cfg)
	if err != nil {
		return nil, err
	}
	p.onClose(server.Close)
	at, err := netip.ParseAddrPort(server.Addr())
	p.Served = at.Addr().Unmap()
	return server, err
}

func (p *Place) onClose(c func() error) { p.closers = append(p.closers, c) }

func (p *Place) onMet(f func(context.Context) error) { p.atMet = append(p.atMet, f) }

// removeWhenMet makes Met call the function remove. If Met is not called, Close calls it.
func (p *Place) removeWhenMet(remove func() error) {
	remove = sync.OnceValue(remove)
	p.atMet = append([]func(context.Context) error{func(context.Context) error { return remove() }},
		p.atMet...)
	p.onClose(remove)
}
