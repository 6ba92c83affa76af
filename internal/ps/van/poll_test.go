package van

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// unixPair returns the two ends of a Unix connection.
func unixPair(t *testing.T) (ends [2]*net.UnixConn) {
	t.Helper()
	fds := testnet.SocketPair(t)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = conn.(*net.UnixConn)
		t.Cleanup(func() { conn.Close() })
	}
	return ends
}

// newUnixLink returns a link of a node with the given role over a Unix connection, and the other end of the
// connection. The link has a request without an answer.
func newUnixLink(t *testing.T, role Role) (*link, *net.UnixConn) {
	t.Helper()
	ends := unixPair(t)
	l := newLink(New(config(role, 1, 1, ""), ignore{}), Process{ID: 8}, ends[0])
	l.sock, l.requests = newSocket(ends[0]), 1
	l.van.members.cores.Store(true)
	return l, ends[1]
}

// newPolledLink is like newUnixLink, but the connection may be polled.
func newPolledLink(t *testing.T, role Role) (*link, *net.UnixConn) {
	t.Helper()
	l, peer := newUnixLink(t, role)
	if l.poll(); l.polled == nil {
		t.Fatal("the connection cannot be polled")
	}
	t.Cleanup(func() { l.conn.Close() })
	return l, peer
}

// TestPolledBytes checks that all bytes arrive in both directions, whether the goroutine that reads polls or
// waits, and however it is woken.
func TestPolledBytes(t *testing.T) {
	for _, role := range []Role{Server, Worker} {
		l, peer := newPolledLink(t, role)
		sent := make([]byte, 4<<20) // more than the connection has room for
		for i := range sent {
			sent[i] = byte(rand.Uint32())
		}
		stop := make(chan struct{})
		polls := make(chan struct{})
		go func() {
			defer close(polls)
			for !isClosed(stop) {
				l.heard.Store(int64(l.van.timing.now())) // a server has handled a message
				runtime.Gosched()
			}
		}()
		go func() {
			defer peer.CloseWrite()
			echoed := make([]byte, 64<<10)
			for {
				n, err := peer.Read(echoed[:1+rand.IntN(len(echoed))])
				if err != nil {
					return
				}
				if _, err := peer.Write(echoed[:n]); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		go func() {
			for p := sent; len(p) > 0; {
				n := 1 + rand.IntN(min(len(p), 20_000))
				if _, err := l.conn.Write(p[:n]); err != nil {
					t.Error(err)
				}
				p = p[n:]
			}
			if err := l.conn.(*polledConn).CloseWrite(); err != nil {
				t.Error(err)
			}
		}()
		got, err := io.ReadAll(l.conn)
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%s: %d of %d bytes have come back, or others, with the error %v", role, len(got),
				len(sent), err)
		}
		close(stop)
		<-polls
	}
}

// pollFor makes the goroutine that reads the link of a server poll for a time. If that is 0, it no longer
// polls.
func pollFor(l *link, t time.Duration) { l.heard.Store(int64(l.van.timing.now() - serverPoll + t)) }

// TestPolledWakes checks that a byte is read that arrives at any time: while the goroutine that reads polls,
// waits, or is between the two.
func TestPolledWakes(t *testing.T) {
	l, peer := newPolledLink(t, Server)
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{l.conn}, struct{ io.Reader }{l.conn})
		done <- err
	}()
	b := make([]byte, 1)
	for i := range 2000 {
		if i%2 == 0 {
			pollFor(l, time.Duration(rand.IntN(100))*time.Microsecond)
		}
		if i%4 < 2 {
			for l.van.polling.Load() {
				runtime.Gosched()
			}
		}
		for range rand.IntN(100) {
			runtime.Gosched()
		}
		if _, err := peer.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(peer, b); err != nil {
			t.Fatal(err)
		}
	}
	if err := peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestPolledDeadline checks that a deadline makes reading fail although bytes have arrived or the goroutine
// polls. Waking the goroutine that reads does not remove its deadline, and a new deadline does not prevent it
// from waking up.
func TestPolledDeadline(t *testing.T) {
	l, peer := newPolledLink(t, Server)
	done := make(chan error, 1)
	read := func() {
		_, err := l.conn.Read(make([]byte, 1))
		done <- err
	}
	pollFor(l, time.Hour)
	go read()
	testnet.Eventually(t, "the goroutine polls", l.van.polling.Load)
	if err := l.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading fails with %v, want %v", err, os.ErrDeadlineExceeded)
	}
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	read()
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline, reading fails with %v, want %v", err, os.ErrDeadlineExceeded)
	}
	if err := l.conn.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	read()
	if err := <-done; err != nil {
		t.Errorf("without a deadline, reading fails: %v", err)
	}

	l, _ = newPolledLink(t, Worker)
	go func() { done <- l.read(newReader(l.conn)) }()
	testnet.Eventually(t, "a worker waits", l.isAwaited)
	if err := l.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("at a worker, reading ends with %v, want %v", err, os.ErrDeadlineExceeded)
	}
}

