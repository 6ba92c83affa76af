package sidecar

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// maxPathBytes is the maximum length of a path in a request. Linux has the same limit.
const maxPathBytes = 4096

// request handles a request that may take a long time: it starts a goroutine, which sends the answer later.
func (s *Server) request(c *conn, q *sidecarpb.Request) {
	var do func() (*sidecarpb.Reply, error)
	switch what := q.What.(type) {
	case *sidecarpb.Request_Init:
		do = func() (*sidecarpb.Reply, error) { return s.init(what.Init) }
	case *sidecarpb.Request_NewUniqueId:
		do = func() (*sidecarpb.Reply, error) { return s.newID(what.NewUniqueId) }
	case *sidecarpb.Request_Shutdown:
		do = func() (*sidecarpb.Reply, error) { return nil, s.end(what.Shutdown) }
	case *sidecarpb.Request_AddProcessSet:
		do = func() (*sidecarpb.Reply, error) { return s.addSet(what.AddProcessSet) }
	case *sidecarpb.Request_StartTimeline:
		do = func() (*sidecarpb.Reply, error) {
			return nil, asUsage("start timeline", s.startTimeline(what.StartTimeline))
		}
	case *sidecarpb.Request_StopTimeline:
		do = func() (*sidecarpb.Reply, error) { return nil, asUsage("stop timeline", s.stopTimeline()) }
	case *sidecarpb.Request_RemoveProcessSet:
		do = func() (*sidecarpb.Reply, error) { return nil, s.removeSet(what.RemoveProcessSet) }
	}
	s.wg.Go(func() {
		r, err := do()
		c.answer(q.Id, r, err)
	})
}

// change acquires the lock changing. It returns an error if the Server is closing.
func (s *Server) change() error {
	select {
	case s.changing <- struct{}{}:
	case <-s.ctx.Done():
		return errEnding
	}
	// If both cases of the select were ready, it may have chosen changing although ctx had ended.
	if s.ctx.Err() != nil {
		<-s.changing
		return errEnding
	}
	return nil
}

// init starts the rank. It returns the rank's place in the job.
func (s *Server) init(q *sidecarpb.Init) (*sidecarpb.Reply, error) {
	if err := s.change(); err != nil {
		return nil, err
	}
	defer func() { <-s.changing }()
	if s.current() != nil {
		return nil, usage("init", "", errors.New("this rank is in a job, or has not sent Shutdown after the last one"))
	}
	s.setState(StateStarting, nil)
	r := new(rank.Rank)
	if err := r.Start(s.ctx, s.options(q)); err != nil {
		s.setState(StateIdle, nil)
		return nil, err
	}
	s.last = r.Epoch
	s.setState(StateRunning, r)
	ready := &sidecarpb.Ready{
		Rank: int32(r.Place.Rank), Size: int32(r.Place.Size), LocalRank: int32(r.Place.LocalRank),
		LocalSize: int32(r.Place.LocalSize),
		CrossRank: int32(r.Place.CrossRank), CrossSize: int32(r.Place.CrossSize), Epoch: r.Epoch,
		Homogeneous: r.Homogeneous,
	}
	for _, set := range r.Sets()[1:] {
		ready.ProcessSets = append(ready.ProcessSets, describeSet(set))
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_Ready{Ready: ready}}, nil
}

// newID makes a unique id and serves the store of the id until 30 s after all ranks have met, or until the
// Server ends.
func (s *Server) newID(q *sidecarpb.NewUniqueID) (*sidecarpb.Reply, error) {
	o := s.withSettings(q.GetSettings())
	id, served, err := o.NewID(s.ctx)
	if err != nil {
		return nil, err
	}
	s.wg.Go(func() { <-served })
	made := &sidecarpb.UniqueID{Text: id.String()}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_UniqueId{UniqueId: made}}, nil
}

// withSettings returns the options of the configuration plus the settings of a client.
func (s *Server) withSettings(settings map[string]string) rank.Options {
	o := s.cfg.Options
	o.Settings = maps.Clone(o.Settings)
	if o.Settings == nil {
		o.Settings = make(map[string]string)
	}
	maps.Copy(o.Settings, settings)
	return o
}

// options returns the options for an Init: the options of the configuration plus the settings and process
// sets of the client.
func (s *Server) options(q *sidecarpb.Init) rank.Options {
	o := s.withSettings(q.GetSettings())
	o.ForClient, o.Kept, o.LastEpoch = true, &s.met, s.last
	o.Sets = slices.Clone(o.Sets)
	for _, set := range q.GetProcessSets() {
		o.Sets = append(o.Sets, ints(set.GetRanks()))
	}
	return o
}

