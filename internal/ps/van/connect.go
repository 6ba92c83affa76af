package van

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// learn records what the scheduler says of the nodes of a process: it has ended, or it has taken the place of
// another one. News of the same place may arrive in any order.
func (v *Van) learn(nodes []*pspb.Node) {
	if len(nodes) == 0 {
		return
	}
	n := nodes[0]
	known, fresh := v.members.hear(n)
	if !fresh {
		return
	}
	if n.Gone != ErrLeft.Error() { // a node that leaves says so on its connection, after all other messages
		v.disconnect(n, known)
	}
	v.members.update(nodes)
	v.handler.News()
	v.members.mu.Lock()
	defer v.members.mu.Unlock()
	v.reconnect(processOf(n))
}

// disconnect ends the link with the process that has had the place of n until now, and waits until the
// handler has been told of its end.
func (v *Van) disconnect(n, known *pspb.Node) {
	l := (*v.links.Load())[int(n.Id)]
	if l == nil || l.process.Incarnation != known.Incarnation {
		return
	}
	if n.Generation == known.Generation {
		l.fail(errors.New(n.Gone))
	} else {
		l.fail(errReplaced)
	}
	<-l.over
}

// reconnect makes this worker connect with the server p, with which it has no connection: p has taken the
// place of another process, or the connection has ended although p has not. The worker tries until p has
// ended. At other nodes, and for other peers, reconnect does nothing. The caller holds the mu of members.
func (v *Van) reconnect(p Process) {
	if v.cfg.Role != Worker || RoleOf(p.ID) != Server || !v.members.takesPart(p) ||
		v.members.leaving || v.ctx.Err() != nil {
		return
	}
	n := v.members.nodes[p.ID]
	v.wg.Go(func() {
		var wait dial.Backoff
		for warned := false; ; warned = true {
			ctx, cancel := context.WithTimeout(v.ctx, v.cfg.StartTimeout)
			err := v.connect(ctx, n)
			cancel()
			if err == nil || v.ctx.Err() != nil {
				return
			}
			if !warned {
				v.log.Warn("ps: no connection with a server yet", zap.String("node", Name(v.ID())),
					zap.Error(err))
			}
			dial.Pause(v.ctx, wait.Next(), nil)
		}
	})
}

// connectServers connects this process with the servers that take part in the job and that it has to dial.
func (v *Van) connectServers(ctx context.Context, table []*pspb.Node) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(v.ctx, func() { cancel(context.Cause(v.ctx)) })
	defer stop()
	var wg sync.WaitGroup
	late := make(chan error, len(table))
	for _, n := range table {
		if v.members.dials(n) && n.Gone == "" {
			wg.Go(func() {
				err := v.connect(ctx, n)
				if err != nil && isLate(ctx) {
					err = fmt.Errorf("connect to %s: %w: %w", Name(int(n.Id)), context.Cause(ctx), err)
					v.blames.blameAll([]Process{processOf(n)}, err)
					late <- err
				}
				if err != nil {
					cancel(err)
				}
			})
		}
	}
	wg.Wait()
	select {
	case err := <-late:
		return err // it says which server has not answered
	default:
	}
	// Other servers may have to dial this one, and one may have returned meanwhile.
	var missing []Process
	if !v.members.await(ctx, func() bool {
		missing = nil
		for id, n := range v.members.nodes {
			if RoleOf(id) == Server && v.members.takesPart(processOf(n)) && !v.reaches(id) {
				missing = append(missing, processOf(n))
			}
		}
		return len(missing) == 0
	}) && isLate(ctx) {
		err := fmt.Errorf("%s has not connected: %w", Name(missing[0].ID), context.Cause(ctx))
		v.blames.blameAll(missing, err)
		return err
	}
	return context.Cause(ctx)
}

// connect connects this process with the server n. If the connection ends before the server has answered, the
// server may have ended: connect tries again until it knows, and then returns nil.
func (v *Van) connect(ctx context.Context, n *pspb.Node) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	p := processOf(n)
	watching.Go(func() {
		v.members.await(ctx, func() bool { return !v.members.takesPart(p) })
		cancel()
	})
	var conn net.Conn
	var r *reader
	err := dial.Retry(ctx, func() (err error) {
		conn, r, err = v.endpoint.dialServer(ctx, n)
		return err
	})
	if err == nil {
		var l *link
		if l, err = v.addLink([]*pspb.Node{n}, conn, r); err == nil {
			l.run(r)
			v.up(l)
			return nil
		}
		conn.Close()
	}
	if v.members.isOver(p) {
		return nil
	}
	return err
}

// supersede ends the link with a worker that has connected again, because its end of the link has ended. The
// network may have dropped the news of that.
func (v *Van) supersede(p Process) {
	if l := (*v.links.Load())[p.ID]; RoleOf(p.ID) == Worker && l != nil && l.process.Whole() == p {
		l.fail(errAgain)
		<-l.over
	}
}

// Evict asks the scheduler to declare the server p dead, for the given reason. It does nothing if the
// scheduler has declared this process dead before, or p has ended.
func (v *Van) Evict(p Process, reason error) {
	l, err := v.link(SchedulerID)
	if err != nil {
		return // this van has ended
	}
	n := &pspb.Node{Role: pspb.Role_SERVER, Id: int32(p.ID), Incarnation: p.Incarnation,
		Generation: p.Generation, Gone: reason.Error()}
	// An error means that the scheduler has gone.
	_ = l.reply(controlMessage(&pspb.Control{Command: pspb.Command_EVICT, Nodes: []*pspb.Node{n}}))
}

// AwaitReturn waits until node id takes part in the job and is connected with this process, if the two have a
// connection. It returns an error if ctx ends first, or the van.
func (v *Van) AwaitReturn(ctx context.Context, id int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(v.ctx, func() { cancel(context.Cause(v.ctx)) })
	defer stop()
	if !v.members.await(ctx, func() bool {
		return v.ctx.Err() == nil && v.members.gone[id] == nil && v.reaches(id)
	}) {
		return context.Cause(ctx)
	}
	return nil
}

// Connects reports whether this process is connected with node id while both take part in the job.
func (v *Van) Connects(id int) bool {
	return v.sched != nil || v.cfg.Role != RoleOf(id) || v.members.neighbour(id)
}

// reaches reports whether this process is connected with node id, or never is. The caller holds the mu of
// members.
func (v *Van) reaches(id int) bool {
	if !v.Connects(id) {
		return true
	}
	l := (*v.links.Load())[id]
	return l != nil && !isClosed(l.done) && l.process.Incarnation == v.members.nodes[id].GetIncarnation()
}