// isAwaited reports whether the goroutine that reads the link of a worker waits for the first byte of a
// message, or is about to.
func (l *link) isAwaited() bool {
	d := l.polled
	if !d.reading.TryLock() {
		return false
	}
	defer d.reading.Unlock()
	return d.reports
}

// TestPolledClose checks that Close ends calls that poll, that wait for bytes, and that wait for room, and
// that the peer notices it.
func TestPolledClose(t *testing.T) {
	for name, c := range map[string]struct {
		role Role
		call func(l *link) error
		busy func(l *link) bool
	}{
		"polls": {
			Server,
			func(l *link) error {
				pollFor(l, time.Hour)
				_, err := l.conn.Read(make([]byte, 1))
				return err
			},
			func(l *link) bool { return l.van.polling.Load() },
		},
		"waits": {Worker, func(l *link) error { return l.read(newReader(l.conn)) }, (*link).isAwaited},
		"writes": {
			Server,
			func(l *link) error { _, err := l.conn.Write(make([]byte, 8<<20)); return err },
			func(l *link) bool { return !pollWritable(l) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, peer := newPolledLink(t, c.role)
			done := make(chan error, 1)
			go func() { done <- c.call(l) }()
			testnet.Eventually(t, "the call "+name, func() bool { return c.busy(l) })
			if err := l.conn.Close(); err != nil {
				t.Error(err)
			}
			if err := <-done; err == nil {
				t.Error("the call has no error")
			}
			if err := l.conn.Close(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("the second call of Close has the error %v, want %v", err, net.ErrClosed)
			}
			if !l.sock.hungUp() || !newSocket(peer).hungUp() {
				t.Error("an end does not see that the connection is closed")
			}
		})
	}
}

// pollWritable reports whether the connection of a link has room.
func pollWritable(l *link) (yes bool) {
	_ = l.polled.Control(func(fd uintptr) { yes = hasEvent(fd, unix.POLLOUT) })
	return yes
}

// record is a Handler that records the numbers of the messages that arrive.
type record struct {
	ignore
	came chan struct{} // gets an element for each message; may be nil

	mu      sync.Mutex
	numbers []int64
}

func (h *record) Receive(_ Process, m *Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.numbers = append(h.numbers, m.Header.Timestamp)
	m.Release()
	if h.came != nil {
		h.came <- struct{}{}
	}
}

// count returns the number of messages that have arrived.
func (h *record) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.numbers)
}

// TestPoll checks that each message arrives once and in order if a worker polls at random times: short
// responses, long ones, requests and responses that the program handles, however they are cut into pieces.
func TestPoll(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	h := new(record)
	l.van.handler = h
	l.van.links.Store(&map[int]*link{l.peer: l})
	ended := make(chan error, 1)
	go func() { ended <- l.read(newReader(l.conn)) }()

	const messages = 3000
	var bytes []byte
	for i := range messages {
		header := &pspb.Header{Push: true, Timestamp: int64(i + 1)}
		m := &Message{Header: header}
		switch rand.IntN(20) {
		case 0:
			header.Request = true
		case 1:
			header.Push = false // of a SimpleApp
		case 2:
			m.Data = [][]byte{make([]byte, rand.IntN(2*readerBytes))}
		case 3:
			header.Error = strings.Repeat("x", readerBytes+rand.IntN(100)) // longer than the reader's buffer
		}
		bytes = append(bytes, wire(t, m)...)
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		for len(bytes) > 0 {
			n := min(1+rand.IntN(200), len(bytes))
			if rand.IntN(50) == 0 {
				n = min(2*readerBytes, len(bytes))
			}
			if _, err := peer.Write(bytes[:n]); err != nil {
				t.Error(err)
				return
			}
			bytes = bytes[n:]
			for range rand.IntN(20) {
				runtime.Gosched()
			}
		}
	}()
	for h.count() < messages && !t.Failed() {
		select {
		case err := <-ended:
			t.Fatalf("reading ends after %d of %d messages: %v", h.count(), messages, err)
		default:
		}
		var over atomic.Bool
		until := time.AfterFunc(time.Duration(rand.IntN(200))*time.Microsecond, func() { over.Store(true) })
		l.van.Poll(&over)
		until.Stop()
		for range rand.IntN(20) {
			runtime.Gosched()
		}
	}
	<-written
	if err := peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("reading ends with %v, want %v", err, io.EOF)
	}
	for i, n := range h.numbers {
		if n != int64(i+1) {
			t.Fatalf("message %d arrives in place %d", n, i+1)
		}
	}
}

