package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// leaderConfig is the configuration of a job of five ranks: ranks 0 and 1 have no leader, and rank 2 leads
// ranks 3 and 4.
func leaderConfig() controller.CoordinatorConfig {
	return controller.CoordinatorConfig{
		Sets: []controller.Set{controller.Global(5)}, CacheCapacity: 8, FusionThresholdBytes: 64,
		LivenessTimeout: livenessTimeout, Leaders: topo.Leaders{0, 1, 2, 2, 2}, Plan: plan(),
	}
}

// sentParts records what leaders pass on, and the verdicts and stalls, the order in which ranks are closed,
// and the heartbeats that name ranks.
type sentParts struct {
	unwatched
	parts    []string
	verdicts []string
	closings []topo.Rank
	leaving  []string
	events   []string
}

func (w *sentParts) relayed(p *message.Part, u *message.Up) {
	w.parts = append(w.parts, fmt.Sprintf("%v %v", p.Ranks, u))
}

func (w *sentParts) failed(n *node, v *controller.Verdict) {
	w.verdicts = append(w.verdicts, fmt.Sprintf("%d: %v", n.rank, v))
}

func (w *sentParts) issued(outs []controller.Outgoing) {
	for _, o := range outs {
		switch {
		case o.Down.Type == message.DownClose:
			w.closings = append(w.closings, o.To...)
		case o.Down.Type == message.DownHeartbeat && len(o.Down.Ranks) > 0:
			w.leaving = append(w.leaving, fmt.Sprintf("%v %v", o.To, o.Down))
		}
	}
}

func (w *sentParts) happened(e controller.Event) { w.events = append(w.events, e.Stall.String()) }

func (w *sentParts) take() []string {
	parts := w.parts
	w.parts = nil
	return parts
}

func newLeaderCluster(t *testing.T, cfg controller.CoordinatorConfig) (*cluster, *sentParts) {
	w := &sentParts{}
	return newCluster(t, cfg, w), w
}

// submitAt submits a request at some ranks, and executes all turns.
func (c *cluster) submitAt(q message.Request, ranks ...int) {
	for _, r := range ranks {
		c.nodes[r].submit(topo.Global, q)
	}
	c.settle()
}

// wantGranted checks that no rank waits for a tensor.
func (c *cluster) wantGranted(tensor, when string) {
	c.tb.Helper()
	for r := range c.nodes {
		if c.nodes[r].waits(topo.Global, tensor) {
			c.tb.Errorf("%s: rank %d waits for %s", when, r, tensor)
		}
	}
}

// submitAll submits the requests at every rank, and executes all turns.
func (c *cluster) submitAll(requests ...message.Request) {
	for _, n := range c.nodes {
		for _, q := range requests {
			n.submit(topo.Global, q)
		}
	}
	c.settle()
}

// pass advances the time in steps of 50 ms, and executes all turns after each step.
func (c *cluster) pass(d time.Duration) {
	for end := c.now + d; c.now < end; {
		c.now += 50 * time.Millisecond
		c.settle()
	}
}

