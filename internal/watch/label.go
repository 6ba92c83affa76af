package watch

import (
	"github.com/gohvd/gohvd/internal/p2p"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// maxLabels is the greatest number of labels of messages that an observer keeps.
const maxLabels = 1024

// labelKey identifies the messages of one size that one rank sends to another with a tag.
type labelKey struct {
	from, to topo.Rank
	tag      uint32
	numElems int64
}

// label is the name and the shape of messages in records. A Recorder may keep both.
type label struct {
	name  string
	shape tensor.Shape
}

// labelKeyOf returns the key of the message m of rank me.
func labelKeyOf(me topo.Rank, m *p2p.Op) labelKey {
	k := labelKey{me, m.Other(), m.Tag, int64(len(m.Buf) / m.DType.Size())}
	if m.Receives() {
		k.from, k.to = k.to, k.from
	}
	return k
}

func (k labelKey) label() label {
	return label{p2p.Name(k.from, k.to, k.tag), tensor.Shape{k.numElems}}
}
