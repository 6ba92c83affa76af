package controller

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
)

// groupKey identifies a group of tensors by its name and size.
type groupKey struct {
	name string
	size int32
}

// groupOf returns the group of a tensor. It is the group in the request of the first member that has made
// one. If the request of another member names a different group, the tensor fails.
func groupOf(requests []*message.Request) groupKey {
	q := firstOf(requests)
	return groupKey{q.Group, q.GroupSize}
}

// otherGroups returns the groups that the requests for a tensor name, without the group that groupOf returns.
func otherGroups(requests []*message.Request) (keys []groupKey) {
	first := groupOf(requests)
	for _, q := range requests {
		if q == nil || q.Group == "" {
			continue
		}
		if key := (groupKey{q.Group, q.GroupSize}); key != first && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// group is the state of a group of tensors that are granted together.
type group struct {
	groupKey
	items []readyItem // the complete tensors, in the order of completion; they wait for the rest of the group
	// failed is the reason why the group has failed, or "" if it has not. answered is the number of tensors
	// of the group that were answered with the failure.
	failed   string
	answered int
	// refused is set if no backend runs one of the tensors and the other tensors have failed for that reason.
	refused bool
}

// fail looks for an error among the items of the group and, if there is one, turns all items of the group
// into errors. An item is also an error if no backend runs its tensor.
func (g *group) fail(items []readyItem) {
	var failed *message.Response
	for i := range items {
		// Choose the error of the first tensor by name, so that the text does not depend on the order of
		// arrival.
		if r := items[i].response; items[i].group == g && r.Kind == message.Error && (failed == nil ||
			r.Name < failed.Name) {
			failed = r
		}
	}
	if failed == nil {
		return
	}
	for i := range items {
		if items[i].group == g && items[i].response.Kind != message.Error {
			items[i].fail(g.reason(failed.Text))
		}
	}
}

// heldGroups holds the groups of which some tensors are complete and others are not.
type heldGroups struct {
	groups []*group // in the order of their first complete tensors
}

// has reports whether complete tensors of a group are held.
func (h *heldGroups) has(key groupKey) bool {
	return slices.ContainsFunc(h.groups, func(g *group) bool { return g.groupKey == key && len(g.items) > 0 })
}

// hasBit reports whether a complete tensor whose response is the cache entry of bit is held.
func (h *heldGroups) hasBit(bit uint32) bool {
	return slices.ContainsFunc(h.groups, func(g *group) bool {
		return slices.ContainsFunc(g.items, func(i readyItem) bool { return i.cached && i.bit == bit })
	})
}

// add holds a complete tensor of a group until the group is complete. If it is the last tensor of the group,
// add returns all tensors of the group. If the item is an error, the group fails at once: add turns the held
// tensors into errors and returns them, and does the same with each later tensor. The error is not delayed
// until the group is complete, because ranks that disagree about the group could hang: a rank may wait for
// the result of one tensor before it submits the next.
func (h *heldGroups) add(item readyItem, key groupKey) []readyItem {
	g := h.at(key)
	item.group = g
	g.items = append(g.items, item)
	if r := item.response; r.Kind == message.Error && g.failed == "" {
		g.failed = r.Text
	}
	if g.failed == "" && len(g.items) < int(g.size) {
		return nil
	}
	return h.release(g)
}

// failGroup fails a group because the members disagree about which group one of its tensors belongs to: one
// member put the tensor into the group with this key, but the first member put it into another group or into
// none. The caller answers that tensor with an error. failGroup returns the other complete tensors of the
// group with this key, which are errors too.
func (h *heldGroups) failGroup(key groupKey, reason string) []readyItem {
	g := h.at(key)
	if g.failed == "" {
		g.failed = reason
	}
	g.answered++
	return h.release(g)
}

// at returns the group with the given key. If the group does not exist, at creates it.
func (h *heldGroups) at(key groupKey) *group {
	for _, g := range h.groups {
		if g.groupKey == key {
			return g
		}
	}
	g := &group{groupKey: key}
	h.groups = append(h.groups, g)
	return g
}

// index returns the position of a tensor among the held tensors, or -1 if it is not held.
func (g *group) index(tensor string) int {
	return slices.IndexFunc(g.items, func(i readyItem) bool { return i.response.Name == tensor })
}

// release returns the held tensors of a group that is complete or has failed. When all tensors of the group
// have been answered, release forgets the group.
func (h *heldGroups) release(g *group) []readyItem {
	items := g.items
	g.items = nil
	g.answered += len(items)
	if g.answered >= int(g.size) {
		h.groups = slices.DeleteFunc(h.groups, func(x *group) bool { return x == g })
	}
	for i := range items {
		if g.failed != "" && items[i].response.Kind != message.Error {
			items[i].fail(g.reason(g.failed))
		}
	}
	return items
}

func (g *group) reason(text string) string {
	return fmt.Sprintf("its group %q failed: %s", g.name, text)
}

// fail drops all groups and returns their held tensors as errors.
func (h *heldGroups) fail(reason string) []readyItem {
	var items []readyItem
	for _, g := range h.groups {
		for _, item := range g.items {
			if item.response.Kind != message.Error {
				item.fail(fmt.Sprintf("its group %q has %d of %d tensors: %s", g.name, len(g.items), g.size,
					reason))
			}
			items = append(items, item)
		}
	}
	clear(h.groups)
	h.groups = h.groups[:0]
	return items
}

// find returns the group that holds a tensor, or nil if no group holds it.
func (h *heldGroups) find(tensor string) *group {
	for _, g := range h.groups {
		if g.index(tensor) >= 0 {
			return g
		}
	}
	return nil
}
