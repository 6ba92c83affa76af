package watch

import (
	"strings"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// exchangeNames holds the timeline names of the activity Exchanging, by backend and kind. They follow the
// pattern of Horovod's names, such as MPI_ALLREDUCE. adasumNames holds those of Adasum.
var exchangeNames, adasumNames = func() (names [message.NumBackends][message.NumKinds]string,
	adasum [message.NumBackends]string) {
	kinds := map[message.Kind]string{
		message.Allreduce: "ALLREDUCE", message.Allgather: "ALLGATHER", message.Broadcast: "BCAST",
		message.Alltoall:      "ALLTOALL",
		message.Reducescatter: "REDUCESCATTER", message.Reduce: "REDUCE",
		message.Gather: "GATHER", message.Scatter: "SCATTER",
		message.Send: "SEND", message.Recv: "RECV",
	}
	for b := range message.Backend(message.NumBackends) {
		prefix := strings.ToUpper(b.String()) + "_"
		adasum[b] = prefix + "ADASUM_ALLREDUCE"
		for k, kind := range kinds {
			names[b][k] = prefix + kind
		}
	}
	return names, adasum
}()

// activityName returns the name of an activity for timelines. It is Horovod's name if Horovod has the same
// activity.
func activityName(a ops.Activity, r *message.Response, b message.Backend) string {
	switch {
	case a == ops.Connecting:
		return "INIT_" + strings.ToUpper(b.String())
	case a == ops.AwaitingData:
		return "WAIT_FOR_DATA"
	case a == ops.CopyingIn:
		return "MEMCPY_IN_HOST_BUFFER"
	case a == ops.CopyingOut:
		return "MEMCPY_OUT_HOST_BUFFER"
	case a == ops.Packing:
		return "MEMCPY_IN_FUSION_BUFFER"
	case a == ops.Unpacking:
		return "MEMCPY_OUT_FUSION_BUFFER"
	case r.Op == tensor.Adasum:
		return adasumNames[b]
	}
	return exchangeNames[b][r.Kind]
}
