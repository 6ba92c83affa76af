package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/failure"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/tensorqueue"
)

// built is the folder of hvdd.
var built = sync.OnceValues(func() (string, error) {
	folder := filepath.Join(scratch, "bin")
	return folder, errors.Join(os.Mkdir(folder, 0o700), testnet.Link(folder, "cmd/hvdd"))
})

// spawn starts hvdd for n ranks.
func spawn(t testing.TB, n int) []*Client {
	t.Helper()
	folder, err := built()
	if err != nil {
		t.Fatal(err)
	}
	server, err := store.Serve("127.0.0.1:0", store.NewHashStore(store.Limits{}), store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	host, port, err := net.SplitHostPort(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	clients := make([]*Client, n)
	for r := range clients {
		c, err := Open(t.Context(), Config{Address: Spawn, Near: []string{"/nothing/is/here", folder},
			Environ: append(os.Environ(), fmt.Sprint("HOROVOD_RANK=", r), fmt.Sprint("HOROVOD_SIZE=", n),
				"HOROVOD_GLOO_RENDEZVOUS_ADDR="+host, "HOROVOD_GLOO_RENDEZVOUS_PORT="+port, "HVD_INSECURE=1")})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		clients[r] = c
	}
	return clients
}

// If hvdd dies, all its waiters get an error that says so, and the other ranks learn which rank has died.
func TestDeath(t *testing.T) {
	clients := spawn(t, 2)
	ranks := make([]*rank.Rank, 2)
	initAll(t, clients, ranks)
	b, err := arena.Alloc(65 << 20) // it gets a chunk of its own, which no engine of another test has sealed
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Free(b)
	// Only in a test do two clients have the same memory. If both send it at the same time, both may own it.
	if _, owns, err := clients[0].memory.find(b); err != nil || !owns {
		t.Fatalf("the first sidecar has mapped the chunk for its owner: %t, %v", owns, err)
	}
	const numBytes = 16 << 20 // so much that the engine reads it in place, instead of a copy
	each(t, 2, func(r int) {
		p := program{Rank: ranks[r]}
		at := b[numBytes*r:][:numBytes]
		copy(at, floats(1))
		p.run("in an arena", sum("arena", numBytes/4), rank.Buffer{In: at, Out: at})
		if got := p.b.String(); !strings.Contains(got, " 00000040000000") {
			panic(got[:min(len(got), 200)])
		}
	})
	// One sidecar has mapped the chunk first, for its client, and the other one reads it. The tensor of the
	// other one was copied.
	owners := 0
	for r, c := range clients {
		_, owns, err := c.memory.find(b)
		if err != nil {
			t.Error(err)
		}
		access := "r--s"
		if owns {
			owners++
			access = "rw-s"
		}
		if got := accessTo(t, c.Pid(), len(b)); got != access {
			t.Errorf("rank %d: the sidecar has mapped the chunk with access %q, want %q", r, got, access)
		}
	}
	if owners != 1 {
		t.Errorf("%d sidecars have mapped the chunk for its owner, want 1", owners)
	}

	const waiters = 5
	errs, begun := make([]error, waiters), make(chan struct{}, waiters)
	each(t, waiters+1, func(i int) {
		if i == waiters {
			for range waiters {
				<-begun
			}
			if err := syscall.Kill(clients[1].Pid(), syscall.SIGKILL); err != nil {
				panic(err)
			}
			return
		}
		p := program{Rank: ranks[min(i, 1)]} // rank 0 waits too
		x := p.execution(sum(fmt.Sprint("x", i), 4), rank.Buffer{In: floats(1, 2, 3, 4)})
		if i == 2 {
			x = p.execution(rank.Spec{Kind: uint32(message.Recv), DType: f32, Peer: 0, Tensors: shaped(1)},
				rank.Buffer{In: make([]byte, 4), Out: make([]byte, 4)})
		}
		wait := begin(x)
		begun <- struct{}{}
		errs[i] = wait()
	})
	if peer, is := errors.AsType[*engine.PeerError](errs[0]); !is || !slices.Equal(peer.Ranks, []int{1}) {
		t.Errorf("rank 0: got %v", chain(errs[0]))
	}
	said := fmt.Sprintf("the sidecar of this process (hvdd, process %d) was killed by SIGKILL", clients[1].Pid())
	for i, err := range errs[1:] {
		_, is := errors.AsType[*DeadError](err)
		if op, isOp := errors.AsType[*engine.OpError](err); !is || !isOp || op.Op == "" ||
			!strings.Contains(err.Error(), said) {
			t.Errorf("waiter %d: got %v", i, chain(err))
		}
	}
	p := program{Rank: ranks[1]}
	for what, err := range map[string]error{
		"later": begin(p.execution(sum("later", 1), rank.Buffer{In: floats(1)}))(), "check": clients[1].Check(),
		"request": clients[1].StopTimeline(t.Context()),
	} {
		if _, is := errors.AsType[*DeadError](err); !is || !strings.Contains(err.Error(), said) {
			t.Errorf("%s: got %v", what, chain(err))
		}
	}
}

// accessTo returns how a process has mapped shared memory of at least n bytes, or "".
func accessTo(t *testing.T, pid, n int) string {
	maps := testnet.ReadFile(t, fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(maps)) {
		var from, to int
		var access string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &access); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if strings.Contains(line, "memfd:") && to-from >= n {
			return access
		}
	}
	return ""
}

// Connections leave no descriptors, goroutines and memory behind.
func TestManyConnections(t *testing.T) {
	count := func() (descriptors, mappings int) {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		maps := testnet.ReadFile(t, "/proc/self/maps")
		return len(files), strings.Count(string(maps), "memfd:")
	}
	var descriptors, mappings int
	for i := range 6 {
		c := spawn(t, 1)[0]
		r, err := c.Init(t.Context(), os.Environ(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		p := program{Rank: r}
		p.run("gather", rank.Spec{Kind: uint32(message.Allgather), DType: f32, Tensors: shaped(1)},
			rank.Buffer{In: floats(1)})
		if !strings.Contains(p.b.String(), "0000803f") {
			t.Fatal(p.b.String())
		}
		if err := errors.Join(c.Shutdown(t.Context(), engine.Departure{}), c.Close()); err != nil {
			t.Fatal(err)
		}
		if i == 2 {
			descriptors, mappings = count()
		}
	}
	// Each round has a store of its own, which the test closes at its end.
	if d, m := count(); d > descriptors+3 || m != mappings {
		t.Errorf("got %d descriptors and %d mappings after 6 connections, %d and %d after 3", d, m, descriptors, mappings)
	}
}

// Requests that are no operations reach the sidecar.
func TestRequests(t *testing.T) {
	clients := spawn(t, 1)
	c := clients[0]
	id, err := c.NewUniqueID(t.Context(), os.Environ(), map[string]string{"HOROVOD_GLOO_IFACE": "lo"})
	if err != nil || len(id) < 20 {
		t.Errorf("unique id: got %q, %v", id, err)
	}
	if err := c.StopTimeline(t.Context()); !errors.Is(err, rank.ErrNotInitialized) {
		t.Errorf("before Init: got %v", err)
	}
	if _, err := c.Init(t.Context(), os.Environ(), map[string]string{"HOROVOD_CACHE_CAPACITY": "many"},
		nil); err == nil || !strings.Contains(err.Error(), "HOROVOD_CACHE_CAPACITY") {
		t.Errorf("a wrong setting: got %v", err)
	}
	r, err := c.Init(t.Context(), os.Environ(), nil, nil)
	if err != nil || r.Place.Size != 1 || !r.Homogeneous || r.Epoch != 1 {
		t.Fatalf("got %+v, %v", r, err)
	}
	path := filepath.Join(t.TempDir(), "timeline.json")
	if err := errors.Join(c.StartTimeline(t.Context(), path, false),
		c.StopTimeline(t.Context())); err != nil {
		t.Error(err)
	}
	if s, err := os.Stat(path); err != nil || s.Size() == 0 {
		t.Errorf("the timeline: got %v, %v", s, err)
	}
	if err := c.StartTimeline(t.Context(), "relative", false); !strings.Contains(chain(err), ".UsageError") {
		t.Errorf("a relative path: got %v", chain(err))
	}
	shutdown(t, clients)
}

// Open reports what is wrong with the sidecar that it should use.
func TestOpenFails(t *testing.T) {
	script := filepath.Join(t.TempDir(), "hvdd")
	testnet.WriteScript(t, script, "#!/bin/sh\necho no license >&2\nexit 3\n")
	silent := filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	short, cancel := context.WithCancel(t.Context())
	cancel()
	for want, try := range map[string]struct {
		ctx context.Context
		cfg Config
	}{
		`HVD_SIDECAR is "here"`:                            {t.Context(), Config{Address: "here"}},
		"cannot connect to the sidecar at unix:///nothing": {t.Context(), Config{Address: "unix:///nothing"}},
		"want the path of an executable file":              {t.Context(), Config{Address: Spawn, Binary: "/etc/passwd"}},
		"hvdd was not found":                               {t.Context(), Config{Address: Spawn, Near: []string{"/etc"}}},
		"exited with status 3":                             {t.Context(), Config{Address: Spawn, Binary: script}},
		"no license":                                       {t.Context(), Config{Address: Spawn, Binary: script}},
		"canceled":                                         {short, Config{Address: "unix://" + silent}},
	} {
		c, err := Open(try.ctx, try.cfg)
		if err == nil {
			t.Errorf("%s: got no error, %v", want, c.Close())
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("got %q, want %q in it", err, want)
		}
	}
}

// The client sends nothing to a process of another user, except root.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can listen as another user")
	}
	folder, err := os.MkdirTemp("", "other")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "socket")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	failed := make(chan error)
	go func() {
		// The kernel keeps the user of the thread that calls listen. The thread ends with this goroutine.
		runtime.LockOSThread()
		const nobody = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			failed <- errno
			return
		}
		failed <- unix.Listen(fd, 1)
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	c, err := Open(t.Context(), Config{Address: "unix://" + path})
	if err == nil {
		t.Fatal(c.Close())
	}
	if !strings.Contains(err.Error(), "runs as user 65534") {
		t.Errorf("got %v", err)
	}
}

