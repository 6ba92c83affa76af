package controller_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// newTestMember returns the Member of rank r in a job of the given size. The job has no coordinator.
func newTestMember(r topo.Rank, size int) *controller.Member {
	return controller.NewMember(controller.MemberConfig{
		Rank: r, Sets: []controller.Set{controller.Global(size)}, LivenessTimeout: livenessTimeout,
	}, 0)
}

// testConfig returns the configuration of a job of the given size without a cache.
func testConfig(size int) controller.CoordinatorConfig {
	return controller.CoordinatorConfig{Sets: []controller.Set{controller.Global(size)},
		LivenessTimeout: livenessTimeout, Plan: plan()}
}

func newTestCoordinator(size int) *controller.Coordinator {
	return controller.NewCoordinator(testConfig(size), 0)
}

// step passes frames from the coordinator to a member, which must accept them.
func step(t *testing.T, m *controller.Member, downs ...*message.Down) {
	t.Helper()
	for _, d := range downs {
		if err := m.Step(d); err != nil {
			t.Fatal(err)
		}
	}
}

func response(name string, numElems int64) *message.Response {
	return &message.Response{
		Kind: message.Allreduce, Name: name, DType: tensor.Float32, Shape: tensor.Shape{numElems},
		Op: tensor.Sum, Prescale: 1, Postscale: 1,
	}
}

// If a frame from the coordinator breaks the protocol, the verdict of the member is that rank 0 has failed.
// The member executes no grant in the frame.
func TestMemberRefuses(t *testing.T) {
	full := func(r ...*message.Response) message.Grant { return message.Grant{Full: r} }
	cycle := func(n uint64, s message.DownSet) *message.Down {
		return &message.Down{Type: message.DownCycle, Cycle: n, Sets: []message.DownSet{s}}
	}
	// This cycle precedes the frame under test and assigns bit 0 to the tensor a.
	first := cycle(1, message.DownSet{Grants: []message.Grant{full(response("a", 1))},
		Puts: []message.Put{{}}})
	good := full(response("good", 1))
	// beside returns a cycle with a good grant and another one.
	beside := func(g message.Grant) *message.Down {
		return cycle(2, message.DownSet{Grants: []message.Grant{good, g}})
	}
	without1 := func(r *message.Response) message.Grant {
		return message.Grant{Absent: []topo.Rank{1}, Full: []*message.Response{r}}
	}
	on := func(name string, devices ...tensor.Device) *message.Response {
		return &message.Response{Kind: message.Broadcast, Name: name, Devices: devices}
	}
	for _, c := range []struct {
		name string
		down *message.Down
		want string
	}{
		{"the same cycle", cycle(1, message.DownSet{Grants: []message.Grant{good}}), "cycle 1 after cycle 1"},
		{"another's set", cycle(2, message.DownSet{Set: 3}), "process set 3, but rank 1 is not a member of it"},
		{"a free bit", beside(message.Grant{Bits: []uint32{1}}),
			"got a grant of cache bit 1, but the cache has no entry for this bit"},
		{"nothing", beside(message.Grant{}), "got a grant without a response"},
		{"two kinds", beside(message.Grant{Bits: []uint32{0},
			Full: []*message.Response{{Kind: message.Barrier, Name: "b"}}}), `barrier "b" together with allreduce "a"`},
		{"rows of one rank too few", beside(full(&message.Response{Kind: message.Allgather, Name: "r",
			DType: tensor.Float32, Shape: tensor.Shape{0}, FirstDims: []int64{4}})),
			`allgather "r": got 1 first dimensions, want 2, one for each rank`},
		{"a device too few", beside(full(on("d", tensor.CUDA(0)))),
			`broadcast "d": got 1 devices, want 2, one for each rank`},
		{"a tensor on the host beside one on a device", beside(full(on("d", tensor.CUDA(0), tensor.Host))),
			`broadcast "d": got device cpu for rank 1, want a CUDA device`},
		{"tensors on different devices", beside(full(on("w"), on("v", tensor.CUDA(0), tensor.CUDA(0)))),
			`broadcast "v" together with broadcast "w"`},
		{"erasure of a free bit", cycle(2, message.DownSet{Grants: []message.Grant{good}, Erase: []uint32{5}}),
			"got an erasure of cache bit 5, but the cache has no entry for this bit"},
		{"put to a taken bit", cycle(2, message.DownSet{Grants: []message.Grant{good}, Puts: []message.Put{{}}}),
			`put "good": cache bit 0 already has the entry "a"`},
		{"put of a cached name", cycle(2, message.DownSet{Grants: []message.Grant{full(response("a", 1))},
			Puts: []message.Put{{Bit: 1}}}), `put "a": got cache bit 1, but the name already has cache bit 0`},
		{"absent ranks that are no members", beside(message.Grant{Absent: []topo.Rank{2}, Full: good.Full}),
			`allreduce "good" with absent ranks [2], want members of process set 0`},
		{"absent ranks in disorder", beside(message.Grant{Absent: []topo.Rank{1, 0}, Full: good.Full}),
			"with absent ranks [1 0]"},
		{"rows of an absent rank", beside(without1(&message.Response{Kind: message.Allgather, Name: "r",
			DType: tensor.Float32, Shape: tensor.Shape{0}, FirstDims: []int64{4, 3}})),
			`allgather "r": got 3 rows from absent rank 1, want 0`},
		{"a root that is no member", beside(full(&message.Response{Kind: message.Broadcast, Name: "w", Root: 2})),
			`broadcast "w": root rank 2 is not a member`},
		{"an absent root", beside(without1(&message.Response{Kind: message.Broadcast, Name: "w", Root: 1})),
			`broadcast "w": root rank 1 is absent`},
		{"absent without a join", beside(without1(&message.Response{Kind: message.Barrier, Name: "b"})),
			`barrier "b" with absent rank 1, which has not joined`},
		{"a removal without this rank",
			beside(without1(&message.Response{Kind: message.RemoveProcessSet, Name: "s", Set: 5})),
			`remove process set "s" with absent rank 1, which has not joined`},
		{"two roots",
			beside(full(on("w"), &message.Response{Kind: message.Broadcast, Name: "v", Root: 1})),
			`broadcast "v" together with broadcast "w"`},
		{"two barriers", beside(full(&message.Response{Kind: message.Barrier, Name: "b"},
			&message.Response{Kind: message.Barrier, Name: "c"})), `barrier "c" together with barrier "b"`},
		{"a set that is there", beside(full(&message.Response{Kind: message.AddProcessSet, Name: "s", Set: 5,
			Ranks: []topo.Rank{1}})), "adds process set 5, which already exists"},
		{"a set from another set", cycle(2, message.DownSet{Set: 5, Grants: []message.Grant{
			full(&message.Response{Kind: message.RemoveProcessSet, Name: "s", Set: 5})}}),
			`remove process set "s": got process set 5, want process set 0, because all ranks take part`},
		{"a join that is not its own", beside(full(&message.Response{Kind: message.Join, Name: "j"})),
			"got the end of a join of process set 0, but rank 1 has not joined"},
		{"close without a stop", &message.Down{Type: message.DownClose, Cycle: 1}, "got a close frame before the cycle that stops the job"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := controller.NewMember(controller.MemberConfig{
				Rank: 1, Sets: []controller.Set{controller.Global(2), {ID: 5, Ranks: []topo.Rank{1}}},
				LivenessTimeout: livenessTimeout,
			}, 0)
			step(t, m, first)
			m.Advance()
			err := m.Step(c.down)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got error %v, want %q", err, c.want)
			}
			v := m.Verdict()
			if v == nil || !slices.Equal(v.Ranks, []topo.Rank{0}) ||
				!strings.Contains(v.Error(), "rank 0 failed: protocol error: ") {
				t.Errorf("verdict %v, want rank 0", v)
			}
			if r := m.Ready(); len(r.Grants) > 0 || len(r.Ups) > 0 || r.Stop {
				t.Errorf("the failed member has work: %+v", r)
			}
			if m.Next() != controller.Never {
				t.Errorf("the failed member wants a turn at %v", m.Next())
			}
			if err := m.Step(&message.Down{Type: message.DownFail, Ranks: []topo.Rank{1}}); err != nil ||
				m.Verdict() != v {
				t.Errorf("a later frame changes the verdict to %v (%v)", m.Verdict(), err)
			}
		})
	}

	t.Run("a cycle after the stop", func(t *testing.T) {
		m := newTestMember(1, 2)
		step(t, m, &message.Down{Type: message.DownCycle, Cycle: 1, Stop: true})
		if err := m.Step(cycle(2, message.DownSet{Grants: []message.Grant{good}})); err == nil ||
			!strings.Contains(err.Error(), "cycle 2 after the cycle that stopped the job") {
			t.Errorf("got error %v", err)
		}
	})
}

