package sidecar

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
	"github.com/gohvd/gohvd/internal/testnet"
)

// refused checks that the reply r is an error of the given class, and that its text contains the string says.
func refused(t *testing.T, what string, r *sidecarpb.Reply, class uint32, says string) {
	t.Helper()
	if r.Error.GetClass() != class || !strings.Contains(r.Error.GetText(), says) {
		t.Errorf("%s: got %v, want class %d and %q", what, r, class, says)
	}
}

// TestUsage sends requests with invalid parameters. Each must fail with an error. The connection of the
// client and the job must continue.
func TestUsage(t *testing.T) {
	ranks(t, 1, func(_ int, c *client, b []byte) {
		good := func(f func(*sidecarpb.Operation, *sidecarpb.Tensor)) *sidecarpb.Operation {
			o := &sidecarpb.Operation{Kind: 1, Dtype: 9, ReduceOp: 2, Name: "x"}
			tt := &sidecarpb.Tensor{Shape: []int64{4}, Input: at(0, 0, 16), Output: at(0, 64, 16)}
			o.Tensors = []*sidecarpb.Tensor{tt}
			f(o, tt)
			return o
		}
		type op = sidecarpb.Operation
		type tens = sidecarpb.Tensor
		for what, o := range map[string]*op{
			"operation 0":          good(func(o *op, _ *tens) { o.Kind = 0 }),
			"operation 8":          good(func(o *op, _ *tens) { o.Kind = 8 }),
			"operation 4294967295": good(func(o *op, _ *tens) { o.Kind = math.MaxUint32 }),
			"element type 0":       good(func(o *op, _ *tens) { o.Dtype = 0 }),
			"element type 257":     good(func(o *op, _ *tens) { o.Dtype = 257 }),
			"reduction 8":          good(func(o *op, _ *tens) { o.ReduceOp = 8 }),
			"option Op":            good(func(o *op, _ *tens) { o.Kind, o.ReduceOp = 3, 2 }),
			"element type 9":       good(func(o *op, _ *tens) { o.WireDtype = 9 }),
			"timeout of NaN":       good(func(o *op, _ *tens) { o.TimeoutSeconds = math.NaN() }),
			"timeout of -1":        good(func(o *op, _ *tens) { o.TimeoutSeconds = -1 }),
			"timeout of 1e+30":     good(func(o *op, _ *tens) { o.TimeoutSeconds = 1e30 }),
			"prescale factor NaN":  good(func(o *op, _ *tens) { o.Prescale = new(math.NaN()) }),
			"0 tensors, want one":  good(func(o *op, _ *tens) { o.Tensors = nil }),
			"2 tensors, want one": good(func(o *op, tt *tens) {
				o.Tensors = append(o.Tensors, &tens{Shape: []int64{0}})
			}),
			"1 tensors, want none": good(func(o *op, _ *tens) { o.Kind = 6 }),
			"no grouped form": good(func(o *op, _ *tens) {
				o.Kind, o.ReduceOp, o.Grouped = 3, 0, true
			}),
			"was removed": good(func(o *op, _ *tens) { o.ProcessSet = 7 }),
			"got root rank -1": good(func(o *op, _ *tens) {
				o.Kind, o.ReduceOp, o.RootRank = 3, 0, -1
			}),
			"splits": good(func(o *op, _ *tens) {
				o.Kind, o.ReduceOp, o.Splits = 4, 0, []int64{5}
			}),
			"negative dimension": good(func(o *op, tt *tens) { tt.Shape = []int64{-1} }),
			"more than 2^63-1": good(func(o *op, tt *tens) {
				tt.Shape = []int64{math.MaxInt64, 2}
			}),
			"than 2^63 bytes": good(func(o *op, tt *tens) { tt.Shape = []int64{math.MaxInt64} }),
			"dimensions, want at most": good(func(o *op, tt *tens) {
				tt.Shape = append(slices.Repeat([]int64{1}, 64), 4)
			}),
			"an input of 16 bytes":   good(func(o *op, tt *tens) { tt.Shape = []int64{5} }),
			"the output has 8 bytes": good(func(o *op, tt *tens) { tt.Output = at(0, 64, 8) }),
			"input at byte 2":        good(func(o *op, tt *tens) { tt.Input = at(0, 2, 16) }),
			"16 bytes at byte 66":    good(func(o *op, tt *tens) { tt.Output = at(0, 66, 16) }),
			"overlap in arena 1":     good(func(o *op, tt *tens) { tt.Output = at(0, 12, 16) }),
			"arena 9 does not exist": good(func(o *op, tt *tens) { tt.Input = at(8, 0, 16) }),
			"arena 2147483649 does not exist": good(func(o *op, tt *tens) {
				tt.Input = &sidecarpb.Memory{Arena: wire.OwnArenas + 1, Bytes: 16}
			}),
			"16 bytes at byte 1048572":  good(func(o *op, tt *tens) { tt.Input = at(0, 1<<20-4, 16) }),
			"at byte 1844674407370955":  good(func(o *op, tt *tens) { tt.Output = at(0, -16, 16) }),
			"tensor name of 5000 bytes": good(func(o *op, _ *tens) { o.Name = strings.Repeat("x", 5000) }),
			"needs option Name": good(func(o *op, _ *tens) {
				o.Name, o.WireDtype, o.ErrorFeedback = "", 7, true
			}),
			"tensors 0 and 2 overlap": good(func(o *op, tt *tens) {
				o.Grouped = true
				o.Tensors = append(o.Tensors, &tens{Shape: []int64{1}, Input: at(0, 128, 4)},
					&tens{Shape: []int64{1}, Input: at(0, 68, 4)})
			}),
		} {
			refused(t, what, c.Run(o), classUsage, what)
		}
		// Inputs may overlap, because the operation only reads them.
		c.MustRun(good(func(o *op, tt *tens) {
			o.Grouped = true
			o.Tensors = append(o.Tensors, &tens{Shape: []int64{1}, Input: at(0, 4, 4)})
		}))
		c.MustRun(good(func(*op, *tens) {}))
		refused(t, "no operation", c.Run(nil), classUsage, "operation 0")
		refused(t, "no ring with it", c.Call(sidecartest.Ring(8192)), classUsage, "file descriptor")
		id := c.Push(5)
		c.Doorbell()
		refused(t, "an empty slot", c.Reply(id), classUsage, "slot 5 has no prepared operation")
		fd, rb := sidecartest.NewRing(t, 16)
		refused(t, "a second ring", c.Call(sidecartest.Ring(uint64(len(rb))), fd), classUsage, "already")
		release(t, fd, rb)
		// An operation that was prepared with an arena must fail if it is submitted after the client has
		// dropped the arena.
		c.Send(sidecartest.Prepare(1, good(func(*op, *tens) {})))
		c.Must(sidecartest.DropArena(1))
		id = c.Push(1)
		c.Doorbell()
		refused(t, "a dropped arena", c.Reply(id), classUsage, "arena 1 does not exist")
		refused(t, "dropped twice", c.Call(sidecartest.DropArena(1)), classUsage, "arena 1 does not exist")
	})
}

