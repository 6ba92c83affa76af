package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
)

// hosts are the hosts of a job of eight ranks. Rank 2 leads ranks 3 and 6, rank 4 leads rank 5, and ranks 1
// and 7 have no leader. With two levels of leaders, rank 2 also leads rank 4.
var hosts = []string{"a", "a", "b", "b", "c", "c", "b", "d"}

// leading has the leader of each rank of the job on these hosts.
type leading []int

var oneLevel, twoLevels = leading{0, 1, 2, 2, 4, 4, 2, 7}, leading{0, 1, 2, 2, 2, 4, 2, 7}

// onHosts makes the ranks of a job negotiate through leaders.
func (l leading) onHosts(cfg *engine.Config) {
	cfg.Hosts, cfg.LeadersAbove = hosts, 1
	if l[4] == 2 {
		cfg.LevelsAbove = 1
	}
}

// onLevels runs a test with one level of leaders and with two.
func onLevels(t *testing.T, test func(t *testing.T, leaders leading)) {
	t.Run("one level", func(t *testing.T) { test(t, oneLevel) })
	t.Run("two levels", func(t *testing.T) { test(t, twoLevels) })
}

// inGroups makes the ranks of each host share memory, without leaders.
func inGroups(cfg *engine.Config) { cfg.Groups = []topo.Rank{0, 0, 2, 2, 4, 4, 2, 7} }

// upstream returns the rank to which rank r has its control connection.
func (l leading) upstream(r int) int {
	if l[r] == r {
		return 0
	}
	return l[r]
}

// tappedMesh is a mesh whose control connections are passed to tap when they are made.
type tappedMesh struct {
	transport.Mesh
	tap func(conn transport.Conn, peer topo.Rank) transport.Conn
}

func (m *tappedMesh) Conn(ctx context.Context, lane transport.Lane, peer topo.Rank) (transport.Conn, error) {
	c, err := m.Mesh.Conn(ctx, lane, peer)
	if err != nil || lane != transport.Control {
		return c, err
	}
	return m.tap(c, peer), nil
}

// A rank is connected to its leader and to the ranks that it leads, and rank 0 to ranks without a leader. The
// sums are those of a job in which all ranks are connected to rank 0.
func TestLeaders(t *testing.T) { onLevels(t, testLeaders) }

func testLeaders(t *testing.T, leaders leading) {
	n := len(hosts)
	var mu sync.Mutex
	var pairs [][2]int
	kept := make([]weak.Pointer[string], n) // the list of hosts of each rank
	c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
		leaders.onHosts(cfg)
		rank := int(cfg.Rank)
		cfg.Hosts = slices.Clone(cfg.Hosts)
		kept[rank] = weak.Make(&cfg.Hosts[0])
		cfg.Mesh = &tappedMesh{cfg.Mesh, func(conn transport.Conn, peer topo.Rank) transport.Conn {
			mu.Lock()
			defer mu.Unlock()
			if rank > int(peer) {
				pairs = append(pairs, [2]int{rank, int(peer)})
			}
			return conn
		}}
	})
	var want [][2]int
	for r := 1; r < n; r++ {
		want = append(want, [2]int{r, leaders.upstream(r)})
	}
	slices.SortFunc(pairs, func(a, b [2]int) int { return a[0] - b[0] })
	if !slices.Equal(pairs, want) {
		t.Errorf("got control connections %v, want %v", pairs, want)
	}
	runtime.GC()
	for r, p := range kept {
		if p.Value() != nil {
			t.Errorf("rank %d keeps the list of the hosts in memory", r)
		}
	}
	c.each(func(r int) {
		for i := range 50 {
			buf := binary.LittleEndian.AppendUint64(nil, uint64(i+r))
			if err := c.wait(c.allreduce(r, fmt.Sprint("x", i%3), buf)); err != nil {
				t.Errorf("rank %d: %v", r, err)
				return
			}
			if got, want := binary.LittleEndian.Uint64(buf), uint64(n*i+n*(n-1)/2); got != want {
				t.Errorf("rank %d: got %d, want %d", r, got, want)
			}
		}
	})
	c.shutdown()
}