// ups returns the types of the frames that the member has to send.
func ups(m *controller.Member) []message.UpType {
	var types []message.UpType
	for _, u := range m.Ready().Ups {
		if u != nil {
			types = append(types, u.Type)
		}
	}
	m.Advance()
	return types
}

// waitForVerdict runs turns of a member until it gives its own verdict, which must be at the time due: that
// rank 0 has failed, for the given reason.
func waitForVerdict(t *testing.T, m *controller.Member, due time.Duration, reason string) {
	t.Helper()
	now := time.Duration(0)
	for ; m.Verdict() == nil && now < due; m.Advance() {
		now = m.Next()
		tick(m, now)
		m.Ready()
	}
	v := m.Verdict()
	if v == nil || now != due || !slices.Equal(v.Ranks, []topo.Rank{0}) || v.Reason != reason {
		t.Errorf("at %v: verdict %v, want at %v that rank 0 failed: %s", now, v, due, reason)
	}
}

func TestMember(t *testing.T) {
	stop := &message.Down{Type: message.DownCycle, Cycle: 1, Stop: true}
	a := allreduce("a", 1)

	t.Run("submits to its sets only", func(t *testing.T) {
		if err := newTestMember(1, 2).Submit(7, &a); err == nil ||
			!strings.Contains(err.Error(), "rank 1 is not a member of process set 7") {
			t.Errorf("got error %v", err)
		}
	})
	t.Run("submits nothing after the stop", func(t *testing.T) {
		m := newTestMember(1, 2)
		step(t, m, stop)
		if !m.Ready().Stop {
			t.Error("the stop is not announced")
		}
		m.Advance()
		if m.Ready().Stop {
			t.Error("the stop is announced twice")
		}
		if err := m.Submit(topo.Global, &a); err != nil {
			t.Error(err)
		}
		m.Shutdown("", nil)
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v", got)
		}
	})
	t.Run("panics when frames would be classified by another cache", func(t *testing.T) {
		m := newTestMember(1, 2)
		if err := m.Submit(topo.Global, &a); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if recover() == nil {
				t.Error("Step between Submit and Ready did not panic")
			}
		}()
		m.Step(stop)
	})
	t.Run("holds a rank that has left until its last messages have arrived", func(t *testing.T) {
		m := newTestMember(1, 3)
		m.Receives([]topo.Rank{2})
		step(t, m, &message.Down{Type: message.DownLeft, Ranks: []topo.Rank{2}})
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v before the messages have arrived", got)
		}
		m.Receives(nil)
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpReleased}) {
			t.Errorf("frames %v afterwards", got)
		}
	})
	t.Run("shuts down once", func(t *testing.T) {
		m := newTestMember(1, 2)
		m.Shutdown("", nil)
		m.Shutdown("", nil)
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpNews}) {
			t.Errorf("frames %v", got)
		}
		m.Shutdown("", nil)
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v after the shutdown is said", got)
		}
	})
	t.Run("says bye once, after the stop", func(t *testing.T) {
		m := newTestMember(1, 2)
		m.Drained()
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v before the stop", got)
		}
		step(t, m, stop)
		m.Advance()
		m.Drained()
		m.Drained()
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpBye}) {
			t.Errorf("frames %v", got)
		}
		if err := m.Step(&message.Down{Type: message.DownClose}); err != nil || !m.Closed() {
			t.Errorf("closed %v (%v)", m.Closed(), err)
		}
		m.Suspect([]topo.Rank{0}, "late")
		m.Lost("end of stream")
		tick(m, time.Hour)
		if got := ups(m); len(got) > 0 || m.Verdict() != nil || m.Next() != controller.Never {
			t.Errorf("after the close: frames %v, verdict %v, next turn at %v", got, m.Verdict(), m.Next())
		}
	})
	t.Run("suspects once", func(t *testing.T) {
		m := newTestMember(1, 3)
		m.Suspect([]topo.Rank{2}, "reset")
		m.Suspect([]topo.Rank{0}, "timeout")
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpSuspect}) {
			t.Errorf("frames %v", got)
		}
		waitForVerdict(t, m, controller.VerdictTimeout, "silent for 3s, and rank 1 suspects rank 2: reset")
	})
	t.Run("suspects one rank after several", func(t *testing.T) {
		m := newTestMember(1, 3)
		m.Suspect([]topo.Rank{0, 1, 2}, "mpi: no such peer")
		ups(m)
		tick(m, time.Second)
		m.Suspect([]topo.Rank{2}, "reset")
		m.Suspect([]topo.Rank{0, 1}, "mpi: no such peer")
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpSuspect}) {
			t.Errorf("frames %v", got)
		}
		waitForVerdict(t, m, time.Second+controller.VerdictTimeout,
			"silent for 4s, and rank 1 suspects rank 2: reset")
	})
	t.Run("believes the coordinator more than itself", func(t *testing.T) {
		m := newTestMember(1, 3)
		m.Suspect([]topo.Rank{2}, "reset")
		ups(m)
		down := &message.Down{Type: message.DownFail, Ranks: []topo.Rank{0, 2}, Reason: "who knows"}
		step(t, m, down)
		down.Ranks[0] = 9 // the caller may reuse the memory of the frame
		tick(m, time.Hour)
		if got, want := m.Verdict().Error(), "ranks 0 and 2 failed: who knows"; got != want {
			t.Errorf("verdict %q, want %q", got, want)
		}
	})
	t.Run("news of finished work end with the epoch", func(t *testing.T) {
		m := newTestMember(0, 2)
		step(t, m, &message.Down{Type: message.DownCycle, Cycle: 1, Sets: []message.DownSet{
			{Grants: []message.Grant{{Full: []*message.Response{response("a", 1)}}}},
		}})
		g := m.Ready().Grants[0]
		m.Advance()
		m.Lost("reset")
		m.Finished(g)
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v", got)
		}
	})
	t.Run("news are a sign of life", func(t *testing.T) {
		m := newTestMember(1, 2)
		tick(m, 3*controller.HeartbeatPeriod)
		if err := m.Submit(topo.Global, &a); err != nil {
			t.Fatal(err)
		}
		if got := ups(m); !slices.Equal(got, []message.UpType{message.UpNews}) {
			t.Errorf("frames %v, want news alone", got)
		}
		if m.Next() != 4*controller.HeartbeatPeriod {
			t.Errorf("next turn at %v, want a heartbeat after the news", m.Next())
		}
	})
	t.Run("finishes what it has of a set that is gone", func(t *testing.T) {
		m := controller.NewMember(controller.MemberConfig{
			Rank: 0, Sets: []controller.Set{controller.Global(2), {ID: 5, Ranks: []topo.Rank{0, 1}}},
			LivenessTimeout: livenessTimeout,
		}, 0)
		for n, s := range []message.DownSet{
			{Set: 5, Grants: []message.Grant{{Full: []*message.Response{response("a", 1)}}}},
			{Grants: []message.Grant{
				{Full: []*message.Response{{Kind: message.RemoveProcessSet, Name: "s", Set: 5}}}}},
		} {
			step(t, m, &message.Down{Type: message.DownCycle, Cycle: uint64(n + 1),
				Sets: []message.DownSet{s}})
		}
		r := m.Ready()
		if len(r.Grants) != 2 || !slices.Equal(removals(r.Grants), []topo.ProcessSetID{5}) {
			t.Fatalf("got %d grants, which remove %v", len(r.Grants), removals(r.Grants))
		}
		g := r.Grants[0]
		m.Advance()
		if m.Finished(g); len(m.Ready().Ups) > 0 {
			t.Errorf("got the frames %v about a removed set, want none", m.Ready().Ups)
		}
	})
	t.Run("says whether a turn must follow the end of a grant", func(t *testing.T) {
		grants := []message.DownSet{{Grants: []message.Grant{{Full: []*message.Response{response("a", 1)}}}}}
		for _, c := range []struct {
			name     string
			rank     topo.Rank
			lockstep bool
			after    *message.Down // arrives between the grant and its end
			want     bool
		}{
			{"the lowest rank reports the end", 0, false, nil, true},
			{"another rank has nothing to send", 1, false, nil, false},
			{"nobody reports it in lock-step", 0, true, nil, false},
			{"a rank that has left is released", 1, false,
				&message.Down{Type: message.DownLeft, Ranks: []topo.Rank{0}}, true},
			{"this rank was stopped", 1, false, &message.Down{Type: message.DownCycle, Cycle: 2, Stop: true}, true},
		} {
			m := controller.NewMember(controller.MemberConfig{Rank: c.rank,
				Sets: []controller.Set{controller.Global(2)}, LivenessTimeout: livenessTimeout,
				Lockstep: c.lockstep}, 0)
			step(t, m, &message.Down{Type: message.DownCycle, Cycle: 1, Sets: grants})
			g := m.Ready().Grants[0]
			m.Advance()
			if c.after != nil {
				step(t, m, c.after)
			}
			if got := m.Finished(g); got != c.want {
				t.Errorf("%s: got %v, want %v", c.name, got, c.want)
			}
		}
	})
	t.Run("says what it does not finish, without what it was stopped for", func(t *testing.T) {
		m := newTestMember(0, 2)
		x := allreduce("x", 1)
		grant := func(n uint64) (a, c *controller.Grant) {
			step(t, m, &message.Down{Type: message.DownCycle, Cycle: n,
				Sets: []message.DownSet{{Grants: []message.Grant{
					{Full: []*message.Response{response("a", 1), response("b", 1)}},
					{Full: []*message.Response{response("c", 1)}},
				}}}})
			g := m.Ready().Grants
			a, c = g[0], g[1]
			m.Advance()
			return a, c
		}
		a, c := grant(1)
		for now := time.Second; now <= 3*time.Second; now += time.Second {
			tick(m, now)
			if up := m.Ready().Ups; len(up) != 1 || up[0].Tensor != "a" ||
				up[0].Millis != uint32(now.Milliseconds()) {
				t.Fatalf("at %v: frames %+v", now, up)
			}
			m.Advance()
		}
		tick(m, time.Hour)
		if up := m.Ready().Ups; len(up) != 1 || up[0].Millis != 3000 {
			t.Errorf("after an hour in which the process did not run: %+v, want an age of 3 s", up[0])
		}
		m.Advance()
		m.Finished(c)
		tick(m, time.Hour+time.Second)
		if up := m.Ready().Ups; len(up) != 2 || up[1].Tensor != "a" {
			t.Errorf("frames %v, want the news and a heartbeat with the older grant", up)
		}
		m.Advance()
		m.Finished(a)
		tick(m, time.Hour+2*time.Second)
		if up := m.Ready().Ups; len(up) != 2 || up[1].Type != message.UpHeartbeat || up[1].Tensor != "" {
			t.Errorf("frames %v, want the news and a heartbeat without a grant", up)
		}
		m.Advance()
		tick(m, time.Hour+3*time.Second)
		if err := m.Submit(topo.Global, &x); err != nil {
			t.Fatal(err)
		}
		if got := ups(m); len(got) != 1 {
			t.Errorf("frames %v, want news alone", got)
		}
	})
	t.Run("has no time limits after the end", func(t *testing.T) {
		m := newTestMember(1, 2)
		m.Lost("reset")
		m.Timeout(topo.Global, "a", time.Second)
		if got := ups(m); len(got) > 0 {
			t.Errorf("frames %v", got)
		}
	})
	t.Run("digest of a set that it is not in", func(t *testing.T) {
		if d := newTestMember(0, 2).Digest(7); d != 0 {
			t.Errorf("got %x, want 0", d)
		}
	})
}