// current returns the rank, or nil if there is none.
func (s *Server) current() *rank.Rank {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rank
}

// setState sets the state to state and the rank to r. If r is not nil, setState starts a goroutine that waits
// for the end of the job and then notifies the client.
func (s *Server) setState(state string, r *rank.Rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.rank = state, r
	if r == nil {
		s.running.Store(nil)
		return
	}
	run := runner(rankRunner{r})
	s.running.Store(&run)
	over := make(chan struct{})
	s.over = over
	s.wg.Go(func() {
		defer close(over)
		<-r.Engine.Ended()
		s.ended(r.Engine.Err())
	})
}

// ended notifies the client that the job is over, with the reason in why.
func (s *Server) ended(why error) {
	ended := new(sidecarpb.Ended)
	if why != nil {
		ended.Error = wire.Describe(why)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = StateEnded
	if s.client != nil {
		s.client.reply(&sidecarpb.Reply{What: &sidecarpb.Reply_Ended{Ended: ended}})
	}
}

// end handles a Shutdown request.
func (s *Server) end(q *sidecarpb.Shutdown) error {
	if r := s.current(); r != nil && q.GetFailed() {
		// The error is that of the shutdown below. A Shutdown in progress holds changing until this call.
		_ = r.Fail(engine.Departure{Reason: q.GetReason(), Failed: true})
	}
	if err := s.change(); err != nil {
		return err
	}
	defer func() { <-s.changing }()
	return s.shutdown(s.ctx, q.GetReason(), q.GetFailed())
}

// shutdown shuts down the engine, if there is one. The caller holds changing.
func (s *Server) shutdown(ctx context.Context, reason string, failed bool) error {
	s.mu.Lock()
	r, over := s.rank, s.over
	s.mu.Unlock()
	if r == nil {
		return nil
	}
	var err error
	if ctx.Err() != nil {
		err = r.Close()
	} else {
		err = r.Shutdown(ctx, engine.Departure{Reason: reason, Failed: failed})
	}
	<-over
	s.setState(StateIdle, nil)
	return err
}

// addSet adds a process set to the job. It returns when all ranks, or with members_only all members, have
// added the set.
func (s *Server) addSet(q *sidecarpb.AddProcessSet) (*sidecarpb.Reply, error) {
	r := s.current()
	if r == nil {
		return nil, usage(message.AddProcessSet.String(), "", rank.ErrNotInitialized)
	}
	set, err := r.AddSetNow(ints(q.GetRanks()), q.GetMembersOnly(), q.GetName(), q.GetTimeoutSeconds())
	if err != nil {
		return nil, err
	}
	return &sidecarpb.Reply{What: &sidecarpb.Reply_ProcessSet{ProcessSet: describeSet(set)}}, nil
}

// removeSet removes a process set from the job. It returns when all ranks, or all members of a set that only
// they have added, have removed the set.
func (s *Server) removeSet(q *sidecarpb.RemoveProcessSet) error {
	r := s.current()
	if r == nil {
		return usage(message.RemoveProcessSet.String(), "", rank.ErrNotInitialized)
	}
	return r.RemoveSetNow(int(q.GetId()), q.GetTimeoutSeconds())
}

// startTimeline starts to write the timeline to the path that the client has sent. It does not check
// permissions, because the client runs as the same user as the sidecar and can write to the same files.
func (s *Server) startTimeline(q *sidecarpb.StartTimeline) error {
	r, path := s.current(), q.GetPath()
	switch {
	case r == nil:
		return rank.ErrNotInitialized
	case len(path) > maxPathBytes:
		return fmt.Errorf("got a path of %d bytes, want at most %d", len(path), maxPathBytes)
	// A relative path is refused, because the sidecar does not know the client's working directory.
	case !filepath.IsAbs(path):
		return fmt.Errorf("got path %q, want an absolute path", path)
	}
	return r.Watch.StartTimeline(path, q.GetMarkCycles())
}

func (s *Server) stopTimeline() error {
	r := s.current()
	if r == nil {
		return rank.ErrNotInitialized
	}
	return r.Watch.StopTimeline()
}

func describeSet(set *rank.Set) *sidecarpb.ProcessSet {
	d := &sidecarpb.ProcessSet{Id: int32(set.ID)}
	for _, r := range set.Ranks {
		d.Ranks = append(d.Ranks, int32(r))
	}
	return d
}

func ints(ranks []int32) []int {
	all := make([]int, len(ranks))
	for i, r := range ranks {
		all[i] = int(r)
	}
	return all
}
