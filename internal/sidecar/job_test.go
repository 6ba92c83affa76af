package sidecar

import (
	"math"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// ended waits for the notice that the job is over, and returns the notice.
func (c *client) ended() *sidecarpb.Ended {
	c.t.Helper()
	return c.Until(func(r *sidecarpb.Reply) bool { return r.GetEnded() != nil }).GetEnded()
}

// TestDeathOfAClient disconnects the client of rank 1 without Bye in the middle of a job. Rank 1 must fail.
// The client of rank 0 must be notified, and must then be able to end the job and to start another one.
func TestDeathOfAClient(t *testing.T) {
	servers := job(t, 2)
	clients := make([]*client, 2)
	all(servers, func(r int, s *Server) { clients[r] = connect(t, s); clients[r].Init() })
	c := clients[0]
	ids := []uint64{c.Begin(&sidecarpb.Operation{Kind: 6, Name: "a"}),
		c.Begin(&sidecarpb.Operation{Kind: 6, Name: "b"})}

	if err := unix.Shutdown(clients[1].FD, unix.SHUT_WR); err != nil {
		t.Fatal(err)
	}
	<-servers[1].Dead()
	if err := servers[1].Death(); err == nil || !strings.Contains(err.Error(), "without Bye") {
		t.Errorf("rank 1 died of %v", err)
	}
	if err := clients[1].end(); err == nil {
		t.Error("the death of the rank is no error of the connection")
	}
	// In production the process of the sidecar exits now. The test calls gone instead, because all ranks are
	// in one process.
	gone(t, servers[1])

	for _, id := range ids {
		a := c.Await(id)
		refused(t, "in flight", a, classPeer, "rank 1")
		if !slices.Equal(a.Error.Ranks, []int32{1}) || a.Error.Operation != "barrier" {
			t.Errorf("error: %v", a.Error)
		}
	}
	if e := c.ended().Error; e.GetClass() != classPeer {
		t.Errorf("news of the end: %v", e)
	}
	refused(t, "afterwards", c.Run(&sidecarpb.Operation{Kind: 6}), classPeer, "rank 1")
	if got := servers[0].Report(); got.State != StateEnded {
		t.Errorf("status: %v", got)
	}
	refused(t, "init without a shutdown", c.Call(sidecartest.Init(nil)), classUsage, "has not sent Shutdown")
	refused(t, "shutdown after the failure", c.Call(sidecartest.Shutdown()), classPeer, "rank 1")
	refused(t, "after the shutdown", c.Run(&sidecarpb.Operation{Kind: 6}), classNotInitialized, "hvd.Init")
	ready := c.Must(sidecartest.Init(map[string]string{"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"})).GetReady()
	if ready.Size != 1 || ready.Epoch != 2 {
		t.Errorf("the next job: %v", ready)
	}
	c.MustRun(&sidecarpb.Operation{Kind: 6})
	c.Shutdown()
	c.bye()
}

// TestLeavingAFailedJob lets clients leave a job that has failed. This must not make their rank fail. When
// the last client has left, the sidecar must free the resources of the job.
func TestLeavingAFailedJob(t *testing.T) {
	servers := job(t, 2)
	clients := make([]*client, 2)
	all(servers, func(r int, s *Server) { clients[r] = connect(t, s); clients[r].Init() })
	gone(t, servers[1])
	clients[0].ended()
	clients[0].bye()
	s := servers[0]
	testnet.Eventually(t, "the job is forgotten", func() bool { return s.Report().State == StateIdle })
	if s.Death() != nil {
		t.Errorf("the rank has failed: %v", s.Death())
	}
}

// TestBye checks when the end of a client makes its rank fail. The rank must not fail if a client disconnects
// while there is no job. It must fail if the client sends Bye during the job. Then a new client is refused.
func TestBye(t *testing.T) {
	s := job(t, 1)[0]
	connect(t, s).bye()
	c := connect(t, s)
	c.Close()
	if err := c.end(); err != nil {
		t.Error(err)
	}
	c = connect(t, s)
	c.Init()
	c.MustRun(&sidecarpb.Operation{Kind: 6})
	c.Bye()
	<-s.Dead()
	if err := s.Death(); err == nil || !strings.Contains(err.Error(), "sent Bye before Shutdown") {
		t.Errorf("the rank has failed because of %v", err)
	}
	testnet.WantError(t, connect(t, s).end(), "refused: the rank has failed", "sent Bye before Shutdown")
}

// TestShutDownByAnother shuts down rank 1 while rank 0 waits for an operation that only rank 0 has submitted.
// The operation must fail with an error that names rank 1.
func TestShutDownByAnother(t *testing.T) {
	all(job(t, 2), func(r int, s *Server) {
		c := connect(t, s)
		c.Init()
		if r == 0 {
			id := c.Begin(&sidecarpb.Operation{Kind: 6, Name: "alone"})
			refused(t, "in flight", c.Await(id), classPeer, "rank 1 failed: shut down")
			if r := c.Call(sidecartest.Shutdown()); !r.GetError().GetShutDown() {
				t.Errorf("shutdown: got %v, want that rank 1 has shut down", r)
			}
			c.bye()
			return
		}
		// The answer to Shutdown is not checked, because it is an error if rank 0's barrier arrives first.
		c.Call(sidecartest.Shutdown())
		c.bye()
	})
}

// TestDisagreement lets ranks disagree on an operation, and submits a name that is in flight. The client must
// get an error.
func TestDisagreement(t *testing.T) {
	ranks(t, 2, func(r int, c *client, b []byte) {
		refused(t, "another length", c.Run(sidecartest.Sum("x", uint32(r+1), 0, int64(r+1))), classMismatch,
			"x")
		first := c.Begin(sidecartest.Sum("y", uint32(r+1), 0, 4))
		// Rank 1 need not wait for its operation y here, because it completes together with rank 0's
		// operation y.
		if r == 0 {
			refused(t, "twice", c.Run(sidecartest.Sum("z", 9, 0, 4)), classUsage, "arena 9 does not exist")
		}
		if a := c.Await(first); a.Error != nil {
			t.Error(a)
		}
		late := &sidecarpb.Operation{Kind: 6, Name: "late"}
		if r == 0 {
			id := c.Begin(late)
			refused(t, "twice", c.Run(late), classDuplicate, "late")
			// If the sidecar has to allocate the output of this operation, the operation must fail in the
			// same way, and the sidecar must free the output.
			same := sidecartest.Sum("late", 1, 0, 4)
			same.Tensors[0].Output = nil
			refused(t, "twice", c.Run(same), classDuplicate, "late")
			if _, _, live := arena.Stats(); live != 0 {
				t.Errorf("%d bytes are kept for the result of an operation that was refused", live)
			}
			c.Must(sidecartest.DropArena(1))
			c.Arena(1, 4096)
			c.MustRun(&sidecarpb.Operation{Kind: 6, Name: "go"})
			c.Await(id)
		} else {
			c.MustRun(&sidecarpb.Operation{Kind: 6, Name: "go"})
			c.MustRun(late)
		}
		// After these errors it must be possible to execute y again, now from the response cache.
		c.MustRun(sidecartest.Sum("y", uint32(r+1), 0, 4))
	})
}

// TestTimeout submits an operation that exceeds its timeout. The operation must fail and the job must end.
func TestTimeout(t *testing.T) {
	all(job(t, 2), func(r int, s *Server) {
		c := connect(t, s)
		c.Init()
		if r == 0 {
			o := &sidecarpb.Operation{Kind: 6, Name: "slow", TimeoutSeconds: 0.05}
			refused(t, "late", c.Run(o), classPeer, "slow")
		}
		c.ended()
		c.Call(sidecartest.Shutdown())
		c.bye()
	})
}

// TestProcessSets registers process sets in Init, and adds others later. All ranks must add them together.
func TestProcessSets(t *testing.T) {
	all(job(t, 3), func(r int, s *Server) {
		c := connect(t, s)
		ready := c.Must(sidecartest.Init(nil, &sidecarpb.Ranks{Ranks: []int32{0, 2}})).GetReady()
		if got := ready.ProcessSets; len(got) != 1 || got[0].Id != 1 ||
			!slices.Equal(got[0].Ranks, []int32{0, 2}) {
			t.Errorf("process sets: %v", got)
		}
		b := c.Arena(uint32(r+1), 4096)
		b[3] = 0x40 // 2.0
		sum := func(set int32) *sidecarpb.Reply {
			o := sidecartest.Sum("x", uint32(r+1), 0, 1)
			o.ProcessSet = set
			return c.Run(o)
		}
		if r == 1 {
			refused(t, "of others", sum(1), classUsage, "not a member")
		} else if a := sum(1); a.Error != nil || b[2] != 0x80 { // 4.0
			t.Errorf("sum of two: %v, %v", a, b[:4])
		}
		add := &sidecarpb.Request{What: &sidecarpb.Request_AddProcessSet{
			AddProcessSet: &sidecarpb.AddProcessSet{Ranks: []int32{2, 1}}}}
		added := c.Must(add).GetProcessSet()
		if added.Id != 2 || !slices.Equal(added.Ranks, []int32{1, 2}) {
			t.Errorf("added %v", added)
		}
		wrong := &sidecarpb.Request{What: &sidecarpb.Request_AddProcessSet{
			AddProcessSet: &sidecarpb.AddProcessSet{Ranks: []int32{3}}}}
		refused(t, "no such rank", c.Call(wrong), classUsage, "rank 3")
		remove := func(id int32) *sidecarpb.Request {
			return &sidecarpb.Request{What: &sidecarpb.Request_RemoveProcessSet{
				RemoveProcessSet: &sidecarpb.RemoveProcessSet{Id: id}}}
		}
		for _, seconds := range []float64{-1, 1e30, math.NaN()} {
			late := &sidecarpb.AddProcessSet{Ranks: []int32{0, 1}, TimeoutSeconds: seconds}
			refused(t, "added in no time",
				c.Call(&sidecarpb.Request{What: &sidecarpb.Request_AddProcessSet{AddProcessSet: late}}),
				classUsage, "a timeout of ")
			q := remove(2)
			q.GetRemoveProcessSet().TimeoutSeconds = seconds
			refused(t, "removed in no time", c.Call(q), classUsage, "a timeout of ")
		}
		c.Must(remove(2))
		refused(t, "removed twice", c.Call(remove(2)), classUsage, "process set 2")
		refused(t, "that of all", c.Call(remove(0)), classUsage, "global")
		refused(t, "in a removed one", sum(2), classUsage, "removed")
		c.Shutdown()
		refused(t, "without a job", c.Call(remove(1)), classNotInitialized, "")
		wrong.Id = 0
		refused(t, "without a job", c.Call(wrong), classNotInitialized, "")
		c.bye()
	})
}

// TestInitFails lets Init fail. The sidecar must not have a job then, and must serve its clients as before.
func TestInitFails(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	s := job(t, 2)[0]
	c := connect(t, s)
	a := c.Call(sidecartest.Init(map[string]string{"HOROVOD_NO_SUCH": "1"}))
	refused(t, "no such setting", a, classInternal, "HOROVOD_NO_SUCH")
	a = c.Call(sidecartest.Init(map[string]string{"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}))
	refused(t, "alone of two", a, classInternal, "init")
	if got := s.Report(); got.State != StateIdle {
		t.Errorf("status: %v", got)
	}
	c.bye()
}

// TestDeathDuringInit disconnects a client while its Init waits for other ranks. The rank must fail.
func TestDeathDuringInit(t *testing.T) {
	s := job(t, 2)[0]
	c := connect(t, s)
	c.Send(sidecartest.Init(nil))
	testnet.Eventually(t, "the Init has begun", func() bool { return s.Report().State == StateStarting })
	c.Close()
	<-s.Dead()
}

// TestChangeWhileClosing sends a request that changes the engine while the server is closing. The request
// must fail and release the lock that Close needs.
func TestChangeWhileClosing(t *testing.T) {
	s := New(Config{})
	s.cancel()
	for range 100 { // repeat, because select chooses randomly between its two cases
		if err := s.change(); err != errEnding {
			t.Fatalf("got %v, want %v", err, errEnding)
		}
		if len(s.changing) > 0 {
			t.Fatal("it has failed, and holds changing")
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