// TestPreparedOperationsAreBounded prepares operations that take too much memory. One that has no room fails
// when it is submitted. When the client prepares the other slots again with small operations, it has room.
func TestPreparedOperationsAreBounded(t *testing.T) {
	ranks(t, 1, func(_ int, c *client, _ []byte) {
		group := func(tensors int) *sidecarpb.Operation {
			o := &sidecarpb.Operation{Kind: 1, Dtype: 9, ReduceOp: 2, Name: "x", Grouped: true}
			for range tensors {
				// The tensors have the same input and an output that the sidecar allocates.
				o.Tensors = append(o.Tensors, &sidecarpb.Tensor{Shape: []int64{1}, Input: at(0, 0, 4)})
			}
			return o
		}
		run := func(slot uint32) *sidecarpb.Reply {
			id := c.Push(slot)
			c.Doorbell()
			c.Wait(id)
			return c.Reply(id)
		}
		c.Ring(16)
		// A tensor takes at least 100 bytes, so these are at least 100 MB.
		const slots, tensors = 100, 10000
		for slot := range uint32(slots) {
			c.Send(sidecartest.Prepare(slot, group(tensors)))
		}
		if r := run(0); r.Error != nil {
			t.Errorf("the first slot: %v", r.Error)
		}
		if e := run(slots - 1).GetError(); !strings.Contains(e.GetText(), "would take more than 67108864 bytes") {
			t.Errorf("the last slot: %v", e)
		}
		for slot := range uint32(slots - 1) {
			c.Send(sidecartest.Prepare(slot, group(1)))
		}
		c.Send(sidecartest.Prepare(slots-1, group(tensors)))
		if r := run(slots - 1); r.Error != nil {
			t.Errorf("the last slot, when there is room: %v", r.Error)
		}
	})
}