func wantParts(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("the leader has passed on\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A leader passes on one part for equal requests, and one part for the votes of all its ranks. It holds the
// votes until the last of these ranks has voted.
func TestLeaderCombines(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.submitAll(allreduce("a", 3), allreduce("b", 4))
	wantParts(t, w.take(),
		"[2 3 4] up seen=0 set=0 request allreduce a float32[3] request allreduce b float32[4]")
	for _, r := range []int{3, 2, 4} {
		c.nodes[r].submit(topo.Global, allreduce("b", 4))
		if r != 4 {
			c.nodes[r].submit(topo.Global, allreduce("a", 3))
		}
		c.settle()
		if r != 4 && len(w.parts) > 0 {
			t.Errorf("the leader has passed on %v before rank 4 has voted", w.parts)
		}
	}
	wantParts(t, w.take(), "[2 3 4] up seen=1 set=0 hits=2")
	// Rank 4 does not vote for a, so the leader passes on the other votes after 200 ms, and then each vote at
	// once.
	c.pass(150 * time.Millisecond)
	wantParts(t, w.take())
	c.pass(50 * time.Millisecond)
	wantParts(t, w.take(), "[2 3] up seen=1 set=0 hits=1")
	c.submitAt(allreduce("a", 3), 4)
	wantParts(t, w.take(), "[4] up seen=1 set=0 hits=1")
}

// A leader holds the requests for a name until the last of its ranks has made one. Requests that differ do
// not share a part. If a rank has not made the request after 200 ms, the others are passed on.
func TestLeaderCombinesRequests(t *testing.T) {
	cfg := leaderConfig()
	cfg.CacheCapacity = 0
	c, w := newLeaderCluster(t, cfg)
	for i, r := range []int{4, 2, 3} {
		wantParts(t, w.take())
		c.nodes[r].submit(topo.Global, allreduce("a", 3))
		c.nodes[r].submit(topo.Global, allreduce("b", int64(3+i/2)))
		c.settle()
	}
	wantParts(t, w.take(),
		"[2 3 4] up seen=0 set=0 request allreduce a float32[3]",
		"[2 4] up seen=0 set=0 request allreduce b float32[3]",
		"[3] up seen=0 set=0 request allreduce b float32[4]")

	c.submitAt(allreduce("c", 1), 2)
	c.pass(150 * time.Millisecond)
	wantParts(t, w.take())
	c.pass(50 * time.Millisecond)
	wantParts(t, w.take(), "[2] up seen=0 set=0 request allreduce c float32[1]")
	c.submitAt(allreduce("c", 1), 4)
	wantParts(t, w.take(), "[4] up seen=0 set=0 request allreduce c float32[1]")
	// After the grant, requests for the name are held again.
	for _, r := range []int{0, 1, 3, 2} {
		c.submitAt(allreduce("c", 1), r)
	}
	wantParts(t, w.take(), "[3] up seen=0 set=0 request allreduce c float32[1]")
	if c.nodes[3].waits(topo.Global, "c") {
		t.Error("c is not granted")
	}
}

// If a rank of a host votes for an entry that was erased, and the others request its name in full, the leader
// does not hold their requests, because no further request of the first rank will arrive.
func TestLeaderPassesRequestsForErasedEntries(t *testing.T) {
	for _, arrives := range []string{"before the erasure", "after it", "after the requests",
		"after the erasure with an invalidation"} {
		cfg := leaderConfig()
		cfg.CacheCapacity = 2
		c, w := newLeaderCluster(t, cfg)
		submit := func(name string, ranks ...int) {
			for _, r := range ranks {
				c.nodes[r].submit(topo.Global, allreduce(name, 3))
			}
		}
		submit("a", 0, 1, 2, 3, 4)
		c.settle() // a has bit 0
		submit("c", 0, 1, 2, 3, 4)
		c.settle()
		submit("b", 0, 1, 2, 3, 4)
		w.take()
		for _, n := range c.nodes { // all requests for b arrive, and rank 2 does not apply the grant
			n.send()
		}
		leader := c.nodes[2]
		leader.combine(all)
		for _, n := range c.nodes {
			for n.arriving() {
				c.receive(n)
			}
		}
		c.decide() // this cycle erases a and gives bit 0 to b
		submit("a", 2)
		if arrives == "after the erasure with an invalidation" {
			leader.submit(topo.Global, allreduce("c", 5))
		}
		leader.send()
		if arrives == "before the erasure" {
			leader.combine(all)
		}
		leader.distribute()
		for _, r := range []int{0, 1, 3, 4} {
			c.nodes[r].read()
		}
		submit("a", 0, 1, 3, 4)
		if arrives == "after the requests" {
			c.nodes[3].send()
			c.nodes[4].send()
			leader.combine(func(of *node) int { return int(of.rank) - 2 })
		}
		c.settle()
		c.wantGranted("a", fmt.Sprintf("the vote arrives %s, after %q", arrives, w.parts))
	}
}

// The same holds if the leader has passed on the vote before the erasure, because it had held it for 200 ms.
func TestLeaderPassesRequestsAfterAnInvalidation(t *testing.T) {
	c, _ := newLeaderCluster(t, leaderConfig())
	c.submitAll(allreduce("a", 3))
	c.submitAt(allreduce("a", 3), 2)
	c.pass(200 * time.Millisecond)
	c.submitAt(allreduce("a", 5), 0)
	c.submitAll(allreduce("b", 3))         // the cycle that answers b erases a
	c.submitAt(allreduce("a", 3), 1, 3, 4) // the answer is an error
	c.wantGranted("a", "after the error")
}

// The same holds if the entry is erased because the cache is turned off, whether the leader holds the vote at
// that time or has passed it on.
func TestLeaderPassesRequestsAfterTheCacheIsOff(t *testing.T) {
	for _, held := range []time.Duration{0, 200 * time.Millisecond} {
		c, w := newLeaderCluster(t, leaderConfig())
		c.submitAll(allreduce("a", 3))
		c.submitAt(allreduce("a", 3), 2)
		c.pass(held)
		c.tune(message.Tuning{FusionThresholdBytes: 64, CacheOff: true})
		c.submitAll(allreduce("b", 3)) // the cycle that answers b erases a
		w.take()
		c.submitAt(allreduce("a", 3), 0, 1, 3)
		wantParts(t, w.take(), "[3] up seen=2 set=0 request allreduce a float32[3]")
		c.submitAt(allreduce("a", 3), 4)
		c.wantGranted("a", fmt.Sprintf("the vote was held for %v", held))
	}
}

// A leader holds neither votes nor requests if a rank of its host has joined and so will not make them.
func TestLeaderPassesVotes(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.submitAll(allreduce("a", 3), allreduce("b", 3))
	c.submitAt(allreduce("a", 3), 2)
	w.take()
	c.submitAt(message.Request{Kind: message.Join, Name: "j"}, 3)
	wantParts(t, w.take(), "[2] up seen=1 set=0 hits=1", "[3] up seen=1 set=0 request join j")
	c.submitAt(allreduce("b", 3), 4)
	wantParts(t, w.take(), "[4] up seen=1 set=0 hits=2")
	c.submitAt(allreduce("c", 3), 4)
	wantParts(t, w.take(), "[4] up seen=1 set=0 request allreduce c float32[3]")
}

// Heartbeats of the ranks of a host share a frame.
func TestLeaderCombinesHeartbeats(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.pass(1200 * time.Millisecond)
	wantParts(t, w.take(), "[2 3 4] heartbeat seen=0")

	// Heartbeats that are held are sent together with a request.
	c.pass(900 * time.Millisecond)
	wantParts(t, w.take())
	c.submitAt(allreduce("a", 3), 2, 3, 4)
	wantParts(t, w.take(), "[2 3 4] up seen=0 set=0 request allreduce a float32[3]", "[2 3 4] heartbeat seen=0")
}

// All ranks learn once that a rank has announced its shutdown, also the ranks behind a leader.
func TestShutdownIsAnnouncedBehindALeader(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.nodes[0].m.Shutdown("", nil)
	c.pass(3500 * time.Millisecond)
	if want := "[0 1 2 3 4] heartbeat leaving=0"; len(w.leaving) == 0 || w.leaving[0] != want {
		t.Errorf("got heartbeats %q, want first %q", w.leaving, want)
	}
	for _, beat := range w.leaving[min(1, len(w.leaving)):] {
		if strings.Contains(beat, "3 4") {
			t.Errorf("got another heartbeat %q, which the leader sends", beat)
		}
	}
}

// The coordinator learns when each vote has arrived at its leader: the rank that was last of all is the one
// that held up the others, and the arrival times are those of the ranks.
func TestArrivalsBehindALeader(t *testing.T) {
	c, _ := newLeaderCluster(t, leaderConfig())
	c.coord.Trace(true)
	at := func(ms int, r int) {
		c.now = time.Duration(ms) * time.Millisecond
		c.nodes[r].submit(topo.Global, allreduce("a", 3))
		c.settle()
	}
	for r := range 5 {
		at(0, r)
	}
	c.coord.Arrivals(0, 1)
	for i, r := range []int{2, 3, 0, 1, 4} {
		at(10+10*i, r)
	}
	want := []time.Duration{30, 40, 10, 20, 50}
	for i := range want {
		want[i] *= time.Millisecond
	}
	if got := c.coord.Arrivals(0, 1); !slices.Equal(got, want) {
		t.Errorf("got arrival times %v, want %v", got, want)
	}
	// The votes of ranks 2 to 4 arrive before those of ranks 0 and 1. Rank 1 is the last.
	for i, r := range []int{2, 3, 4, 0, 1} {
		at(100+10*i, r)
	}
	// The votes of ranks 2 to 4 do not arrive in the order of the ranks.
	for i, r := range []int{0, 1, 3, 4, 2} {
		at(200+10*i, r)
	}
	late := c.coord.Stats().Late
	for _, r := range []topo.Rank{1, 2, 4} {
		if want := (trace.HeldUp{Rank: r, Last: 1, Held: 10 * time.Millisecond}); late[r] != want {
			t.Errorf("got lateness %+v, want %+v", late[r], want)
		}
	}
}

// A stalled tensor is reported with the ranks that are missing, also if they are behind a leader.
func TestStallBehindALeader(t *testing.T) {
	cfg := leaderConfig()
	cfg.StallWarning = time.Second
	c, w := newLeaderCluster(t, cfg)
	for range 2 {
		c.submitAll(allreduce("a", 3))
	}
	c.submitAt(allreduce("a", 3), 0, 1, 2, 4)
	c.pass(1100 * time.Millisecond)
	if len(w.events) != 1 || !strings.HasSuffix(w.events[0], "has waited 1s for rank 3") {
		t.Errorf("got stalls %q, want one that waits for rank 3", w.events)
	}
}

// silence lets the time pass until the job has failed, while the given rank does nothing, and returns the
// ranks of the verdict of the coordinator.
func silence(t *testing.T, r topo.Rank) []string {
	c, w := newLeaderCluster(t, leaderConfig())
	c.settle()
	c.nodes[r].over = true // it is stopped, and its connections are open
	for c.now < 2*livenessTimeout {
		c.pass(50 * time.Millisecond)
	}
	return w.verdicts
}

// If a rank behind a leader is silent, the verdict names it. If a leader is silent, the verdict names only
// the leader, at the ranks behind it too.
func TestSilenceWithLeaders(t *testing.T) {
	for r := topo.Rank(1); r < 5; r++ {
		verdicts := silence(t, r)
		if len(verdicts) != 4 {
			t.Errorf("rank %d is silent: got verdicts %q, want one at every other rank", r, verdicts)
		}
		for _, v := range verdicts {
			if !strings.Contains(v, fmt.Sprintf(": rank %d failed: silent for 10s", r)) {
				t.Errorf("rank %d is silent: got verdict %q", r, v)
			}
			const behind = "; it passes on the frames of ranks 3 and 4"
			if strings.HasPrefix(v, "0") && (r == 2) != strings.HasSuffix(v, behind) {
				t.Errorf("rank %d is silent: got verdict %q", r, v)
			}
		}
	}
}

// A rank that has shut down is closed after the ranks that it leads, or to which it passes on memory.
func TestClosedLast(t *testing.T) {
	leaders, groups := leaderConfig().Leaders, []topo.Rank{0, 0, 2, 2, 2}
	for name, c := range map[string]struct {
		leaders, groups []topo.Rank
		leave           []int
		want            []topo.Rank
	}{
		"leader":           {leaders, nil, []int{2, 3, 4}, []topo.Rank{3, 4, 2}},
		"group":            {nil, groups, []int{2, 3, 4}, []topo.Rank{3, 4, 2}},
		"leader and group": {leaders, groups, []int{2, 3, 4}, []topo.Rank{3, 4, 2}},
		"group of rank 0":  {nil, groups, []int{0, 1, 3}, []topo.Rank{1, 3}},
	} {
		cfg := leaderConfig()
		cfg.Leaders, cfg.Groups = c.leaders, c.groups
		cluster, w := newLeaderCluster(t, cfg)
		for _, r := range c.leave {
			cluster.nodes[r].m.Shutdown("", nil)
			cluster.settle()
		}
		if !slices.Equal(w.closings, c.want) {
			t.Errorf("%s: the ranks are closed in the order %v, want %v", name, w.closings, c.want)
		}
		if len(w.verdicts) > 0 || cluster.coord.Closed() {
			t.Errorf("%s: got verdicts %v, closed %v: not all ranks have left", name, w.verdicts,
				cluster.coord.Closed())
		}
	}
}

// A leader does not report the end of the connection of a rank that was closed.
func TestClosedIsNotLost(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.nodes[3].m.Shutdown("", nil)
	c.settle()
	w.take()
	c.endConnection(3, "end of stream")
	c.settle()
	wantParts(t, w.take())
}

// wantVerdicts checks that every rank, except one, has got a verdict that contains want.
func wantVerdicts(t *testing.T, got []string, except topo.Rank, want string) {
	t.Helper()
	slices.Sort(got)
	for r := topo.Rank(0); r < 5; r++ {
		if r != except && !slices.ContainsFunc(got, func(v string) bool {
			return strings.HasPrefix(v, fmt.Sprintf("%d: %s", r, want))
		}) {
			t.Errorf("got verdicts %q, want one at rank %d that begins with %q", got, r, want)
		}
	}
}

// keeperConfigs returns configurations of a job of five ranks in which rank 2 stays for ranks 3 and 4: it
// leads them, or it passes on the memory that they share.
func keeperConfigs() map[string]controller.CoordinatorConfig {
	leads, shares, both := leaderConfig(), leaderConfig(), leaderConfig()
	shares.Leaders, shares.Groups = nil, []topo.Rank{0, 0, 2, 2, 2}
	both.Groups = shares.Groups
	return map[string]controller.CoordinatorConfig{"leader": leads, "group": shares, "both": both}
}

// keeperInBye returns a job in which rank 2, which stays for ranks 3 and 4, has sent bye.
func keeperInBye(t *testing.T, cfg controller.CoordinatorConfig) (*cluster, *sentParts) {
	c, w := newLeaderCluster(t, cfg)
	c.nodes[2].m.Shutdown("", nil)
	c.settle()
	if n := c.nodes[2]; !n.drained || n.over {
		t.Fatalf("sent bye %v, over %v; want a rank that stays after its bye", n.drained, n.over)
	}
	return c, w
}

// If a rank ends or is silent after its bye, and a rank for which it stays has not sent bye, the verdict
// names it.
func TestKeeperFailsAfterItsBye(t *testing.T) {
	for name, cfg := range keeperConfigs() {
		for _, killed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s killed=%t", name, killed), func(t *testing.T) {
				c, w := keeperInBye(t, cfg)
				want := "rank 2 failed: silent for 10s"
				if killed {
					want = "rank 2 failed: killed"
					c.kill(2, "killed")
				} else {
					c.die(2) // its connections stay open
				}
				c.pass(livenessTimeout + time.Second)
				wantVerdicts(t, w.verdicts, 2, want)
			})
		}
	}
}

