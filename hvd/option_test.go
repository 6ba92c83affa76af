package hvd_test

import (
	"slices"
	"testing"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/hvd/cuda"
)

// applies reports whether option applies to an operation with options of type O. If it does not, a call with
// it does not compile.
func applies[O any](option any) bool {
	_, ok := option.(O)
	return ok
}

// TestOptionsByOperation checks to which operations each option applies.
func TestOptionsByOperation(t *testing.T) {
	operations := []struct {
		name    string
		applies func(option any) bool
		want    []string
	}{
		{"Allreduce", applies[hvd.AllreduceOption], []string{"On", "Timeout", "Over", "Name", "Shape", "InPlace",
			"Op", "Prescale", "Postscale", "CompressFP16", "CompressBF16", "ErrorFeedback"}},
		{"GroupedAllreduce", applies[hvd.GroupedAllreduceOption], []string{"On", "Timeout", "Over", "Name", "Shapes",
			"InPlace", "Op", "Prescale", "Postscale", "CompressFP16", "CompressBF16", "ErrorFeedback"}},
		{"Reduce", applies[hvd.ReduceOption], []string{"On", "Timeout", "Over", "Name", "Shape", "InPlace", "Op",
			"Prescale", "Postscale"}},
		{"GroupedReducescatter", applies[hvd.GroupedReduceOption], []string{"On", "Timeout", "Over", "Name",
			"Shapes", "InPlace", "Op", "Prescale", "Postscale"}},
		{"Allgather", applies[hvd.MoveOption], []string{"On", "Timeout", "Over", "Name", "Shape", "InPlace"}},
		{"GroupedAllgather", applies[hvd.GroupedMoveOption], []string{"On", "Timeout", "Over", "Name", "Shapes",
			"InPlace"}},
		{"Gather", applies[hvd.GatherOption], []string{"On", "Timeout", "Over", "Name", "Shape"}},
		{"Barrier", applies[hvd.BarrierOption], []string{"On", "Timeout", "Over", "Name"}},
		{"Send", applies[hvd.MessageOption], []string{"On", "Timeout", "Over"}},
		{"Join", applies[hvd.JoinOption], []string{"On", "Timeout", "Over", "Empty"}},
		{"AddProcessSet", applies[hvd.AddProcessSetOption], []string{"On", "Timeout", "Name", "MembersOnly"}},
		{"RemoveProcessSet", applies[hvd.RemoveProcessSetOption], []string{"On", "Timeout"}},
		{"cuda.Allreduce", applies[cuda.AllreduceOption], []string{"On", "Timeout", "Over", "Name", "Shape", "Op",
			"Prescale", "Postscale", "CompressFP16", "CompressBF16", "ErrorFeedback"}},
		{"cuda.GroupedAllreduce", applies[cuda.GroupedAllreduceOption], []string{"On", "Timeout", "Over", "Name",
			"Shapes", "Op", "Prescale", "Postscale", "CompressFP16", "CompressBF16", "ErrorFeedback"}},
		{"cuda.Reduce", applies[cuda.ReduceOption], []string{"On", "Timeout", "Over", "Name", "Shape", "Op",
			"Prescale", "Postscale"}},
		{"cuda.GroupedReducescatter", applies[cuda.GroupedReduceOption], []string{"On", "Timeout", "Over", "Name",
			"Shapes", "Op", "Prescale", "Postscale"}},
		{"cuda.Alltoall", applies[cuda.MoveOption], []string{"On", "Timeout", "Over", "Name", "Shape"}},
		{"cuda.GroupedAllgather", applies[cuda.GroupedMoveOption], []string{"On", "Timeout", "Over", "Name",
			"Shapes"}},
	}
	for name, option := range map[string]any{
		"On": hvd.On(nil), "Timeout": hvd.Timeout(1), "Over": hvd.Over(nil), "Name": hvd.Name("x"),
		"Shape": hvd.Shape(1), "Shapes": hvd.Shapes(), "InPlace": hvd.InPlace(), "Op": hvd.Op(hvd.Sum),
		"Prescale": hvd.Prescale(1), "Postscale": hvd.Postscale(1), "CompressFP16": hvd.CompressFP16(),
		"CompressBF16": hvd.CompressBF16(), "ErrorFeedback": hvd.ErrorFeedback(), "Empty": hvd.Empty(),
		"MembersOnly": hvd.MembersOnly(),
	} {
		for _, o := range operations {
			if got, want := o.applies(option), slices.Contains(o.want, name); got != want {
				t.Errorf("%s of %s: applies is %v, want %v", name, o.name, got, want)
			}
		}
	}
}
