package engine_test

import (
	"flag"
	"fmt"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/simulate"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/mem"
	"github.com/gohvd/gohvd/tensorqueue"
)

var simulatedRanks = flag.Int("simulated-ranks", 64, "the size of the job in TestSimulation (make scale)")

// newsLoad counts what a simulated rank 0 counts: frames and bytes of the news and cycles on the connections
// of rank 0, without heartbeats and clock probes, which depend on the time.
type newsLoad struct {
	mu                sync.Mutex
	frames, bytes     int64
	to                []topo.Rank
	parts, newsOfRank []message.Part
}

type newsConn struct {
	transport.Conn
	load *newsLoad
	root bool // whether this is rank 0's end
}

func (c *newsConn) Send(p []byte) error {
	c.load.count(p[8:], c.root)
	return c.Conn.Send(p)
}

// count counts a frame. A leader may add heartbeats and probes of its ranks to a frame with news.
func (l *newsLoad) count(frame []byte, down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	numBytes := len(frame)
	switch {
	case down:
		if to, inner, err := message.DecodeAddressed(frame, l.to); err == nil {
			l.to, frame = to, inner
		}
		if frame[0] != byte(message.DownCycle) {
			return
		}
	case message.IsCombined(frame):
		var err error
		if l.parts, err = message.DecodeCombined(frame, l.parts); err != nil {
			return
		}
		l.newsOfRank = l.newsOfRank[:0]
		for _, p := range l.parts {
			if p.Frame[0] == byte(message.UpNews) {
				l.newsOfRank = append(l.newsOfRank, p)
			}
		}
		if len(l.newsOfRank) == 0 {
			return
		}
		numBytes = len(message.AppendCombined(nil, l.newsOfRank))
	case frame[0] != byte(message.UpNews):
		return
	}
	l.frames++
	l.bytes += int64(numBytes + 8)
}

func (l *newsLoad) counted() (frames, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.frames, l.bytes
}

// A step of real engines has the frames, bytes and connections at rank 0 that the simulation has. On a busy
// machine a leader may pass on votes that it has held for too long, or those of a step in two parts, so the
// ranks repeat the step until it had the frames and bytes of the simulation.
func TestSimulation(t *testing.T) {
	const perHost, tensors = 8, 8
	ranks := *simulatedRanks
	for _, p := range []struct {
		policy          simulate.Policy
		leaders, levels int // engine.Config.LeadersAbove and LevelsAbove
		group           int
	}{
		{simulate.Star, ranks, 0, 0}, {simulate.Leaders, 1, ranks, 0}, {simulate.Levels, 1, 6, 6},
		{simulate.Levels, 1, 2, 2}, // three levels or more
	} {
		for _, capacity := range []int{64, 0} {
			t.Run(fmt.Sprintf("%s/group=%d/cache=%d", p.policy, p.group, capacity), func(t *testing.T) {
				want, err := simulate.Run(simulate.Config{Ranks: ranks, PerHost: perHost, Policy: p.policy,
					Group: p.group, Workload: simulate.Small(tensors), Steps: 3, CacheCapacity: capacity,
					Costs: simulate.Measured})
				if err != nil {
					t.Fatal(err)
				}
				root := want.Steps[2].Root
				load, connections := newsLoad{}, 0
				c := startOn(t, mem.New(ranks), ranks, func(cfg *engine.Config) {
					cfg.CacheCapacity, cfg.Spin = capacity, -1
					cfg.LivenessTimeout = deadline // a large job starves its ranks
					cfg.LeadersAbove, cfg.LevelsAbove = p.leaders, p.levels
					for r := range ranks {
						cfg.Hosts = append(cfg.Hosts, fmt.Sprint("host", r/perHost))
					}
					me := cfg.Rank
					cfg.Mesh = &tappedMesh{cfg.Mesh, func(conn transport.Conn,
						peer topo.Rank,
					) transport.Conn {
						if me != 0 && peer != 0 {
							return conn
						}
						load.mu.Lock()
						defer load.mu.Unlock()
						if me == 0 {
							connections++
						}
						return &newsConn{conn, &load, me == 0}
					}}
				})
				step := func(r int) {
					entries := make([]*tensorqueue.Entry, tensors)
					for i := range entries {
						entries[i] = sum(fmt.Sprint("g", i), make([]byte, 8))
					}
					done := make(chan error, tensors)
					for _, e := range entries {
						e.Done = func(err error) { done <- err }
					}
					if err := c.engines[r].Submit(entries...); err != nil {
						t.Error(err)
						return
					}
					for range entries {
						if err := c.wait(done); err != nil {
							t.Error(err)
							return
						}
					}
				}
				var frames, bytes int64
				wantFrames, wantBytes := root.FramesIn+root.FramesOut, root.BytesIn+root.BytesOut
				for steps := 0; !t.Failed() &&
					(steps < 2 || frames != wantFrames || bytes != wantBytes); steps++ {
					if steps == 50 {
						t.Errorf("got %d frames and %d bytes in a step, want %d and %d", frames, bytes,
							wantFrames, wantBytes)
						break
					}
					c.extend() // a busy machine may need long for the start and for each step
					framesBefore, bytesBefore := load.counted()
					c.each(step)
					frames, bytes = load.counted()
					frames, bytes = frames-framesBefore, bytes-bytesBefore
					t.Logf("%d ranks: %d frames, %d bytes at rank 0; simulated %v", ranks, frames, bytes, root)
				}
				if connections != want.Steps[2].Connections {
					t.Errorf("got %d connections, want %d", connections, want.Steps[2].Connections)
				}
				c.extend()
				c.shutdown()
			})
		}
	}
}
