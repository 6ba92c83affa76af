//go:build mpi || (nccl && cgo)

package conformance

import (
	"crypto/sha256"
	"fmt"
	stdhash "hash"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// runProcess runs the part of the scripts that belongs to this process, in a job in which each rank is a
// process. It prints digests of the results that all ranks must get with the same bits; title is a part of
// their names. If heard is nil, it does not check frames.
func runProcess(t *testing.T, title string, o testcluster.Options, scripts []*script, heard *frames) {
	digests := make(map[string]stdhash.Hash)
	for _, s := range scripts {
		me := slices.Index(s.members, o.Process.Rank)
		if me < 0 || s.joined>>me&1 == 1 {
			continue // this rank does not get all results
		}
		key := fmt.Sprint(s.members, s.joined)
		if digests[key] == nil {
			digests[key] = sha256.New()
		}
		for _, jobs := range s.rounds {
			for _, j := range jobs {
				j.digest = digests[key]
			}
		}
	}
	o.Sets = sets(o.Ranks)
	testcluster.Run(t, o, func(r *testcluster.Rank) {
		for _, s := range scripts {
			s.run(r, nil)
			if heard != nil && r.Rank == 0 {
				s.checkGranted(r, heard)
			}
		}
	})
	for key, d := range digests {
		fmt.Printf("digest of %s %s: %x\n", key, title, d.Sum(nil))
	}
	t.Logf("%d cases", len(scripts))
}

// checkGranted checks, at rank 0 of a job whose ranks are processes, that rank 0 has granted tensors together
// if they can be fused.
func (s *script) checkGranted(r *testcluster.Rank, heard *frames) {
	other := slices.IndexFunc(s.members, func(m topo.Rank) bool { return m != 0 })
	if other < 0 || s.members[0] != 0 || s.joined>>other&1 == 1 {
		return
	}
	for _, j := range s.rounds[0] {
		_, granted := heard.take(s.members[other], j.name)
		s.checkFused(r, j, granted)
	}
}
