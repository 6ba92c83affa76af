package analysis_test

import (
	"fmt"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Example finds out which ranks were late and which ranks others wait for. In each of three steps, rank 1
// asks for an operation 5 ms after rank 0. Then rank 0 asks for another operation, and rank 1 does not.
func Example() {
	const ms = time.Millisecond
	late := analysis.NewLate(func(*analysis.Member, time.Duration, time.Duration, time.Duration) {})
	var snapshots []*analysis.Snapshot
	members := []*analysis.Member{late.Member(0, analysis.Clock{Known: true}),
		late.Member(1, analysis.Clock{Known: true})}
	for rank, m := range members {
		s := &analysis.Snapshot{Rank: rank, Size: 2, Host: "h", At: time.Second}
		snapshots = append(snapshots, s)
		for step := range 3 {
			at := time.Duration(step+1) * 100 * ms
			r := trace.Record{
				Number: uint64(step + 1), Kind: message.Allreduce, Name: "grad/0",
				Submitted: at + time.Duration(rank)*5*ms, Granted: at + 6*ms, Begun: at + 6*ms,
				Ended: at + 9*ms,
			}
			late.Add(m, &trace.Operation{Records: []trace.Record{r}})
			s.Operations = append(s.Operations, r)
			s.Recorded++
		}
	}
	snapshots[0].Pending = []trace.Record{{Kind: message.Allreduce, Name: "grad/1", Submitted: 400 * ms}}

	for _, r := range late.Findings().Ranks {
		fmt.Printf("rank %d held up the others for %v\n", r.Rank, r.Held)
	}
	for _, w := range analysis.Analyse(snapshots, 2, nil).Waiting {
		fmt.Printf("%s has waited for %v for %s of rank %d\n", topo.FormatRanks(w.Ranks), w.Longest,
			w.Names[0], w.Missing[0].Rank)
	}
	// Output:
	// rank 0 held up the others for 0s
	// rank 1 held up the others for 15ms
	// rank 0 has waited for 600ms for grad/1 of rank 1
}