// If all processes of a job were stopped for an hour, neither the coordinator nor a member fails another rank
// for its silence in this time. If a rank is silent later, it fails.
func TestStoppedProcess(t *testing.T) {
	c := newTestCoordinator(2)
	m := newTestMember(1, 2)
	for _, now := range []time.Duration{time.Second, time.Hour} {
		tick(c, now)
		c.Ready()
		c.Advance()
		tick(m, now)
		if c.Closed() || m.Verdict() != nil {
			t.Fatalf("at %v: the coordinator is closed: %v; the member's verdict is %v", now, c.Closed(),
				m.Verdict())
		}
	}
	for now := time.Hour + time.Second; !c.Closed(); now += time.Second {
		if now > 2*time.Hour {
			t.Fatal("the silent rank does not fail")
		}
		tick(c, now)
		c.Ready()
		c.Advance()
	}
	// Nor does a member that waits for the verdict about its suspicion give its own one earlier.
	m = newTestMember(1, 2)
	m.Suspect([]topo.Rank{0}, "reset")
	tick(m, time.Hour)
	if tick(m, time.Hour+2*controller.HeartbeatPeriod); m.Verdict() != nil {
		t.Errorf("after the stop: got verdict %v", m.Verdict())
	}
	if tick(m, time.Hour+controller.VerdictTimeout); m.Verdict() == nil {
		t.Error("got no verdict in time")
	}
	// Nor does the coordinator end a shutdown in which ranks still execute operations.
	c = newTestCoordinator(2)
	for r := range topo.Rank(2) {
		c.Step(r, &message.Up{Type: message.UpNews, Shutdown: true})
	}
	c.Ready()
	c.Advance()
	if tick(c, time.Hour); c.Closed() {
		t.Error("the shutdown ended after the stop")
	}
}