func release(t *testing.T, fd int, b []byte) {
	t.Helper()
	if err := errors.Join(unix.Close(fd), unix.Munmap(b)); err != nil {
		t.Error(err)
	}
}

// TestArenaRefused sends arenas with invalid numbers, sizes or seals, and rings with invalid headers. The
// sidecar must refuse them and close the descriptors that came with them.
func TestArenaRefused(t *testing.T) {
	const size = 1 << 16
	chunksBefore, _, _ := arena.Stats()
	s := server(t, Config{})
	c := connect(t, s)
	c.Arena(5, size)
	for _, q := range []struct {
		what, says string
		number     uint32
		numBytes   int64
		seals      int
		change     func(fd int) error
	}{
		{"unsealed", "sealed", 1, size, 0, nil},
		{"it can grow", "sealed", 1, size, unix.F_SEAL_SHRINK, nil},
		{"it can shrink", "sealed", 1, size, unix.F_SEAL_GROW, nil},
		{"its seals are sealed", "seal", 1, size, sidecartest.Seals | unix.F_SEAL_SEAL, nil},
		{"holes", "allocated", 1, size, sidecartest.Seals, func(fd int) error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
		}},
		{"another size", "65536 bytes", 1, 2 * size, sidecartest.Seals, nil},
		{"number 0", "a number from", 0, size, sidecartest.Seals, nil},
		{"a number of the sidecar's", "a number from", wire.OwnArenas, size, sidecartest.Seals, nil},
		{"no bytes", "1 to 2^40 bytes", 1, 0, sidecartest.Seals, nil},
		{"too large", "1 to 2^40 bytes", 1, 1<<40 + 4096, sidecartest.Seals, nil},
		{"a number in use", "already", 5, size, sidecartest.Seals, nil},
	} {
		fd, b := sidecartest.File(t, size, q.seals)
		if q.change != nil {
			if err := q.change(fd); err != nil {
				t.Fatal(err)
			}
		}
		before := testnet.OpenFiles(t)
		refused(t, q.what, c.Call(sidecartest.Arena(q.number, q.numBytes), fd), classUsage, q.says)
		if after := testnet.OpenFiles(t); after != before {
			t.Errorf("%s: %d descriptors before, %d after", q.what, before, after)
		}
		release(t, fd, b)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	refused(t, "a pipe", c.Call(sidecartest.Arena(1, size), int(r.Fd())), classUsage, "seals")
	refused(t, "nothing", c.Call(sidecartest.Arena(1, size)), classUsage, "file descriptor")
	for _, spoil := range []func(b []byte){
		func(b []byte) { b[0] = 'X' },
		func(b []byte) { b[4] = 1 },
		func(b []byte) { binary.LittleEndian.PutUint32(b[8:], 15) },
		func(b []byte) { binary.LittleEndian.PutUint32(b[8:], 48) },
		func(b []byte) { binary.LittleEndian.PutUint32(b[8:], 1<<17) },
		func(b []byte) { binary.LittleEndian.PutUint32(b[8:], 4096) },
	} {
		fd, b := sidecartest.NewRing(t, 32)
		spoil(b)
		refused(t, "a broken ring", c.Call(sidecartest.Ring(uint64(len(b))), fd), classUsage, "a ring")
		release(t, fd, b)
	}
	c.Ring(16)
	// Once the sidecar has accepted an arena, nobody can map the arena for writing any more. Existing
	// mappings must still work.
	fd, b := sidecartest.File(t, size, sidecartest.Seals)
	c.Must(sidecartest.Arena(6, size), fd)
	if _, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err,
		unix.EPERM) {
		t.Errorf("an arena can be mapped with write access: %v", err)
	}
	release(t, fd, b)
	c.bye()
	if chunks, _, _ := arena.Stats(); chunks != chunksBefore {
		t.Errorf("%d arenas are left when their client has gone", chunks-chunksBefore)
	}
}

