package serve_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/serve"
)

type closer struct{ closed int }

func (c *closer) Close() error {
	c.closed++
	return nil
}

// The one that has stood in the doorway longest makes room for one more; who has left cannot be thrown out.
func TestDoorway(t *testing.T) {
	d := serve.NewDoorway(2)
	var conns [4]closer
	first, second := d.Enter(&conns[0]), d.Enter(&conns[1])
	third := d.Enter(&conns[2])
	if first.Leave() || conns[0].closed != 1 {
		t.Errorf("the oldest was closed %d times", conns[0].closed)
	}
	if !second.Leave() {
		t.Error("one that had its place has lost it")
	}
	fourth := d.Enter(&conns[3])
	if !third.Leave() || !fourth.Leave() {
		t.Error("there was room for two")
	}
	d.Grow(1) // it has room for two
	var more [4]closer
	for i := range more[:2] {
		d.Enter(&more[i])
	}
	d.Grow(3)
	d.Enter(&more[2])
	if more[0].closed != 0 {
		t.Error("one was thrown out though the doorway has grown")
	}
	if d.Enter(&more[3]); more[0].closed != 1 || more[1].closed != 0 {
		t.Error("it has grown without a bound")
	}
	for i := range conns[1:] {
		if n := conns[1+i].closed; n != 0 {
			t.Errorf("connection %d was closed", 1+i)
		}
	}
}