// If a rank of a job with leaders dies, every other rank gets a verdict that names only that rank.
func TestDeathWithLeaders(t *testing.T) {
	n := len(hosts)
	for levels, leaders := range []leading{oneLevel, twoLevels} {
		for _, executing := range executingOrNot() {
			for victim := range n {
				spin := victim%2 == levels
				c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
					leaders.onHosts(cfg)
					if !spin {
						cfg.Spin = -1
					}
				})
				dies(t, c, victim, executing)
				if t.Failed() {
					t.Fatalf("victim %d, executing %v, spin %v, leaders %v", victim, executing, spin, leaders)
				}
			}
		}
	}
}

// A leader that has shut down stays for the ranks behind it, and the lowest of the ranks that share
// memory stays for the others. If the deadline of its Shutdown passes, the verdict names these ranks. If it
// dies, the verdict names it. If rank 0 dies, the verdict names rank 0, at the ranks behind the leader too.
func TestKeeperAfterItsBye(t *testing.T) {
	for name, config := range map[string]func(*engine.Config){"leader": oneLevel.onHosts,
		"leader of a leader": twoLevels.onHosts, "group": inGroups} {
		behind := []int{3, 6}
		if name == "leader of a leader" {
			behind = []int{3, 4, 5, 6}
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := start(t, len(hosts), config)
				ctx, cancel := context.WithTimeout(c.ctx, 3*time.Second)
				defer cancel()
				err := c.engines[2].Shutdown(ctx, engine.Departure{})
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("rank 2: got error %v, want the context's", err)
				}
				c.endWith(-1, behind...)
			})
			synctest.Test(t, func(t *testing.T) { c := leaves(t, 2, config); c.die(2); c.endWith(2, 2) })
		})
	}
	for _, l := range []leading{oneLevel, twoLevels} {
		synctest.Test(t, func(t *testing.T) { c := leaves(t, 2, l.onHosts); c.die(0); c.endWith(0, 0) })
	}
}

// leaves starts a job in which the given rank has sent bye and waits until it is closed.
func leaves(t *testing.T, r int, config func(*engine.Config)) *cluster {
	c := start(t, len(hosts), config)
	go func() { _ = c.engines[r].Shutdown(c.ctx, engine.Departure{}) }()
	synctest.Wait()
	return c
}

// die ends the engine of a rank as if its process had died.
func (c *cluster) die(r int) {
	c.net.Kill(topo.Rank(r))
	c.engines[r].Close()
}

// endWith checks that every engine, except that of the rank dead, ends with a verdict that names the given
// ranks.
func (c *cluster) endWith(dead int, failed ...int) {
	for r, e := range c.engines {
		select {
		case <-e.Ended():
		case <-c.ctx.Done():
			c.t.Errorf("rank %d has not ended after %v", r, deadline)
			e.Close()
		}
		var peer *engine.PeerError
		if err := e.Err(); r != dead && (!errors.As(err, &peer) || !slices.Equal(peer.Ranks, failed)) {
			c.t.Errorf("rank %d: got error %v, want one that names ranks %v", r, err, failed)
		}
	}
	for _, e := range c.engines {
		e.Close()
	}
}

// cutConn is a control connection that is cut when the value is set: nothing arrives on it anymore.
type cutConn struct {
	transport.Conn
	cut  *atomic.Bool
	peer topo.Rank
}

func (c *cutConn) TryRead(p []byte) (int, error) {
	if c.cut.Load() {
		return 0, &transport.PeerError{Peer: c.peer, Err: io.ErrUnexpectedEOF}
	}
	return c.Conn.TryRead(p)
}

// If the control connection of a rank is cut, the verdict of rank 0 names the rank at the other end from rank
// 0, also if a leader has found the end of the connection. The ranks that are cut off name the rank at the
// other end of their connection, as they do without leaders.
func TestCutConnectionsWithLeaders(t *testing.T) { onLevels(t, cutConnections) }

