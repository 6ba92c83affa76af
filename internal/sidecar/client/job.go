package client

import (
	"cmp"
	"context"
	"errors"
	"strings"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/tensorqueue"
)

// job is the job of this rank. The mu of the Client guards its fields.
type job struct {
	queues map[topo.ProcessSetID]*tensorqueue.Queue
	ended  bool
	why    error // why the job has ended; nil if it was shut down in order
}

// jobEnded records that the job has ended.
func (c *Client) jobEnded(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if j := c.job; j != nil && !j.ended {
		j.ended, j.why = true, why
		for _, q := range j.queues {
			j.close(q)
		}
	}
}

// close makes further operations in q fail.
func (j *job) close(q *tensorqueue.Queue) {
	if j.why != nil {
		q.Close(j.why)
	} else {
		q.Close(engine.ErrShutDown)
	}
}

// queueOf returns the queue of a process set. The caller holds mu, and the process is in a job.
func (c *Client) queueOf(set topo.ProcessSetID) *tensorqueue.Queue {
	q := c.job.queues[set]
	if q == nil {
		q = tensorqueue.New()
		c.job.queues[set] = q
		if c.job.ended {
			c.job.close(q)
		}
	}
	return q
}

// settings returns the settings of the job in an environment.
func settings(environ []string) map[string]string {
	all := make(map[string]string)
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		if kept(name) {
			all[name] = value
		}
	}
	return all
}

// kept reports whether the sidecar gets a variable again in each Init. The others are those of the process,
// or secrets.
func kept(name string) bool {
	switch name {
	case "HVD_SIDECAR", "HVD_SIDECAR_BINARY", "HVD_SECRET", "HVD_SECRET_FILE", "HVD_RUN":
		return false
	}
	return strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_")
}

// changed returns the settings that have changed in the environment since the connection began, and given
// without the settings that choose the sidecar.
func (c *Client) changed(environ []string, given map[string]string) map[string]string {
	now, all := settings(environ), make(map[string]string)
	for name, value := range now {
		if before, ok := c.began[name]; !ok || before != value {
			all[name] = value
		}
	}
	for name := range c.began {
		if _, ok := now[name]; !ok {
			all[name] = ""
		}
	}
	for name, value := range given {
		if name != config.SidecarVariable && name != config.SidecarBinaryVariable {
			all[name] = value
		}
	}
	return all
}

// Init joins the job and waits until all ranks have joined. environ is the environment now; settings that
// have changed in it since Open override those of the sidecar, and given overrides both. If ctx ends before,
// Init ends the connection, because otherwise the sidecar would join the job nevertheless.
func (c *Client) Init(ctx context.Context, environ []string, given map[string]string,
	sets [][]int) (*rank.Rank, error) {
	q := &sidecarpb.Init{Settings: c.changed(environ, given)}
	for _, ranks := range sets {
		q.ProcessSets = append(q.ProcessSets, &sidecarpb.Ranks{Ranks: int32s(ranks)})
	}
	// The job exists before the answer, because the news of its end may arrive before the answer is handled.
	j := &job{queues: make(map[topo.ProcessSetID]*tensorqueue.Queue)}
	c.mu.Lock()
	if c.job == nil {
		c.job = j
	}
	c.mu.Unlock()
	stop := c.failAfter(ctx, "this process has failed while it joined the job")
	r, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Init{Init: q}}, -1)
	stop()
	ready := r.GetReady()
	if err == nil && ready == nil {
		err = errors.New("init: the answer of the sidecar does not say which rank this is")
	}
	if err != nil {
		c.leave(j) // it has no effect if the process was in a job before
		return nil, cmp.Or(ctx.Err(), err)
	}
	joined := rank.Joined{Epoch: ready.GetEpoch(), Homogeneous: ready.GetHomogeneous(), Place: topo.Topology{
		Rank: int(ready.GetRank()), Size: int(ready.GetSize()),
		LocalRank: int(ready.GetLocalRank()), LocalSize: int(ready.GetLocalSize()),
		CrossRank: int(ready.GetCrossRank()), CrossSize: int(ready.GetCrossSize()),
	}, Sets: make(map[topo.ProcessSetID][]topo.Rank)}
	for _, s := range ready.GetProcessSets() {
		joined.Sets[topo.ProcessSetID(s.GetId())] = ranksOf(s.GetRanks())
	}
	c.me.Store(int64(joined.Place.Rank))
	return rank.NewRemote(joined, c), nil
}

// leave ends the job j in this process.
func (c *Client) leave(j *job) {
	c.mu.Lock()
	if c.job == j {
		c.job = nil
	}
	c.mu.Unlock()
}

