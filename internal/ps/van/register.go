package van

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// answerTime is how long a node waits for the scheduler's answer after its own time limit. The answer says
// which nodes are missing.
const answerTime = 700 * time.Millisecond

// register sends the registration on conn, which leads to node id, and reads the answer.
//
// The scheduler answers when all nodes have registered. Until then both ends send heartbeats, and each
// notices if the other one dies or hangs. If the time limit of ctx passes, the node asks who is missing. If
// register fails because of other nodes, it blames them.
func (e *endpoint) register(ctx context.Context, conn net.Conn, id int) (*reader, []*pspb.Node, error) {
	if err := writeMessage(conn, controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE,
		Nodes:      e.members.self,
		NumWorkers: int32(e.cfg.NumWorkers), NumServers: int32(e.cfg.NumServers),
		Replicas: int32(e.cfg.Replicas), Staleness: int32(e.cfg.Staleness) + 1,
		Meets: e.cfg.Meets})); err != nil {
		return nil, nil, err
	}
	if e.cfg.Verbose > 0 && id == SchedulerID {
		e.log.Info("ps: registered, waiting until all nodes have registered",
			zap.Stringer("role", e.cfg.Role))
	}
	w := &registration{pulse{timing: e.timing, conn: conn}, e, id == SchedulerID}
	w.hear()
	answered := make(chan struct{})
	var ticking sync.WaitGroup
	ticking.Go(func() { w.await(ctx, answered) })
	r := newReader(conn)
	r.limit = maxHeaderBytes // the table is long
	m, err := w.readAnswer(r)
	close(answered)
	ticking.Wait()
	switch {
	case err != nil:
		err = w.explain(ctx, err)
	case m.Header.Error != "":
		err = errors.New(m.Header.Error)
		if missing := processesOf(m.Header.Control.GetNodes()); len(missing) > 0 {
			e.members.blames.blameAll(missing, err)
		}
	case w.scheduler && m.Header.Control.GetCommand() == pspb.Command_TERMINATE:
		err = ErrOver
	case m.Header.Control.GetCommand() != pspb.Command_ADD_NODE:
		err = errors.New("malformed answer to the registration")
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, nil, err
	}
	return r, m.Header.Control.Nodes, nil
}

// pulse keeps up a connection that has no link yet. It sends heartbeats and notices if the peer is silent.
type pulse struct {
	timing timing
	conn   net.Conn
	heard  atomic.Int64 // time of the last message, in ns since the van's start
	silent error        // the peer is silent; valid when run has returned
}

// hear records that a message has come.
func (p *pulse) hear() { p.heard.Store(int64(p.timing.now())) }

// run returns when the channel done or end is closed, or the peer is silent.
func (p *pulse) run(done, end <-chan struct{}) {
	t := p.timing
	ticker := time.NewTicker(t.interval())
	defer ticker.Stop()
	for beaten, ticked := t.now(), t.now(); ; ticked = t.now() {
		select {
		case <-done:
			return
		case <-end:
			return
		case <-ticker.C:
		}
		p.heard.Add(int64(t.stopped(ticked)))
		if silent := t.now() - time.Duration(p.heard.Load()); silent > t.cfg.HeartbeatTimeout {
			p.silent = &silenceError{silent, t.cfg.HeartbeatTimeout}
			return
		}
		if t.now()-beaten >= t.cfg.HeartbeatInterval {
			beaten = t.now()
			// The goroutine that reads notices an error too.
			_ = writeMessage(p.conn, controlMessage(&pspb.Control{Command: pspb.Command_HEARTBEAT}))
		}
	}
}

// registration is the state of a node that waits for the answer to its registration.
type registration struct {
	pulse
	endpoint  *endpoint
	scheduler bool // the scheduler is to answer
}

// readAnswer reads messages until the answer has arrived.
func (w *registration) readAnswer(r *reader) (*Message, error) {
	for {
		m, err := r.next()
		if err != nil || m.Header.Control.GetCommand() != pspb.Command_HEARTBEAT {
			return m, err
		}
		m.Release()
		w.hear()
	}
}

// await ends the wait for the answer if the scheduler is silent, or some time after the end of ctx. It
// returns when the channel answered is closed.
func (w *registration) await(ctx context.Context, answered <-chan struct{}) {
	defer w.conn.SetDeadline(time.Time{})
	if w.scheduler && w.timing.beats() {
		w.run(answered, ctx.Done())
	} else {
		select {
		case <-answered:
		case <-ctx.Done():
		}
	}
	if w.scheduler && w.silent == nil && isLate(ctx) && !isClosed(answered) {
		// An error is also one of the call that reads.
		_ = writeMessage(w.conn, controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE,
			Withdraw: true}))
		dial.Pause(w.endpoint.ctx, answerTime, answered)
	}
	w.conn.SetDeadline(time.Unix(1, 0))
	<-answered
}

// explain returns the reason why no answer has arrived, where reading has failed with err. It blames the
// scheduler if that is the cause.
func (w *registration) explain(ctx context.Context, err error) error {
	switch {
	case w.silent != nil:
		err = w.silent
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case errors.Is(err, io.EOF):
		err = errEnded
	}
	err = fmt.Errorf("no answer to the registration: %w", err)
	if w.scheduler && (ctx.Err() == nil || isLate(ctx)) {
		w.endpoint.members.blames.blame(Process{ID: SchedulerID}, err)
	}
	return err
}
