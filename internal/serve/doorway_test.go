package serve_test

import (
	"strconv"
	"testing"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/serve"
	"github.com/gohvd/gohvd/internal/testnet"
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

// A storm of one message is a few lines, and does not hide another.
func TestQuiet(t *testing.T) {
	log, entries := testnet.Logs()
	quiet := serve.Quiet(log)
	for i := range 900 {
		quiet.Warn("a storm", zap.Int("i", i))
	}
	quiet.Warn("something else")
	if n := entries.FilterMessage("a storm").Len(); n < 10 || n > 50 {
		t.Errorf("a storm of 900 is %d lines", n)
	}
	if !testnet.Logged(entries, "something else") {
		t.Error("another message was lost")
	}
	if !testnet.Logged(entries, "a storm") || entries.FilterField(zap.Int("i", 0)).Len() != 1 {
		t.Errorf("the first line is missing among %s", strconv.Itoa(entries.Len()))
	}
	serve.Quiet(nil).Warn("nobody hears")
}
