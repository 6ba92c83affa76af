package controller

import (
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/topo"
)

// agree makes the response to one request from each member of a set, in the order of the set. If the
// requests contradict each other it is an Error, whose text says who sent what: the first contradiction in the
// order of Horovod's checks, except that the operation comes before the element type, which a barrier has not.
func agree(set *Set, requests []message.Request) *message.Response {
	first := &requests[0]
	r := &message.Response{
		Kind: first.Kind, Name: first.Name, DType: first.DType, Shape: first.Shape,
		Op: first.Op, Prescale: first.Prescale, Postscale: first.Postscale, Root: first.Root,
	}
	text := disagreement(set, requests)
	if text == "" && first.Kind == message.Allgather {
		r.FirstDims = make([]int64, len(requests))
		for i := range requests {
			r.FirstDims[i] = requests[i].Shape[0]
		}
		r.Shape = append(r.Shape[:0:0], r.Shape...)
		r.Shape[0] = 0
		if _, err := r.NumElems(); err != nil {
			text = fmt.Sprintf("allgather %q: the result is too large: first dimensions %v of shape %v", r.Name, r.FirstDims, r.Shape)
		}
	}
	if text != "" {
		return &message.Response{Kind: message.Error, Name: first.Name, Text: text}
	}
	return r
}

// disagreement says how requests for one name contradict each other, or is empty.
func disagreement(set *Set, requests []message.Request) string {
	first := &requests[0]
	tensorOf := func(q *message.Request) string { return fmt.Sprintf("%v%v", q.DType, q.Shape) }
	report := func(what, verb string, say func(q *message.Request) string) string {
		return fmt.Sprintf("%v %q: mismatched %s: %s", first.Kind, first.Name, what, whoSaid(set, requests, verb, say))
	}
	differ := func(same func(q *message.Request) bool) bool {
		for i := range requests {
			if !same(&requests[i]) {
				return true
			}
		}
		return false
	}
	if differ(func(q *message.Request) bool { return q.Kind == first.Kind }) {
		return fmt.Sprintf("tensor %q: mismatched operations: %s", first.Name,
			whoSaid(set, requests, "called", func(q *message.Request) string { return q.Kind.String() }))
	}
	if first.Kind == message.Barrier {
		return ""
	}
	if differ(func(q *message.Request) bool { return q.DType == first.DType }) {
		return report("data types", "sent", tensorOf)
	}
	switch first.Kind {
	case message.Allreduce, message.Broadcast:
		if differ(func(q *message.Request) bool { return q.Shape.Equal(first.Shape) }) {
			return report("shapes", "sent", tensorOf)
		}
	case message.Allgather:
		if differ(func(q *message.Request) bool { return len(q.Shape) > 0 }) {
			return fmt.Sprintf("allgather %q: a scalar has no first dimension: %s", first.Name, whoSaid(set, requests, "sent", tensorOf))
		}
		if differ(func(q *message.Request) bool { return q.Shape[1:].Equal(first.Shape[1:]) }) {
			return report("shapes beyond the first dimension", "sent", tensorOf)
		}
	}
	switch first.Kind {
	case message.Allreduce:
		if differ(func(q *message.Request) bool { return q.Prescale == first.Prescale && q.Postscale == first.Postscale }) {
			return report("scale factors", "asked for", func(q *message.Request) string {
				return fmt.Sprintf("prescale %v and postscale %v", q.Prescale, q.Postscale)
			})
		}
		if differ(func(q *message.Request) bool { return q.Op == first.Op }) {
			return report("reductions", "asked for", func(q *message.Request) string { return q.Op.String() })
		}
	case message.Broadcast:
		if differ(func(q *message.Request) bool { return q.Root == first.Root }) {
			return report("root ranks", "named", func(q *message.Request) string { return fmt.Sprintf("root %d", q.Root) })
		}
		if set.index(first.Root) < 0 {
			return fmt.Sprintf("broadcast %q: root rank %d is not in the process set of %s", first.Name, first.Root, rankList(set.Ranks))
		}
	}
	return ""
}

// whoSaid groups the members by what they said, so that the odd one out is plain:
// "ranks 0, 1 and 3 sent float32[4], rank 2 sent float32[5]".
func whoSaid(set *Set, requests []message.Request, verb string, say func(*message.Request) string) string {
	const most = 4
	type group struct {
		said  string
		ranks []topo.Rank
	}
	var groups []group
next:
	for i := range requests {
		said := say(&requests[i])
		for g := range groups {
			if groups[g].said == said {
				groups[g].ranks = append(groups[g].ranks, set.Ranks[i])
				continue next
			}
		}
		groups = append(groups, group{said, []topo.Rank{set.Ranks[i]}})
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
		fmt.Fprintf(&b, "%s %s %s", rankList(g.ranks), verb, g.said)
	}
	return b.String()
}
