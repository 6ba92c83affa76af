package exec

import (
	"sync"
	"time"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/fusion"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops"
)

// A machine executes the operations of a lane, one at a time.
type machine struct {
	set       controller.Set
	me        int // the position of this rank in the set
	manager   *ops.Manager
	cfg       *Config
	warned    *sync.Map // the reasons that warnInHost has logged for any lane
	scratch   scratch
	execution execution
	// setLimit is called before the entries of an operation complete earlier than the operation. ended is
	// called when an operation that was launched on a device has ended.
	setLimit func(*Work, limit)
	ended    func(*Work, error)
}

// scratch holds memory that a lane keeps between operations.
type scratch struct {
	fused  fusion.Buffer // memory for data that is not in a caller's buffer
	counts []int64       // numbers of bytes, by rank or by tensor
	// tensors lists the tensors of an operation that the backend reads and writes in place.
	tensors []ops.Tensor
	wide    fusion.Buffer // wide and back are memory for compression
	back    fusion.Buffer
	ready   []*cuda.Event // when the tensors on a device can be read
	streams []uintptr     // that wait for an operation on a device
	losses  []lossKey
	types   []tensor.DType // the element types of a group
	// residuals are the accumulated compression losses of tensors with error feedback.
	residuals map[lossKey]*residual
}

// execution is the state of the operation that a lane executes. An operation runs in parts, one after
// another. Most operations have one part. An allreduce of a group has at least one part for each element
// type. It has more if the tensors do not fit into the fusion buffer together.
type execution struct {
	work    *Work
	backend ops.Backend
	lists   bool           // whether the backend reads and writes tensors in place
	op      ops.Operation  // the operation of the current part
	device  ops.DevicePart // op.Device, if the operation is on devices
	one     [1]ops.Tensor  // the tensor of the current part, if there is only one

	buf []byte // the data that is copied to the outputs at the end
	reduction
}

// reduction is the state of an allreduce or of a reduce between its parts.
type reduction struct {
	types   []tensor.DType // the element types after the current one
	scaling scaling
	// tensors holds this rank's tensors of the current type. It is empty if this rank is absent. counts holds
	// the number of bytes to send for each tensor. It is nil if all tensors form one part and no counts are
	// needed. losses holds the key of each tensor's compression loss. It is nil if no tensor has error
	// feedback.
	tensors []ops.Tensor
	counts  []int64
	losses  []lossKey
	next    int // index of the first tensor after the current part
	batch   batch
	staged  bool // whether the part is reduced in execution.buf, which is its output or the fusion buffer
	direct  bool // whether execution.buf is the output of the part
}

// A batch holds the tensors that are reduced as one part.
type batch struct {
	tensors []ops.Tensor
	counts  []int64
	losses  []lossKey
}

// lossKey identifies the compression loss of a tensor. The key of a single tensor is its name. The key of a
// tensor in a group is the name of the group, the index of the tensor and the number of tensors. An empty
// name means that the tensor has no error feedback.
type lossKey struct {
	name         string
	index, count int
}

// residual is the accumulated compression loss of a tensor, for error feedback.
type residual struct {
	dt  tensor.DType
	pre float64 // the prescale factor of the tensor
	buf []byte
}

// limit is the time limit of an operation whose entries have completed before its end.
type limit struct {
	name    string        // of the tensor with the limit
	timeout time.Duration // 0 means that there is no limit
	due     time.Duration // when the timeout ends, or when it must be reported again
}
