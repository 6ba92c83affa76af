package shm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
)

func wantPeer(t *testing.T, call string, err error, lane transport.Lane, peer topo.Rank) {
	t.Helper()
	var p *transport.PeerError
	if !errors.As(err, &p) || p.Peer != peer || p.Lane != lane {
		t.Errorf("%s: got %v, want a *PeerError for lane %d to rank %d", call, err, lane, peer)
	}
}

func wantErr(t *testing.T, call string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", call, err, want)
	}
}

// within calls the function done repeatedly until it returns true, because no event announces the change. If
// that takes longer than hangTimeout, the test fails with the message in what.
func within(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(hangTimeout); !done(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestShare checks that every rank can read the segments that were shared with it, and no other segments. The
// order of the calls of Share and Peer must not matter.
func TestShare(t *testing.T) {
	const size = 3
	meshes := onOneHost(t, shm.Config{}, size)
	type got struct {
		owner, reader int
		b             []byte
		err           error
	}
	results := make(chan got, size*size)
	for r, m := range meshes {
		for p := range meshes {
			if p == r {
				continue
			}
			go func() { // some of these calls begin before the peer has called Share
				b, err := m.Peer(t.Context(), 5, topo.Rank(p))
				results <- got{p, r, b, err}
			}()
		}
	}
	own := make([][]byte, size)
	for r, m := range meshes {
		b, err := m.Share(5, int64(1000*(r+1)), []topo.Rank{0, 1, 2})
		if err != nil {
			t.Fatal(err)
		}
		if page := os.Getpagesize(); len(b)%page != 0 || len(b) < 1000*(r+1) {
			t.Errorf("rank %d: got %d bytes, want whole pages", r, len(b))
		}
		own[r] = b
		if mine, err := m.Peer(t.Context(), 5, topo.Rank(r)); err != nil || &mine[0] != &b[0] {
			t.Errorf("rank %d: its own segment: %v", r, err)
		}
	}
	for range size * (size - 1) {
		g := <-results
		if g.err != nil {
			t.Fatal(g.err)
		}
		own[g.owner][17] = byte(10 + g.owner)
		if len(g.b) != len(own[g.owner]) || g.b[17] != byte(10+g.owner) || g.b[18] != 0 {
			t.Errorf("rank %d does not read the bytes that rank %d wrote", g.reader, g.owner)
		}
	}
	if _, err := meshes[0].Share(5, 1, nil); err == nil {
		t.Error("a second Share of a lane: got no error, want one")
	}
	if _, err := meshes[0].Share(6, 1, []topo.Rank{1, 3}); err == nil {
		t.Error("Share with a rank that does not exist: got no error, want one")
	}
	if _, err := meshes[0].Share(7, 1, []topo.Rank{1}); err != nil {
		t.Error(err)
	}
	if _, err := meshes[1].Peer(t.Context(), 7, 0); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := meshes[2].Peer(ctx, 7, 0) // rank 0 has shared lane 7 only with rank 1
	wantErr(t, "peer", err, context.DeadlineExceeded)
	_, err = meshes[1].Peer(t.Context(), 7, 1)
	if err == nil {
		t.Error("Peer returned a segment of this rank, which has not shared one")
	}
	var none *shmem.NoMemoryError
	if _, err := meshes[0].Share(8, 1<<50, []topo.Rank{1}); !errors.As(err, &none) {
		t.Errorf("got %v, want a *NoMemoryError", err)
	}
	if _, err := meshes[0].Share(8, 1, []topo.Rank{1}); err != nil {
		t.Errorf("after a call of Share that has failed: %v", err)
	}
}

// TestLaneEnds checks that pending and later calls on a lane fail if the lane is aborted or released, if the
// mesh is closed, or if the peer dies. Err must return the same error as these calls.
func TestLaneEnds(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		end  func(meshes []shm.Sharer)
		want error // expected error; nil means a *PeerError
	}{
		"abort":   {func(m []shm.Sharer) { m[1].Abort(2, boom) }, boom},
		"release": {func(m []shm.Sharer) { m[1].Release(2) }, transport.ErrReleased},
		"close":   {func(m []shm.Sharer) { _ = m[1].Close() }, transport.ErrClosed},
		"death":   {func(m []shm.Sharer) { _ = m[0].Close() }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			meshes := onOneHost(t, shm.Config{}, 3)
			check := func(call string, err error) {
				t.Helper()
				if c.want == nil {
					wantPeer(t, call, err, 2, 0)
				} else {
					wantErr(t, call, err, c.want)
				}
			}
			if err := meshes[1].Err(2, 0); err != nil {
				t.Errorf("before: %v", err)
			}
			waiting := make(chan error, 1)
			go func() {
				_, err := meshes[1].Peer(t.Context(), 2, 0)
				waiting <- err
			}()
			c.end(meshes)
			check("pending peer", <-waiting)
			check("err", meshes[1].Err(2, 0))
			_, err := meshes[1].Peer(t.Context(), 2, 0)
			check("peer", err)
			if name == "death" {
				wantPeer(t, "err of a lane not used before", meshes[1].Err(3, 0), 3, 0)
				for _, lane := range []transport.Lane{2, 3} {
					for _, other := range []topo.Rank{1, 2} {
						if err := meshes[1].Err(lane, other); err != nil {
							t.Errorf("lane %d of rank %d, which lives: %v", lane, other, err)
						}
					}
				}
				_, err := meshes[1].Arena(t.Context(), 0, 1000)
				wantPeer(t, "arena", err, transport.Control, 0)
				if _, err := meshes[1].Share(2, 1, []topo.Rank{0, 2}); err != nil {
					t.Errorf("share with a dead rank: %v", err)
				}
				return
			}
			check("err for itself", meshes[1].Err(2, 1))
			_, err = meshes[1].Share(2, 1, []topo.Rank{0})
			check("share", err)
			if name != "close" {
				if err := meshes[1].Err(3, 0); err != nil {
					t.Errorf("another lane: %v", err)
				}
				_, err := meshes[1].Conn(t.Context(), 2, 0)
				check("conn of the mesh underneath", err)
			}
		})
	}
}