// A suspicion explains a timeout better, even if it is read after the report of the timeout in the same turn.
func TestSuspicionExplainsTimeout(t *testing.T) {
	c := newTestCoordinator(3)
	c.Step(1, news(allreduce("a", 1)))
	c.Step(1, &message.Up{Type: message.UpTimeout, Tensor: "a", Millis: 500})
	c.Step(0, &message.Up{Type: message.UpSuspect, Suspects: []topo.Rank{2}, Reason: "reset"})
	if v := verdictOf(c); v != nil {
		t.Errorf("got verdict %v, want none before the suspicion is decided", v)
	}
}

// A process that runs late finds frames that have arrived meanwhile. The ranks that sent them were not
// silent: not for a verdict about a suspicion, and not when an operation has timed out. The same holds for
// rank 0 at a member.
func TestLateProcess(t *testing.T) {
	const late = 2 * controller.HeartbeatPeriod
	beat := message.Up{Type: message.UpHeartbeat}
	for name, c := range map[string]struct {
		up   message.Up
		want string
	}{
		"suspicion": {message.Up{Type: message.UpSuspect, Suspects: []topo.Rank{2}, Reason: "reset"},
			"ranks 1 and 2: rank 1 lost its connection to rank 2: reset"},
		"timeout": {message.Up{Type: message.UpTimeout, Tensor: "a", Millis: 500},
			`rank 0: allreduce "a" timed out after 0.5s at rank 1: rank 0 has not submitted it`},
	} {
		coord := newTestCoordinator(3)
		for _, r := range []topo.Rank{1, 2} {
			coord.Step(r, news(allreduce("a", 1)))
		}
		now := time.Duration(0)
		turn := func(d time.Duration, ups ...*message.Up) {
			now += d
			coord.Tick(now)
			for _, up := range ups {
				for r := range topo.Rank(3) {
					if up == &beat || r == 1 {
						coord.Step(r, up)
					}
				}
			}
		}
		if name == "suspicion" {
			turn(controller.HeartbeatPeriod, &beat, &c.up)
			if v := verdictOf(coord); v != nil {
				t.Fatalf("%s: got verdict %v at once", name, v)
			}
			coord.Advance()
			turn(controller.HeartbeatPeriod/2, &beat)
			turn(late, &beat)
		} else {
			turn(late, &c.up, &beat) // the report of rank 1 is read before the frame of rank 2
		}
		got := ""
		if v := verdictOf(coord); v != nil {
			got = topo.FormatRanks(v.Ranks) + ": " + v.Reason
		}
		if got != c.want {
			t.Errorf("%s: got verdict %q, want %q", name, got, c.want)
		}
	}
	m := newTestMember(1, 2)
	m.Suspect([]topo.Rank{0}, "reset")
	m.Tick(late)
	m.Timeout(topo.Global, "a", time.Second)
	m.Tick(2 * late)
	step(t, m, &message.Down{Type: message.DownHeartbeat})
	if m.Expire(); m.Verdict() != nil {
		t.Errorf("the member has the verdict %v", m.Verdict())
	}
}