// TestResultsAreSealed checks that the sidecar seals the memory of a result before it gives the client access
// to it; sidecartest checks the seals. The job has only one rank, because in a larger job sharing memory
// between the ranks would already have sealed it.
func TestResultsAreSealed(t *testing.T) {
	const large = 65 << 20 // more than the sealed memory that the sidecar may have kept from earlier jobs
	ranks(t, 1, func(_ int, c *client, _ []byte) {
		c.Arena(9, large)
		place := c.own("x", &sidecarpb.Memory{Arena: 9, Bytes: large})
		if got := len(c.Arenas[place.Arena]); got < large {
			t.Errorf("the result is in %d bytes, want %d or more", got, large)
		}
	})
}

// TestArenaInUse drops an arena that an operation in flight uses. The client must get an error. If the client
// leaves instead, the sidecar must unmap the arena when the operation is done.
func TestArenaInUse(t *testing.T) {
	before, _, _ := arena.Stats()
	s := server(t, Config{})
	begun := make(chan *operation, 1)
	install(s, stub{begin: func(o *operation) error { begun <- o; return nil },
		drive: func(context.Context, func() bool) {}})
	c := connect(t, s)
	c.Arena(1, 4096)
	c.Begin(sidecartest.Sum("x", 1, 0, 1))
	o := <-begun
	refused(t, "in use", c.Call(sidecartest.DropArena(1)), classUsage, "use it 2 times")
	if got := s.Report(); got.InFlight != 1 || !got.Connected {
		t.Errorf("status: %v", got)
	}
	c.bye()
	if chunks, _, _ := arena.Stats(); chunks != before+1 {
		t.Error("the arena has gone in the middle of the operation")
	}
	o.Finished(nil)
	if chunks, _, _ := arena.Stats(); chunks != before {
		t.Error("the arena is left after the operation")
	}
	s.running.Store(nil)
}

// TestGarbage lets clients break the protocol. The sidecar must close their connections, leak no descriptor,
// and continue to serve later clients.
func TestGarbage(t *testing.T) {
	s := server(t, Config{})
	var opened []func()
	memfd := func(c *client) int {
		fd, b := sidecartest.File(t, 4096, sidecartest.Seals)
		opened = append(opened, func() { release(t, fd, b) })
		return fd
	}
	for what, send := range map[string]func(c *client){
		"protocol error: the length":  func(c *client) { c.Write([]byte{0x81, 0x80, 0x80, 0x08}) },
		"more than 16777216":          func(c *client) { c.Write(bytes.Repeat([]byte{0xff}, 10)) },
		"proto":                       func(c *client) { c.Write([]byte{3, 0xff, 0xff, 0xff}) },
		"a kind that this version":    func(c *client) { c.Write([]byte{2, 8, 1}) },
		"got a request with number 0": func(c *client) { c.Write([]byte{2, 0x62, 0}) },
		"slot 131072": func(c *client) {
			c.Send(sidecartest.Prepare(131072, sidecartest.Sum("x", 1, 0, 1)))
		},
		"a frame that needs none": func(c *client) { c.Send(sidecartest.StopTimeline(), memfd(c)) },
		"2 descriptors":           func(c *client) { c.Send(sidecartest.Arena(1, 4096), memfd(c), memfd(c)) },
		"at least 3 descriptors":  func(c *client) { c.Write([]byte{3, 0}, memfd(c), memfd(c), memfd(c)) },
		"with a doorbell":         func(c *client) { c.Write([]byte{0}, memfd(c)) },
		"without Bye": func(c *client) {
			frame := c.Frame(sidecartest.StopTimeline())
			c.Write(frame[:len(frame)-1])
			if err := unix.Shutdown(c.FD, unix.SHUT_WR); err != nil {
				t.Error(err)
			}
		},
		"5 submissions, of which hvdd has taken 0 and completed 0": func(c *client) {
			c.Ring(16)
			c.RingBytes[64] = 5 // the entries are empty, so all five operations have the number 0
			c.Doorbell()
		},
		"17 submissions": func(c *client) {
			c.Ring(16)
			c.RingBytes[64] = 17
			c.Doorbell()
		},
		"submission 0 of the ring has number 0": func(c *client) {
			c.Ring(16)
			c.RingBytes[64] = 1
			c.Doorbell()
		},
	} {
		before := testnet.OpenFiles(t)
		c := connect(t, s)
		send(c)
		if err := c.end(); what == "without Bye" && err != nil {
			t.Errorf("%s: %v", what, err)
		} else if what != "without Bye" && !errors.Is(err, wire.ErrFrame) {
			t.Errorf("%s: the connection has ended with %v", what, err)
		}
		c.Close()
		for _, f := range opened {
			f()
		}
		opened = nil
		if after := testnet.OpenFiles(t); after != before {
			t.Errorf("%s: %d descriptors before, %d after", what, before, after)
		}
		select {
		case <-s.Dead():
			t.Fatalf("%s: the rank has failed without a job: %v", what, s.Death())
		default:
		}
	}
	c := connect(t, s)
	if got := s.Report(); !got.Connected || got.State != StateIdle {
		t.Errorf("status: %v", got)
	}
	c.bye()
}

