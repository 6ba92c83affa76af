package hier

import (
	"errors"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// planner decides which responses run on two levels.
type planner struct {
	cfg *Config
	// mu guards census, because a Planner may be called from any goroutine.
	mu     sync.Mutex
	census census
}

// count counts the given ranks by their hosts.
func (p *planner) count(ranks []topo.Rank) counted {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.census.count(p.cfg.Groups, ranks)
}

// These are the reasons for which Plan refuses a response. They are variables so that a refusal allocates
// nothing: the coordinator plans every grant.
var (
	errOff           = errors.New("the settings turn it off")
	errDeterministic = errors.New("in deterministic mode, a sum must not depend on the hosts of the ranks")
	errAlltoall      = errors.New("alltoall sends no byte to another host twice")
	errAdasum        = errors.New("on one level, adasum combines neighbouring ranks first and sends as few bytes")
	errKind          = errors.New("it moves no data")
	errUnsupported   = errors.New("it is not supported on two levels")
)

// plan implements ops.Planner. The planners of the levels choose their algorithms when an operation runs.
func (p *planner) plan(members []topo.Rank, r *message.Response, _ int64,
	t *message.Tuning) (message.Algorithm, error) {
	if err := p.refusal(members, r, t); err != nil {
		return message.NoAlgorithm, err
	}
	return message.TwoLevel, nil
}

// refusal returns the reason why the backend cannot run r, or nil if it can.
func (p *planner) refusal(members []topo.Rank, r *message.Response, t *message.Tuning) error {
	switch {
	case !r.Kind.MovesData():
		return errKind
	case r.Kind == message.Alltoall:
		return errAlltoall
	case starts[r.Kind] == nil:
		return errUnsupported
	case !p.cfg.Kinds[r.Kind] || t.OneLevel(r.Kind):
		return errOff
	case r.Kind.Reduces() && r.Op.Base() == tensor.Adasum:
		return errAdasum
	case r.Kind.Reduces() && p.cfg.Deterministic:
		return errDeterministic
	}
	if r.Kind.Reduces() {
		if err := tensor.CheckReduce(r.Op, r.WireType()); err != nil {
			return err
		}
	}
	counted := p.count(members)
	if err := counted.refusal(); err != nil {
		return err
	}
	if !counted.together && (r.Kind == message.Allgather || r.Kind == message.Reducescatter) {
		return errScattered
	}
	return nil
}