// TestPollLeavesTheRest checks that a response arrives that comes when a call of Poll ends, although nobody
// polls any longer and nothing else arrives.
func TestPollLeavesTheRest(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	h := &record{came: make(chan struct{}, 1)}
	l.van.handler = h
	l.van.links.Store(&map[int]*link{l.peer: l})
	ended := make(chan error, 1)
	go func() { ended <- l.read(newReader(l.conn)) }()
	message := wire(t, &Message{Header: &pspb.Header{Push: true, Timestamp: 1}})
	for range 5000 {
		var over atomic.Bool
		written := make(chan struct{})
		go func() {
			defer close(written)
			for range rand.IntN(30) {
				runtime.Gosched()
			}
			over.Store(true)
			if _, err := peer.Write(message); err != nil {
				t.Error(err)
			}
		}()
		l.van.Poll(&over)
		select {
		case <-h.came:
		case <-time.After(time.Minute):
			t.Fatal("a response has not arrived")
		}
		<-written
	}
	peer.Close()
	<-ended
}

// TestPollSeesTheEnd checks that a call of Poll that meets the end of the connection leaves it to the
// goroutine that reads.
func TestPollSeesTheEnd(t *testing.T) {
	for range 200 {
		l, peer := newPolledLink(t, Worker)
		l.van.links.Store(&map[int]*link{l.peer: l})
		ended := make(chan error, 1)
		go func() { ended <- l.read(newReader(l.conn)) }()
		go peer.Close()
		l.van.Poll(new(atomic.Bool))
		if err := <-ended; !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Fatalf("reading ends with %v, want %v", err, io.EOF)
		}
		l.conn.Close()
	}
}

// TestPollMeetsAnError checks that an error that a call of Poll meets ends the link, although a whole
// response follows in the buffer.
func TestPollMeetsAnError(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	h := new(record)
	l.van.handler = h
	bad := []byte{0, 0, 0, 1, 0xff} // a header that is cut off
	if _, err := peer.Write(append(bad, wire(t, &Message{Header: &pspb.Header{Push: true}})...)); err != nil {
		t.Fatal(err)
	}
	r := newReader(l.conn)
	r.open(l)
	l.reader = r
	if l.takeResponse() {
		t.Error("a malformed response was handled")
	}
	ended := make(chan error, 1)
	go func() { ended <- l.read(r) }()
	select {
	case err := <-ended:
		testnet.WantError(t, err, "malformed message")
	case <-time.After(time.Minute):
		t.Error("the error does not end the link")
		l.conn.Close()
		<-ended
	}
	if n := h.count(); n > 0 {
		t.Errorf("%d responses after the malformed one were handled", n)
	}
}

