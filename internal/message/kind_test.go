package message_test

import (
	"fmt"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
)

// The numbers of these values are in frames, in the frames of a sidecar's clients and in tables of
// algorithms, so no number may change.
func TestNumbersInFrames(t *testing.T) {
	check(t, []named[message.Kind]{
		{message.NoKind, "none"}, {message.Allreduce, "allreduce"}, {message.Allgather, "allgather"},
		{message.Broadcast, "broadcast"}, {message.Alltoall, "alltoall"},
		{message.Reducescatter, "reducescatter"}, {message.Barrier, "barrier"}, {message.Join, "join"},
		{message.AddProcessSet, "add process set"}, {message.RemoveProcessSet, "remove process set"},
		{message.Reduce, "reduce"}, {message.Gather, "gather"}, {message.Scatter, "scatter"},
		{message.Error, "error"}, {message.Send, "send"}, {message.Recv, "recv"},
		{message.Push, "push"}, {message.Pull, "pull"}, {message.PushPull, "pushpull"}, {19, "Kind(19)"},
	})
	check(t, []named[message.Backend]{
		{message.NoBackend, "none"}, {message.TCP, "tcp"}, {message.SHM, "shm"}, {message.Hier, "hier"},
		{message.MPI, "mpi"}, {message.NCCL, "nccl"}, {6, "Backend(6)"},
	})
	check(t, []named[message.Algorithm]{
		{message.NoAlgorithm, "none"}, {message.Ring, "ring"}, {message.Tree, "tree"},
		{message.Direct, "direct"}, {message.HalvingDoubling, "halving-doubling"},
		{message.Exchange, "exchange"}, {message.RecursiveDoubling, "recursive-doubling"},
		{message.Bruck, "bruck"}, {message.Chain, "chain"}, {message.TwoLevel, "two-level"},
		{10, "Algorithm(10)"},
	})
	check(t, []named[message.UpType]{
		{0, "?"}, {message.UpNews, "up"}, {message.UpHeartbeat, "heartbeat"}, {message.UpBye, "bye"},
		{message.UpSuspect, "suspect"}, {message.UpTimeout, "timeout"}, {message.UpReleased, "released"},
		{message.UpLost, "lost"}, {message.UpFault, "fault"}, {9, "UpType(9)"},
	})
	for i, v := range []message.DownType{message.DownCycle, message.DownHeartbeat, message.DownFail,
		message.DownClose, message.DownLeft} {
		if int(v) != i+1 {
			t.Errorf("got type %d of a Down frame, want %d", v, i+1)
		}
	}
}

// named is a value with the text that String must return.
type named[T any] struct {
	value T
	name  string
}

// check checks that the values have ascending numbers from 0, and their names.
func check[T interface {
	~uint8
	fmt.Stringer
}](t *testing.T, all []named[T]) {
	t.Helper()
	for number, v := range all {
		if int(v.value) != number || v.value.String() != v.name {
			t.Errorf("got %T %d with the name %v, want %s with the number %d", v.value, uint8(v.value), v.value,
				v.name, number)
		}
	}
}
