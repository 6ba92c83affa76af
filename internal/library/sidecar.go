package library

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/client"
)

// errInSidecar is the error of a function for which the sidecar has no request.
var errInSidecar = errors.New("it does not work with a sidecar: unset HVD_SIDECAR")

// sidecars has the connections of this process to sidecars. A connection stays open for later jobs, because
// a launcher may let a process learn only once where the ranks meet.
type sidecars struct {
	near func() []string // see New

	mu        sync.Mutex
	byAddress map[string]*client.Client // by the value of HVD_SIDECAR
}

// open returns the connection to the sidecar that the environment and settings ask for. It returns nil if
// they ask for none, because then this process runs the engine. op is the function that needs to know it.
func (s *sidecars) open(op string, settings map[string]string) (c *client.Client, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("hvd: %s: %w", op, err)
		}
	}()
	// The process that runs the engine checks whether the settings say where the ranks meet.
	environ := config.Environ()
	cfg, err := config.Load(config.Sources{Environ: environ, API: settings, HaveStore: true})
	if err != nil {
		return nil, err
	}
	address := cfg.Variable(config.SidecarVariable)
	if address == "" {
		return nil, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.byAddress[address]; c != nil {
		if !c.Ending() {
			return c, nil
		}
		delete(s.byAddress, address)
		if err := c.Close(); err != nil {
			return nil, err
		}
	}
	c, err = client.Open(context.Background(), client.Config{
		Address: address, Binary: cfg.Variable(config.SidecarBinaryVariable), Near: s.near(),
		Environ: environ,
	})
	if err != nil {
		return nil, err
	}
	if s.byAddress == nil {
		s.byAddress = make(map[string]*client.Client)
	}
	s.byAddress[address] = c
	return c, nil
}

// join joins the job with the rank of the sidecar.
func (s *sidecars) join(ctx context.Context, c *client.Client, o *InitOptions) (*rank.Rank, error) {
	if o.MPIComm != nil {
		return nil, &engine.UsageError{Op: "init",
			Err: errors.New("got an MPI communicator, which a sidecar cannot use: unset HVD_SIDECAR")}
	}
	return c.Init(ctx, config.Environ(), o.Settings, o.Sets)
}

// sidecarOf returns the connection to the sidecar that runs the engine of r, or nil if this process runs it.
func sidecarOf(r *rank.Rank) *client.Client {
	c, _ := r.Remote.(*client.Client)
	return c
}
