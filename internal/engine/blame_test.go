package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// The suspect of an error is the peer whose connection failed, or, if the backend cannot tell which rank
// failed, all ranks of the operation. This rank is the only suspect of any other error. It is also the only
// suspect if a connection failed because this rank lacks memory. Then the reason does not name the
// connection.
func TestBlame(t *testing.T) {
	cause := errors.New("MPI_Test: process failed")
	for _, c := range []struct {
		err  error
		want []topo.Rank
	}{
		{cause, []topo.Rank{1}},
		{fmt.Errorf("ops/mpi: alltoall: %w", &transport.PeerError{Peer: 2, Err: cause}), []topo.Rank{2}},
		{fmt.Errorf("ops/tcp: allreduce: %w", &transport.PeerError{Peer: 2, Err: errors.Join(cause, syscall.ENOMEM)}),
			[]topo.Rank{1}},
		{fmt.Errorf("ops/mpi: allreduce: %w", &ops.UnknownRankError{Ranks: []topo.Rank{1, 3}, Err: cause}),
			[]topo.Rank{1, 3}},
	} {
		got, reason := blame(c.err, 1)
		if !slices.Equal(got, c.want) || !strings.Contains(reason, cause.Error()) ||
			strings.Contains(reason, "connection to rank") {
			t.Errorf("%v: got ranks %v and the reason %q, want ranks %v", c.err, got, reason, c.want)
		}
	}
}
