package van

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

func replicated(c *Config) { c.Replicas = 1 }

// connected reports whether node a has a connection with node b that has not ended.
func connected(nodes map[int]*node, a, b int) bool { return nodes[a].Connected(nodes[b].Process()) }

// TestServersConnect checks that servers are connected with those of the next and the previous rank and with
// no others, also after they were started again, and that they know which servers have ended.
func TestServersConnect(t *testing.T) {
	for _, servers := range []int{2, 3, 4} {
		nodes := startJob(t, servers, 1, replicated)
		check := func(id int) {
			for rank := range servers {
				other := ServerID(rank)
				between := (rank - Rank(id) + servers) % servers
				if want := between == 1 || between == servers-1; connected(nodes, id, other) != want ||
					connected(nodes, other, id) != want {
					t.Errorf("%d servers: %s is connected with %s: %v, want %v", servers, Name(id), Name(other),
						!want, want)
				}
			}
		}
		for rank := range servers {
			check(ServerID(rank))
		}
		for rank := range servers {
			id := ServerID(rank)
			next, old := nodes[ServerID((rank+1)%servers)], nodes[id].Process()
			kill(nodes[id])
			testnet.Eventually(t, "the next server knows of the end", func() bool { return next.Ended(old) })
			again(t, nodes, id, replicated)
			check(id)
			if now := nodes[id].Process(); !next.Ended(old) || next.Ended(now) || next.Current(id) != now {
				t.Errorf("%s takes %v for the current process, want %v", Name(next.ID()), next.Current(id), now)
			}
		}
	}
}

// TestEvict cuts the connection between two servers. The scheduler declares exactly one of them dead, and the
// other one learns it.
func TestEvict(t *testing.T) {
	for range 5 {
		nodes := startJob(t, 2, 1, replicated)
		l := nodes[8].linkWith(t, 10)
		l.conn.Close()
		ended := func(id int) bool { return nodes[id].ctx.Err() != nil }
		testnet.Eventually(t, "a server fails", func() bool { return ended(8) || ended(10) })
		alive, dead := nodes[8], nodes[10]
		if ended(8) {
			alive, dead = dead, alive
		}
		for _, n := range []*node{alive, nodes[9]} {
			testnet.Eventually(t, "the others know which one", func() bool { return n.Ended(dead.Process()) })
			if n.Ended(alive.Process()) {
				t.Errorf("%s takes both servers for dead", Name(n.ID()))
			}
		}
		if err := dead.Err(); err == nil || ended(alive.ID()) {
			t.Errorf("%s: %v, %s: %v", Name(dead.ID()), err, Name(alive.ID()), alive.Err())
		}
		stopAll(nodes)
	}
}

// TestEvictEachOther makes two servers accuse each other at the same time, again and again. One is dead.
func TestEvictEachOther(t *testing.T) {
	for range 20 {
		nodes := startJob(t, 2, 1, replicated)
		var wg sync.WaitGroup
		for _, pair := range [][2]int{{8, 10}, {10, 8}} {
			wg.Go(func() { nodes[pair[0]].Evict(nodes[pair[1]].Process(), errors.New("test")) })
		}
		wg.Wait()
		testnet.Eventually(t, "a server is dead", func() bool { return len(nodes[9].Dead(time.Hour)) > 0 })
		alive, dead := nodes[8], nodes[9].Dead(time.Hour)
		if dead[0] == 8 {
			alive = nodes[10]
		}
		// The scheduler has handled both accusations when it answers.
		testnet.WantError(t, alive.Barrier(t.Context(), 0, GroupServers), Name(dead[0])+" is gone")
		if dead := nodes[9].Dead(time.Hour); len(dead) != 1 {
			t.Errorf("dead are %v, want one", dead)
		}
		stopAll(nodes)
	}
}

// TestDeadHasNoSay checks that the scheduler does not believe a server that it has declared dead, even if the
// message of that server is handled already, and no node but a server.
func TestDeadHasNoSay(t *testing.T) {
	nodes := startJob(t, 2, 1, replicated)
	record := func(id int) []*pspb.Node {
		p := nodes[id].Process()
		return []*pspb.Node{{Id: int32(p.ID), Incarnation: p.Incarnation, Gone: "test"}}
	}
	links := make(map[int]*link)
	for _, id := range []int{8, 9, 10} {
		l := nodes[1].linkWith(t, id)
		links[id] = l
	}
	s := nodes[1].sched
	s.evict(links[9], record(8)) // a worker
	s.evict(links[8], record(9))
	s.evict(links[8], record(10))
	s.evict(links[10], record(8))
	for id, want := range map[int]bool{8: false, 9: false, 10: true} {
		if got := links[id].ended(); got != want {
			t.Errorf("%s is dead: %v, want %v", Name(id), got, want)
		}
	}
}