// A process that has failed can leave its job if the sidecar does not answer.
func TestFailWithoutAnswer(t *testing.T) {
	pair := testnet.SocketPair(t)
	c, err := newClient(nil)
	if err != nil {
		t.Fatal(err)
	}
	c.fd, c.job = pair[0], new(job)
	c.name = "the sidecar"
	synctest.Test(t, func(t *testing.T) { // without a limit, it panics because all goroutines wait
		err := c.Shutdown(t.Context(), engine.Departure{Reason: "KeyError: 1", Failed: true})
		if want := "hvd: shutdown: the sidecar has not answered for 10s"; err == nil || err.Error() != want || c.job != nil ||
			!c.Ending() {
			t.Errorf("got %v, job %v, want %s and the end of the connection", err, c.job, want)
		}
	})
	if err := errors.Join(c.ring.segment.Close(), unix.Close(pair[0]), unix.Close(pair[1])); err != nil {
		t.Error(err)
	}
}

// A process that has failed ends its waits if another thread waits for room in the socket.
func TestFailWithoutRoom(t *testing.T) {
	for name, f := range map[string]func(*Client, context.Context) error{
		"node": func(c *Client, ctx context.Context) error { return c.FailNode(ctx, "its file is damaged") },
		"rank": func(c *Client, ctx context.Context) error {
			return c.Shutdown(ctx, engine.Departure{Failed: true})
		},
		"init": func(c *Client, ctx context.Context) error { _, err := c.Init(ctx, nil, nil, nil); return err },
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		c, err := newClient(nil)
		if err != nil {
			t.Fatal(err)
		}
		c.fd = pair[0]
		if name == "rank" {
			c.job = new(job)
		}
		each(t, 2, func(r int) {
			if r == 0 {
				_ = c.write(make([]byte, 1<<24), -1) // it fails in the end
				return
			}
			for c.writing.TryLock() {
				c.writing.Unlock()
				runtime.Gosched()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			if err := f(c, ctx); err == nil {
				t.Errorf("%s: got no error", name)
			}
		})
		if err := errors.Join(c.ring.segment.Close(), unix.Close(pair[0]), unix.Close(pair[1])); err != nil {
			t.Error(err)
		}
	}
}

// FuzzReplies gives a client arbitrary bytes of a sidecar. It must return an error or handle them.
func FuzzReplies(f *testing.F) {
	frame := func(r *sidecarpb.Reply) []byte {
		body, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		return append(protowire.AppendVarint(nil, uint64(len(body))), body...)
	}
	gathered := &sidecarpb.Completion{Results: []*sidecarpb.Result{{Shape: []int64{2},
		Memory: &sidecarpb.Memory{Arena: wire.OwnArenas + 1, Offset: 4, Bytes: 8}}}}
	f.Add([]byte{0})
	for _, r := range []*sidecarpb.Reply{
		{Id: 1 << 16, What: &sidecarpb.Reply_Completion{Completion: gathered}},
		{Id: 1 << 16, Error: &sidecarpb.Error{Class: uint32(failure.Peer), Text: "rank 1 failed: x", Ranks: []int32{1}}},
		{Id: firstRequest + 1, What: &sidecarpb.Reply_Ready{Ready: new(sidecarpb.Ready)}},
		{What: &sidecarpb.Reply_Ended{Ended: new(sidecarpb.Ended)}},
		{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: wire.OwnArenas + 1}}},
		{What: &sidecarpb.Reply_DropArena{DropArena: &sidecarpb.DropArena{Arena: wire.OwnArenas + 1}}},
	} {
		f.Add(frame(r))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := newClient(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer c.ring.segment.Close()
		s, err := shmem.Create("results", 4096)
		if err != nil {
			t.Fatal(err)
		}
		c.maps[wire.OwnArenas+1] = s
		defer s.Close()
		c.job = &job{queues: nil}
		c.requests[firstRequest+1] = func(*sidecarpb.Reply, error) {}
		k := &call{id: 1 << 16, task: task{kind: message.Allgather, plan: new(plan),
			tensors: []tensorPlaces{{dtype: tensor.Float32, shape: tensor.Shape{1}, outMode: allocated}}}}
		made := 0
		e := newEntry(func(n int) []byte { made += n; return make([]byte, n) })
		k.entries = append(k.entries, e)
		c.calls.at[0].Store(k)
		r := receiver{buf: b}
		if err := r.frames(c); err == nil && made > 4096 {
			t.Fatalf("allocated %d bytes for a result in 4096 bytes", made)
		}
	})
}

// newEntry returns an entry of an allgather that is in flight.
func newEntry(allocate func(int) []byte) *tensorqueue.Entry {
	e := &tensorqueue.Entry{Allocate: allocate, Done: func(error) {}}
	e.Request.Kind, e.Request.Name = message.Allgather, "x"
	if err := tensorqueue.New().Add(e); err != nil {
		panic(err)
	}
	return e
}