// TestReadEndsInFrame fills the buffer of an inbox up to the first byte of a frame. The next read gets the
// rest of the frame and the next frame, and each frame must get its own descriptor.
func TestReadEndsInFrame(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := sidecartest.New(t, pair[1])
	i := inbox{FD: pair[0]}
	defer unix.Close(pair[0])
	defer i.Close()
	c.Write(make([]byte, cap(slices.Grow(i.buf, readBytes))-1)) // doorbells
	sizes := []int64{4096, 8192}
	for n, size := range sizes {
		fd, b := sidecartest.File(t, size, sidecartest.Seals)
		defer release(t, fd, b)
		c.Write(c.Frame(sidecartest.Arena(uint32(n+1), size)), fd)
	}
	for got := 0; got < len(sizes); {
		if came, err := i.Fill(false); !came || err != nil {
			t.Fatalf("after %d frames: got %t, %v", got, came, err)
		}
		for body, ok, err := i.Next(); ok || err != nil; body, ok, err = i.Next() {
			if err != nil {
				t.Fatal(err)
			}
			if len(body) == 0 {
				continue
			}
			fd, err := i.Descriptor()
			if err != nil {
				t.Fatal(err)
			}
			var s unix.Stat_t
			if err := errors.Join(unix.Fstat(fd, &s), unix.Close(fd)); err != nil || s.Size != sizes[got] {
				t.Errorf("frame %d: got a file of %d bytes, %v, want %d", got, s.Size, err, sizes[got])
			}
			got++
		}
	}
}

// TestTooMany lets a client use a number that is still in use, and exceed the limit on operations in flight.
// In each case the sidecar must close the connection.
func TestTooMany(t *testing.T) {
	const most = 100
	for _, what := range []string{"number", "operations", "tensors", "ring"} {
		servers := job(t, 2)
		servers[0].cfg.MaxInFlight = most
		all(servers, func(r int, s *Server) {
			c := connect(t, s)
			c.Init()
			if r > 0 {
				return // rank 1 submits nothing, so no operation completes
			}
			c.Arena(1, 4096)
			switch what {
			case "number":
				q := sidecartest.Init(nil)
				q.Id = c.Begin(sidecartest.Sum("x", 1, 0, 1))
				// The sidecar starts operations in order. So when the second operation has failed, the first
				// one has been started.
				c.Await(c.Begin(sidecartest.Sum("no arena", 9, 0, 1)))
				c.Send(q)
			case "operations":
				c.Ring(128)
				for i := range uint32(most + 1) {
					c.Send(sidecartest.Prepare(i, &sidecarpb.Operation{Kind: 6, Name: fmt.Sprint(i)}))
					c.Push(i)
				}
				c.Doorbell()
			case "tensors":
				group := &sidecarpb.Operation{Kind: 1, Dtype: 9, Grouped: true, Name: "x"}
				for range most/2 + 1 {
					group.Tensors = append(group.Tensors, &sidecarpb.Tensor{Shape: []int64{0}})
				}
				c.Begin(group)
				group.Name = "y"
				c.Begin(group)
			case "ring":
				c.Ring(16)
				for i := range uint32(17) {
					c.Send(sidecartest.Prepare(i, &sidecarpb.Operation{Kind: 6, Name: fmt.Sprint(i)}))
				}
				for i := range uint32(16) {
					c.Push(i)
				}
				c.Doorbell()
				testnet.Eventually(t, "all were taken", func() bool { return c.Word(wire.RingTaken).Load() == 16 })
				c.Push(16)
				c.Doorbell()
			}
			if err := c.end(); !errors.Is(err, wire.ErrFrame) {
				t.Errorf("%s: the connection has ended with %v", what, err)
			}
			<-s.Dead()
		})
	}
}