// If rank 0 dies while a leader stays after its bye, the leader passes on the verdict that rank 0 has failed.
func TestCoordinatorDiesAfterTheByeOfALeader(t *testing.T) {
	c, w := keeperInBye(t, leaderConfig())
	c.kill(0, "killed")
	c.settle()
	wantVerdicts(t, w.verdicts, 0, "rank 0 failed: killed")
}

// If the Shutdown of a rank has a deadline, which passes after its bye, the verdict names those of the ranks
// for which it stays that have not called Shutdown. If it is canceled, the verdict names the rank itself. If
// these ranks have sent bye too, the rank closes.
func TestKeeperExpiresAfterItsBye(t *testing.T) {
	const never = topo.Rank(9)
	expire := func(c *cluster, waited time.Duration) {
		for range 3 { // a rank repeats the report every second
			c.nodes[2].m.ExpireShutdown(waited)
			c.settle()
			c.pass(time.Second)
		}
	}
	for name, cfg := range keeperConfigs() {
		t.Run(name, func(t *testing.T) {
			c, w := keeperInBye(t, cfg)
			expire(c, 5*time.Second)
			wantVerdicts(t, w.verdicts, never,
				"ranks 3 and 4 failed: Shutdown timed out after 5s at rank 2: ranks 3 and 4 have not called Shutdown")

			c, w = keeperInBye(t, cfg)
			c.nodes[3].m.Shutdown("", nil)
			c.settle()
			expire(c, 0)
			wantVerdicts(t, w.verdicts, 3,
				"rank 2 failed: its Shutdown was canceled: rank 4 has not called Shutdown")

			c, w = keeperInBye(t, cfg)
			c.die(1) // rank 1 does not report that it needs no rank that has left
			for _, n := range c.nodes[3:] {
				n.m.Shutdown("", nil)
			}
			c.settle()
			if c.nodes[2].over || c.nodes[3].over {
				t.Fatal("the ranks that have left are closed, although rank 1 may need them")
			}
			c.nodes[2].m.ExpireShutdown(5 * time.Second)
			c.settle()
			if !c.nodes[2].m.Closed() || len(w.verdicts) > 0 {
				t.Errorf("rank 2 is closed: %v; verdicts %q, want none", c.nodes[2].m.Closed(), w.verdicts)
			}
		})
	}
}

