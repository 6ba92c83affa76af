package sidecar

import (
	"bytes"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// pair returns the two ends of a connection between Unix sockets.
func pair(t *testing.T) (near, far int) {
	t.Helper()
	fds := testnet.SocketPair(t)
	t.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
	return fds[0], fds[1]
}

// drain returns all bytes that have arrived at fd. It does not wait for more.
func drain(t *testing.T, fd int) (got []byte) {
	t.Helper()
	b := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
		if err == unix.EAGAIN {
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, b[:n]...)
	}
}

// numbered returns n bytes. Each is computed from its position.
func numbered(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i%255 + 1)
	}
	return b
}

// TestOutbox sends more bytes than the socket has room for. All must arrive, in order. A closed outbox sends
// nothing.
func TestOutbox(t *testing.T) {
	near, far := pair(t)
	o := newOutbox(near)
	sent := numbered(4 << 20)
	o.Put(bytes.Clone(sent), -1)
	got := drain(t, far) // the rest stays in the queue, because Run is not running
	if o.Unsent() != len(sent)-len(got) || o.Unsent() <= maxUnsentBytes {
		t.Fatalf("%d bytes are unsent, of %d that %d were read of", o.Unsent(), len(sent), len(got))
	}
	var running sync.WaitGroup
	running.Go(o.Run)
	for len(got) < len(sent) {
		got = append(got, drain(t, far)...)
	}
	if !bytes.Equal(got, sent) {
		t.Error("something came between the bytes of a frame")
	}
	o.Room()
	if n := o.Unsent(); n != 0 {
		t.Errorf("%d bytes are unsent when all have come", n)
	}
	o.Close()
	running.Wait()
	o.Put([]byte{1}, -1)
	if got := drain(t, far); len(got) != 0 {
		t.Errorf("a closed outbox has sent %v", got)
	}
}

// TestAnswerThatCannotBeEncoded checks that a client does not wait for such an answer.
func TestAnswerThatCannotBeEncoded(t *testing.T) {
	near, far := pair(t)
	c := newConn(New(Config{Options: rank.Options{Log: zap.NewNop()}}), near, 1)
	id := &sidecarpb.UniqueID{Text: "\xff"}
	c.answer(1, &sidecarpb.Reply{What: &sidecarpb.Reply_UniqueId{UniqueId: id}}, nil)
	if n, _, err := unix.Recvfrom(far, make([]byte, 1), unix.MSG_DONTWAIT); n != 0 || err != nil {
		t.Errorf("got %d bytes and %v, want the end of the connection", n, err)
	}
}

// TestRoom queues too many bytes. Room must block until the other end has read enough of them.
func TestRoom(t *testing.T) {
	near, far := pair(t)
	synctest.Test(t, func(t *testing.T) {
		o := newOutbox(near)
		sent := numbered(4 << 20)
		o.Put(bytes.Clone(sent), -1)
		waited := make(chan struct{})
		go func() {
			defer close(waited)
			o.Room()
		}()
		synctest.Wait() // wait until Room blocks
		var running sync.WaitGroup
		running.Go(o.Run)
		for n := 0; n < len(sent); {
			n += len(drain(t, far))
		}
		<-waited
		o.Close()
		running.Wait()
	})
}

// TestOutboxCloses checks that Close makes Room return and closes the descriptors in the queue.
func TestOutboxCloses(t *testing.T) {
	near, _ := pair(t)
	queued, err := unix.FcntlInt(uintptr(near), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		o := newOutbox(near)
		o.Put(numbered(4<<20), -1)
		o.Put([]byte{1}, queued)
		waited := make(chan struct{})
		go func() {
			defer close(waited)
			o.Room()
		}()
		synctest.Wait()
		select {
		case <-waited:
			t.Error("there was room")
		default:
		}
		o.Close()
		o.Close()
		<-waited
		if _, err := unix.FcntlInt(uintptr(queued), unix.F_GETFD, 0); err != unix.EBADF {
			t.Errorf("the descriptor is open: %v", err)
		}
		if n := o.Unsent(); n != 0 {
			t.Errorf("%d bytes are unsent in a closed outbox", n)
		}
	})
}