// TestErrOrder lets a lane end for several reasons. ErrReleased must have precedence over ErrClosed,
// ErrClosed over the error of Abort, and the error of Abort over the death of a peer.
func TestErrOrder(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 2)
	boom := errors.New("boom")
	m := meshes[1]
	if err := meshes[0].Close(); err != nil {
		t.Fatal(err)
	}
	within(t, "the death is not noticed", func() bool { return m.Err(2, 0) != nil })
	wantPeer(t, "dead", m.Err(2, 0), 2, 0)
	m.Abort(2, boom)
	m.Abort(2, errors.New("later"))
	wantErr(t, "aborted", m.Err(2, 0), boom)
	m.Abort(3, boom)
	m.Release(3)
	wantErr(t, "released", m.Err(3, 0), transport.ErrReleased)
	m.Abort(3, boom)
	wantErr(t, "aborted afterwards", m.Err(3, 0), transport.ErrReleased)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "closed", m.Err(2, 0), transport.ErrClosed)
	wantErr(t, "released and closed", m.Err(3, 0), transport.ErrReleased)
	wantErr(t, "a lane after close", m.Err(4, 0), transport.ErrClosed)
	m.Release(2)
	wantErr(t, "released after close", m.Err(2, 0), transport.ErrClosed)
}

func TestErrCosts(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 2)
	if n := testing.AllocsPerRun(100, func() { _ = meshes[0].Err(1, 1) }); n != 0 {
		t.Errorf("got %v allocations, want none", n)
	}
}