// unread is a number of answers to requests of unanswerable that a socket has no room for.
const unread = 60000

// unanswerable returns a request that the reader answers with an error.
func unanswerable() *sidecarpb.Request { return sidecartest.DropArena(9) }

// unsent returns the number of bytes that are queued for the client.
func unsent(s *Server) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.client.out.Unsent()
}

// TestClientThatNeverReads runs a client that does not read its answers. The sidecar must queue only a
// limited number of bytes for it. When the client starts to read, it must get all answers.
func TestClientThatNeverReads(t *testing.T) {
	s := server(t, Config{})
	c := connect(t, s)
	sent := make(chan error, 1)
	var frames []byte
	var ids []uint64
	for range unread {
		q := unanswerable()
		frames = append(frames, c.Frame(q)...)
		ids = append(ids, q.Id)
	}
	go func() { sent <- c.TryWrite(frames) }()
	testnet.Eventually(t, "the bound", func() bool { return unsent(s) > maxUnsentBytes })
	if got := unsent(s); got > maxUnsentBytes+1100 {
		t.Errorf("%d bytes are kept, want about %d", got, maxUnsentBytes)
	}
	for _, id := range ids { // the client reads now, and gets all answers
		if got := c.Reply(id).GetError(); got == nil {
			t.Fatalf("reply %d: %v", id, got)
		}
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	c.bye()
}

// TestOperationOfClientThatNeverReads runs a client that does not read its replies. The sidecar must stop
// reading the client's requests, and must still complete the operations that the client has already
// submitted.
func TestOperationOfClientThatNeverReads(t *testing.T) {
	s := server(t, Config{})
	helped := make(chan struct{}, 1)
	begun := make(chan *operation, 1)
	install(s, stub{
		begin: func(o *operation) error { begun <- o; return nil },
		drive: func(context.Context, func() bool) {
			select {
			case helped <- struct{}{}:
			default:
			}
		},
	})
	c := connect(t, s)
	id := c.Begin(&sidecarpb.Operation{Kind: 6, Name: "b"})
	o := <-begun
	<-helped
	var frames []byte
	for range unread {
		frames = append(frames, c.Frame(unanswerable())...)
	}
	sent := make(chan error, 1)
	go func() { sent <- c.TryWrite(frames) }()
	testnet.Eventually(t, "nothing more is read", func() bool { return unsent(s) > maxUnsentBytes })
	o.Finished(nil)
	if !c.Wait(id) {
		t.Error("the operation was answered, want that the ring says that it is done")
	}
	gone(t, s)
	<-sent // the write has ended, with an error if the sidecar has not read everything
	s.running.Store(nil)
}

// TestClientThatNeverReadsGoes lets a client disconnect that has not read its replies. ServeConn must return,
// although replies are still queued.
func TestClientThatNeverReadsGoes(t *testing.T) {
	s := server(t, Config{})
	c := connect(t, s)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for c.TryWrite(c.Frame(unanswerable())) == nil {
		}
	}()
	testnet.Eventually(t, "a queue", func() bool { return unsent(s) > maxUnsentBytes })
	if err := unix.Shutdown(c.FD, unix.SHUT_RDWR); err != nil {
		t.Fatal(err)
	}
	<-sent
	if err := c.end(); err != nil {
		t.Error(err)
	}
}

