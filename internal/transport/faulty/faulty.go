// Package faulty wraps the meshes of any transport and injects faults, for tests and benchmarks: it limits
// the bandwidth between ranks, delays bytes, counts them, and cuts connections.
//
// A Network has the rules of an epoch. Network.Wrap wraps the mesh of a rank. All ranks must be in this
// process, because they share the state of the rules. The wrapped meshes obey the contract of package
// transport.
//
// Bytes take this way from a sender to a receiver. Send appends them to a queue. A goroutine of the sending
// mesh waits until the rules let them pass, and then sends a copy on the wrapped connection. A goroutine of
// the receiving mesh reads them from the wrapped connection into a buffer, from which Read and TryRead return
// them. So a byte leaves the sender's buffer when it has passed the rules and the wrapped transport has taken
// it.
//
// Package faulty takes the time from package time, so the times of faults are exact in a testing/synctest
// bubble. The wrapped mesh must then work in a bubble too. In a bubble, no loop may wait by polling Sent or
// TryRead for bytes that a rule holds back, because the clock does not advance while a goroutine polls.
//
// A Messages injects faults into a stream of messages instead: it drops, duplicates and reorders them.
package faulty

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// Network has the rules of an epoch and the state that its ranks share. It remembers each connection that was
// ever made, also after the release of its lane.
type Network struct {
	seed  uint64
	rules []*Rule

	// mu also guards the state of the rules. It may be locked before the mu of a pipe, but not after it.
	mu    sync.Mutex
	pipes map[key]*pipe
}

// key identifies one direction of a connection.
type key struct {
	lane     transport.Lane
	from, to topo.Rank
}

// reverse returns the key of the other direction of the connection.
func (k key) reverse() key { return key{k.lane, k.to, k.from} }

// New makes a Network with the given rules. All rules that select a connection apply to it. The delays of
// rules with Jitter depend only on seed, the connection and the number of messages sent on it before. A rule
// can belong to only one Network.
func New(seed uint64, rules ...*Rule) *Network {
	n := &Network{seed: seed, rules: rules, pipes: make(map[key]*pipe)}
	for _, r := range rules {
		if r.network != nil {
			panic(fmt.Sprintf("faulty: bug: rule %q belongs to another network", r.Name))
		}
		r.network = n
	}
	return n
}

// Rule selects connections and says what happens to the bytes that are sent on them. A connection has two
// directions, and a rule selects each of them separately. The exported fields must not change after New. A
// rule without faults only counts.
type Rule struct {
	// Name identifies the rule in errors.
	Name string
	// Pairs reports whether the rule selects the direction from one rank to another. If Pairs is nil, the
	// rule selects both directions of all pairs.
	Pairs func(from, to topo.Rank) bool
	// Lanes reports whether the rule selects the connections of a lane. If Lanes is nil, the rule selects all
	// lanes.
	Lanes func(lane transport.Lane) bool

	// BytesPerSecond limits the bandwidth that all selected directions have together, like that of one cable.
	// If it is 0, the bandwidth is unlimited. If several directions have bytes to send, each sends pieces of
	// at most 10 ms and 64 KiB in turn.
	BytesPerSecond int64
	// BurstBytes is the number of bytes that pass without delay after a pause (the depth of the token
	// bucket). Outside of a bubble, timers fire late by up to about 1 ms. If BurstBytes is several ms of
	// BytesPerSecond, the average bandwidth is BytesPerSecond nevertheless. Default 0.
	BurstBytes int64

	// Delay is the time for which each message (the bytes of one Send) is held back. The time of a message
	// does not depend on the messages before it, but messages never overtake each other.
	Delay time.Duration
	// Jitter is the upper bound of a random time that is added to Delay for each message.
	Jitter time.Duration

	// CutAfterBytes and CutAfterMessages cut the selected connections as Cut does, as soon as so many bytes
	// or messages have passed the rule. No further byte passes the rule, so the last message may pass in
	// part. If both are 0, only Cut cuts connections.
	CutAfterBytes, CutAfterMessages int64
	// Silent makes a cut silent: nothing arrives any more, and no call fails. Bytes that are sent after the
	// cut count as Sent. If Silent is false, a cut is like a reset: Send and Flush of the sender fail, and
	// Read of the receiver fails after it has returned the bytes that had passed.
	Silent bool
	// OneWay makes a cut end only the selected directions. If it is false, a cut ends both directions of each
	// connection of which the rule selects a direction.
	OneWay bool

	network *Network // the fields from here on are guarded by network.mu, except network itself
	bucket  bucket
	counts  Counts
	cut     bool
}

// Counts are the numbers of bytes and messages that have passed a rule. A message has passed when its last
// byte has passed. Bytes of the protocol below the wrapped transport do not count.
type Counts struct{ Bytes, Messages int64 }

