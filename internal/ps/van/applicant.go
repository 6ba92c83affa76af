package van

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// applicant is the connection of a node that has registered with the scheduler, until the scheduler has
// answered and the node has sent its next message.
type applicant struct {
	pulse
	r *reader
	// answered says that the answer is on its way, so the next message is for the link.
	answered atomic.Bool
	lost     chan struct{} // closed when read has returned
	err      error         // reason why the node does not wait any longer, valid when lost is closed
	beats    sync.WaitGroup
	stop     chan struct{} // closed when heartbeats end
	told     chan struct{} // closed when the answer was written
}

// errWithdrawn is the reason why a node does not wait any longer for the answer to its registration if it has
// said so.
var errWithdrawn = errors.New("the time limit of the node has passed")

// watch reads the messages of a node that waits for the answer to its registration, and sends it heartbeats.
func (s *scheduler) watch(conn net.Conn, r *reader) *applicant {
	a := &applicant{pulse: pulse{timing: s.van.timing, conn: conn}, r: r, lost: make(chan struct{}),
		stop: make(chan struct{}), told: make(chan struct{})}
	a.hear()
	s.mu.Lock()
	s.waiting[a] = true
	s.mu.Unlock()
	if a.timing.beats() {
		a.beats.Go(func() {
			if a.run(a.stop, nil); a.silent != nil {
				_ = a.conn.SetReadDeadline(time.Unix(1, 0)) // ends read
			}
		})
	}
	s.van.wg.Go(func() {
		defer close(a.lost)
		a.err = a.read()
	})
	return a
}

// read reads messages until the answer was sent, the node withdraws, is silent, or its connection ends. It
// does not read the first message after the answer.
func (a *applicant) read() error {
	for {
		_, err := a.r.in.Peek(1)
		if err == nil && a.answered.Load() {
			return nil
		}
		var m *Message
		if err == nil {
			m, err = a.r.next()
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			a.beats.Wait()
			return a.silent
		case errors.Is(err, io.EOF):
			return errEnded
		case err != nil:
			return err
		}
		a.hear()
		c := m.Header.Control
		withdraws := c.GetCommand() == pspb.Command_ADD_NODE && c.GetWithdraw()
		m.Release()
		if withdraws {
			return errWithdrawn
		}
	}
}

// endBeats ends the heartbeats, so that the caller can write the answer.
func (a *applicant) endBeats() {
	a.answered.Store(true)
	close(a.stop)
	a.beats.Wait()
}

// told records that the answer was written.
func (s *scheduler) told(a *applicant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[a] {
		delete(s.waiting, a)
		close(a.told)
	}
}

// tell waits until all nodes have their answers, because the job does not start.
func (s *scheduler) tell() {
	s.mu.Lock()
	waiting := slices.Collect(maps.Keys(s.waiting))
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	for _, a := range waiting {
		dial.Pause(ctx, answerTime, a.told)
	}
}

// remove drops the registration of a node that does not wait any longer because of err, and returns what the
// node is told. If the job has started meanwhile, remove returns nil: the end of the node is then one like
// any other.
func (s *scheduler) remove(hello *pspb.Control, err error) error {
	if p, ok := wanted(hello); ok && err != errWithdrawn {
		s.van.blames.blame(p, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		return nil
	}
	missing := s.missingError(err)
	s.nodes = slices.DeleteFunc(s.nodes, func(n *pspb.Node) bool {
		return n.Incarnation == hello.Nodes[0].Incarnation
	})
	if s.err != nil {
		return s.err
	}
	if err == errWithdrawn {
		if p, ok := wanted(hello); ok {
			s.gaveUp[p.ID] = true
		}
		return missing
	}
	return fmt.Errorf("the scheduler has declared this process dead: %w", err)
}

// wanted identifies the process of a registration by the rank that it wants. If it wants none, wanted returns
// false.
func wanted(hello *pspb.Control) (Process, bool) {
	first := hello.Nodes[0]
	id := WorkerID
	if first.Role == pspb.Role_SERVER {
		id = ServerID
	}
	return Process{ID: id(int(first.Rank) - 1), Incarnation: first.Incarnation}, first.Rank > 0
}

// missingError says which nodes have not registered, and why nobody waits for them any longer.
type missingError struct {
	text  string
	nodes []*pspb.Node // those that can be told from the ranks that the others want
}

func (e *missingError) Error() string { return e.text }

// missingError returns the error of a start that fails because of err while nodes are missing. The caller
// holds mu.
func (s *scheduler) missingError(err error) *missingError {
	cfg := &s.van.cfg
	e := &missingError{text: fmt.Sprintf("%d of %d servers and %d of %d workers have registered",
		s.count(pspb.Role_SERVER), cfg.NumServers, s.count(pspb.Role_WORKER), cfg.NumWorkers)}
	all := append(unclaimed(s.nodes, pspb.Role_SERVER, cfg.NumServers, ServerID),
		unclaimed(s.nodes, pspb.Role_WORKER, cfg.NumWorkers, WorkerID)...)
	// A node that has given up has waited for others itself.
	e.nodes = slices.DeleteFunc(slices.Clone(all), func(n *pspb.Node) bool { return s.gaveUp[int(n.Id)] })
	if len(e.nodes) == 0 {
		e.nodes = all
	}
	if len(e.nodes) > 0 {
		e.text += ", not " + nameList(e.nodes)
	}
	e.text += ": " + err.Error()
	return e
}

// unclaimed returns the nodes of a role whose ranks no registered node wants. If a node with this role has
// registered that does not get the rank that it wants, it may be any of them, and unclaimed returns nil.
func unclaimed(registered []*pspb.Node, role pspb.Role, count int, id func(rank int) int) (all []*pspb.Node) {
	claimed := make(map[int32]bool)
	for _, n := range registered {
		if n.Role != role {
			continue
		}
		if n.Rank < 1 || int(n.Rank) > count || claimed[n.Rank] {
			return nil
		}
		claimed[n.Rank] = true
	}
	for r := range count {
		if !claimed[int32(r+1)] {
			all = append(all, &pspb.Node{Role: role, Id: int32(id(r))})
		}
	}
	return all
}

// nameList returns the names of nodes, separated by commas.
func nameList(nodes []*pspb.Node) string {
	var all []string
	for _, n := range nodes {
		all = append(all, Name(int(n.Id)))
	}
	return strings.Join(all, ", ")
}

// processesOf identifies the processes of nodes.
func processesOf(nodes []*pspb.Node) (all []Process) {
	for _, n := range nodes {
		all = append(all, processOf(n))
	}
	return all
}
