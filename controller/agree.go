package controller

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// agree makes the response to the requests of the members of a set. The slice requests has an element for
// each member, in the order of the set. If a member takes part without making a request, because it has
// joined or has shut down, its element is nil. At least one member has made a request.
//
// The response is an Error if the requests contradict each other, or if the operation cannot run without the
// members that made no request. The text of the Error says which rank sent what. If there are several
// contradictions, the text names the first in the order of Horovod's checks. Unlike Horovod, agree compares
// the operations before the element types, because a barrier has no element type.
func agree(set *Set, requests []*message.Request, joined *joinState) *message.Response {
	first := firstOf(requests)
	r := &message.Response{
		Kind: first.Kind, Name: first.Name, DType: first.DType, Shape: first.Shape,
		Op: first.Op, Prescale: first.Prescale, Postscale: first.Postscale, Wire: first.Wire,
		Root:  first.Root,
		Group: first.Group, GroupSize: first.GroupSize, Parts: first.Parts, Ranks: first.Ranks,
		Set: first.Set,
	}
	v := &requestSet{set: set, requests: requests, joined: joined, first: first}
	text := v.disagreement()
	if text == "" && first.Kind == message.Scatter {
		r.Shape = v.root().Shape
	}
	if text == "" && first.Kind.Ragged() {
		r.Shape = append(r.Shape[:0:0], r.Shape...)
		r.Shape[0] = 0
	}
	if text == "" && first.Kind == message.Allgather {
		r.FirstDims = make([]int64, len(requests))
		for i := range requests {
			if requests[i] != nil {
				r.FirstDims[i] = requests[i].Shape[0]
			}
		}
		if _, err := r.NumElems(); err != nil {
			text = v.errorText("the result is too large: the ranks have first dimensions %v, and the shape is %v", r.FirstDims,
				r.Shape)
		}
	}
	if first.Kind.MovesData() && first.Device != tensor.Host {
		r.Devices = make([]tensor.Device, len(requests))
		for i := range requests {
			r.Devices[i] = joined.devices[i]
			if requests[i] != nil {
				r.Devices[i] = requests[i].Device
			}
		}
	}
	if text != "" {
		return &message.Response{Kind: message.Error, Name: first.Name, Text: text}
	}
	return r
}

// firstOf returns the first request in the order of the members.
func firstOf(requests []*message.Request) *message.Request {
	for _, q := range requests {
		if q != nil {
			return q
		}
	}
	return nil
}

// requestSet holds the requests of all members for one name, so that they can be compared.
type requestSet struct {
	set      *Set
	requests []*message.Request
	joined   *joinState
	first    *message.Request
}

func (v *requestSet) errorText(format string, args ...any) string {
	return fmt.Sprintf("%v %q: %s", v.first.Kind, v.first.Name, fmt.Sprintf(format, args...))
}

// differ reports whether same returns false for any request.
func (v *requestSet) differ(same func(q *message.Request) bool) bool {
	var last *message.Request // equal requests share one
	for _, q := range v.requests {
		if q != nil && q != last && !same(q) {
			return true
		}
		last = q
	}
	return false
}

// mismatch returns a text that says what differs between the requests and what each rank sent. It returns ""
// if same returns true for all requests.
func (v *requestSet) mismatch(what, verb string, format func(q *message.Request) string,
	same func(q *message.Request) bool) string {
	if !v.differ(same) {
		return ""
	}
	return v.errorText("mismatched %s: %s", what, v.valuesByRank(verb, format))
}

// tensorOf formats the element type and the shape of a tensor. If the operation sends rows, it omits the
// first dimension, which may differ between ranks and is unknown to the coordinator if a rank has only voted.
// It omits the shape of a scatter, which only the root has.
func tensorOf(q *message.Request) string {
	if q.Kind == message.Scatter {
		return q.DType.String()
	}
	shape := q.Shape.String()
	if q.Kind.SendsRows() && len(q.Shape) > 0 {
		_, rest, more := strings.Cut(shape, " ")
		if shape = "[*]"; more {
			shape = "[* " + rest
		}
	}
	return q.DType.String() + shape
}