// If an operation times out, votes that a leader holds count: the verdict names only the rank that has not
// voted.
func TestTimeoutBehindALeader(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.submitAll(allreduce("a", 3))
	for _, r := range []int{0, 1, 2, 4} {
		c.nodes[r].submit(topo.Global, allreduce("a", 3))
	}
	for range 3 { // a rank repeats a timeout every second
		c.nodes[0].m.Timeout(topo.Global, "a", time.Millisecond)
		c.settle()
		c.pass(time.Second)
	}
	const want = `rank 3 failed: allreduce "a" timed out`
	if len(w.verdicts) != 5 || !strings.Contains(w.verdicts[0], want) {
		t.Errorf("got verdicts %q, want one that names rank 3 at each rank", w.verdicts)
	}
}

// A leader that passes on a frame of a rank that it does not lead has failed. So has a leader that reports
// the end of a connection that it does not have, and a leader that passes by its own leader.
func TestLeaderOfOthers(t *testing.T) {
	one, two := topo.Leaders{0, 1, 2, 2, 2}, topo.Leaders{0, 1, 2, 2, 3}
	for _, x := range []struct {
		leaders topo.Leaders
		leader  topo.Rank
		of      topo.Rank
		up      *message.Up
	}{
		{one, 2, 1, &message.Up{Type: message.UpHeartbeat}},
		{one, 2, 2, &message.Up{Type: message.UpLost, Suspect: 1}},
		{one, 2, 2, &message.Up{Type: message.UpLost, Suspect: 2}},
		{one, 2, 2, &message.Up{Type: message.UpLost, Suspect: 9}},
		{one, 2, 2, &message.Up{Type: message.UpFault, Suspect: 1}},
		{two, 2, 2, &message.Up{Type: message.UpLost, Suspect: 4}},
		{two, 3, 4, &message.Up{Type: message.UpHeartbeat}},
	} {
		cfg := leaderConfig()
		cfg.Leaders = x.leaders
		c := controller.NewCoordinator(cfg, 0)
		c.Relay(x.leader, &message.Part{Ranks: []topo.Rank{x.of}, Held: []uint32{0}}, x.up)
		outs := c.Ready()
		if len(outs) == 0 || !slices.Equal(outs[0].Down.Ranks, []topo.Rank{x.leader}) ||
			!strings.Contains(outs[0].Down.Reason, "which it does not lead") {
			t.Errorf("%v of rank %d: got %+v, want a verdict that names rank %d", x.up, x.of, outs, x.leader)
		}
	}
}

