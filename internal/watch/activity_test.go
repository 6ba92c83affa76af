package watch

import (
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// The name of the exchange in timelines begins with the backend, and contains Horovod's name for the
// operation.
func TestExchangeNames(t *testing.T) {
	for b := message.NoBackend + 1; b < message.Backend(message.NumBackends); b++ {
		prefix := strings.ToUpper(b.String()) + "_"
		for _, c := range []struct {
			r    message.Response
			want string
		}{
			{message.Response{Kind: message.Allreduce, Op: tensor.Sum}, "ALLREDUCE"},
			{message.Response{Kind: message.Allreduce, Op: tensor.Adasum}, "ADASUM_ALLREDUCE"},
			{message.Response{Kind: message.Allgather}, "ALLGATHER"},
			{message.Response{Kind: message.Broadcast}, "BCAST"},
			{message.Response{Kind: message.Alltoall}, "ALLTOALL"},
			{message.Response{Kind: message.Reducescatter, Op: tensor.Max}, "REDUCESCATTER"},
		} {
			if got := activityName(ops.Exchanging, &c.r, b); got != prefix+c.want {
				t.Errorf("%v of backend %v: got %q, want %q", c.r.Kind, b, got, prefix+c.want)
			}
		}
	}
}
