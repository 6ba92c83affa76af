package message

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Check returns an error if r is invalid by itself. It does not check whether the requests of the ranks
// agree, which the coordinator does.
func (r *Request) Check() error {
	if !r.Kind.Valid() {
		return fmt.Errorf("request %q: got unknown kind %d", r.Name, r.Kind)
	}
	if err := CheckName(r.Name); err != nil {
		return err
	}
	if err := r.CheckParameters(); err != nil {
		return fmt.Errorf("%v %q: %w", r.Kind, r.Name, err)
	}
	return nil
}

// CheckParameters checks everything that Check does except the name, which may be missing. Its errors do not
// name the operation.
func (r *Request) CheckParameters() error {
	if (r.Group == "") != (r.GroupSize == 0) || r.GroupSize < 0 || r.Group != "" && !r.Kind.MovesData() {
		return fmt.Errorf("got group %q with a size of %d, want a name and a size of at least 1, or no group; only an operation that moves data can be in a group", r.Group, r.GroupSize)
	}
	if r.Group != "" {
		if err := CheckName(r.Group); err != nil {
			return err
		}
	}
	if !r.Device.Valid() {
		return fmt.Errorf("got device %d, want 0 for the host, or 1 to %d for a CUDA device", r.Device,
			tensor.MaxCUDADevices)
	}
	if len(r.Parts) > 0 {
		return r.checkParts()
	}
	if r.MembersOnly && r.Kind != AddProcessSet {
		return fmt.Errorf("got a request of the members only, but only a process set can be added in this way")
	}
	switch r.Kind {
	case AddProcessSet:
		return checkMembers(r.Ranks)
	case RemoveProcessSet:
		if r.Set == topo.Global {
			return fmt.Errorf("the global process set cannot be removed")
		}
		return nil
	case Barrier, Join:
		return nil
	}
	if _, err := checkTensor(r.DType, r.Shape); err != nil {
		return err
	}
	if r.Kind.HasRoot() && r.Root < 0 {
		return fmt.Errorf("got root rank %d, want at least 0", r.Root)
	}
	if r.Kind.Reduces() {
		return r.checkReduction(r.DType)
	}
	return nil
}

// checkParts checks the parameters of a request for a whole group.
func (r *Request) checkParts() error {
	switch {
	case r.Kind != Allreduce:
		return fmt.Errorf("got a request for a whole group, but only allreduce supports such requests")
	case r.Group != "":
		return fmt.Errorf("got a request for a whole group that itself belongs to group %q", r.Group)
	case len(r.Shape) != 1:
		return fmt.Errorf("got shape %v for a request that stands for a whole group, want a single dimension, the total number of elements", r.Shape)
	}
	if err := r.Parts.check(r.DType, r.Shape[0]); err != nil {
		return err
	}
	for dt := range r.Parts.Types() {
		if err := r.checkReduction(dt); err != nil {
			return err
		}
	}
	return nil
}

// checkReduction checks the parameters of a reduction of elements of type dt: the reduction, the scale
// factors and the compression.
func (r *Request) checkReduction(dt tensor.DType) error {
	if err := tensor.CheckReduce(r.Op, dt); err != nil {
		return err
	}
	if r.Kind != Allreduce && r.Op == tensor.Adasum {
		return fmt.Errorf("got reduction adasum, which only allreduce supports")
	}
	if math.IsNaN(r.Prescale) || math.IsNaN(r.Postscale) {
		return fmt.Errorf("got prescale factor %v and postscale factor %v, want factors that are not NaN", r.Prescale, r.Postscale)
	}
	if r.Prescale != 1 || r.Postscale != 1 {
		if err := tensor.CheckScale(dt); err != nil {
			return err
		}
	}
	if r.Wire != tensor.Invalid {
		switch {
		case r.Kind != Allreduce:
			return fmt.Errorf("got compression to %v, which only allreduce supports", r.Wire)
		case !r.Wire.IsHalf() || dt != tensor.Float32 && dt != tensor.Float64:
			return fmt.Errorf("got compression of %v to %v, want compression of float32 or float64 to float16 or bfloat16", dt, r.Wire)
		}
	}
	return nil
}

// check returns an error if the response is invalid by itself. Members call it before they compute with the
// sizes in a response.
func (r *Response) check() error {
	if r.Kind == Error {
		if len(r.Ranks) > 0 {
			if err := checkMembers(r.Ranks); err != nil {
				return err
			}
		}
		return CheckName(r.Name)
	}
	q := r.request()
	if err := q.Check(); err != nil {
		return err
	}
	if r.Kind.Ragged() && (len(r.Shape) == 0 || r.Shape[0] != 0) || r.Kind == Reducescatter &&
		len(r.Shape) == 0 {
		return fmt.Errorf("%v %q: got a response with shape %v, want at least one dimension, and 0 as the first dimension of an allgather or alltoall", r.Kind, r.Name, r.Shape)
	}
	for _, d := range r.Devices {
		if !d.Valid() {
			return fmt.Errorf("%v %q: got device %d, want at most %d", r.Kind, r.Name, d, tensor.MaxCUDADevices)
		}
	}
	if len(r.Devices) > 0 && !r.Kind.MovesData() {
		return fmt.Errorf("%v %q: got devices %v, but the operation has no tensor", r.Kind, r.Name, r.Devices)
	}
	if r.Kind == AddProcessSet && r.Set == topo.Global {
		return fmt.Errorf("%v %q: got process set 0, want the number of a new process set", r.Kind, r.Name)
	}
	if r.Kind == Allgather {
		if _, err := r.NumElems(); err != nil {
			return fmt.Errorf("allgather %q: got first dimensions %v for shape %v: a dimension is negative, or the result is too large", r.Name, r.FirstDims, r.Shape)
		}
	}
	return nil
}

// CheckName returns an error if name is not a valid name of a tensor or a group.
func CheckName(name string) error {
	if name == "" || len(name) > MaxNameBytes {
		return fmt.Errorf("got a tensor name of %d bytes, want 1 to %d", len(name), MaxNameBytes)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("tensor name %q is not UTF-8", name)
	}
	return nil
}

// checkMembers checks whether ranks can be the members of a process set. There must be at least one rank, and
// the ranks must be in ascending order.
func checkMembers(ranks []topo.Rank) error {
	if len(ranks) == 0 {
		return fmt.Errorf("got a process set without ranks")
	}
	for i, r := range ranks {
		if r < 0 || r >= MaxRanks || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("got ranks %v, want ascending ranks from 0 to %d", ranks, MaxRanks-1)
		}
	}
	return nil
}

// checkTensor checks a tensor and returns its number of elements. The size of the tensor in bytes must fit
// into an int64.
func checkTensor(dt tensor.DType, s tensor.Shape) (numElems int64, err error) {
	if !dt.Valid() {
		return 0, fmt.Errorf("got unknown element type %d", dt)
	}
	if len(s) > MaxDims {
		return 0, fmt.Errorf("got %d dimensions, want at most %d", len(s), MaxDims)
	}
	n, err := s.NumElems()
	if err != nil {
		return 0, err
	}
	if n > math.MaxInt64/int64(dt.Size()) {
		return 0, fmt.Errorf("a tensor of type %[2]v with shape %[1]v has more than 2^63-1 bytes", s, dt)
	}
	return n, nil
}