// A rank without ranks behind it that passes on a frame of all of them has failed, and so has a leader that
// passes on the same request of all of them twice.
func TestLeaderOfAll(t *testing.T) {
	asks := &message.Up{Type: message.UpNews, Sets: []message.UpSet{{
		Requests: []message.Request{allreduce("a", 1), allreduce("a", 1)}}}}
	for _, x := range []struct {
		leader topo.Rank
		want   string
	}{{1, "it leads no rank"}, {2, "second request"}} {
		c := controller.NewCoordinator(leaderConfig(), 0)
		c.Relay(x.leader, &message.Part{All: true, Ranks: []topo.Rank{x.leader, x.leader},
			Held: []uint32{0, 0}}, asks)
		outs := c.Ready()
		if len(outs) == 0 || !slices.Equal(outs[0].Down.Ranks, []topo.Rank{x.leader}) ||
			!strings.Contains(outs[0].Down.Reason, x.want) {
			t.Errorf("rank %d: got %+v, want a verdict with %q", x.leader, outs, x.want)
		}
	}
}

// A suspicion of one rank replaces one of several ranks just before the verdict. The verdict comes within
// LongestVerdict.
func TestLongestVerdict(t *testing.T) {
	for levels, longest := range map[int]time.Duration{1: 7200 * time.Millisecond, 2: 8 * time.Second} {
		cfg := leaderConfig()
		if levels == 2 {
			cfg.Leaders[4] = 3
		}
		if got := controller.LongestVerdict(cfg.Leaders.Levels()); got != longest {
			t.Errorf("%d levels: got %v, want %v", levels, got, longest)
		}
		c, w := newLeaderCluster(t, cfg)
		c.nodes[0].m.Suspect([]topo.Rank{1, 3}, "no such peer")
		c.settle()
		c.pass(longest/2 - 50*time.Millisecond)
		c.nodes[4].m.Suspect([]topo.Rank{3}, "connection reset")
		c.settle()
		if len(w.verdicts) > 0 {
			t.Errorf("after %v: got verdicts %q, want none", c.now, w.verdicts)
		}
		c.pass(longest - c.now)
		if len(w.verdicts) != 5 || !strings.Contains(w.verdicts[0], "ranks 3 and 4 failed") {
			t.Errorf("after %v: got verdicts %q, want one that names ranks 3 and 4 at each rank", c.now,
				w.verdicts)
		}
	}
}

