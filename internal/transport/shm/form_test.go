package shm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
)

// exchange sends one byte in each direction between the ranks a and b on the given lane.
func exchange(t *testing.T, meshes []shm.Sharer, lane transport.Lane, a, b int) {
	t.Helper()
	done := make(chan error, 2)
	half := func(r, p int) {
		done <- func() error {
			c, err := meshes[r].Conn(t.Context(), lane, topo.Rank(p))
			if err != nil {
				return err
			}
			if err := c.Send([]byte{byte(r)}); err != nil {
				return err
			}
			got := make([]byte, 1)
			if _, err := io.ReadFull(c, got); err != nil {
				return err
			}
			if got[0] != byte(p) {
				return fmt.Errorf("rank %d got %d from rank %d", r, got[0], p)
			}
			return c.Flush()
		}()
	}
	go half(a, b)
	go half(b, a)
	if err := errors.Join(<-done, <-done); err != nil {
		t.Error(err)
	}
}

// TestGroups checks that the group of a rank consists of exactly the ranks on its host. Their Control
// channels to its lowest rank must be in shared memory, and the mesh must also reach all other ranks.
func TestGroups(t *testing.T) {
	for _, hosts := range []string{"a", "aa", "ab", "aaaa", "abab", "abbba", "abcb"} {
		t.Run(hosts, func(t *testing.T) {
			meshes := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, len(hosts)),
				strings.Split(hosts, "")...).mustConnect(t)
			for r, m := range meshes {
				var want []topo.Rank
				for p := range hosts {
					if hosts[p] == hosts[r] {
						want = append(want, topo.Rank(p))
					}
					lowest := topo.Rank(strings.IndexByte(hosts, hosts[p]))
					if got := m.Groups()[p]; got != lowest {
						t.Errorf("rank %d: rank %d is in the group of rank %d, want %d", r, p, got, lowest)
					}
				}
				if got := m.Group(); !slices.Equal(got, want) || m.UnsharedReason() != "" {
					t.Errorf("rank %d: got group %v, %q, want %v", r, got, m.UnsharedReason(), want)
				}
				for p := range r {
					exchange(t, meshes, transport.Control, p, r)
					exchange(t, meshes, 1, p, r)
					c, err := m.Conn(t.Context(), transport.Control, topo.Rank(p))
					if err != nil {
						t.Fatal(err)
					}
					leader := strings.IndexByte(hosts, hosts[p]) == p
					if inMemory := fmt.Sprintf("%T", c) == "*shm.conn"; inMemory != (leader && hosts[p] == hosts[r]) {
						t.Errorf("rank %d: the channel to rank %d is a %T", r, p, c)
					}
				}
			}
		})
	}
}

// TestDissolved makes one rank unable to share memory. Then the ranks of its host must not share memory, but
// the ranks of other hosts must still share it. At all ranks of the host, UnsharedReason must name the rank
// and the reason.
func TestDissolved(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, j *job)
		why   []string // texts that UnsharedReason on host a must contain
	}{
		"no offer": {func(t *testing.T, j *job) {
			j.offers[2] = shm.Offer{}
		}, []string{"rank 2: it offers no shared memory"}},
		"bad offer": {func(t *testing.T, j *job) {
			j.offers[2].Token = j.offers[2].Token[:20]
		}, []string{"rank 2: its token has 20 bytes"}},
		"other user": {func(t *testing.T, j *job) {
			j.offers[2].UID++
		}, []string{"rank 2: it runs as user", "rank 0 runs as user"}},
		"unavailable": {func(t *testing.T, j *job) {
			if err := j.endpoints[2].Close(); err != nil {
				t.Fatal(err)
			}
			j.endpoints[2] = shm.Unavailable(errors.New("no space for a socket"))
			j.offers[2] = j.endpoints[2].Offer()
		}, []string{"rank 2: no space for a socket"}},
		"all unavailable": {func(t *testing.T, j *job) {
			for _, r := range []int{0, 2, 4} {
				if err := j.endpoints[r].Close(); err != nil {
					t.Fatal(err)
				}
				reason := "no space for a socket"
				if r == 4 {
					reason = "no descriptor"
				}
				j.endpoints[r] = shm.Unavailable(errors.New(reason))
				j.offers[r] = j.endpoints[r].Offer()
			}
		}, []string{"ranks 0 and 2: no space for a socket; rank 4: no descriptor"}},
		"socket gone": {func(t *testing.T, j *job) {
			if err := os.Remove(j.offers[2].Socket); err != nil {
				t.Fatal(err)
			}
		}, []string{"rank 0: connect to rank 2"}},
		"wrong token": {func(t *testing.T, j *job) {
			// The other ranks get this changed token, but rank 2 itself uses the original token.
			j.offers[2].Token = append([]byte{j.offers[2].Token[0] + 1}, j.offers[2].Token[1:]...)
		}, []string{"rank 2"}},
		"wrong epoch": {func(t *testing.T, j *job) {
			j.epoch = func(r int, ep *shm.Epoch) {
				if r == 2 {
					ep.Epoch = 2
				}
			}
		}, []string{"rank 2"}},
		"wrong job": {func(t *testing.T, j *job) {
			j.epoch = func(r int, ep *shm.Epoch) {
				if r == 2 {
					ep.Job = "other"
				}
			}
		}, []string{"rank 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 5), "a", "b", "a", "b", "a")
			c.spoil(t, j)
			dissolved(t, j, c.why)
		})
	}
}