// If the coordinator's process was stopped, the time of the stop does not count as waiting time of tensors.
func TestStoppedProcessAndStalls(t *testing.T) {
	cfg := testConfig(2)
	cfg.CacheCapacity, cfg.StallWarning = 1, 3*time.Second
	c := controller.NewCoordinator(cfg, 0)
	var hit message.Bits
	hit.Set(0)
	turn := func() {
		c.Ready()
		c.Advance()
	}
	for r := range topo.Rank(2) {
		c.Step(r, news(allreduce("cached", 1)))
	}
	turn()
	c.Step(0, &message.Up{Type: message.UpNews, Seen: 1,
		Sets: []message.UpSet{{Hits: hit, Requests: []message.Request{allreduce("full", 1)}}}})
	beat := func(ms uint32) {
		c.Step(0, &message.Up{Type: message.UpHeartbeat, Seen: 1})
		c.Step(1, &message.Up{Type: message.UpHeartbeat, Seen: 1, Tensor: "cached", Millis: ms})
	}
	want := func(at time.Duration, names ...string) {
		t.Helper()
		tick(c, at)
		var got []string
		for _, e := range c.Events() {
			got = append(got, e.Stall.Name)
			if e.Stall.Waited != 3*time.Second {
				t.Errorf("%v", e.Stall)
			}
		}
		if !slices.Equal(got, names) {
			t.Errorf("at %v: got stalls of %q, want %q", at, got, names)
		}
	}
	for now := time.Second; now <= 2*time.Second; now += time.Second {
		want(now)
		beat(uint32(now.Milliseconds()))
		turn()
	}
	want(time.Hour)
	beat(2000)
	turn()
	want(time.Hour+time.Second, "full", "cached", "cached")
	if c.Events() != nil && len(c.Events()) > 0 {
		t.Error("Events returned events twice")
	}
}