// disagreement returns a text that says how the requests contradict each other or why the operation cannot
// run. It returns "" if the requests agree.
func (v *requestSet) disagreement() string {
	first := v.first
	if v.differ(func(q *message.Request) bool { return q.Kind == first.Kind }) {
		return fmt.Sprintf("tensor %q: mismatched operations: %s", first.Name,
			v.valuesByRank("called", func(q *message.Request) string { return q.Kind.String() }))
	}
	var checks []func() string
	switch first.Kind {
	case message.AddProcessSet:
		checks = append(checks, v.callers, v.members, v.absence)
	case message.RemoveProcessSet:
		checks = append(checks, v.ids, v.absence)
	case message.Allreduce:
		checks = append(checks, v.parts, v.types, v.shapes, v.factors, v.reductions, v.compressions, v.groups)
	case message.Reduce:
		checks = append(checks, v.types, v.shapes, v.factors, v.reductions, v.groups, v.roots)
	case message.Reducescatter:
		checks = append(checks, v.types, v.shapes, v.factors, v.reductions, v.groups, v.absence, v.scalars)
	case message.Broadcast:
		checks = append(checks, v.types, v.shapes, v.groups, v.absence, v.roots)
	case message.Gather:
		checks = append(checks, v.types, v.groups, v.absence, v.roots, v.scalars, v.dimensions, v.rows)
	case message.Scatter:
		checks = append(checks, v.types, v.groups, v.absence, v.roots, v.scalarRoot)
	case message.Allgather, message.Alltoall:
		checks = append(checks, v.types, v.groups, v.absence, v.scalars, v.dimensions, v.rows)
	}
	if first.Kind.MovesData() {
		checks = append(checks, v.devices)
	}
	for _, check := range checks {
		if text := check(); text != "" {
			return text
		}
	}
	return ""
}

// parts compares the requests for a group that is one request: first the numbers of tensors, then each
// tensor. The returned text is about the first tensor that differs.
func (v *requestSet) parts() string {
	size := func(q *message.Request) int { return q.Parts.Len() }
	text := v.mismatch("groups", "sent", func(q *message.Request) string {
		if len(q.Parts) == 0 {
			return "a tensor outside a group"
		}
		return fmt.Sprintf("a group of %d", size(q))
	}, func(q *message.Request) bool { return size(q) == size(v.first) })
	if text != "" {
		return text
	}
	differs := -1
	for i := range v.requests {
		if q := v.requests[i]; q != nil {
			if d := v.first.Parts.Difference(q.Parts); d >= 0 && (differs < 0 || d < differs) {
				differs = d
			}
		}
	}
	if differs < 0 {
		return ""
	}
	at := func(q *message.Request) message.Request {
		dt, shape := q.Parts.At(differs)
		return message.Request{Kind: q.Kind, DType: dt, Shape: shape}
	}
	what, first := "shapes", at(v.first)
	if v.differ(func(q *message.Request) bool { return at(q).DType == first.DType }) {
		what = "data types"
	}
	return v.errorText("mismatched %s of tensor %d of %d: %s", what, differs+1, size(v.first),
		v.valuesByRank("sent", func(q *message.Request) string {
			one := at(q)
			return tensorOf(&one)
		}))
}

func (v *requestSet) types() string {
	return v.mismatch("data types", "sent", tensorOf, func(q *message.Request) bool {
		return q.DType == v.first.DType
	})
}

func (v *requestSet) shapes() string {
	return v.mismatch("shapes", "sent", tensorOf, func(q *message.Request) bool {
		return q.Shape.Equal(v.first.Shape)
	})
}

func (v *requestSet) factors() string {
	return v.mismatch("scale factors", "asked for", func(q *message.Request) string {
		return fmt.Sprintf("prescale %v and postscale %v", q.Prescale, q.Postscale)
	}, func(q *message.Request) bool {
		return q.Prescale == v.first.Prescale && q.Postscale == v.first.Postscale
	})
}

func (v *requestSet) reductions() string {
	return v.mismatch("reductions", "asked for", func(q *message.Request) string { return q.Op.String() },
		func(q *message.Request) bool { return q.Op == v.first.Op })
}

func (v *requestSet) compressions() string {
	return v.mismatch("compressions", "asked for", func(q *message.Request) string {
		if !q.Wire.Valid() {
			return "none"
		}
		return q.Wire.String()
	}, func(q *message.Request) bool { return q.Wire == v.first.Wire })
}

func (v *requestSet) groups() string {
	return v.mismatch("groups", "named", func(q *message.Request) string {
		if q.Group == "" {
			return "none"
		}
		return fmt.Sprintf("%q of %d tensors", q.Group, q.GroupSize)
	}, func(q *message.Request) bool { return q.Group == v.first.Group && q.GroupSize == v.first.GroupSize })
}

// devices compares whether the tensors are in host memory. The numbers of CUDA devices may differ, because
// the ranks of a host use different devices.
func (v *requestSet) devices() string {
	return v.mismatch("devices", "sent", func(q *message.Request) string {
		if q.Device == tensor.Host {
			return "a tensor in host memory"
		}
		return "a tensor on a CUDA device"
	}, func(q *message.Request) bool { return (q.Device == tensor.Host) == (v.first.Device == tensor.Host) })
}