// dissolved connects the ranks of j, which are on the hosts a, b, a, b, a. Connect must return soon at all
// ranks. No rank of host a may share memory, and UnsharedReason of these ranks must contain the texts in why.
func dissolved(t *testing.T, j *job, why []string) {
	t.Helper()
	if j.offers[2].Token == nil && j.offers[2].Reason == "" {
		j.noOffer(t, 2)
	}
	began := time.Now()
	meshes := j.mustConnect(t)
	if took := time.Since(began); took > hangTimeout/2 {
		t.Errorf("Connect took %v", took)
	}
	for r, m := range meshes {
		if got, want := m.Groups(), []topo.Rank{0, 1, 2, 1, 4}; !slices.Equal(got, want) {
			t.Errorf("rank %d: got groups %v, want %v", r, got, want)
		}
		if r%2 == 1 {
			if got := m.Group(); len(got) != 2 || m.UnsharedReason() != "" {
				t.Errorf("rank %d: got group %v, %q, want both ranks of its host", r, got, m.UnsharedReason())
			}
			continue
		}
		if got := m.Group(); !slices.Equal(got, []topo.Rank{topo.Rank(r)}) {
			t.Errorf("rank %d: got group %v, want itself", r, got)
		}
		for _, part := range why {
			if !strings.Contains(m.UnsharedReason(), part) {
				t.Errorf("rank %d: got %q, want %q in it", r, m.UnsharedReason(), part)
			}
		}
		if m.UnsharedReason() != meshes[0].UnsharedReason() {
			t.Errorf("rank %d says %q, rank 0 %q", r, m.UnsharedReason(), meshes[0].UnsharedReason())
		}
		b, err := m.Share(1, 100, nil)
		if err != nil || len(b) < 100 {
			t.Errorf("rank %d: share in a group of one: got %d bytes, %v", r, len(b), err)
		}
		if _, err := m.Peer(t.Context(), 1, topo.Rank((r+2)%6)); err == nil {
			t.Errorf("rank %d: got a segment of a rank outside its group", r)
		}
	}
	exchange(t, meshes, transport.Control, 0, 2)
	exchange(t, meshes, 1, 0, 4)
}

// TestNoMemory lets one rank fail to allocate its segment. UnsharedReason must contain the size of the
// segment, and the other ranks must not wait for this rank.
func TestNoMemory(t *testing.T) {
	under := testcluster.TCPMeshes(t, 5)
	j := newJob(t, shm.Config{}, under, "a", "b", "a", "b", "a")
	if err := j.endpoints[2].Close(); err != nil {
		t.Fatal(err)
	}
	greedy, err := shm.Listen(shm.Config{RuntimeDir: j.cfg.RuntimeDir, RingBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	j.endpoints[2], j.offers[2] = greedy, greedy.Offer()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 30, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
			t.Error(err)
		}
	}()
	dissolved(t, j, []string{"rank 2: shmem: gohvd-control: cannot allocate 10737", "RLIMIT_FSIZE"})
}

