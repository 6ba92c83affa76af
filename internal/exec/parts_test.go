package exec

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// Each part of a large group has the tensors, the sizes and the compression losses of the same tensors.
func TestPartsOfGroup(t *testing.T) {
	m := new(machine)
	x := &m.execution
	x.work = &Work{Grant: &controller.Grant{Responses: []*message.Response{{Kind: message.Allreduce,
		Op: tensor.Sum}}}}
	x.counts = []int64{maxStagedBytes - 8, 8, 8, maxStagedBytes + 8, 8}
	for i := range x.counts {
		x.tensors = append(x.tensors, ops.Tensor{In: make([]byte, i)})
		x.losses = append(x.losses, lossKey{"g", i, len(x.counts)})
	}
	var got [][]int
	for x.hasParts() {
		if err := m.nextPart(); err != nil {
			t.Fatal(err)
		}
		b, part := x.batch, []int(nil)
		for k, of := range b.losses {
			part = append(part, of.index)
			if len(b.tensors) != len(b.losses) || len(b.counts) != len(b.losses) ||
				len(b.tensors[k].In) != of.index || b.counts[k] != x.counts[of.index] {
				t.Fatalf("got the part %+v", b)
			}
		}
		got = append(got, part)
	}
	if want := "[[0 1] [2] [3] [4]]"; fmt.Sprint(got) != want {
		t.Errorf("got the parts %v, want %s", got, want)
	}
}
