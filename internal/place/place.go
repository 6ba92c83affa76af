// Package place finds where the ranks of a job meet, and which of them this process is. [Open] does so by
// what the program, the settings or the launcher say: it asks the launcher that has started the process
// ([Detect], [Env.Meet]), opens the URL of an init method ([Methods]), or the store of a unique id
// ([OpenIDs]). It also finds the address of this host on which the rank must listen.
//
// [Detect] checks for the kinds of launchers in a fixed order, and the first match wins: hvdrun and other
// programs that set Horovod's variables, HVD_SIZE=1, Open MPI, MPICH and others that speak PMI, torchrun,
// Slurm, Kubernetes, and last the plain variables of PyTorch. So mpirun wins over the Slurm or Kubernetes in
// which it runs.
//
//	kind        ranks meet at                                       secret
//	hvdrun      the store of hvdrun                                 given by hvdrun
//	HVD_SIZE=1  nowhere: the process is a job of its own
//	Open MPI    a store of rank 0, told in a 0600 file in           made by rank 0, in that file
//	            the job's session directory; one host only
//	MPICH, PMI  a store of rank 0, told in the key-value space      made by rank 0, in that space
//	torchrun    its TCPStore at MASTER_ADDR:MASTER_PORT             one host: made by rank 0, in a 0600 file
//	Slurm       a store of rank 0, on the first host of the step    given by the user
//	Kubernetes  a store of rank 0, at the DNS name of index 0       given by the user
//	plain       a store of rank 0, told at a TCPStore at            one host: made by rank 0, in a 0600 file
//	            MASTER_ADDR:MASTER_PORT
//
// A secret that the user gives replaces one that rank 0 would make. If the user has to give one and does not,
// Meet fails with ErrNoSecret unless it is told to go without.
//
// If variables contradict each other, the error names them with their values. A contradiction never makes the
// process rank 0 of 1: several such processes would train separately, and nobody would notice.
package place

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// Place is where the ranks of a job meet, as seen by one of them.
type Place struct {
	// Store is where rank 0 publishes the root of the rendezvous. All ranks have the same store, or one with
	// a copy of that root.
	Store      store.Store
	Rank, Size int
	// Addr is the address at which this rank reaches the store, host:port. It is empty at the rank that
	// serves it.
	Addr string
	// NoAddr says that the store has no address, like a file.
	NoAddr bool
	// Secret is the secret of the job, the same at all ranks, if the place provides it. Zero is no secret.
	Secret secret.Secret
	// JobID is the name of the job, if the place provides it: the same at all ranks, and different for other
	// jobs.
	JobID string
	// Terms are values, by name, that must be the same at all ranks because of the way in which they meet.
	Terms map[string]string

	mu      sync.Mutex
	closers []func() error                    // called by Close, the last one first
	atMet   []func(ctx context.Context) error // called by Met in this order
}

// Met removes what rank 0 has left for the others to find, such as the file with the secret, and frees a port
// that another program uses afterwards; the other ranks wait until rank 0 has done that. Each rank calls it
// when all ranks have met. Further calls do nothing. Close removes what is left if Met was not called.
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

// Close closes the store and what was opened for it. If rank 0 serves the store, its Close ends the store for
// all ranks, so it must come after everything that the others do there. Further calls do nothing.
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

func (p *Place) onClose(c func() error) { p.closers = append(p.closers, c) }

func (p *Place) onMet(f func(context.Context) error) { p.atMet = append(p.atMet, f) }

// removeWhenMet registers how to remove what this rank has left for the others.
func (p *Place) removeWhenMet(remove func() error) {
	remove = sync.OnceValue(remove)
	p.atMet = append([]func(context.Context) error{func(context.Context) error { return remove() }},
		p.atMet...)
	p.onClose(remove)
}
