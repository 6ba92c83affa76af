package ps

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"sync"
)

const (
	// MaxKey is the upper bound of keys: every key is less. The default ranges of the servers are parts of 0
	// to MaxKey.
	MaxKey = math.MaxUint64

	// maxLists and maxListBytes bound the lists of keys that a worker remembers, and those that a server
	// remembers for each customer of each worker.
	maxLists     = 1 << 10
	maxListBytes = 256 << 20
	// maxPlacesBytes bounds the memory in which a server remembers where the values of these lists are,
	// unless a single list needs more.
	maxPlacesBytes = 64 << 20
)

// Range is a range of keys: Begin <= key < End.
type Range struct{ Begin, End uint64 }

// ServerKeyRanges returns the range of keys of each server: parts of 0 to MaxKey, equal but for rounding. It
// returns nil if the job has no servers.
func (p *postoffice) ServerKeyRanges() []Range {
	if p.cfg.NumServers == 0 {
		return nil
	}
	ranges := make([]Range, p.cfg.NumServers)
	for r := range ranges {
		size := uint64(MaxKey) / uint64(len(ranges))
		ranges[r] = Range{uint64(r) * size, uint64(r+1) * size}
	}
	ranges[len(ranges)-1].End = MaxKey
	return ranges
}

// Slicer splits a sorted list of keys among servers: server r gets keys[bounds[r]:bounds[r+1]]. So bounds
// has one element more than there are servers, begins with 0 and ends with len(keys). The result must depend
// only on the arguments.
type Slicer func(keys []uint64, ranges []Range) (bounds []int, err error)

// rangeSlicer splits keys by the ranges of the servers.
func rangeSlicer(keys []uint64, ranges []Range) ([]int, error) {
	bounds := make([]int, 1, len(ranges)+1)
	for _, r := range ranges {
		n, _ := slices.BinarySearch(keys, r.End)
		bounds = append(bounds, n)
	}
	if n := bounds[len(bounds)-1]; n < len(keys) {
		return nil, fmt.Errorf("key %d is %d, want less than %d", n, keys[n], ranges[len(ranges)-1].End)
	}
	return bounds, nil
}

// checkKeys returns an error unless keys are sorted and unique.
func checkKeys(keys []uint64) error {
	for i := 1; i < len(keys); i++ {
		if keys[i] <= keys[i-1] {
			return fmt.Errorf("key %d is %d and follows key %d: keys must be sorted and unique", i, keys[i],
				keys[i-1])
		}
	}
	return nil
}

// keyList is a list of keys that a worker has used.
type keyList struct {
	number uint64 // names the list in messages
	keys   []uint64
	bounds []int // see Slicer
	// sent says that the keys of a range were sent, by 2·rank of the range, plus 1 for the second server that
	// has the range. It is guarded by the mu of keyLists.
	sent []bool
}

// keyLists remembers the lists of keys that a worker has used, so that each is checked, split and sent once.
// When there are too many, it forgets the oldest.
type keyLists struct {
	mu     sync.Mutex
	lists  map[uint64][]*keyList // by fingerprint
	order  []*keyList            // oldest first
	bytes  int                   // size of all keys
	number uint64                // number of lists so far
}

// fingerprint returns a number that differs for most lists.
func fingerprint(keys []uint64) uint64 {
	h := uint64(len(keys))
	for i := range min(len(keys), 16) {
		h = (h ^ keys[i*(len(keys)-1)/max(min(len(keys), 16)-1, 1)]) * 0x9E3779B97F4A7C15
		h ^= h >> 29
	}
	return h
}

// get returns the list with the given keys. If it is new, get checks the keys and calls slice to split them.
func (l *keyLists) get(keys []uint64, slice func(keys []uint64) ([]int, error)) (*keyList, error) {
	print := fingerprint(keys)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, known := range l.lists[print] {
		if bytes.Equal(bytesOfKeys(known.keys), bytesOfKeys(keys)) {
			return known, nil
		}
	}
	if err := checkKeys(keys); err != nil {
		return nil, err
	}
	bounds, err := slice(keys)
	if err != nil {
		return nil, err
	}
	l.number++
	k := &keyList{l.number, slices.Clone(keys), bounds, make([]bool, 2*(len(bounds)-1))}
	if l.lists == nil {
		l.lists = make(map[uint64][]*keyList)
	}
	l.lists[print] = append(l.lists[print], k)
	l.order = append(l.order, k)
	l.bytes += len(keys) * keyBytes
	for len(l.order) > maxLists || l.bytes > maxListBytes && len(l.order) > 1 {
		l.forgetList(l.order[0])
	}
	return k, nil
}

// forgetList removes the oldest list. The caller holds mu.
func (l *keyLists) forgetList(k *keyList) {
	l.order = l.order[1:]
	l.bytes -= len(k.keys) * keyBytes
	print := fingerprint(k.keys)
	rest := slices.DeleteFunc(l.lists[print], func(other *keyList) bool { return other == k })
	if len(rest) == 0 {
		delete(l.lists, print)
	} else {
		l.lists[print] = rest
	}
}

// first reports whether the keys of a range were not sent to a server yet, and records that they are now.
// rank is that of the range, and second says that the server is the second one that has it.
func (l *keyLists) first(k *keyList, rank int, second bool) bool {
	i := 2 * rank
	if second {
		i++
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !k.sent[i]
	k.sent[i] = true
	return first
}

// serverList is a list of keys that a server knows.
type serverList struct {
	of       *serverLists // nil if it is not remembered
	keys     []uint64
	resolved *resolved // where a store has the values, if it remembers that
	// replicated is the number of the list among those that the other server of the range knows.
	replicated uint64
}

// serverLists has the lists of keys of a customer of a worker, by their numbers. When there are too many, it
// forgets the oldest.
type serverLists struct {
	lists map[uint64]*serverList
	order []uint64 // oldest first
	bytes int      // size of all keys; the other server of a range counts the same
	// places is the size of what the lists that were first remembered here have resolved.
	places, mostPlaces int
}

func newServerLists() *serverLists {
	return &serverLists{lists: make(map[uint64]*serverList), mostPlaces: maxPlacesBytes}
}

// remember records where a store has the values of the list. If the lists then take too much memory for that,
// it forgets those of the others.
func (l *serverList) remember(r *resolved) {
	if s := l.of; s != nil {
		s.places += r.bytes() - l.resolved.bytes()
		if s.places > s.mostPlaces {
			for _, other := range s.lists {
				if other.of == s {
					other.resolved = nil
				}
			}
			s.places = r.bytes()
		}
	}
	l.resolved = r
}

// addList remembers a list.
func (s *serverLists) addList(number uint64, list *serverList) {
	if old := s.lists[number]; old != nil {
		return
	}
	if list.of == nil {
		list.of = s
	}
	s.lists[number] = list
	s.order = append(s.order, number)
	s.bytes += len(list.keys) * keyBytes
	for len(s.order) > maxLists || s.bytes > maxListBytes && len(s.order) > 1 {
		oldest := s.order[0]
		s.order = s.order[1:]
		old := s.lists[oldest]
		s.bytes -= len(old.keys) * keyBytes
		if old.of == s {
			s.places -= old.resolved.bytes()
			old.of, old.resolved = nil, nil
		}
		delete(s.lists, oldest)
	}
}