// Shutdown makes the rank leave the job. It returns when all its operations have ended. If the job has
// failed, it returns the reason, and the rank has left the job nevertheless. If why.Failed is set, it is the
// last request of this process (see last).
func (c *Client) Shutdown(ctx context.Context, why engine.Departure) error {
	if why.Failed {
		return c.last(ctx, "shutdown", func(ctx context.Context) error { return c.shutdown(ctx, why) })
	}
	return c.shutdown(ctx, why)
}

func (c *Client) shutdown(ctx context.Context, why engine.Departure) error {
	c.mu.Lock()
	j := c.job
	if j == nil {
		c.mu.Unlock()
		return nil
	}
	for _, q := range j.queues {
		q.Close(engine.ErrShutDown)
	}
	c.mu.Unlock()
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_Shutdown{
		Shutdown: &sidecarpb.Shutdown{Reason: why.Reason, Failed: why.Failed}}}, -1)
	if ctx.Err() == nil {
		c.Drive(ctx, nil, func() bool { return c.calls.none() })
	}
	c.leave(j)
	c.plans.clear(c)
	return err
}

// NewUniqueID makes an id by which the ranks of a job can meet. The sidecar serves them.
func (c *Client) NewUniqueID(ctx context.Context, environ []string, given map[string]string) (string, error) {
	r, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_NewUniqueId{
		NewUniqueId: &sidecarpb.NewUniqueID{Settings: c.changed(environ, given)}}}, -1)
	return r.GetUniqueId().GetText(), err
}

// StartTimeline starts the timeline of this rank. path must be absolute.
func (c *Client) StartTimeline(ctx context.Context, path string, markCycles bool) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_StartTimeline{
		StartTimeline: &sidecarpb.StartTimeline{Path: path, MarkCycles: markCycles}}}, -1)
	return err
}

// StopTimeline ends the timeline of this rank. It returns when the file is complete.
func (c *Client) StopTimeline(ctx context.Context) error {
	_, err := c.request(ctx, &sidecarpb.Request{What: &sidecarpb.Request_StopTimeline{
		StopTimeline: new(sidecarpb.StopTimeline)}}, -1)
	return err
}

// changeSets sends the request in e, which adds or removes a process set.
func (c *Client) changeSets(e *tensorqueue.Entry) error {
	q := &e.Request
	fail := func(err error) error { return &engine.OpError{Op: q.Kind.String(), Tensor: q.Name, Err: err} }
	c.mu.Lock()
	err := c.over
	if err == nil && c.job == nil {
		err = rank.ErrNotInitialized
	}
	if err == nil {
		queue := c.queueOf(e.Set)
		if err = queue.Add(e); err == nil {
			queue.Pop(nil)
		}
	}
	c.mu.Unlock()
	if err != nil {
		return fail(err)
	}
	request := &sidecarpb.Request{What: &sidecarpb.Request_RemoveProcessSet{
		RemoveProcessSet: &sidecarpb.RemoveProcessSet{Id: int32(q.Set), TimeoutSeconds: seconds(e.Timeout)}}}
	if q.Kind == message.AddProcessSet {
		// The name of the request has a prefix and, after a point, the name that the program has given.
		_, name, _ := strings.Cut(q.Name, "process_set.add.")
		add := &sidecarpb.AddProcessSet{Ranks: int32s(q.Ranks), MembersOnly: q.MembersOnly, Name: name,
			TimeoutSeconds: seconds(e.Timeout)}
		request = &sidecarpb.Request{What: &sidecarpb.Request_AddProcessSet{AddProcessSet: add}}
	}
	err = c.send(request, -1, func(r *sidecarpb.Reply, err error) {
		if _, dead := err.(*DeadError); dead {
			err = fail(err)
		}
		if s := r.GetProcessSet(); s != nil {
			e.Response = &message.Response{Kind: q.Kind, Set: topo.ProcessSetID(s.GetId()),
				Ranks: ranksOf(s.GetRanks())}
		} else if q.Kind == message.AddProcessSet && err == nil {
			err = fail(errUnexpected)
		}
		e.Finish(err)
		c.ring.changed()
	})
	if err != nil {
		e.Finish(fail(err))
	}
	return nil
}

func int32s[N ~int | ~int32](all []N) []int32 {
	out := make([]int32, len(all))
	for i, n := range all {
		out[i] = int32(n)
	}
	return out
}

func ranksOf(all []int32) []topo.Rank {
	out := make([]topo.Rank, len(all))
	for i, n := range all {
		out[i] = topo.Rank(n)
	}
	return out
}