// If several stall warnings for a tensor are due when the coordinator runs a turn, it reports the tensor only
// once. The next report is due at the next multiple of the warning time.
func TestStallsAreNotMadeUpFor(t *testing.T) {
	const period = 100 * time.Millisecond
	cfg := testConfig(2)
	cfg.StallWarning = period
	c := controller.NewCoordinator(cfg, 0)
	c.Step(0, news(allreduce("a", 1)))
	if c.Next() != period {
		t.Errorf("next turn at %v, want %v", c.Next(), period)
	}
	tick(c, 350*time.Millisecond)
	if n := len(c.Events()); n != 1 || c.Next() != 4*period {
		t.Errorf("%d reports, next turn at %v; want 1 and %v", n, c.Next(), 4*period)
	}
}

// If a job already has as many process sets as a frame can hold, the request to add another one returns an
// error.
func TestTooManySets(t *testing.T) {
	cfg := testConfig(2)
	for id := range topo.ProcessSetID(message.MaxSets - 1) {
		cfg.Sets = append(cfg.Sets, controller.Set{ID: id + 1, Ranks: []topo.Rank{0}})
	}
	c := controller.NewCoordinator(cfg, 0)
	for r := range topo.Rank(2) {
		c.Step(r, news(message.Request{Kind: message.AddProcessSet, Name: "s", Ranks: []topo.Rank{1}}))
	}
	got := c.Ready()[0].Down.Sets[0].Grants[0].Full[0]
	if want := `add process set "s": the job already has 1024 process sets, which is the maximum`; got.Text != want {
		t.Errorf("got %v %q, want %q", got.Kind, got.Text, want)
	}
}

// counting counts the frames that ranks send and get.
type counting struct {
	unwatched
	ups, downs map[topo.Rank]int
}

func (w *counting) sent(n *node, _ *message.Up)      { w.ups[n.rank]++ }
func (w *counting) applied(n *node, _ *message.Down) { w.downs[n.rank]++ }

// To add a process set by its members, each member sends one frame and gets one. In addition, the lowest
// member reports that the addition has ended. If members add several sets at once, these frames serve for
// all. The other ranks send and get no frame.
func TestFramesToAddSets(t *testing.T) {
	const sets = 50
	for _, atOnce := range []bool{false, true} {
		w := &counting{ups: make(map[topo.Rank]int), downs: make(map[topo.Rank]int)}
		c := newCluster(t, testConfig(6), w)
		for i := range sets {
			for _, r := range []topo.Rank{1, 2, 3, 4} {
				c.nodes[r].submit(topo.Global, founding(fmt.Sprint(i), 1, 2, 3, 4))
			}
			if !atOnce {
				c.settle()
			}
		}
		c.settle()
		n := sets
		if atOnce {
			n = 1
		}
		ups, downs := map[topo.Rank]int{1: 2 * n, 2: n, 3: n, 4: n}, map[topo.Rank]int{1: n, 2: n, 3: n, 4: n}
		if !maps.Equal(w.ups, ups) || !maps.Equal(w.downs, downs) {
			t.Errorf("at once: %v: ranks sent %v and got %v frames, want %v and %v", atOnce, w.ups, w.downs, ups,
				downs)
		}
	}
}

// If a rank asks for more process sets at once than a frame can hold, the answers are in several frames. Here
// the job has the maximum number of sets, so all answers are errors.
func TestAnswersDoNotFitIntoAFrame(t *testing.T) {
	const asked = 1500
	cfg := controller.CoordinatorConfig{Sets: []controller.Set{controller.Global(1)}, Plan: plan()}
	for id := range topo.ProcessSetID(message.MaxSets - 1) {
		cfg.Sets = append(cfg.Sets, controller.Set{ID: id + 1, Ranks: []topo.Rank{0}})
	}
	t.Run("events", func(t *testing.T) {
		cfg.LivenessTimeout = livenessTimeout
		c := newCluster(t, cfg, unwatched{})
		for i := range asked {
			c.nodes[0].submit(topo.Global, founding(fmt.Sprint(i), 0))
		}
		c.nodes[0].send()
		c.receive(c.nodes[0])
		c.decide()
		if next := c.coord.Next(); next > c.now {
			t.Errorf("the next turn is due at %v, although answers wait", next)
		}
		c.settle()
		if n := len(c.nodes[0].pending); n > 0 {
			t.Errorf("%d of %d requests are not answered", n, asked)
		}
	})
	t.Run("lockstep", func(t *testing.T) {
		j := newLockstepJob(t, cfg)
		for i := range asked {
			j.submit(0, request{q: founding(fmt.Sprint(i), 0)})
		}
		for range 3 {
			j.cycle()
		}
		if n := len(j.pending[0]); n > 0 {
			t.Errorf("%d of %d requests are not answered", n, asked)
		}
	})
}

