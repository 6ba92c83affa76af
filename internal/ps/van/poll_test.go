package van

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// newUnixLink returns a link of a node with the given role over a Unix connection, and the other end of the
// connection. The link has a request without an answer.
func newUnixLink(t *testing.T, role Role) (*link, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
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
	l := newLink(New(config(role, 1, 1, ""), ignore{}), Process{ID: 8}, ends[0])
	l.sock, l.requests = newSocket(ends[0]), 1
	l.van.polls.Store(true)
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
				l.polled.pollFor(20 * time.Microsecond)
				l.heard.Store(int64(l.van.now())) // a server has handled a message
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

// TestPolledWakes checks that a byte is read that arrives at any time: while the goroutine that reads polls,
// waits, or is between the two.
func TestPolledWakes(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{l.conn}, struct{ io.Reader }{l.conn})
		done <- err
	}()
	b := make([]byte, 1)
	for i := range 2000 {
		if i%2 == 0 {
			l.polled.pollFor(time.Duration(rand.IntN(100)) * time.Microsecond)
		}
		if i%4 < 2 {
			for !l.polled.waits.Load() {
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
// polls. Waking the goroutine that reads neither ends it nor removes its deadline, and a new deadline does
// not prevent it from waking up.
func TestPolledDeadline(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	done := make(chan error, 1)
	read := func() {
		_, err := l.conn.Read(make([]byte, 1))
		done <- err
	}
	go read()
	for range 100 {
		testnet.Eventually(t, "the goroutine waits", l.polled.waits.Load)
		l.polled.pollFor(time.Hour)
		if err := l.conn.SetReadDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, "the goroutine polls", l.van.polling.Load)
		l.polled.until.Store(0)
	}
	if err := l.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	l.polled.pollFor(time.Hour) // the deadline passes while the goroutine polls
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
}

// TestPolledClose checks that Close ends calls that poll, that wait for bytes, and that wait for room, and
// that the peer notices it.
func TestPolledClose(t *testing.T) {
	for name, c := range map[string]struct {
		call func(l *link) error
		busy func(l *link) bool
	}{
		"polls": {
			func(l *link) error {
				l.polled.pollFor(time.Hour)
				_, err := l.conn.Read(make([]byte, 1))
				return err
			},
			func(l *link) bool { return l.van.polling.Load() },
		},
		"waits": {
			func(l *link) error { _, err := l.conn.Read(make([]byte, 1)); return err },
			func(l *link) bool { return l.polled.waits.Load() },
		},
		"writes": {
			func(l *link) error { _, err := l.conn.Write(make([]byte, 8<<20)); return err },
			func(l *link) bool { return !pollWritable(l) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, peer := newPolledLink(t, Worker)
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
	_ = l.polled.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, _ := unix.Poll(p, 0)
		yes = n > 0
	})
	return yes
}

// TestPollingEnds checks that a worker polls only while Poll says so and a request has no answer, and that at
// most one goroutine of a process polls.
func TestPollingEnds(t *testing.T) {
	l, peer := newPolledLink(t, Worker)
	got := make(chan error, 1)
	go func() {
		_, err := l.conn.Read(make([]byte, 1))
		got <- err
	}()
	waits := func() bool { return l.polled.waits.Load() && !l.van.polling.Load() }
	polls := func() bool { return l.van.polling.Load() }
	testnet.Eventually(t, "the goroutine waits", waits)
	l.polled.pollFor(time.Hour)
	testnet.Eventually(t, "the goroutine polls", polls)
	l.answered()
	testnet.Eventually(t, "the goroutine waits, because there is no request", waits)
	l.mu.Lock()
	l.requests++
	l.mu.Unlock()
	l.polled.pollFor(time.Millisecond)
	testnet.Eventually(t, "the goroutine waits, because the time is over", waits)
	testnet.Eventually(t, "another goroutine polls", func() bool {
		return l.van.polling.CompareAndSwap(false, true)
	})
	l.polled.pollFor(time.Hour)
	testnet.Eventually(t, "the goroutine waits while another one polls", l.polled.waits.Load)
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// TestPolledFiles checks that the links of a job hold no file after a node has ended, and that a link works
// without polling if there is no free file descriptor.
func TestPolledFiles(t *testing.T) {
	before := testnet.OpenFiles(t)
	for _, id := range []int{8, 9} {
		// Without heartbeats, nothing ends a link that hangs.
		nodes := startJob(t, 1, 1, func(c *Config) { c.HeartbeatInterval = 0 })
		if l, err := nodes[9].link(8); err != nil || (l.polled != nil) != nodes[9].polls.Load() {
			t.Errorf("the link of the worker is polled: %t, want %t (%v)", l.polled != nil,
				nodes[9].polls.Load(), err)
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
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE,
		&unix.Rlimit{Cur: uint64(free + 1), Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	l.poll() // has a descriptor for the socket, but none for the epoll instance
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	_, err = l.conn.Read(make([]byte, 1))
	if err != nil || l.polled != nil || testnet.OpenFiles(t) > before+2 {
		t.Errorf("without a free descriptor, the link is polled: %t, and %d files are open, want %d (%v)",
			l.polled != nil, testnet.OpenFiles(t), before+2, err)
	}
}

// TestMayPoll checks that a node polls only if there is a processor for each process of its host.
func TestMayPoll(t *testing.T) {
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
		v.setNode(&pspb.Node{Id: SchedulerID, HostId: "here"})
		id := 7
		for i := range c.here + c.elsewhere {
			for customer := range c.customers {
				host := "here"
				if i >= c.here {
					host = "elsewhere"
				}
				id++
				v.setNode(&pspb.Node{Id: int32(id), Incarnation: uint64(i + 1), CustomerId: int32(customer),
					HostId: host})
			}
		}
		if got := v.mayPoll(); got != c.want {
			t.Errorf("%d processes here and %d elsewhere: a node polls: %t, want %t", c.here, c.elsewhere,
				got, c.want)
		}
	}
}

// TestPollingEndsWithReturn checks that a node no longer polls when so many processes have returned on its
// host that some of them have no processor.
func TestPollingEndsWithReturn(t *testing.T) {
	processors := min(runtime.NumCPU(), runtime.GOMAXPROCS(0))
	l, _ := newPolledLink(t, Worker)
	v := l.van
	for i := range processors + 1 {
		host := v.cfg.HostID
		if i == 0 {
			host = "elsewhere"
		}
		v.setNode(&pspb.Node{Id: int32(8 + i), Incarnation: uint64(i + 1), HostId: host})
	}
	l.polled.pollFor(time.Hour)
	if !v.mayPoll() || !l.polls() {
		t.Errorf("with %d processes on %d processors, the link is not polled", processors, processors)
	}
	defer v.close(ErrStopped) // learn makes the worker connect with server 0
	v.learn([]*pspb.Node{{Id: 8, Incarnation: 99, Generation: 1, HostId: v.cfg.HostID}})
	if l.polls() {
		t.Errorf("with %d processes on %d processors, the link is polled", processors+1, processors)
	}
}
