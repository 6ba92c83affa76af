package dial

import (
	"net"
	"testing"
	"testing/synctest"

	"github.com/gohvd/gohvd/internal/testnet"
)

type closer struct{ closed int }

func (c *closer) Close() error {
	c.closed++
	return nil
}

// TestLimiter checks that Acquire closes the connection with the oldest slot if all slots are taken. It must
// never close a connection whose slot was released.
func TestLimiter(t *testing.T) {
	l := NewLimiter(2)
	var conns [4]closer
	first, second := l.Acquire(&conns[0]), l.Acquire(&conns[1])
	third := l.Acquire(&conns[2])
	if first.Release() || conns[0].closed != 1 {
		t.Errorf("the oldest was closed %d times", conns[0].closed)
	}
	if !second.Release() {
		t.Error("one that had its slot has lost it")
	}
	fourth := l.Acquire(&conns[3])
	if !third.Release() || !fourth.Release() {
		t.Error("there was room for two")
	}
	l.Grow(1) // must not lower the limit of 2
	var more [4]closer
	for i := range more[:2] {
		l.Acquire(&more[i])
	}
	l.Grow(3)
	l.Acquire(&more[2])
	if more[0].closed != 0 {
		t.Error("one was closed though the bound has grown")
	}
	if l.Acquire(&more[3]); more[0].closed != 1 || more[1].closed != 0 {
		t.Error("it has grown without a bound")
	}
	for i := range conns[1:] {
		if n := conns[1+i].closed; n != 0 {
			t.Errorf("connection %d was closed", 1+i)
		}
	}
}

// pipes is a listener that always has a connection.
type pipes struct{ net.Listener }

func (pipes) Accept() (net.Conn, error) {
	conn, _ := net.Pipe()
	return conn, nil
}

// A Listener accepts no connection before those that the Limiter has closed have ended.
func TestListenerSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1).Listener(pipes{})
		first, _ := l.Accept()
		second, _ := l.Accept() // closes the first one
		var third net.Conn
		go func() { third, _ = l.Accept() }()
		synctest.Wait()
		if third != nil {
			t.Error("a third connection was accepted before the first one has ended")
		}
		first.Close()
		synctest.Wait()
		if third == nil {
			t.Fatal("no third connection was accepted after the first one has ended")
		}
		second.Close()
		third.Close()
	})
}

// A Limiter uses at most an eighth of the descriptors that the process may open, even if its limit grows.
func TestLimiterLeavesDescriptors(t *testing.T) {
	testnet.LimitDescriptors(t, 1024)
	l := NewLimiter(1000)
	l.Grow(2000)
	var first closer
	l.Acquire(&first)
	for range 127 {
		l.Acquire(new(closer))
	}
	if first.closed != 0 {
		t.Error("fewer than 128 connections have room")
	}
	if l.Acquire(new(closer)); first.closed != 1 {
		t.Error("more than 128 connections have room")
	}
}

// TestNeedDescriptors checks that the soft limit is raised only for jobs that may need more.
func TestNeedDescriptors(t *testing.T) {
	testnet.LimitDescriptors(t, 1024)
	NeedDescriptors(112)
	if n := Descriptors(); n != 1024 {
		t.Errorf("112 peers: got a limit of %d, want the 1024 from before", n)
	}
	NeedDescriptors(113)
	if n := Descriptors(); n <= 1024 {
		t.Errorf("113 peers: got a limit of %d, want the hard limit", n)
	}
}

// Settle waits until a connection that Acquire has closed has released its slot.
func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1)
		first := l.Acquire(new(closer))
		l.Settle()
		second := l.Acquire(new(closer))
		settled := false
		go func() {
			l.Settle()
			settled = true
		}()
		if synctest.Wait(); settled {
			t.Error("it has not waited")
		}
		first.Release()
		if synctest.Wait(); !settled {
			t.Error("it still waits")
		}
		second.Release()
		l.Settle()
	})
}
