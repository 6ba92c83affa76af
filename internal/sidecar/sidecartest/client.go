// Package sidecartest implements a client of a sidecar for tests of the protocol in docs/sidecar.md. It can
// also break the protocol. It shares no code with the sidecar and with the package client, which programs
// use, except the messages.
package sidecartest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
)

// HangTimeout is how long a Client waits for a message before the test fails.
const HangTimeout = 30 * time.Second

// ErrEnd reports that the sidecar has closed the connection.
var ErrEnd = errors.New("the sidecar closed the connection")

// Seals are the seals that the memfd of a client's arena must have.
const Seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// These are offsets in a ring, and sizes of its parts.
const (
	ringSubmitted = 64
	ringEntries   = 4096
	entryBytes    = 16
	ownRing       = 64 // number of entries in the ring that Begin makes if the client has no ring
	firstSlot     = 1 << 16
	firstRequest  = 1 << 63 // the numbers of requests begin after it, those of operations at 1
	stateDone     = 3
	pollInterval  = 1 // ms

	// RingWaiting and RingLooking are offsets of words in the ring. They are arguments of Word.
	RingWaiting = 320
	RingLooking = 384
)

// Client is a client of a sidecar. It is not safe for concurrent use. If an error occurs in a method that
// returns no error, the method fails the test.
type Client struct {
	// FD is the socket. It is -1 after Close.
	FD int
	// News holds the replies that are notices, not answers to requests.
	News []*sidecarpb.Reply
	// Arenas holds the mapped arenas of the client and of the sidecar by their numbers. RingBytes is the
	// memory of the ring, or nil if there is no ring.
	Arenas    map[uint32][]byte
	RingBytes []byte

	t      testing.TB
	buf    []byte
	fds    []int
	lastID uint64
	// early holds, by request number, the answers that have arrived before the test waited for them.
	early     map[uint64]*sidecarpb.Reply
	n         uint64 // number of entries in the ring
	submitted uint64
	begun     map[uint64]*sidecarpb.Operation
}