// Counts returns the numbers of bytes and messages that have passed the rule since New, on all selected
// directions together.
func (r *Rule) Counts() Counts {
	r.network.mu.Lock()
	defer r.network.mu.Unlock()
	return r.counts
}

// Cut cuts the connections that the rule selects, including those that are made later. Bytes that have not
// passed all rules are lost. Only the first cut of a connection has an effect.
func (r *Rule) Cut() {
	r.network.mu.Lock()
	defer r.network.mu.Unlock()
	r.cut = true
	for _, p := range r.network.pipes {
		if r.cuts(p.key) {
			p.end(r)
		}
	}
}

// cuts reports whether a cut of the rule ends the direction k.
func (r *Rule) cuts(k key) bool { return r.selects(k) || !r.OneWay && r.selects(k.reverse()) }

func (r *Rule) selects(k key) bool {
	return (r.Pairs == nil || r.Pairs(k.from, k.to)) && (r.Lanes == nil || r.Lanes(k.lane))
}

// left returns how many of n bytes may pass the rule before it cuts. The caller holds network.mu.
func (r *Rule) left(n int) int {
	if r.CutAfterMessages > 0 && r.counts.Messages >= r.CutAfterMessages {
		return 0
	}
	if r.CutAfterBytes > 0 {
		return int(min(int64(n), r.CutAfterBytes-r.counts.Bytes))
	}
	return n
}

// Pair selects the direction between two ranks, for Rule.Pairs.
func Pair(from, to topo.Rank) func(from, to topo.Rank) bool {
	return func(f, t topo.Rank) bool { return f == from && t == to }
}

// Hosts selects all directions from the ranks of one host to the ranks of another, for Rule.Pairs. hosts has
// the host of each rank.
func Hosts(hosts []string, from, to string) func(from, to topo.Rank) bool {
	return func(f, t topo.Rank) bool { return hosts[f] == from && hosts[t] == to }
}

// Lane selects one lane, for Rule.Lanes.
func Lane(lane transport.Lane) func(transport.Lane) bool {
	return func(l transport.Lane) bool { return l == lane }
}

// Data selects all lanes except Control, for Rule.Lanes.
func Data(lane transport.Lane) bool { return lane != transport.Control }

// bucket is a token bucket that is full at first. It does the arithmetic with the number of bytes since the
// bucket was full, so that rounding errors do not add up.
type bucket struct {
	full  time.Time // the time at which the bucket was last full
	bytes int64     // the number of bytes taken since
}

// take takes n bytes from the bucket. It returns the time at which they may pass.
func (b *bucket) take(n int, r *Rule) time.Time {
	duration := func(bytes int64) time.Duration {
		return time.Duration(float64(bytes) / float64(r.BytesPerSecond) * float64(time.Second))
	}
	if now := time.Now(); !now.Before(b.full.Add(duration(b.bytes))) {
		b.full, b.bytes = now, 0
	}
	b.bytes += int64(n)
	return b.full.Add(duration(max(0, b.bytes-r.BurstBytes)))
}

// pipe returns the given direction of a connection. If it does not exist, pipe makes it.
func (n *Network) pipe(k key) *pipe {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pipes[k]
	if p != nil {
		return p
	}
	p = &pipe{
		key: k, network: n, broken: make(chan struct{}), maxBytes: chunkBytes,
		random: rand.New(rand.NewPCG(n.seed, uint64(k.lane)<<32^uint64(k.from)<<16^uint64(k.to))),
	}
	p.changed.L = &p.mu
	for _, r := range n.rules {
		if r.selects(k) {
			p.rules = append(p.rules, r)
			if r.BytesPerSecond > 0 {
				p.maxBytes = min(p.maxBytes, int(max(r.BytesPerSecond/100, 1)))
			}
		}
		if r.cut && r.cuts(k) {
			p.end(r)
		}
	}
	n.pipes[k] = p
	return p
}

// reserve takes n bytes from the buckets of the rules of p. It returns the time at which they may pass.
func (n *Network) reserve(p *pipe, numBytes int) (at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range p.rules {
		if r.BytesPerSecond > 0 {
			if t := r.bucket.take(numBytes, r); t.After(at) {
				at = t
			}
		}
	}
	return at
}

// cutDue makes the cuts of the rules of p that are due because of the number of bytes or messages.
func (n *Network) cutDue(p *pipe) {
	n.mu.Lock()
	due := slices.DeleteFunc(slices.Clone(p.rules), func(r *Rule) bool { return r.left(1) > 0 })
	n.mu.Unlock()
	for _, r := range due {
		r.Cut()
	}
}