// TestUnauthenticatedPeers connects clients that send nothing, or that use another protocol or version. The
// sidecar must refuse them.
func TestUnauthenticatedPeers(t *testing.T) {
	s, hasty := server(t, Config{}), server(t, Config{HelloTimeout: 50 * time.Millisecond})
	for what, hello := range map[string]string{
		"i/o timeout": "", "greeting is": "GET / HT", "got protocol version 1": "GHVD\x00\x00\x00\x01",
		"secret": "GHVA\x01\x00\x00\x00",
	} {
		c := newClient(t, s)
		if hello == "" {
			c = newClient(t, hasty)
		}
		c.Write([]byte(hello))
		if err := c.end(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%q: the connection has ended with %v, want %q", hello, err, what)
		}
	}
}

const otherUserVariable = "GOHVD_SIDECAR_OTHER_USER"

// otherUser connects to the socket at path. The test calls it in a process of another user. otherUser returns
// the exit status of this process: 0 if the sidecar serves it.
func otherUser(path string) int {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return 2
	}
	if _, err := conn.Write([]byte("GHVD\x00\x00\x00\x03")); err != nil {
		return 1
	}
	var b [8]byte
	if n, err := conn.Read(b[:]); n == 0 || err != nil {
		return 1
	}
	return 0
}

// TestOtherUser connects from a process of another user that can open the socket. The sidecar must refuse it.
func TestOtherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start processes of other users")
	}
	dir, err := os.MkdirTemp("", "sidecar")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// The test binary is copied to a directory where the other user can run it.
	self := testnet.ReadFile(t, "/proc/self/exe")
	program := filepath.Join(dir, "client")
	if err := errors.Join(os.WriteFile(program, self, 0o755), os.Chmod(dir, 0o755),
		os.Chmod(path, 0o777)); err != nil {
		t.Fatal(err)
	}
	s := server(t, Config{})
	for _, uid := range []uint32{0, 65534} {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = append(os.Environ(), otherUserVariable+"="+path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		conn, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		err = s.ServeConn(conn)
		if refused := err != nil &&
			strings.Contains(err.Error(), "the client runs as user 65534, want 0"); refused != (uid != 0) {
			t.Errorf("user %d: %v", uid, err)
		}
		if err := cmd.Wait(); (err == nil) != (uid == 0) {
			t.Errorf("user %d: the client ended with %v", uid, err)
		}
	}
}

// TestOneClient connects further clients. While the first one is connected, they must be refused, with an
// error that names its process. When it has left, the next one must be served, even if the sidecar has not
// noticed yet that the first one has left.
func TestOneClient(t *testing.T) {
	s := server(t, Config{})
	c := connect(t, s)
	second := connect(t, s)
	testnet.WantError(t, second.end(), fmt.Sprintf("refused: process %d is connected", os.Getpid()))
	news := second.Until(func(r *sidecarpb.Reply) bool { return r.Error != nil })
	refused(t, "the second client", news, classInternal, "a sidecar has one client at a time")

	begun, driving, release := make(chan *operation, 1), make(chan struct{}, 1), make(chan struct{})
	install(s, stub{
		begin: func(o *operation) error { begun <- o; return nil },
		drive: func(context.Context, func() bool) {
			select {
			case driving <- struct{}{}:
			default:
			}
			<-release
		},
	})
	c.Begin(&sidecarpb.Operation{Kind: 6})
	o := <-begun
	<-driving
	c.Bye()
	c.Close()
	third := newClient(t, s)
	greeted := make(chan struct{})
	go func() { third.Hello(); close(greeted) }()
	select {
	case <-greeted:
		t.Error("the third client was greeted before the first one was done")
	case <-time.After(20 * time.Millisecond):
	}
	close(release)
	o.Finished(nil)
	<-greeted
	if got := s.Report(); !got.Connected || got.InFlight != 0 {
		t.Errorf("with the third client: %+v", got)
	}
	third.bye()
	s.running.Store(nil)
}

// TestClose checks that Close closes all connections: those without a greeting, and that of a client in a
// job. It also checks that a later connection is refused.
func TestClose(t *testing.T) {
	s := New(Config{})
	silent, busy := newClient(t, s), connect(t, s)
	busy.Init()
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	for _, c := range []*client{silent, busy} {
		if err := c.end(); err == nil {
			t.Error("a client was not notified of the end")
		}
	}
	if err := newClient(t, s).end(); !errors.Is(err, errEnding) {
		t.Errorf("a client after the end: %v", err)
	}
	if s.Death() != nil {
		t.Errorf("an orderly end is a death: %v", s.Death())
	}
}