// New returns a client that uses the socket fd. The client owns fd.
func New(t testing.TB, fd int) *Client {
	c := &Client{t: t, FD: fd, early: make(map[uint64]*sidecarpb.Reply), Arenas: make(map[uint32][]byte),
		begun: make(map[uint64]*sidecarpb.Operation), lastID: firstRequest}
	timeout := unix.NsecToTimeval(HangTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Close closes the socket and unmaps the memory. If it is called again, it does nothing.
func (c *Client) Close() {
	if c.FD < 0 {
		return
	}
	c.close(c.FD)
	c.FD = -1
	for _, fd := range c.fds {
		c.close(fd)
	}
	for _, b := range c.Arenas {
		c.unmap(b)
	}
	if c.RingBytes != nil {
		c.unmap(c.RingBytes)
	}
}

func (c *Client) close(fd int) {
	if err := unix.Close(fd); err != nil {
		c.t.Fatal(err)
	}
}

func (c *Client) unmap(b []byte) {
	if err := unix.Munmap(b); err != nil {
		c.t.Fatal(err)
	}
}

// Hello sends the greeting, reads the sidecar's greeting and checks it.
func (c *Client) Hello() {
	c.t.Helper()
	const greeting = "GHVD\x00\x00\x00\x03"
	c.Write([]byte(greeting))
	for len(c.buf) < len(greeting) {
		if err := c.Read(); err != nil {
			c.t.Fatalf("no greeting: %v", err)
		}
	}
	if got := string(c.buf[:len(greeting)]); got != greeting {
		c.t.Fatalf("greeting is %q, want %q", got, greeting)
	}
	c.buf = c.buf[len(greeting):]
}

// Write sends all of b together with the descriptors fds.
func (c *Client) Write(b []byte, fds ...int) {
	c.t.Helper()
	if err := c.TryWrite(b, fds...); err != nil {
		c.t.Fatal(err)
	}
}

// TryWrite is like Write but returns an error.
func (c *Client) TryWrite(b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for len(b) > 0 {
		n, err := unix.SendmsgN(c.FD, b, oob, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("write to the sidecar: %w", err)
		}
		b, oob = b[n:], nil
	}
	return nil
}

// Read reads from the socket once. It keeps the bytes and descriptors that arrive, and calls sort to decode
// them.
func (c *Client) Read() error {
	var (
		b   [4096]byte
		oob [64]byte
	)
	for {
		n, oobn, _, _, err := unix.Recvmsg(c.FD, b[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("read from the sidecar: %w", err)
		case n == 0:
			return ErrEnd
		}
		c.buf = append(c.buf, b[:n]...)
		if oobn == 0 {
			return nil
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return err
		}
		for _, m := range messages {
			fds, err := unix.ParseUnixRights(&m)
			if err != nil {
				return err
			}
			c.fds = append(c.fds, fds...)
		}
		return nil
	}
}

// sort decodes all complete frames that have arrived. It keeps replies, and maps arenas of the sidecar.
func (c *Client) sort() error {
	for {
		n, head := protowire.ConsumeVarint(c.buf)
		if head < 0 || uint64(len(c.buf)-head) < n {
			return nil // the frame is incomplete
		}
		body := c.buf[head : head+int(n)]
		c.buf = c.buf[head+int(n):]
		r := new(sidecarpb.Reply)
		if err := proto.Unmarshal(body, r); err != nil {
			return err
		}
		if r.Id != 0 {
			c.early[r.Id] = r
			continue
		}
		c.News = append(c.News, r)
		if a := r.GetArena(); a != nil {
			if err := c.take(a); err != nil {
				return err
			}
		}
	}
}

// take maps the arena a of the sidecar. Its descriptor is the oldest one that has arrived and was not used
// yet.
func (c *Client) take(a *sidecarpb.Arena) error {
	if len(c.fds) == 0 {
		return fmt.Errorf("arena %d came without a descriptor", a.Arena)
	}
	fd := c.fds[0]
	c.fds = c.fds[1:]
	b, err := unix.Mmap(fd, 0, int(a.Bytes), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		c.close(fd)
		return fmt.Errorf("map arena %d: %w", a.Arena, err)
	}
	err = sealed(fd, len(b))
	c.close(fd)
	if err != nil {
		c.unmap(b)
		return fmt.Errorf("arena %d: %w", a.Arena, err)
	}
	c.Arenas[a.Arena] = b
	return nil
}

// sealed returns an error if it is possible to write to the sidecar's memory or to shrink it through the
// descriptor fd.
func sealed(fd, numBytes int) error {
	if b, err := unix.Mmap(fd, 0, numBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		return errors.Join(errors.New("the file can be mapped with write access"), unix.Munmap(b))
	}
	const want = Seals | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
	if got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || got&want != want {
		return fmt.Errorf("got seals %#x, %v, want %#x", got, err, want)
	}
	return nil
}

// Frame encodes q as a frame. If q has no number yet, Frame sets it to the next unused number.
func (c *Client) Frame(q *sidecarpb.Request) []byte {
	if q.Id == 0 {
		c.lastID++
		q.Id = c.lastID
	}
	body, err := proto.Marshal(q)
	if err != nil {
		c.t.Fatal(err)
	}
	return append(protowire.AppendVarint(nil, uint64(len(body))), body...)
}

// Send sends q together with the descriptors fds, and returns the number of the request.
func (c *Client) Send(q *sidecarpb.Request, fds ...int) uint64 {
	c.t.Helper()
	c.Write(c.Frame(q), fds...)
	return q.Id
}

// Reply waits for the answer to the request with the number id, and returns the answer.
func (c *Client) Reply(id uint64) *sidecarpb.Reply {
	c.t.Helper()
	for {
		err := c.sort()
		if r := c.early[id]; r != nil {
			delete(c.early, id)
			return r
		}
		if err == nil {
			err = c.Read()
		}
		if err != nil {
			c.t.Fatalf("no reply to request %d: %v", id, err)
		}
	}
}

// Until waits for a notice for which enough returns true, and returns the first such notice. It also
// considers notices that arrived before the call.
func (c *Client) Until(enough func(*sidecarpb.Reply) bool) *sidecarpb.Reply {
	c.t.Helper()
	for at := 0; ; {
		if err := c.sort(); err != nil {
			c.t.Fatal(err)
		}
		for ; at < len(c.News); at++ {
			if enough(c.News[at]) {
				return c.News[at]
			}
		}
		if err := c.Read(); err != nil {
			c.t.Fatalf("waiting for news: %v", err)
		}
	}
}

// Call sends a request, waits for the answer and returns it.
func (c *Client) Call(q *sidecarpb.Request, fds ...int) *sidecarpb.Reply {
	c.t.Helper()
	return c.Reply(c.Send(q, fds...))
}

// Must is like Call, but fails the test if the answer is an error.
func (c *Client) Must(q *sidecarpb.Request, fds ...int) *sidecarpb.Reply {
	c.t.Helper()
	r := c.Call(q, fds...)
	if r.Error != nil {
		c.t.Fatalf("%v: %v", q, r.Error)
	}
	return r
}

// Init joins the job and returns the rank's place in it.
func (c *Client) Init() *sidecarpb.Ready {
	c.t.Helper()
	return c.Must(Init(nil)).GetReady()
}

// Shutdown leaves the job.
func (c *Client) Shutdown() {
	c.t.Helper()
	c.Must(Shutdown())
}

// Bye tells the sidecar that the client is leaving.
func (c *Client) Bye() {
	c.t.Helper()
	c.Send(&sidecarpb.Request{What: &sidecarpb.Request_Bye{Bye: &sidecarpb.Bye{}}})
}

// File creates a memfd of numBytes bytes with the given seals, and returns its descriptor and its mapping. A
// client creates such a file for an arena or a ring. numBytes must be a multiple of the page size.
func File(t testing.TB, numBytes int64, seals int) (fd int, b []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("client", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(fd, 0, 0, numBytes); err != nil {
		t.Fatal(err)
	}
	if b, err = unix.Mmap(fd, 0, int(numBytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return fd, b
}

// Arena creates an arena, sends it to the sidecar and returns its mapping. numBytes must be a multiple of the
// page size.
func (c *Client) Arena(number uint32, numBytes int64) []byte {
	c.t.Helper()
	fd, b := File(c.t, numBytes, Seals)
	c.Arenas[number] = b
	c.Must(Arena(number, numBytes), fd)
	c.close(fd)
	return b
}

// NewRing creates a memfd that contains a ring of n entries, and returns its descriptor and its mapping. A
// Ring request can send the descriptor to the sidecar.
func NewRing(t testing.TB, n uint64) (fd int, b []byte) {
	t.Helper()
	page := uint64(os.Getpagesize())
	fd, b = File(t, int64((ringEntries+2*entryBytes*n+page-1)/page*page), Seals)
	copy(b, "GHVR")
	binary.LittleEndian.PutUint32(b[4:], 3)
	binary.LittleEndian.PutUint32(b[8:], uint32(n))
	return fd, b
}

// Ring creates a ring of n entries and sends it to the sidecar. The ring says that a thread waits.
func (c *Client) Ring(n uint64) {
	c.t.Helper()
	if bits.OnesCount64(n) != 1 {
		c.t.Fatalf("a ring of %d entries", n)
	}
	fd, b := NewRing(c.t, n)
	c.RingBytes, c.n = b, n
	c.Word(RingWaiting).Store(1)
	c.Must(Ring(uint64(len(b))), fd)
	c.close(fd)
}

// Word returns the word at a byte offset in the ring.
func (c *Client) Word(offset int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&c.RingBytes[offset]))
}

// state returns the state in the ring of the operation with the number id.
func (c *Client) state(id uint64) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&c.RingBytes[ringEntries+entryBytes*(c.n+id%c.n)]))
}

// Push submits the operation that is prepared in slot, and returns the number of the operation. It sends no
// doorbell. At most as many operations in a row as the ring has entries may be in flight.
func (c *Client) Push(slot uint32) uint64 { return c.PushCall(slot, 0) }

// PushCall is like Push, but gives the call a number, which the sidecar appends to the operation's name.
func (c *Client) PushCall(slot, call uint32) uint64 {
	id := c.submitted + 1
	c.state(id).Store(1)
	e := c.RingBytes[ringEntries+entryBytes*(c.submitted%c.n):]
	binary.LittleEndian.PutUint64(e, id)
	binary.LittleEndian.PutUint32(e[8:], slot)
	binary.LittleEndian.PutUint32(e[12:], call)
	c.submitted++
	c.Word(ringSubmitted).Store(c.submitted)
	return id
}

// Doorbell wakes the sidecar, so that it reads the ring. A sidecar that polls the ring may have closed the
// connection already because of what is in the ring, so Doorbell succeeds if the connection is closed.
func (c *Client) Doorbell() {
	c.t.Helper()
	if err := c.TryWrite([]byte{0}); err != nil && !errors.Is(err, unix.EPIPE) {
		c.t.Fatal(err)
	}
}

// Begin prepares and submits an operation, and returns its number, which is the argument of Await.
func (c *Client) Begin(o *sidecarpb.Operation) uint64 {
	c.t.Helper()
	if c.RingBytes == nil {
		c.Ring(ownRing)
	}
	slot := firstSlot + uint32(c.submitted)%firstSlot
	c.Send(Prepare(slot, o))
	id := c.Push(slot)
	c.begun[id] = o
	c.Doorbell()
	return id
}

// Await waits for an operation that Begin has submitted, and returns the answer. If the sidecar sends none,
// because all results are in their outputs, Await itself makes an answer, in which the results are the
// operation's outputs, without shapes.
func (c *Client) Await(id uint64) *sidecarpb.Reply {
	c.t.Helper()
	o := c.begun[id]
	delete(c.begun, id)
	if !c.Wait(id) {
		return c.Reply(id)
	}
	a := new(sidecarpb.Completion)
	for _, t := range o.GetTensors() {
		a.Results = append(a.Results, &sidecarpb.Result{Memory: t.Output})
	}
	return &sidecarpb.Reply{Id: id, What: &sidecarpb.Reply_Completion{Completion: a}}
}

// Run submits an operation, waits for it and returns the answer, as Await does.
func (c *Client) Run(o *sidecarpb.Operation) *sidecarpb.Reply {
	c.t.Helper()
	return c.Await(c.Begin(o))
}

// MustRun is like Run, but fails the test if the answer is an error.
func (c *Client) MustRun(o *sidecarpb.Operation) *sidecarpb.Completion {
	c.t.Helper()
	r := c.Run(o)
	if r.Error != nil {
		c.t.Fatalf("%v: %v", o, r.Error)
	}
	return r.GetCompletion()
}

// Wait waits until an operation has ended. It reports whether the ring says so. Otherwise there is an answer.
func (c *Client) Wait(id uint64) bool {
	c.t.Helper()
	for deadline := time.Now().Add(HangTimeout); ; {
		if c.state(id).Load() == stateDone {
			return true
		}
		if c.early[id] != nil {
			return false
		}
		fds := []unix.PollFd{{Fd: int32(c.FD), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, pollInterval); n > 0 && err == nil {
			if err := errors.Join(c.Read(), c.sort()); err != nil {
				c.t.Fatalf("waiting for operation %d: %v", id, err)
			}
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("operation %d does not end", id)
		}
	}
}
