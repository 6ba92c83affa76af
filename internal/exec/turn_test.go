package exec

import (
	"testing"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/ops"
	"github.com/gohvd/gohvd/tensorqueue"
)

// stepping is a backend that is never used.
type stepping struct{ ops.Backend }

// A turn executes a large allgather or broadcast only if no tensor has to be copied or allocated first, because
// no heartbeat leaves the rank during the first step.
func TestFirstStepOfATurnIsShort(t *testing.T) {
	x := New(Config{Observer: unwatched{}, Pin: func() {}, Backends: ops.Registry{{ID: message.TCP, Lists: ops.Always,
		New: func(topo.ProcessSetID, []topo.Rank, int) (ops.Backend, error) { return stepping{}, nil }}}})
	l, err := x.NewLane(controller.Global(2), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, numBytes := range []int64{maxDriveBytes, maxDriveBytes + 1} {
		for _, test := range []struct {
			kind          message.Kind
			root          topo.Rank
			inPlace, fits bool
		}{
			{message.Allgather, 0, true, true},
			{message.Allgather, 0, false, false},
			{message.Broadcast, 0, true, true},
			{message.Broadcast, 0, false, false},
			{message.Broadcast, 1, false, true},
		} {
			r := &message.Response{Kind: test.kind, DType: tensor.Uint8, Op: tensor.Sum, Root: test.root,
				Shape: tensor.Shape{numBytes / 2}, FirstDims: []int64{numBytes / 2, numBytes - numBytes/2}}
			if test.kind == message.Broadcast {
				r.Shape = tensor.Shape{numBytes}
			}
			w := &Work{Grant: &controller.Grant{Backend: message.TCP, Responses: []*message.Response{r}},
				Entries: []*tensorqueue.Entry{{InPlace: test.inPlace}}}
			if got, want := l.machine.fitsInTurn(w, true), test.fits || numBytes == maxDriveBytes; got != want {
				t.Errorf("%v of %d bytes, root %d, in place %t: got %t, want %t", test.kind, numBytes, test.root,
					test.inPlace, got, want)
			}
		}
	}
}