// TestArena checks that Arena returns chunks that existed before Connect and chunks that were made later. A
// chunk that has been freed must read as zeros.
func TestArena(t *testing.T) {
	const large = 65 << 20 // so large that each tensor gets its own chunk
	early := mustAlloc(t, large)
	meshes := onOneHost(t, shm.Config{}, 3)
	late := mustAlloc(t, large)
	for _, b := range [][]byte{early, late} {
		at, ok := arena.Find(b)
		if !ok {
			t.Fatal("Find has not found the tensor")
		}
		b[7] = 77
		var seen [][]byte
		for r, m := range meshes {
			for p := range meshes {
				if p == r {
					if _, err := m.Arena(t.Context(), topo.Rank(p), at.Chunk); err == nil {
						t.Error("Arena of this rank: got no error, want one")
					}
					continue
				}
				got, err := m.Arena(t.Context(), topo.Rank(p), at.Chunk)
				if err != nil {
					t.Fatal(err)
				}
				if got[at.Offset+7] != 77 {
					t.Errorf("rank %d does not read the bytes that rank %d wrote", r, p)
				}
				if n := testing.AllocsPerRun(100, func() {
					_, _ = m.Arena(t.Context(), topo.Rank(p), at.Chunk)
				}); n != 0 {
					t.Errorf("a later call: got %v allocations, want none", n)
				}
				seen = append(seen, got)
			}
		}
		if err := arena.Free(b); err != nil {
			t.Fatal(err)
		}
		for i, got := range seen {
			within(t, fmt.Sprintf("mapping %d still shows the chunk", i), func() bool {
				return got[at.Offset+7] == 0
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		_, err := meshes[0].Arena(ctx, 1, at.Chunk)
		wantErr(t, "a chunk that has gone", err, context.DeadlineExceeded)
		cancel()
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := meshes[0].Arena(t.Context(), 1, 1<<30)
		waiting <- err
	}()
	if err := meshes[0].Close(); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "pending arena", <-waiting, transport.ErrClosed)
	_, err := meshes[0].Arena(t.Context(), 1, 1)
	wantErr(t, "arena", err, transport.ErrClosed)
}

func mustAlloc(t *testing.T, n int) []byte {
	t.Helper()
	b, err := arena.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestOwnerLacksDescriptors makes an arena chunk while the process has no descriptor left to share it. Find
// must not find tensors in this chunk, so that no peer waits for it. Later chunks must be shared.
func TestOwnerLacksDescriptors(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 2)
	deliver(t, meshes, 9)
	var segments [2]*shmem.Segment
	for i := range segments {
		var err error
		if segments[i], err = shmem.CreateOpen("test", 4096); err != nil {
			t.Fatal(err)
		}
	}
	restore := testnet.LimitDescriptors(t, 1)
	unshared := arena.Adopt(segments[0])
	restore()
	later := arena.Adopt(segments[1])
	for r, m := range meshes {
		if _, ok := m.Find(segments[0].Bytes()); ok {
			t.Errorf("rank %d finds a tensor in a chunk that the peer does not have", r)
		}
		if at, ok := m.Find(segments[1].Bytes()); !ok || at.Chunk != later.ID {
			t.Errorf("rank %d: a tensor in chunk %d: got %v, %t", r, later.ID, at, ok)
		}
		if _, err := m.Arena(t.Context(), topo.Rank(1-r), later.ID); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(arena.Abandon(unshared.ID), arena.Abandon(later.ID)); err != nil {
		t.Error(err)
	}
	deliver(t, meshes, 10) // the end of the chunks is no violation of the protocol
}

// TestNothingIsLeft checks that after Release and Close the process has no more mappings and open descriptors
// than before the test.
func TestNothingIsLeft(t *testing.T) {
	b := mustAlloc(t, 100)
	defer func() {
		if err := arena.Free(b); err != nil {
			t.Error(err)
		}
	}()
	j := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 3), "a", "a", "a")
	if err := errors.Join(j.endpoints[0].Close(), j.endpoints[1].Close(),
		j.endpoints[2].Close()); err != nil {
		t.Fatal(err)
	}
	for _, m := range j.under {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	files, maps := testnet.OpenFiles(t), mappings(t)
	for range 3 {
		meshes, errs := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 3), "a", "a", "a").connect(t.Context())
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if mappings(t) == maps {
			t.Error("nothing is mapped: this test cannot fail")
		}
		before := 0
		for lane := transport.Lane(1); lane < 10; lane++ {
			for r, m := range meshes {
				if _, err := m.Share(lane, 4096, []topo.Rank{0, 1, 2}); err != nil {
					t.Fatal(err)
				}
				for p := range r {
					for _, pair := range [][2]int{{r, p}, {p, r}} {
						if pair[0] < pair[1] {
							continue
						}
						if _, err := meshes[pair[0]].Peer(t.Context(), lane, topo.Rank(pair[1])); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			if _, err := meshes[0].Peer(t.Context(), lane, 1); err != nil {
				t.Fatal(err)
			}
			if _, err := meshes[0].Peer(t.Context(), lane, 2); err != nil {
				t.Fatal(err)
			}
			if _, err := meshes[1].Peer(t.Context(), lane, 2); err != nil {
				t.Fatal(err)
			}
			if lane%2 == 0 {
				continue // leave these lanes, so that Close has to unmap their segments
			}
			for _, m := range meshes {
				m.Release(lane)
			}
			if lane == 1 {
				before = mappings(t)
			} else if got := mappings(t); got > before+9*int(lane/2) {
				t.Errorf("after lane %d: got %d mappings, want at most %d", lane, got, before+9*int(lane/2))
			}
		}
		for _, m := range meshes {
			if err := errors.Join(m.Close(), m.Close()); err != nil {
				t.Error(err)
			}
		}
		if got := testnet.OpenFiles(t); got != files {
			t.Errorf("got %d open files, want %d", got, files)
		}
		if got := mappings(t); got != maps {
			t.Errorf("got %d mappings of memfds, want %d", got, maps)
		}
	}
}

// mappings returns the number of mappings in this process that belong to memfds of gohvd.
func mappings(t *testing.T) int {
	t.Helper()
	text := testnet.ReadFile(t, "/proc/self/maps")
	return strings.Count(string(text), "/memfd:gohvd-")
}

// TestBreaches sends messages that violate the protocol. The channels to the sender must fail with a
// *PeerError. The receiver must not close its connection, so the sender notices nothing.
func TestBreaches(t *testing.T) {
	segment := func(t *testing.T) (int, uint64) {
		s, err := shmem.Create("test", 1)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		fd, err := unix.Dup(s.FD())
		if err != nil {
			t.Fatal(err)
		}
		return fd, uint64(len(s.Bytes()))
	}
	unsealed := func(t *testing.T) (int, uint64) {
		fd, err := unix.MemfdCreate("test", 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(fd, 4096); err != nil {
			t.Fatal(err)
		}
		return fd, 4096
	}
	for name, send := range map[string]func(t *testing.T, m *shm.Mesh){
		"unknown kind": func(t *testing.T, m *shm.Mesh) { m.Put(1, 9, 0, 0) },
		"no kind":      func(t *testing.T, m *shm.Mesh) { m.Put(1, 0, 0, 0) },
		"control again": func(t *testing.T, m *shm.Mesh) {
			a, n := segment(t)
			b, _ := segment(t)
			m.Put(1, shm.ControlMessage, 0, n, a, b)
		},
		"no descriptor": func(t *testing.T, m *shm.Mesh) { m.Put(1, shm.ShareMessage, 1, 4096) },
		"many descriptors": func(t *testing.T, m *shm.Mesh) {
			var fds []int
			for range 20 {
				fd, _ := segment(t)
				fds = append(fds, fd)
			}
			m.Put(1, shm.ShareMessage, 1, 4096, fds...)
		},
		"unwanted descriptor": func(t *testing.T, m *shm.Mesh) {
			fd, _ := segment(t)
			m.Put(1, shm.DropMessage, 1, 0, fd)
		},
		"wrong size": func(t *testing.T, m *shm.Mesh) {
			fd, n := segment(t)
			m.Put(1, shm.ShareMessage, 1, n+4096, fd)
		},
		"no size": func(t *testing.T, m *shm.Mesh) {
			fd, _ := segment(t)
			m.Put(1, shm.ArenaMessage, 1, 0, fd)
		},
		"not sealed": func(t *testing.T, m *shm.Mesh) {
			fd, n := unsealed(t)
			m.Put(1, shm.ArenaMessage, 1<<30, n, fd)
		},
		"share not sealed": func(t *testing.T, m *shm.Mesh) {
			fd, n := unsealed(t)
			m.Put(1, shm.ShareMessage, 1, n, fd)
		},
		"shared twice": func(t *testing.T, m *shm.Mesh) {
			for range 2 {
				fd, n := segment(t)
				m.Put(1, shm.ShareMessage, 1, n, fd)
			}
		},
		"arena twice": func(t *testing.T, m *shm.Mesh) {
			for range 2 {
				fd, n := segment(t)
				m.Put(1, shm.ArenaMessage, 1<<30, n, fd)
			}
		},
		"arena 0": func(t *testing.T, m *shm.Mesh) {
			fd, n := segment(t)
			m.Put(1, shm.ArenaMessage, 0, n, fd)
		},
		"dropped unknown": func(t *testing.T, m *shm.Mesh) { m.Put(1, shm.DropMessage, 1<<30, 0) },
		"too many lanes": func(t *testing.T, m *shm.Mesh) {
			for i := range uint32(1<<12 + 1) {
				fd, n := segment(t)
				m.Put(1, shm.ShareMessage, 1000+i, n, fd)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			meshes := onOneHost(t, shm.Config{}, 2)
			send(t, shm.Inner(meshes[0]))
			within(t, "nobody noticed", func() bool { return meshes[1].Err(9, 0) != nil })
			wantPeer(t, "err", meshes[1].Err(9, 0), 9, 0)
			c, err := meshes[0].Conn(t.Context(), transport.Control, 1)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Send([]byte("hello")); err != nil {
				t.Errorf("the sender noticed: %v", err)
			}
			if err := meshes[0].Err(9, 1); err != nil {
				t.Errorf("the sender noticed: %v", err)
			}
		})
	}
}

// TestPassedOn lets rank 1 of three send messages to rank 0, the leader, which passes them on to rank 2. Each
// message must reach rank 2, and if it violates the protocol, ranks 0 and 2 must blame the right rank.
func TestPassedOn(t *testing.T) {
	unsealed := func(t *testing.T) int {
		fd, err := unix.MemfdCreate("test", 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(fd, 4096); err != nil {
			t.Fatal(err)
		}
		return fd
	}
	const none = topo.Rank(-1)
	for name, c := range map[string]struct {
		send     func(t *testing.T, meshes []*shm.Mesh)
		at0, at2 topo.Rank // the rank that ranks 0 and 2 give up
	}{
		"dropped unknown": {func(_ *testing.T, m []*shm.Mesh) { m[1].Put(0, shm.DropMessage, 1<<30, 0) }, 1, 1},
		"not sealed": {func(t *testing.T, m []*shm.Mesh) {
			m[1].Put(0, shm.ArenaMessage, 1<<30, 4096, unsealed(t))
		}, 1, 1},
		"in the name of another rank": {func(_ *testing.T, m []*shm.Mesh) {
			m[1].PutFrom(2, 0, shm.DropMessage, 1<<30, 0)
		}, 1, 1},
		"gone": {func(_ *testing.T, m []*shm.Mesh) { m[1].Put(0, shm.GoneMessage, 0, 0) }, 1, 1},
		"closed": {func(t *testing.T, m []*shm.Mesh) {
			if err := m[1].Close(); err != nil {
				t.Error(err)
			}
		}, 1, 1},
		"the leader has gone": {func(_ *testing.T, m []*shm.Mesh) { m[0].Put(2, shm.GoneMessage, 0, 0) }, none, 0},
		"an unknown reason":   {func(_ *testing.T, m []*shm.Mesh) { m[0].PutFrom(1, 2, shm.GoneMessage, 0, 4096) }, none, 0},
		"the rank itself":     {func(_ *testing.T, m []*shm.Mesh) { m[0].PutFrom(2, 2, shm.GoneMessage, 0, 0) }, none, 0},
		"only rank 2 sees it": {func(_ *testing.T, m []*shm.Mesh) { m[0].PutFrom(1, 2, shm.DropMessage, 1<<30, 0) }, none, 1},
	} {
		t.Run(name, func(t *testing.T) {
			shared := onOneHost(t, shm.Config{}, 3)
			var meshes []*shm.Mesh
			for _, m := range shared {
				meshes = append(meshes, shm.Inner(m))
			}
			c.send(t, meshes)
			for at, blamed := range map[int]topo.Rank{0: c.at0, 2: c.at2} {
				if blamed != none {
					within(t, fmt.Sprintf("rank %d does not notice", at), func() bool {
						return shared[at].Err(9, blamed) != nil
					})
					wantPeer(t, "err", shared[at].Err(9, blamed), 9, blamed)
				}
				for r := range topo.Rank(3) {
					if err := shared[at].Err(9, r); r != blamed && err != nil {
						t.Errorf("rank %d gives up rank %d: %v", at, r, err)
					}
				}
			}
		})
	}
}

// deliver shares memory for a lane and returns when every rank has received all messages that were sent
// before, such as the descriptors of the arena chunks that earlier tests have left in this process.
func deliver(t *testing.T, meshes []shm.Sharer, id transport.Lane) {
	t.Helper()
	for _, m := range meshes {
		if _, err := m.Share(id, 1, m.Group()); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range meshes {
		for _, r := range m.Group() {
			if _, err := m.Peer(t.Context(), id, r); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestLeaderLacksDescriptors lets the leader receive an arena chunk of rank 1 while it has no free
// descriptor. Ranks 0 and 2 must blame the leader. The leader must still see the end of rank 1.
func TestLeaderLacksDescriptors(t *testing.T) {
	shared := onOneHost(t, shm.Config{}, 3)
	deliver(t, shared, 10)
	rank1 := shm.Inner(shared[1])
	fd, err := unix.MemfdCreate("test", 0)
	if err != nil {
		t.Fatal(err)
	}
	restore := testnet.LimitDescriptors(t, 0)
	rank1.Put(0, shm.ArenaMessage, 1<<30, 4096, fd)
	for _, at := range []int{0, 2} {
		within(t, fmt.Sprintf("rank %d does not notice", at), func() bool { return shared[at].Err(9, 1) != nil })
		wantPeer(t, "err", shared[at].Err(9, 1), 9, 0)
		if errors.Is(shared[at].Err(9, 1), unix.EMFILE) != (at == 0) {
			t.Errorf("rank %d: got error %v; only that of rank 0 may wrap EMFILE", at, shared[at].Err(9, 1))
		}
	}
	restore()
	if err := shared[2].Err(9, 0); err != nil {
		t.Errorf("rank 2 gives up the leader: %v", err)
	}
	// The channel still works, and a message that refers to the chunk is no violation of the protocol.
	rank1.Put(0, shm.DropMessage, 1<<30, 0)
	within(t, "the message is not sent", func() bool { return rank1.Queued(0) == 0 })
	c, err := shared[0].Conn(t.Context(), transport.Control, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send([]byte("hello")); err != nil {
		t.Error(err)
	}
	if err := rank1.Close(); err != nil {
		t.Error(err)
	}
	_, err = c.Read(make([]byte, 1))
	wantPeer(t, "read", err, transport.Control, 1)
	wantErr(t, "read", err, io.ErrUnexpectedEOF)
}

// TestLeaderGone checks that a rank stops waiting for memory if the leader, which would pass it on, has gone.
func TestLeaderGone(t *testing.T) {
	meshes := onOneHost(t, shm.Config{}, 3)
	waiting := make(chan error, 2)
	go func() {
		_, err := meshes[2].Peer(t.Context(), 5, 1)
		waiting <- err
		_, err = meshes[2].Arena(t.Context(), 1, 1<<30)
		waiting <- err
	}()
	if err := meshes[0].Close(); err != nil {
		t.Fatal(err)
	}
	wantPeer(t, "peer", <-waiting, 5, 0)
	wantPeer(t, "arena", <-waiting, transport.Control, 0)
	if err := meshes[2].Err(5, 1); err != nil {
		t.Errorf("rank 1 has not gone: %v", err)
	}
}

// TestManyRanks connects 40 ranks of a host. All ranks but the leader must have one connection, and all must
// get the segments of all others, in more messages than fit into a packet. A segment that is shared with a
// few ranks must reach only these.
func TestManyRanks(t *testing.T) {
	const size = 40
	meshes := onOneHost(t, shm.Config{RingBytes: 4096}, size)
	for r, m := range meshes {
		want := 1
		if r == 0 {
			want = size - 1
		}
		if got := shm.Inner(m).Links(); got != want {
			t.Errorf("rank %d: got %d connections, want %d", r, got, want)
		}
		for lane := transport.Lane(1); lane <= 3; lane++ {
			b, err := m.Share(lane, 4096, m.Group())
			if err != nil {
				t.Fatal(err)
			}
			b[lane] = byte(r)
		}
		if _, err := m.Share(4, 4096, []topo.Rank{0, topo.Rank(size - 1 - r)}); err != nil {
			t.Fatal(err)
		}
	}
	for r, m := range meshes {
		for p := range topo.Rank(size) {
			for lane := transport.Lane(1); lane <= 3; lane++ {
				b, err := m.Peer(t.Context(), lane, p)
				if err != nil {
					t.Fatal(err)
				}
				if b[lane] != byte(p) {
					t.Errorf("rank %d: lane %d: got %d from rank %d", r, lane, b[lane], p)
				}
			}
		}
		if _, err := m.Peer(t.Context(), 4, topo.Rank(size-1-r)); err != nil {
			t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := meshes[3].Peer(ctx, 4, 5) // rank 5 has shared lane 4 only with ranks 0 and 34
	wantErr(t, "peer", err, context.DeadlineExceeded)
}

// TestArenaIsSealed checks that each chunk is sealed before its descriptor is sent to peers. The allocator
// does not seal chunks, because a sidecar must be able to write to them.
func TestArenaIsSealed(t *testing.T) {
	seals := func() (all []int) {
		arena.Watch(func(c arena.Chunk) {
			s, err := unix.FcntlInt(uintptr(c.Segment.FD()), unix.F_GET_SEALS, 0)
			if err != nil {
				t.Error(err)
			}
			all = append(all, s)
		}, func(uint32) {})()
		return all
	}
	before, err := arena.Alloc(1)
	if err != nil {
		t.Fatal(err)
	}
	onOneHost(t, shm.Config{}, 2)
	after, err := arena.Alloc(100 << 20) // so large that it gets its own chunk
	if err != nil {
		t.Fatal(err)
	}
	const want = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	all := seals()
	if len(all) < 2 {
		t.Errorf("got %d chunks, want 2", len(all))
	}
	for _, s := range all {
		if s&want != want {
			t.Errorf("a chunk that peers were given has the seals %#x, want %#x", s, want)
		}
	}
	if err := errors.Join(arena.Free(before), arena.Free(after)); err != nil {
		t.Error(err)
	}
}