// A leader holds what all ranks behind another leader have made as one, with the times of the first and the
// last two. If it must pass it on before the others have made it, it lists the ranks.
func TestLeaderHoldsGroups(t *testing.T) {
	news := func(hits ...uint32) []byte {
		up, err := message.AppendUp(nil, &message.Up{Type: message.UpNews, Seen: 1,
			Sets: []message.UpSet{{Hits: bits(hits...)}}})
		if err != nil {
			t.Fatal(err)
		}
		return up
	}
	all := func(first, latest, second uint32, hits ...uint32) *message.Part {
		return &message.Part{All: true, First: first, Ranks: []topo.Rank{4, 3},
			Held: []uint32{latest, second}, Frame: news(hits...)}
	}
	const now = time.Second
	for _, test := range []struct {
		name   string
		brief  bool
		events func(c *controller.Combiner)
		want   string
	}{
		{"all", true, func(c *controller.Combiner) {
			c.Relay(2, all(900, 100, 200, 0))
			c.Up(1, news(0))
			c.Tick(now + 50*time.Microsecond)
			c.Up(5, news(0))
		}, "all 950 [5 1] [0 50] up seen=1 set=0 hits=1"},
		{"all, and rank 0 wants all times", false, func(c *controller.Combiner) {
			c.Relay(2, all(900, 100, 200, 0))
			c.Up(1, news(0))
			c.Up(5, news(0))
		}, "[1 2 3 4 5] [0 900 200 100 0] up seen=1 set=0 hits=1"},
		{"after 200 ms", true, func(c *controller.Combiner) {
			c.Up(5, news(0))
			c.Relay(2, all(900, 100, 200, 0))
			c.Tick(now + 200*time.Millisecond)
		}, "[2 3 4 5] [200900 200200 200100 200000] up seen=1 set=0 hits=1"},
		{"a rank has voted before", true, func(c *controller.Combiner) {
			c.Relay(2, &message.Part{Ranks: []topo.Rank{3}, Held: []uint32{7}, Frame: news(1)})
			c.Relay(2, all(900, 100, 200, 0, 1))
			c.Up(1, news(0))
			c.Up(5, news(0))
		}, "[2 3] [900 7] up seen=1 set=0 hits=2; [3] [200] up seen=1 set=0 hits=2; " +
			"[4] [100] up seen=1 set=0 hits=2; all 900 [5 1] [0 0] up seen=1 set=0 hits=1"},
		{"a rank votes twice", true, func(c *controller.Combiner) {
			c.Relay(2, all(900, 100, 200, 0))
			c.Relay(2, &message.Part{Ranks: []topo.Rank{3}, Held: []uint32{7}, Frame: news(0)})
		}, "[2 3 4] [900 200 100] up seen=1 set=0 hits=1; [3] [7] up seen=1 set=0 hits=1"},
	} {
		c := controller.NewCombiner(1, topo.Leaders{0, 1, 1, 2, 2, 1},
			[]controller.Set{controller.Global(6)}, 0)
		c.Tick(now)
		c.Down(nil, &message.Down{Type: message.DownCycle, Cycle: 1, Brief: test.brief,
			Sets: []message.DownSet{{
				Grants: []message.Grant{{Full: []*message.Response{response("a", 1), response("b", 1)}}},
				Puts:   []message.Put{{Bit: 0}, {Tensor: 1, Bit: 1}},
			}}})
		test.events(c)
		parts, _ := c.Ready()
		var got []string
		for _, p := range parts {
			var up message.Up
			if err := message.DecodeUp(p.Frame, &up); err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprintf("%v %v %v", p.Ranks, p.Held, &up)
			if p.All {
				text = fmt.Sprintf("all %d %s", p.First, text)
			}
			got = append(got, text)
		}
		if text := strings.Join(got, "; "); text != test.want {
			t.Errorf("%s: the leader has passed on\n%s\nwant\n%s", test.name, text, test.want)
		}
	}
}

