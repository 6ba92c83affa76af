package controller_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// Rank 0 waits for tensors that no other rank submits, and the other ranks wait for tensors that rank 0 does
// not submit. The cost of the verdict grows linearly with the number of tensors. Otherwise rank 0 would send
// no heartbeats meanwhile, and the other ranks would find that rank 0 has failed.
func TestVerdictOnManyWaitingTensors(t *testing.T) {
	const ranks, tensors = 64, 100
	requests := func(prefix string) *message.Up {
		var u message.UpSet
		for i := range tensors {
			u.Requests = append(u.Requests, allreduce(fmt.Sprint(prefix, i), 1))
		}
		return &message.Up{Type: message.UpNews, Sets: []message.UpSet{u}}
	}
	var jobs []*controller.Coordinator
	for range 2 { // AllocsPerRun calls its argument twice
		c := newTestCoordinator(ranks)
		c.Step(0, requests("own"))
		for r := 1; r < ranks; r++ {
			c.Step(topo.Rank(r), requests("common"))
		}
		c.Step(1, &message.Up{Type: message.UpTimeout, Tensor: "common0", Millis: 500})
		jobs = append(jobs, c)
	}
	allocs := testing.AllocsPerRun(1, func() {
		if v := verdictOf(jobs[0]); v == nil || !slices.Equal(v.Ranks, []topo.Rank{0}) {
			t.Errorf("got verdict %v, want one of rank 0", v)
		}
		jobs = jobs[1:]
	})
	if perTensor := allocs / (2 * tensors); perTensor > 50 {
		t.Errorf("the verdict allocates memory %.0f times for each tensor, want at most 50", perTensor)
	}
}