// If a shutdown makes no progress and a rank is silent, the verdict names that rank, even before its liveness
// timeout has passed.
func TestSilentInShutdown(t *testing.T) {
	cfg := testConfig(3)
	cfg.LivenessTimeout = time.Minute
	c := controller.NewCoordinator(cfg, 0)
	for r := range topo.Rank(3) {
		c.Step(r, &message.Up{Type: message.UpNews, Shutdown: true})
	}
	for now := time.Duration(0); now < controller.CloseTimeout; now += time.Second {
		tick(c, now)
		c.Ready()
		c.Advance()
		c.Step(0, &message.Up{Type: message.UpHeartbeat, Seen: 1})
		c.Step(1, &message.Up{Type: message.UpHeartbeat, Seen: 1})
	}
	tick(c, controller.CloseTimeout)
	out := c.Ready()
	if len(out) != 1 || out[0].Down.Type != message.DownFail ||
		!slices.Equal(out[0].Down.Ranks, []topo.Rank{2}) {
		t.Errorf("got %+v, want a verdict that names rank 2", out)
	}
}

// Expire and Ready handle what has arrived since they were called last, even if Next was called meanwhile.
func TestNextForgetsNothing(t *testing.T) {
	c := newTestCoordinator(2)
	ready := func() int {
		defer c.Advance()
		return len(c.Ready())
	}
	ready()
	c.Next()
	for r := range topo.Rank(2) {
		c.Step(r, news(allreduce("a", 1)))
	}
	c.Next()
	if n := ready(); n == 0 {
		t.Error("no grant although all ranks have requested the tensor")
	}
	c.Next()
	c.Step(0, &message.Up{Type: message.UpNews, Seen: 1,
		Sets: []message.UpSet{{Requests: []message.Request{allreduce("b", 1)}}}})
	c.Expire()
	c.Step(0, &message.Up{Type: message.UpTimeout, Seen: 1, Tensor: "b", Millis: 500})
	ready()
	c.Next()
	if v := verdictOf(c); v == nil || !slices.Equal(v.Ranks, []topo.Rank{1}) {
		t.Errorf("got verdict %v, want one on rank 1, which has not submitted the tensor", v)
	}
}

// Coordinator.Next returns the time of the next turn for each reason for which a turn can be due. The scripts
// test what the coordinator does in that turn.
func TestCoordinatorNext(t *testing.T) {
	const beat = controller.HeartbeatPeriod
	start := func(cycleTime time.Duration) *controller.Coordinator {
		cfg := testConfig(2)
		cfg.CycleTime = cycleTime
		return controller.NewCoordinator(cfg, 0)
	}
	turn := func(c *controller.Coordinator) {
		c.Ready()
		c.Advance()
	}
	// The function until executes one turn in each heartbeat period, as the engine does. If turns were
	// further apart, the coordinator would conclude that the process was stopped.
	until := func(c *controller.Coordinator, at time.Duration) {
		for now := beat; now < at; now += beat {
			tick(c, now)
			turn(c)
		}
		tick(c, at)
	}
	want := func(c *controller.Coordinator, at time.Duration, why string) {
		t.Helper()
		if got := c.Next(); got != at {
			t.Errorf("next turn at %v, want %v: %s", got, at, why)
		}
	}

	c := start(0)
	want(c, beat, "heartbeat")
	for at := beat; at < livenessTimeout-beat/2; at += beat {
		tick(c, at)
		c.Step(0, &message.Up{Type: message.UpHeartbeat})
		turn(c)
		want(c, at+beat, "heartbeat after heartbeat")
	}
	tick(c, livenessTimeout-beat/2)
	c.Step(0, &message.Up{Type: message.UpSuspect, Suspects: []topo.Rank{1}})
	want(c, livenessTimeout-beat/2+controller.SuspectGrace, "suspicion")

	// Rank 0 has sent bye. Rank 1 sends heartbeats but no bye.
	c = start(0)
	for r := range topo.Rank(2) {
		c.Step(r, &message.Up{Type: message.UpNews, Shutdown: true})
	}
	turn(c)
	c.Step(0, &message.Up{Type: message.UpBye, Seen: 1})
	until(c, controller.CloseTimeout-beat/2)
	c.Step(1, &message.Up{Type: message.UpHeartbeat, Seen: 1})
	turn(c)
	want(c, controller.CloseTimeout, "close, though the last heartbeat was half a period ago")
	tick(c, controller.CloseTimeout)
	if !c.Closed() {
		t.Error("not closed on time")
	}
	want(c, controller.Never, "closed")

	// Rank 0 is silent until its liveness timeout has passed.
	c = start(0)
	until(c, livenessTimeout-beat/2)
	turn(c)
	want(c, livenessTimeout, "silence")
	tick(c, livenessTimeout)
	if !c.Closed() {
		t.Error("not failed on time")
	}
	want(c, controller.Never, "failed")

	// A tensor is ready, but it is too early for the next cycle.
	c = start(beat / 2)
	for cycle := range uint64(2) {
		for r := range topo.Rank(2) {
			c.Step(r, &message.Up{Type: message.UpNews, Seen: cycle,
				Sets: []message.UpSet{{Requests: []message.Request{allreduce("a", 1)}}}})
		}
		turn(c)
	}
	want(c, beat/2, "cycle time")
}

// steady is a job in which every rank submits the same cached tensors in each cycle. Like the engine, it
// reuses its buffers.
type steady struct {
	tb       testing.TB
	coord    *controller.Coordinator
	members  []*controller.Member
	requests []message.Request
	now      time.Duration
	up       message.Up
	downs    []message.Down // indexed by member
	ups      [][]byte       // indexed by member
	down     []byte
}