// TestPollTakesShortResponses checks that the goroutine that reads the link handles the responses with much
// data, also if the data is in shared memory. Meanwhile a call of Poll would not hear the other links, nor
// the end of its context.
func TestPollTakesShortResponses(t *testing.T) {
	for name, c := range map[string]struct {
		frames []*pspb.Frame
		want   bool
	}{
		"none":   {nil, true},
		"short":  {[]*pspb.Frame{{Bytes: wholeBytes / 2}, {Bytes: wholeBytes/2 - 1}}, true},
		"long":   {[]*pspb.Frame{{Bytes: wholeBytes / 2}, {Bytes: wholeBytes / 2}}, false},
		"shared": {[]*pspb.Frame{{Bytes: 1 << 63, Block: 1}, {Bytes: 1 << 63, Block: 2}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l, peer := newPolledLink(t, Worker)
			l.van.handler = new(record)
			message, err := (&Message{Header: &pspb.Header{Push: true, Frames: c.frames}}).encode(nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range c.frames {
				if f.Block == 0 {
					message = append(message, make([]byte, f.Bytes)...)
				}
			}
			if _, err := peer.Write(message); err != nil {
				t.Fatal(err)
			}
			r := newReader(l.conn)
			r.open(l)
			l.reader = r
			if taken := l.takeResponse(); taken != c.want || l.polled.left == c.want || r.failed != nil {
				t.Errorf("handled: %v, left to the goroutine that reads: %v, error %v, want handled: %v", taken,
					l.polled.left, r.failed, c.want)
			}
		})
	}
}

// TestPollWithoutRequests checks that a worker does not poll if no request waits for an answer, or another
// goroutine polls.
func TestPollWithoutRequests(t *testing.T) {
	l, _ := newPolledLink(t, Worker)
	l.van.links.Store(&map[int]*link{l.peer: l})
	l.van.polling.Store(true)
	l.van.Poll(new(atomic.Bool))
	if !l.van.polling.Swap(false) {
		t.Error("a goroutine has ended the polling of another one")
	}
	l.answered()
	l.van.Poll(new(atomic.Bool))
	if l.polled.reports {
		t.Error("a link without requests was polled")
	}
}

// TestPolledFiles checks that the links of a job hold no file after a node has ended, and that a link works
// without polling if there is no free file descriptor.
func TestPolledFiles(t *testing.T) {
	before := testnet.OpenFiles(t)
	for _, id := range []int{8, 9} {
		// Without heartbeats, nothing ends a link that hangs.
		nodes := startJob(t, 1, 1, func(c *Config) { c.HeartbeatInterval = 0 })
		if l, err := nodes[9].link(8); err != nil || (l.polled != nil) != nodes[9].members.cores.Load() {
			t.Errorf("the link of the worker is polled: %t, want %t (%v)", l.polled != nil,
				nodes[9].members.cores.Load(), err)
		}
		kill(nodes[id])
		stopAll(nodes)
	}
	testnet.Eventually(t, "no file of the jobs is open", func() bool { return testnet.OpenFiles(t) <= before })

	l, peer := newUnixLink(t, Worker)
	free, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(free); err != nil {
		t.Fatal(err)
	}
	restore := testnet.LimitDescriptors(t, uint64(free+1))
	l.poll() // has a descriptor for the socket, but none for the epoll instance
	restore()
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	_, err = l.conn.Read(make([]byte, 1))
	if err != nil || l.polled != nil || testnet.OpenFiles(t) > before+2 {
		t.Errorf("without a free descriptor, the link is polled: %t, and %d files are open, want %d (%v)",
			l.polled != nil, testnet.OpenFiles(t), before+2, err)
	}
}

// TestHaveCores checks that a node polls only if there is a processor for each process of its host.
func TestHaveCores(t *testing.T) {
	processors := min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
	for _, c := range []struct {
		here, customers, elsewhere int
		want                       bool
	}{
		{1, 1, 0, true},
		{processors, 3, 5, true},
		{processors + 1, 1, 0, false},
	} {
		v := New(config(Worker, 1, c.here+c.elsewhere-1, ""), ignore{})
		v.members.setNode(&pspb.Node{Id: SchedulerID, HostId: "here"})
		id := 7
		for i := range c.here + c.elsewhere {
			for customer := range c.customers {
				host := "here"
				if i >= c.here {
					host = "elsewhere"
				}
				id++
				v.members.setNode(&pspb.Node{Id: int32(id), Incarnation: uint64(i + 1),
					CustomerId: int32(customer), HostId: host})
			}
		}
		if got := v.members.haveCores(); got != c.want {
			t.Errorf("%d processes here and %d elsewhere: a node polls: %t, want %t", c.here, c.elsewhere,
				got, c.want)
		}
	}
}

// TestPollingEndsWithReturn checks that a node no longer polls when so many processes have returned on its
// host that some of them have no processor.
func TestPollingEndsWithReturn(t *testing.T) {
	processors := min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
	l, _ := newPolledLink(t, Server)
	v := l.van
	for i := range processors + 1 {
		host := v.cfg.HostID
		if i == 0 {
			host = "elsewhere"
		}
		v.members.setNode(&pspb.Node{Id: int32(8 + i), Incarnation: uint64(i + 1), HostId: host})
	}
	pollFor(l, time.Hour)
	if !v.members.haveCores() || !l.polls() {
		t.Errorf("with %d processes on %d processors, the link is not polled", processors, processors)
	}
	defer v.close(ErrStopped)
	v.learn([]*pspb.Node{{Id: 8, Incarnation: 99, Generation: 1, HostId: v.cfg.HostID}})
	if l.polls() {
		t.Errorf("with %d processes on %d processors, the link is polled", processors+1, processors)
	}
}
