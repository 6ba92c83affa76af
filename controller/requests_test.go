package controller_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// On hosts with 8 devices, the coordinator keeps 8 requests for a tensor, not one for each rank. The result
// is still about the request of each rank.
func TestSharedRequests(t *testing.T) {
	const ranks, devices = 16, 8
	for last, want := range map[tensor.DType]string{
		tensor.Float32: "",
		tensor.Float64: `allreduce "g": mismatched data types: ranks 0-14 sent float32[1], rank 15 sent float64[1]`,
	} {
		c := controller.NewCoordinator(controller.CoordinatorConfig{
			Sets:            []controller.Set{controller.Global(ranks)},
			LivenessTimeout: time.Hour, StallWarning: time.Hour, Plan: plan(),
		}, 0)
		var all []tensor.Device
		for r := range topo.Rank(ranks) {
			q := allreduce("g", 1)
			q.Device = tensor.Device(1 + r%devices)
			all = append(all, q.Device)
			if r == ranks-1 {
				if got := c.DistinctRequests("g"); got != devices {
					t.Errorf("%d ranks have %d requests, want %d", r, got, devices)
				}
				q.DType = last
			}
			c.Step(r, news(q))
		}
		c.Expire()
		var got *message.Response
		for _, o := range c.Ready() {
			for _, s := range o.Down.Sets {
				for _, g := range s.Grants {
					got = g.Full[0]
				}
			}
		}
		c.Advance()
		if got == nil || got.Text != want || want == "" && !slices.Equal(got.Devices, all) {
			t.Errorf("last rank sent %v: got the response %+v, want devices %v or the error %q", last, got, all, want)
		}
	}
}
