package exec

import (
	"fmt"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/outcome"
	"github.com/gohvd/gohvd/tensorqueue"
)

// finish reports the results of the tensors of w, unless that was done before. If err is nil, a refused
// tensor ends with the error in w.Refused, and every other tensor ends without an error. Otherwise all
// tensors end with err. Every operation that a lane has begun, or was to begin, ends here.
func (m *machine) finish(w *Work, err error) {
	if w.finished {
		return
	}
	w.finished = true
	m.cfg.Observer.Ended(w, err)
	for i, e := range w.Entries {
		cause := err
		if cause == nil && i < len(w.Refused) {
			cause = w.Refused[i]
		}
		if cause != nil {
			cause = outcome.Of(&e.Request, cause)
		}
		e.Finish(cause)
	}
}

// checkResult returns an error if other ranks determine the size of the result and the result, in host memory
// or on a device, is larger than it may be. In this case the caller must not allocate the result.
func (cfg *Config) checkResult(k message.Kind, onDevice bool, numBytes int64) error {
	limit, reason := cfg.MaxResultBytes, "the memory that this rank can get (of the host, or by its cgroup)"
	if onDevice {
		limit, reason = cfg.MaxDeviceBytes, "the memory size of the host"
	}
	if k.Ragged() && numBytes > limit {
		return fmt.Errorf("the result has %d bytes, want at most %d, %s", numBytes, limit, reason)
	}
	return nil
}

// output returns the buffer for the result of e. If e has no buffer yet because the size of the result was
// unknown, output allocates one. It returns nil if e has a buffer of another size. That happens with an
// operation in place if other ranks contribute more or less than this rank expects.
func output(e *tensorqueue.Entry, numBytes int) []byte {
	if e.Allocate != nil && e.Output == nil {
		e.Output = e.Allocate(numBytes)
		e.Allocate = nil // it is called once, also if it fails
	}
	if len(e.Output) != numBytes {
		return nil
	}
	return e.Output
}

// refuseSize refuses tensor i of w because the output of the tensor cannot hold a result of numBytes.
func refuseSize(w *Work, i int, numBytes int) {
	e := w.Entries[i]
	place := "the output, which is also the input,"
	if !e.InPlace {
		place = "the output"
	}
	why := "not all ranks contributed as many rows as this rank"
	if e.Request.Kind == message.Scatter {
		why = "the root has sent more or less than this rank has room for"
	}
	text := fmt.Sprintf("%v %q: the result has %d bytes, but %s has %d bytes: %s",
		e.Request.Kind, e.Request.Name, numBytes, place, len(e.Output), why)
	if rows := w.Grant.Responses[i].FirstDims; rows != nil {
		text += fmt.Sprintf(": rows by rank %v", rows)
	} else if len(e.Received) > 0 {
		text += fmt.Sprintf(": rows received by sender %v", e.Received)
	}
	w.refuse(i, &outcome.MismatchError{Tensor: e.Request.Name, Text: text})
}

func copyUnlessSame(dst, src []byte) {
	if len(dst) > 0 && len(src) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}