func newSteady(tb testing.TB, ranks, tensors int) *steady {
	cfg := testConfig(ranks)
	cfg.CacheCapacity, cfg.FusionThresholdBytes = 1024, 64<<20
	s := &steady{tb: tb, ups: make([][]byte, ranks), downs: make([]message.Down, ranks),
		coord: controller.NewCoordinator(cfg, 0)}
	for r := range ranks {
		s.members = append(s.members, newTestMember(topo.Rank(r), ranks))
	}
	for i := range tensors {
		s.requests = append(s.requests, allreduce(fmt.Sprintf("layer%d.weight", i), 1000))
	}
	// Run cycles until the tensors are cached and all buffers have their final sizes.
	for range 3 {
		s.cycle()
	}
	return s
}

// cycle runs one cycle: all ranks submit all tensors, the coordinator decides, and all ranks apply the
// decision.
func (s *steady) cycle() {
	s.now += time.Microsecond
	for r := range s.members {
		s.send(r)
	}
	s.decide()
	for r := range s.members {
		s.read(r)
	}
}

// send makes rank r submit all tensors, and encodes its frame.
func (s *steady) send(r int) {
	m := s.members[r]
	tick(m, s.now)
	for i := range s.requests {
		if err := m.Submit(topo.Global, &s.requests[i]); err != nil {
			s.tb.Fatal(err)
		}
	}
	var err error
	if s.ups[r], err = message.AppendUp(s.ups[r][:0], m.Ready().Ups[0]); err != nil {
		s.tb.Fatal(err)
	}
	m.Advance()
}

// decide executes a turn of the coordinator. All ranks get the same frame.
func (s *steady) decide() {
	s.coord.Tick(s.now)
	for r, frame := range s.ups {
		if err := message.DecodeUp(frame, &s.up); err != nil {
			s.tb.Fatal(err)
		}
		s.coord.Step(topo.Rank(r), &s.up)
	}
	s.coord.Expire()
	outs := s.coord.Ready()
	if len(outs) != 1 || len(outs[0].To) != len(s.members) {
		s.tb.Fatalf("the coordinator sends %+v, want one frame to all", outs)
	}
	var err error
	if s.down, err = message.AppendDown(s.down[:0], outs[0].Down); err != nil {
		s.tb.Fatal(err)
	}
	s.coord.Advance()
}

// read executes a turn of rank r in which the frame from the coordinator arrives.
func (s *steady) read(r int) {
	m := s.members[r]
	m.Tick(s.now)
	if err := message.DecodeDown(s.down, &s.downs[r]); err != nil {
		s.tb.Fatal(err)
	}
	if err := m.Step(&s.downs[r]); err != nil {
		s.tb.Fatal(err)
	}
	m.Expire()
	ready := m.Ready()
	if len(ready.Grants) != 1 || len(ready.Grants[0].Responses) != len(s.requests) {
		s.tb.Fatalf("rank %d is to run %v, want one fused response", r, ready.Grants)
	}
	// The member reuses a grant after Finished and the list of grants after Advance.
	g := ready.Grants[0]
	m.Advance()
	m.Finished(g)
}

// In steady state, a rank's part of a cycle allocates nothing. This holds for the lowest rank of the set,
// which reports finished grants, and for the other ranks.
func TestMemberAllocatesNothing(t *testing.T) {
	for rank := range 2 {
		s := newSteady(t, 2, 161)
		n := testing.AllocsPerRun(20, func() {
			s.now += time.Microsecond
			s.send(rank)
			// The next frame from the coordinator differs from the previous one only in the number of the
			// cycle, so the test increments that number.
			s.down[2]++
			s.read(rank)
		})
		if n != 0 {
			t.Errorf("rank %d: %v allocations per cycle", rank, n)
		}
	}
}

// BenchmarkCycle measures the work of all ranks and of the coordinator in one cycle of cached tensors, in one
// goroutine: submit, encode, decode, decide and apply. It uses 161 tensors because ResNet-50 has 161
// gradients.
func BenchmarkCycle(b *testing.B) {
	steadily(b, func(s *steady) func() { return s.cycle })
}

// BenchmarkCoordinator measures only the work of the coordinator in one cycle: it decodes the frames of all
// ranks, counts the votes, decides, and encodes one frame.
func BenchmarkCoordinator(b *testing.B) {
	steadily(b, func(s *steady) func() {
		return func() {
			s.now += time.Microsecond
			for r := range s.ups { // set the last cycle that each rank has seen
				copy(s.ups[r][2:10], s.down[2:10])
			}
			s.decide()
		}
	})
}

func steadily(b *testing.B, f func(*steady) func()) {
	for _, ranks := range []int{2, 4, 8, 64} {
		for _, tensors := range []int{1, 161} {
			b.Run(fmt.Sprintf("ranks=%d/tensors=%d", ranks, tensors), func(b *testing.B) {
				turn := f(newSteady(b, ranks, tensors))
				b.ReportAllocs()
				for b.Loop() {
					turn()
				}
			})
		}
	}
}

// tick executes a turn of a member or a coordinator in which no frame arrives.
func tick(of interface {
	Tick(time.Duration)
	Expire()
}, now time.Duration) {
	of.Tick(now)
	of.Expire()
}
