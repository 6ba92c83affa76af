package ps

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/topo"
	kvstore "github.com/gohvd/gohvd/store"
)

const (
	// blameTime is how long a failure waits until the launcher knows of it.
	blameTime = 2 * time.Second
	// dumpTime is how long it then waits until the dump is written.
	dumpTime = 500 * time.Millisecond
)

// epochs is the number of times that this process has connected with hvdrun. A verdict of a later epoch
// replaces one of an earlier epoch.
var epochs atomic.Uint64

// launcher is the connection with hvdrun. For hvdrun each node is a process with a number: 0 is the
// scheduler, the servers follow, and then the workers.
type launcher struct {
	kv     *kvstore.Client
	epoch  uint64
	link   joblink.Link
	cancel context.CancelFunc
	wg     sync.WaitGroup // the goroutine that answers
}

// dialLauncher connects with hvdrun if it has started this process as a node. Otherwise it leaves p.launcher
// nil. If own, the settings of the program, has one that hvdrun sets, the node belongs to another job.
func (p *postoffice) dialLauncher(ctx context.Context, own map[string]string) error {
	set := &p.set
	if set.PS.Process == config.Unset {
		return nil
	}
	for name := range own {
		if s, ok := config.Lookup(name); ok && s.Scope == config.ByLauncher {
			return nil
		}
	}
	addr := net.JoinHostPort(set.RendezvousAddr, strconv.Itoa(set.RendezvousPort))
	kv, err := kvstore.Dial(ctx, addr, kvstore.Config{Secret: p.cfg.Secret, Log: p.log})
	if err != nil {
		return fmt.Errorf("connect with hvdrun: %w", err)
	}
	l := &launcher{kv: kv, epoch: epochs.Add(1), link: joblink.New(kv, set.PS.Process)}
	if err := l.link.Introduce(ctx, p.van.Process().Incarnation); err != nil {
		_ = kv.Close() // nothing is in flight
		return fmt.Errorf("connect with hvdrun: %w", err)
	}
	answering, cancel := context.WithCancel(context.Background())
	p.launcher, l.cancel = l, cancel
	l.wg.Go(func() {
		if err := l.link.Answer(answering, p.answerLauncher); err != nil {
			p.log.Debug("ps: receiving requests from hvdrun failed", zap.Error(err))
		}
	})
	return nil
}

// answerLauncher answers a question of hvdrun.
func (p *postoffice) answerLauncher(what string) []byte {
	switch what {
	case joblink.Metrics:
		text, err := metrics.NodeText(p.stats)
		if err != nil {
			p.log.Warn("ps: collecting metrics for hvdrun failed", zap.Error(err))
			return nil
		}
		return text
	case joblink.Node:
		return p.state(false)
	}
	return nil
}

// state returns the state of this node for hvdrun, or nil if it cannot be encoded. If final is set, the node
// has left the job.
func (p *postoffice) state(final bool) []byte {
	s := p.stats()
	s.Final = final
	text, err := s.Encode()
	if err != nil {
		p.log.Warn("ps: encoding the state of this node for hvdrun failed", zap.Error(err))
		return nil
	}
	return text
}

// reportState sends the state of this node to hvdrun, for its report at the end of the job.
func (p *postoffice) reportState(ctx context.Context, final bool) {
	if p.launcher == nil {
		return
	}
	if err := p.launcher.link.Report(ctx, joblink.Node, p.state(final)); err != nil {
		p.log.Debug("ps: the state of this node was not reported to hvdrun", zap.Error(err))
	}
}

// process returns the number that a node has for hvdrun, or -1 if there is no such node.
func (p *postoffice) process(id int) int {
	switch rank := van.Rank(id); {
	case id == van.SchedulerID:
		return 0
	case van.RoleOf(id) == van.Server && rank < p.cfg.NumServers:
		return 1 + rank
	case van.RoleOf(id) == van.Worker && rank < p.cfg.NumWorkers:
		return 1 + p.cfg.NumServers + rank
	}
	return -1
}

// closeLauncher ends the connection with hvdrun.
func (p *postoffice) closeLauncher() {
	if p.launcher != nil {
		p.launcher.cancel()
		p.launcher.wg.Wait()
		_ = p.launcher.kv.Close() // nothing is in flight
	}
}

// Restored tells hvdrun that a node has not failed, although this one has said so. The job may fail later for
// another reason.
func (p router) Restored(back van.Process) {
	if p.launcher == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), blameTime)
	defer cancel()
	v := p.verdict([]van.Process{back}, "its connection works again")
	v.Over = true
	if err := p.launcher.link.ReportVerdict(ctx, v); err != nil {
		p.log.Debug("ps: the return of a node was not reported to hvdrun", zap.Error(err))
	}
}

// verdict returns a verdict about processes.
func (p router) verdict(about []van.Process, reason string) joblink.Verdict {
	v := joblink.Verdict{Epoch: p.launcher.epoch, Process: about[0].Incarnation, Reason: reason}
	for _, a := range about {
		v.Ranks = append(v.Ranks, topo.Rank(p.process(a.ID)))
	}
	return v
}

// Blame tells hvdrun which nodes have failed, and writes the dump of the flight recorder. Nodes that fail
// because of them may end before hvdrun notices their end. A file system that hangs delays Blame by dumpTime.
func (p router) Blame(failed []van.Process, err error) {
	written := p.startDump(err.Error())
	if p.launcher != nil {
		ctx, cancel := context.WithTimeout(context.Background(), blameTime)
		defer cancel()
		if err := p.launcher.link.ReportVerdict(ctx, p.verdict(failed, err.Error())); err != nil {
			p.log.Debug("ps: the failure of a node was not reported to hvdrun", zap.Error(err))
		}
		p.reportState(ctx, false)
	}
	dial.Pause(context.Background(), dumpTime, written)
}