// A leader of leaders remembers an erasure only until all ranks have seen it, also if no frame stands for all
// ranks behind another leader.
func TestLeaderForgetsErasures(t *testing.T) {
	c := controller.NewCombiner(1, topo.Leaders{0, 1, 1, 2, 2, 1}, []controller.Set{controller.Global(6)}, 0)
	for cycle := uint64(1); cycle <= 10; cycle++ {
		up, err := message.AppendUp(nil, &message.Up{Type: message.UpNews, Seen: cycle - 1})
		if err != nil {
			t.Fatal(err)
		}
		c.Up(1, up)
		c.Up(5, up)
		c.Relay(2, &message.Part{Ranks: []topo.Rank{2, 3, 4}, Held: make([]uint32, 3), Frame: up})
		c.Ready()
		c.Advance()
		c.Down(nil, &message.Down{Type: message.DownCycle, Cycle: cycle,
			Sets: []message.DownSet{{Erase: []uint32{0}}}})
	}
	if n := c.Remembered(topo.Global); n != 1 {
		t.Errorf("the leader remembers %d erasures, want only the last one", n)
	}
}

// A leader allocates nothing while its ranks vote for cached tensors.
func TestLeaderAllocatesNothing(t *testing.T) {
	ranks := []topo.Rank{2, 3, 4}
	c := controller.NewCombiner(2, leaderConfig().Leaders, []controller.Set{controller.Global(5)}, 0)
	put := &message.Down{Type: message.DownCycle, Cycle: 1, Sets: []message.DownSet{{
		Grants: []message.Grant{{Full: []*message.Response{response("a", 1), response("b", 1)}}},
		Puts:   []message.Put{{Bit: 0}, {Tensor: 1, Bit: 1}},
	}}}
	c.Down(ranks, put)
	up, err := message.AppendUp(nil, &message.Up{Type: message.UpNews, Seen: 1,
		Sets: []message.UpSet{{Hits: bits(0, 1)}}})
	if err != nil {
		t.Fatal(err)
	}
	down := &message.Down{Type: message.DownCycle, Cycle: 2, Sets: []message.DownSet{{
		Grants: []message.Grant{{Bits: []uint32{0, 1}}},
	}}}
	var frame []byte
	if n := testing.AllocsPerRun(100, func() {
		for _, r := range ranks {
			c.Up(r, up)
		}
		parts, _ := c.Ready()
		if len(parts) != 1 {
			t.Fatalf("got %d parts, want 1", len(parts))
		}
		frame = message.AppendCombined(frame[:0], parts)
		c.Advance()
		down.Cycle++
		c.Down(ranks, down)
	}); n != 0 {
		t.Errorf("got %v allocations for a cycle, want none", n)
	}
}

func founding(name string, ranks ...topo.Rank) message.Request {
	return message.Request{Kind: message.AddProcessSet, Name: name, Ranks: ranks, MembersOnly: true}
}

