package client

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/memfd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/tensorqueue"
	"github.com/gohvd/gohvd/topo"
)

type anyCall struct{ answered int }

func (c *anyCall) answer(*sidecarpb.Reply) error { c.answered++; return nil }
func (c *anyCall) fail(error)                    {}

func FuzzReply(f *testing.F) {
	for _, r := range []*sidecarpb.Reply{
		{Id: 1}, {Id: 2}, {What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: 1 << 31, Bytes: 4096}}},
		{What: &sidecarpb.Reply_DropArena{DropArena: &sidecarpb.DropArena{Arena: 1 << 31}}},
		{What: &sidecarpb.Reply_Ended{Ended: &sidecarpb.Ended{Error: &sidecarpb.Error{Text: "why"}}}},
	} {
		body, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c := new(anyCall)
		e := &Engine{
			calls: map[uint64]call{1: c}, theirs: make(map[uint32]*memfd.Segment), ended: make(chan struct{}),
			queues: make(map[topo.ProcessSetID]*tensorqueue.Queue),
		}
		if err := e.take(body); err == nil && e.over && e.why() == nil {
			t.Errorf("the job is over without a reason after %x", body)
		}
		if c.answered != 1-len(e.calls) {
			t.Errorf("the call was answered %d times", c.answered)
		}
	})
}