func (v *requestSet) scalars() string {
	if !v.differ(func(q *message.Request) bool { return len(q.Shape) > 0 }) {
		return ""
	}
	return v.errorText("a scalar has no first dimension: %s", v.valuesByRank("sent", tensorOf))
}

func (v *requestSet) dimensions() string {
	return v.mismatch("numbers of dimensions", "sent", tensorOf, func(q *message.Request) bool {
		return len(q.Shape) == len(v.first.Shape)
	})
}

func (v *requestSet) rows() string {
	return v.mismatch("shapes beyond the first dimension", "sent", tensorOf,
		func(q *message.Request) bool { return q.Shape[1:].Equal(v.first.Shape[1:]) })
}

func (v *requestSet) roots() string {
	text := v.mismatch("root ranks", "named", func(q *message.Request) string {
		return fmt.Sprintf("root %d", q.Root)
	},
		func(q *message.Request) bool { return q.Root == v.first.Root })
	if text != "" {
		return text
	}
	switch root := v.set.index(v.first.Root); {
	case root < 0:
		return v.errorText("root rank %d is not in the process set of %s", v.first.Root,
			topo.FormatRanks(v.set.Ranks))
	case v.requests[root] == nil:
		return v.errorText("root rank %d has joined", v.first.Root)
	}
	return ""
}

// root returns the root's request. The method roots must have checked the root.
func (v *requestSet) root() *message.Request { return v.requests[v.set.index(v.first.Root)] }

func (v *requestSet) scalarRoot() string {
	if len(v.root().Shape) > 0 {
		return ""
	}
	return v.errorText("a scalar has no first dimension: root %d sent %v", v.first.Root, v.first.DType)
}

// callers compares who has to make the request to add a process set.
func (v *requestSet) callers() string {
	return v.mismatch("callers", "expected", func(q *message.Request) string {
		if q.MembersOnly {
			return "only the members to call it"
		}
		return "all ranks to call it"
	}, func(q *message.Request) bool { return q.MembersOnly == v.first.MembersOnly })
}

func (v *requestSet) members() string {
	return v.mismatch("members", "named", func(q *message.Request) string {
		return topo.FormatRanks(q.Ranks)
	},
		func(q *message.Request) bool { return slices.Equal(q.Ranks, v.first.Ranks) })
}

func (v *requestSet) ids() string {
	return v.mismatch("process sets", "named", func(q *message.Request) string {
		return fmt.Sprintf("process set %d", q.Set)
	},
		func(q *message.Request) bool { return q.Set == v.first.Set })
}

// absence returns a text if some members have joined without requesting the operation and it cannot run
// without them. Otherwise it returns "". Members that have not requested a removal and have not joined have
// agreed to it by their shutdown.
func (v *requestSet) absence() string {
	var refuse []topo.Rank
	for m := range v.requests {
		left := v.first.Kind == message.RemoveProcessSet && !v.joined.has(m)
		needed := changesSets(v.first.Kind) || !v.joined.empty[m]
		if v.requests[m] == nil && !left && needed {
			refuse = append(refuse, v.set.Ranks[m])
		}
	}
	switch {
	case len(refuse) == 0:
		return ""
	case v.first.MembersOnly:
		return v.errorText("%s joined, but every member has to call this operation", have(refuse))
	case changesSets(v.first.Kind):
		return v.errorText("%s joined, but every rank has to call this operation", have(refuse))
	}
	return v.errorText("%s joined, but this operation needs data from every rank, unless ranks join with empty contributions", have(refuse))
}

// valuesByRank groups the members by what they sent, so that a rank that differs from the other ranks is easy
// to see: "ranks 0, 1 and 3 sent float32[4], rank 2 sent float32[5]".
func (v *requestSet) valuesByRank(verb string, format func(*message.Request) string) string {
	const most = 4
	type group struct {
		value string
		ranks []topo.Rank
	}
	var groups []group
next:
	for i := range v.requests {
		if v.requests[i] == nil {
			continue
		}
		value := format(v.requests[i])
		for g := range groups {
			if groups[g].value == value {
				groups[g].ranks = append(groups[g].ranks, v.set.Ranks[i])
				continue next
			}
		}
		groups = append(groups, group{value, []topo.Rank{v.set.Ranks[i]}})
	}
	var b strings.Builder
	for i, g := range groups {
		if i == most {
			fmt.Fprintf(&b, ", and %d others differ", len(groups)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %s %s", topo.FormatRanks(g.ranks), verb, g.value)
	}
	return b.String()
}