func cutConnections(t *testing.T, leaders leading) {
	n := len(hosts)
	for cutOff := 1; cutOff < n; cutOff++ {
		var cut atomic.Bool
		c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
			leaders.onHosts(cfg)
			rank := int(cfg.Rank)
			cfg.Mesh = &tappedMesh{cfg.Mesh, func(conn transport.Conn, peer topo.Rank) transport.Conn {
				if pair := []int{rank, int(peer)}; slices.Contains(pair, cutOff) &&
					slices.Contains(pair, leaders.upstream(cutOff)) {
					return &cutConn{conn, &cut, peer}
				}
				return conn
			}}
		})
		c.each(func(r int) {
			c.succeeds(c.allreduce(r, "x", make([]byte, 8)))
		})
		cut.Store(true)
		c.each(func(r int) {
			var err error
			if r != 1 { // so that the operation does not end
				err = c.wait(c.allreduce(r, "y", make([]byte, 8)))
			} else {
				<-c.engines[r].Ended()
				err = c.engines[r].Err()
			}
			want := cutOff
			if r == cutOff || leaders[r] == cutOff || leaders[leaders[r]] == cutOff {
				want = leaders.upstream(cutOff)
			}
			var peer *engine.PeerError
			if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{want}) {
				t.Errorf("connection of rank %d cut: rank %d got error %v, want one that names rank %d", cutOff, r,
					err, want)
			}
		})
		for _, e := range c.engines {
			if err := e.Shutdown(c.ctx, engine.Departure{}); err == nil {
				t.Error("a shutdown after the failure gave no error")
			}
		}
	}
}

// badConn is a control connection that changes bits of a byte of each frame when the value is set.
type badConn struct {
	transport.Conn
	bad  *atomic.Bool
	at   int
	bits byte
}

func (c *badConn) Send(p []byte) error {
	if c.bad.Load() {
		p = slices.Clone(p)
		p[c.at] ^= c.bits
	}
	return c.Conn.Send(p)
}

// If a rank behind a leader, or a leader behind a leader, sends a malformed frame or one of a rank that it
// does not lead, every rank gets a verdict that names it, and that rank too.
func TestGarbageToALeader(t *testing.T) {
	for _, x := range []struct {
		culprit topo.Rank
		at      int // of the length, the number, the type, the number of parts, that of ranks, the first rank
		bits    byte
		want    string
	}{
		{3, 4, 1, "rank 3 failed: protocol error: malformed frame: got frame number"},
		{4, 9, 0x80, "rank 4 failed: protocol error: message: combined frame"},
		{4, 17, 6, "rank 4 failed: protocol error: got frames of rank"}, // of rank 2 or 3 instead of 4 or 5
	} {
		n := len(hosts)
		var bad atomic.Bool
		c := startOn(t, mem.New(n), n, func(cfg *engine.Config) {
			twoLevels.onHosts(cfg)
			if cfg.Rank == x.culprit {
				cfg.Mesh = &tappedMesh{cfg.Mesh, func(conn transport.Conn, peer topo.Rank) transport.Conn {
					if peer != 2 {
						return conn
					}
					return &badConn{conn, &bad, x.at, x.bits}
				}}
			}
		})
		bad.Store(true)
		c.each(func(r int) {
			err := c.wait(c.allreduce(r, "x", make([]byte, 8)))
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("rank %d: got error %v, want %s", r, err, x.want)
			}
		})
		for _, e := range c.engines {
			if err := e.Shutdown(c.ctx, engine.Departure{}); err == nil {
				t.Error("a shutdown after the failure gave no error")
			}
		}
	}
}

// Clock probes pass through leaders: every rank measures its clock against that of rank 0.
func TestClocksBehindLeaders(t *testing.T) {
	n := len(hosts)
	logs := make([]log, n)
	c := start(t, n, func(cfg *engine.Config) {
		twoLevels.onHosts(cfg)
		cfg.ClockDomain = fmt.Sprint(cfg.Rank)
	})
	c.measureClocks(logs)
	want := c.engines[0].Clock().Job()
	for r := range n {
		if o, _ := c.engines[r].Observer().Offset(); o.Job != want || r > 0 && o.Error <= 0 {
			t.Errorf("rank %d: got offset %+v, want one that was measured against job %q", r, o, want)
		}
	}
	c.shutdown()
}