// TestAbsentRank runs a job in which one rank never calls Connect. Connect of the other ranks must return
// when their context ends. No socket may be left in the directory.
func TestAbsentRank(t *testing.T) {
	for _, absent := range []int{0, 1, 2} {
		j := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 3), "a", "a", "a")
		idle := j.endpoints[absent]
		j.endpoints[absent] = nil
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, errs := j.connect(ctx)
		cancel()
		for r, err := range errs {
			if r != absent && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("without rank %d: rank %d: got %v, want %v", absent, r, err,
					context.DeadlineExceeded)
			}
		}
		if err := errors.Join(idle.Close(), idle.Close(), j.under[absent].Close()); err != nil {
			t.Error(err)
		}
		empty(t, "closed", j.cfg.RuntimeDir)
	}
}

// TestDeathWhileForming kills a rank while the other ranks form a group. Connect of all other ranks must
// return an error that names the dead rank. They must not wait for it.
func TestDeathWhileForming(t *testing.T) {
	for _, dead := range []int{0, 2} {
		j := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 3), "a", "a", "a")
		e := j.endpoints[dead]
		j.endpoints[dead] = nil
		if err := errors.Join(e.Close(), j.under[dead].Close(), j.sessions[dead].Close()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), hangTimeout)
		_, errs := j.connect(ctx)
		cancel()
		for r, err := range errs {
			why, ok := errors.AsType[*rendezvous.FailedError](err)
			if r != dead && (!ok || !slices.Equal(why.Ranks, []topo.Rank{topo.Rank(dead)})) {
				t.Errorf("rank %d: got %v, want that rank %d failed", r, err, dead)
			}
		}
	}
}

// TestUnauthenticatedPeers connects clients that send arbitrary bytes or nothing to the sockets of two ranks.
// The ranks must form a group nevertheless.
func TestUnauthenticatedPeers(t *testing.T) {
	j := newJob(t, shm.Config{}, testcluster.TCPMeshes(t, 2), "a", "a")
	for _, sent := range [][]byte{nil, []byte("GET / HTTP/1.1\r\n\r\n"), make([]byte, 72),
		make([]byte, 1000)} {
		nc, err := net.Dial("unixpacket", j.offers[1].Socket)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if sent != nil {
			if _, err := nc.Write(sent); err != nil {
				t.Fatal(err)
			}
		}
	}
	for r, m := range j.mustConnect(t) {
		if len(m.Group()) != 2 {
			t.Errorf("rank %d: got group %v, %q", r, m.Group(), m.UnsharedReason())
		}
	}
}

func TestConnectChecks(t *testing.T) {
	for name, change := range map[string]func(ep *shm.Epoch){
		"no job":       func(ep *shm.Epoch) { ep.Job = "" },
		"long job":     func(ep *shm.Epoch) { ep.Job = strings.Repeat("x", 65) },
		"no such rank": func(ep *shm.Epoch) { ep.Rank = 2 },
		"few offers":   func(ep *shm.Epoch) { ep.Offers = ep.Offers[:1] },
	} {
		j := newJob(t, shm.Config{}, testcluster.MemMeshes(2), "a", "b")
		j.epoch = func(_ int, ep *shm.Epoch) { change(ep) }
		if _, errs := j.connect(t.Context()); errs[1] == nil {
			t.Errorf("%s: got no error", name)
		}
		if _, err := j.under[1].Conn(t.Context(), 1, 0); !errors.Is(err, transport.ErrClosed) {
			t.Errorf("%s: the mesh underneath: got error %v, want that it is closed", name, err)
		}
	}
	j := newJob(t, shm.Config{}, testcluster.MemMeshes(1), "a")
	j.mustConnect(t)
	if _, errs := j.connect(t.Context()); errs[0] == nil {
		t.Error("a second Connect: got no error, want one")
	}
}

func TestListenChecks(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]shm.Config{
		"a long path": {RuntimeDir: long},
		"ring":        {RingBytes: 1000}, "small ring": {RingBytes: 32}, "large ring": {RingBytes: 1 << 31},
	} {
		if e, err := shm.Listen(cfg); err == nil {
			t.Errorf("%s: got no error", name)
			_ = e.Close()
		}
	}
	empty(t, "after the long path", long)
}