// A leader holds requests to add a process set by its members only until the members on its host have made
// them. It knows the new set, so it then holds the requests on that set until these members have made them.
func TestLeaderHoldsRequestsOfMembers(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	c.submitAt(founding("s", 0, 2, 4), 2)
	wantParts(t, w.take())
	c.submitAt(founding("s", 0, 2, 4), 4)
	wantParts(t, w.take(), "[2 4] up seen=0 set=0 request add-process-set s ranks=0,2,4 members-only")
	c.submitAt(founding("s", 0, 2, 4), 0)
	c.nodes[4].submit(1, allreduce("a", 3))
	c.settle()
	wantParts(t, w.take())
	c.nodes[2].submit(1, allreduce("a", 3))
	c.settle()
	wantParts(t, w.take(), "[2 4] up seen=1 set=1 request allreduce a float32[3]")
	for _, r := range []int{2, 4} {
		c.nodes[r].submit(1, message.Request{Kind: message.RemoveProcessSet, Name: "r", Set: 1})
	}
	c.settle()
	wantParts(t, w.take(), "[2 4] up seen=1 set=1 request remove-process-set r id=1")
}

// The members of a set get the error that they disagree in different frames of one cycle. The first of them
// requests the same name again before the second frame arrives at the leader, which must not forget this
// request.
func TestLeaderKeepsTheNextRequest(t *testing.T) {
	c, w := newLeaderCluster(t, leaderConfig())
	leader := c.nodes[2]
	c.nodes[2].submit(topo.Global, founding("s", 2, 3))
	c.nodes[3].submit(topo.Global, founding("s", 0, 2, 3))
	c.submitAt(founding("t", 3), 3)
	c.pass(200 * time.Millisecond)
	w.take()
	c.nodes[0].submit(topo.Global, founding("s", 0, 2, 3))
	c.nodes[0].submit(topo.Global, founding("u", 0, 3))
	c.nodes[3].submit(topo.Global, founding("u", 0, 3))
	c.nodes[3].send()
	leader.combine(all)
	c.nodes[0].send()
	for _, n := range c.nodes {
		for n.arriving() {
			c.receive(n)
		}
	}
	c.decide()
	if len(leader.downs) != 2 {
		t.Fatalf("the leader gets %d frames, want one for each of the ranks 2 and 3", len(leader.downs))
	}
	leader.distribute()
	for _, n := range []*node{c.nodes[2], c.nodes[3]} {
		if len(n.down) > 0 {
			n.read()
			n.submit(topo.Global, founding("s", 2, 3))
			n.send()
		}
	}
	leader.combine(all)
	leader.distribute()
	for _, n := range []*node{c.nodes[2], c.nodes[3]} {
		for len(n.down) > 0 {
			n.read()
			n.submit(topo.Global, founding("s", 2, 3))
		}
	}
	c.settle()
	for _, r := range []int{2, 3} {
		if pending := c.nodes[r].pending; len(pending) > 0 {
			t.Errorf("rank %d still waits for %v", r, pending)
		}
	}
}

// A leader of leaders passes on one part for the votes of all ranks behind it, and holds votes for 200 ms in
// all. The ranks behind it are closed before it. If it dies after its bye, every rank names it.
func TestLeaderOfLeaders(t *testing.T) {
	cfg := leaderConfig()
	cfg.Sets = []controller.Set{controller.Global(7)}
	// Rank 2 leads ranks 3 and 4, and rank 4 leads ranks 5 and 6.
	cfg.Leaders = topo.Leaders{0, 1, 2, 2, 2, 4, 4}
	c, w := newLeaderCluster(t, cfg)
	c.submitAll(allreduce("a", 3))
	wantParts(t, w.take(), "[2 3 4 5 6] up seen=0 set=0 request allreduce a float32[3]")
	c.submitAll(allreduce("a", 3))
	wantParts(t, w.take(), "[2 3 4 5 6] up seen=1 set=0 hits=1")
	c.submitAt(allreduce("a", 3), 2, 3, 5)
	c.pass(150 * time.Millisecond)
	wantParts(t, w.take())
	c.pass(50 * time.Millisecond)
	wantParts(t, w.take(), "[2 3] up seen=2 set=0 hits=1", "[5] up seen=2 set=0 hits=1")
	c.submitAt(allreduce("a", 3), 0, 1, 4, 6)
	wantParts(t, w.take(), "[4] up seen=2 set=0 hits=1", "[6] up seen=2 set=0 hits=1")

	for _, n := range c.nodes {
		if n.rank != 6 {
			n.m.Shutdown("", nil)
		}
	}
	c.settle()
	if slices.Sort(w.closings); !slices.Equal(w.closings, []topo.Rank{1, 3, 5}) {
		t.Errorf("ranks %v are closed, want 1, 3 and 5, because ranks 2 and 4 stay for rank 6", w.closings)
	}
	c.kill(2, "reset") // after its bye
	c.settle()
	slices.Sort(w.verdicts)
	want := []string{"0: rank 2 failed: reset", "4: rank 2 failed: reset", "6: rank 2 failed: reset"}
	if !slices.Equal(w.verdicts, want) {
		t.Errorf("got verdicts %q, want %q", w.verdicts, want)
	}
}
