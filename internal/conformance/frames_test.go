package conformance

import (
	"fmt"
	"sync"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops/tcp"
)

// frames counts the requests and grants in the frames that ranks other than 0 send and receive. The counts
// show whether a tensor came from the cache and whether it was fused, which the result of the operation does
// not show.
type frames struct {
	mu       sync.Mutex
	requests map[said]int // how often the rank sent the request for this tensor in full
	grants   map[said]int // the number of tensors in the grant that described this tensor in full
	// log has, for each rank, the received grants that describe responses in full. The grants are in the
	// order of arrival, each in brackets. If log is nil, no grants are logged.
	log map[topo.Rank]string
	// used has a rule with kind and algorithm for each grant that described a response in full.
	used map[tcp.Rule]bool
}

// said identifies a tensor in the frames of one rank.
type said struct {
	rank topo.Rank
	name string
}

func newFrames() *frames {
	return &frames{requests: make(map[said]int), grants: make(map[said]int), used: make(map[tcp.Rule]bool)}
}

// hear counts the requests and grants in a frame. It is the value of testcluster.Options.OnFrame.
func (f *frames) hear(from, to topo.Rank, frame []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if from == 0 {
		f.hearDown(to, frame)
	} else {
		f.hearUp(from, frame)
	}
}

func (f *frames) hearUp(from topo.Rank, frame []byte) {
	var up message.Up
	if message.UpType(frame[0]) != message.UpNews || message.DecodeUp(frame, &up) != nil {
		return
	}
	for _, s := range up.Sets {
		for _, q := range s.Requests {
			f.requests[said{from, q.Name}]++
		}
	}
}

func (f *frames) hearDown(to topo.Rank, frame []byte) {
	var down message.Down
	if message.DownType(frame[0]) != message.DownCycle || message.DecodeDown(frame, &down) != nil {
		return
	}
	for _, s := range down.Sets {
		for _, g := range s.Grants {
			if f.log != nil {
				f.log[to] += grantText(g)
			}
			for _, r := range g.Full {
				f.used[tcp.Rule{Kind: r.Kind, Algorithm: g.Algorithm}] = true
				f.grants[said{to, r.Name}] = len(g.Bits) + len(g.Full)
			}
		}
	}
}

// grantText returns the names of the tensors that a grant describes in full, in brackets.
func grantText(g message.Grant) string {
	var names []string
	for _, r := range g.Full {
		names = append(names, r.Name)
	}
	return fmt.Sprint(names)
}

// take returns the counts for a tensor at a rank and sets them to 0.
func (f *frames) take(rank topo.Rank, name string) (requests, granted int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := said{rank, name}
	requests, granted = f.requests[k], f.grants[k]
	delete(f.requests, k)
	delete(f.grants, k)
	return requests, granted
}
