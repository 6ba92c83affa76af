package van

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/shmem"
	"github.com/gohvd/gohvd/internal/testnet"
)

// TestBlocks sends messages of many sizes, whose long frames are in shared memory, and gets them back.
// Blocks must be used again, and none may stay with the receiver.
func TestBlocks(t *testing.T) {
	for _, host := range []string{"here", ""} {
		nodes := startJob(t, 1, 1, func(c *Config) { c.HostID, c.WaterMark = host, 4 })
		s, w := nodes[8], nodes[9]
		s.handle(func(from Process, m *Message) {
			sizes := make([]int, len(m.Data))
			for i, d := range m.Data {
				sizes[i] = len(d)
			}
			back := &Message{Header: &pspb.Header{Timestamp: m.Header.Timestamp}}
			s.Allocate(from.ID, back, sizes...)
			for i, d := range m.Data {
				copy(back.Data[i], d)
			}
			m.Release()
			if err := s.Reply(from, back); err != nil {
				t.Error(err)
			}
		})
		random := rand.New(rand.NewPCG(1, 2))
		sizes := []int{0, 1, 1000, SharedBytes - 1, SharedBytes, SharedBytes + 1, 300_000, 1<<20 + 3}
		link := w.linkWith(t, 8)
		if got := link.shares(); got != (host != "") {
			t.Fatalf("the connection shares memory: %v", got)
		}
		for i := range 100 {
			frames := make([][]byte, random.IntN(maxFrames+1))
			for j := range frames {
				frames[j] = make([]byte, sizes[random.IntN(len(sizes))])
				for k := range frames[j] {
					frames[j][k] = byte(random.Uint32())
				}
			}
			m := &Message{Header: &pspb.Header{Request: true, Timestamp: int64(i)},
				Data: slices.Clone(frames)}
			got := make(chan bool, 1)
			w.mu.Lock()
			w.response = func(m *Message) { got <- slices.EqualFunc(m.Data, frames, bytes.Equal) }
			w.mu.Unlock()
			if _, err := w.Request(t.Context(), 8, m); err != nil {
				t.Fatal(err)
			}
			if !<-got {
				t.Fatalf("message %d has changed", i)
			}
			released(t, s, w)
		}
		for _, n := range []*node{s, w} {
			l := n.linkWith(t, 17-n.ID())
			if shared := l.own.count > 0; shared != (host != "") || l.own.count > 3*maxFrames {
				t.Errorf("%s has made %d blocks", Name(n.ID()), l.own.count)
			}
		}
	}
}

// released waits until the server s and the worker w have released all blocks of each other.
func released(t *testing.T, s, w *node) {
	t.Helper()
	for _, n := range []*node{s, w} {
		l := n.linkWith(t, 17-n.ID())
		testnet.Eventually(t, "all blocks are released", func() bool {
			l.own.mu.Lock()
			defer l.own.mu.Unlock()
			return len(l.own.flying) == 0
		})
	}
}

// arenaBytes allocates n bytes in the arena for the duration of a test, filled with v.
func arenaBytes(t *testing.T, n int, v byte) []byte {
	t.Helper()
	b, err := arena.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := arena.Free(b); err != nil {
			t.Error(err)
		}
	})
	for i := range b {
		b[i] = v
	}
	return b
}

// TestRegions sends frames that are in the arena, which the receiver reads in place, together with others.
// Free is called when the receiver has released the message, or when the link has ended.
func TestRegions(t *testing.T) {
	const n = SharedBytes
	mem := arenaBytes(t, 4*n, 1)
	nodes := startJob(t, 1, 1, nil)
	s, w := nodes[8], nodes[9]
	got := make(chan *Message, 1)
	s.handle(func(_ Process, m *Message) { got <- m })
	var freed atomic.Int32
	frames := [][]byte{mem[8:][:n], bytes.Repeat([]byte{2}, n), mem[2*n:], mem[n+1:][:n]}
	send := func(frames [][]byte) *Message {
		freed.Store(0)
		if _, err := w.Request(t.Context(), 8, &Message{Header: &pspb.Header{Request: true},
			Data: slices.Clone(frames), Free: func() { freed.Add(1) }}); err != nil {
			t.Fatal(err)
		}
		select {
		case m := <-got:
			return m
		case <-time.After(time.Minute):
			t.Fatal("the message does not arrive")
			return nil
		}
	}
	for range 3 {
		m := send(frames)
		if !slices.EqualFunc(m.Data, frames, bytes.Equal) {
			t.Fatal("the message has changed")
		}
		// The first and the third frame are read in place. The fourth one is not aligned.
		mem[8], mem[2*n], mem[n+1] = 3, 4, 5
		if m.Data[0][0] != 3 || m.Data[2][0] != 4 || m.Data[3][0] != 1 {
			t.Errorf("the frames have %d, %d and %d, want 3, 4 and 1", m.Data[0][0], m.Data[2][0],
				m.Data[3][0])
		}
		mem[8], mem[2*n], mem[n+1] = 1, 1, 1
		if freed.Load() != 0 {
			t.Error("the frames are free before the message is released")
		}
		m.Release()
		released(t, s, w)
		testnet.Eventually(t, "the frames are free", func() bool { return freed.Load() > 0 })
		if freed.Load() != 1 {
			t.Errorf("the frames were freed %d times", freed.Load())
		}
	}
	l := w.linkWith(t, 8)
	if l.own.placed != 0 || l.own.count != 2 || len(l.own.regions) != 1 {
		t.Errorf("%d bytes are in flight, %d blocks and %d regions were made", l.own.placed, l.own.count,
			len(l.own.regions))
	}
	m := send(frames[:1])
	if err := m.Intact(); err != nil || freed.Load() != 0 {
		t.Errorf("got %v, and the frame was freed %d times", err, freed.Load())
	}
	kill(s)
	testnet.Eventually(t, "the frames are free", func() bool { return freed.Load() == 1 })
	m.Release()
}

// TestFramesAreIntact checks that the receiver of a frame in the arena learns that the sender has ended the
// link, even if it does not read the connection.
func TestFramesAreIntact(t *testing.T) {
	mem := arenaBytes(t, SharedBytes, 1)
	for _, aborts := range []bool{true, false} {
		nodes := startJob(t, 1, 1, nil)
		s, w := nodes[8], nodes[9]
		l := s.linkWith(t, 9)
		var freed atomic.Bool
		done := make(chan struct{})
		w.handle(func(_ Process, m *Message) {
			defer close(done)
			if err := m.Intact(); err != nil {
				t.Error(err)
			}
			if aborts {
				l.abort(errors.New("test"))
			} else {
				l.fail(errors.New("test"))
			}
			testnet.Eventually(t, "the frames are free", freed.Load)
			testnet.WantError(t, m.Intact(), "server 0 is gone: its connection has ended")
			wantBlamed(t, w, 8)
			m.Release()
		})
		if err := s.Reply(l.process, &Message{Header: &pspb.Header{Request: true}, Data: [][]byte{mem},
			Free: func() { freed.Store(true) }}); err != nil {
			t.Fatal(err)
		}
		<-done
		stopAll(nodes)
	}
}

// TestFramesOfALeavingPeerAreIntact checks that frames in the arena of a peer that leaves the job are intact
// as long as the peer waits for the receiver to close the connection.
func TestFramesOfALeavingPeerAreIntact(t *testing.T) {
	mem := arenaBytes(t, SharedBytes, 1)
	nodes := startJob(t, 1, 1, nil)
	s, w := nodes[8], nodes[9]
	var freed atomic.Bool
	left, done := make(chan struct{}), make(chan struct{})
	w.handle(func(_ Process, m *Message) {
		defer close(done)
		go func() {
			defer close(left)
			s.Stop(t.Context())
		}()
		testnet.Eventually(t, "the server has closed its side", func() bool {
			p := []unix.PollFd{{Events: unix.POLLRDHUP}}
			n := 0
			err := m.link.sock.raw.Control(func(fd uintptr) {
				p[0].Fd = int32(fd)
				n, _ = unix.Poll(p, 0)
			})
			return err == nil && n == 1
		})
		if err := m.Intact(); err != nil || freed.Load() {
			t.Errorf("got %v, and the frames are free: %v", err, freed.Load())
		}
		m.Release()
	})
	if err := s.Reply(w.Process(), &Message{Header: &pspb.Header{Request: true}, Data: [][]byte{mem},
		Free: func() { freed.Store(true) }}); err != nil {
		t.Fatal(err)
	}
	<-done
	<-left
	wantBlamed(t, w)
}

// TestFreedRegion checks that the receiver unmaps a chunk of the arena that the sender has freed, as soon as
// it reads no frame of it, even if it reads a frame of another one.
func TestFreedRegion(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	got := make(chan *Message, 1)
	nodes[8].handle(func(_ Process, m *Message) { got <- m })
	send := func() (mem []byte, m *Message) {
		mem, err := arena.Alloc(65 << 20) // has a chunk of its own
		if err != nil {
			t.Fatal(err)
		}
		mem[0] = 1
		if _, err := nodes[9].Request(t.Context(), 8, &Message{Header: &pspb.Header{Request: true},
			Data: [][]byte{mem[:SharedBytes]}}); err != nil {
			t.Fatal(err)
		}
		return mem, <-got
	}
	l := nodes[8].linkWith(t, 9)
	mapped := func(freed, regions int) func() bool {
		return func() bool {
			l.theirs.mu.Lock()
			defer l.theirs.mu.Unlock()
			n := 0
			for _, r := range l.theirs.regions {
				if r.freed {
					n++
				}
			}
			return n == freed && len(l.theirs.regions) == regions
		}
	}
	first, m := send()
	if err := arena.Free(first); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "the server knows that the chunk was freed", mapped(1, 1))
	second, other := send()
	other.Release()
	if err := arena.Free(second); err != nil {
		t.Fatal(err)
	}
	third, other := send()
	testnet.Eventually(t, "the second chunk is not mapped", mapped(1, 2))
	if m.Data[0][0] != 1 {
		t.Error("the frame has changed")
	}
	m.Release()
	if !mapped(0, 1)() {
		t.Error("the first chunk is still mapped")
	}
	other.Release()
	if err := arena.Free(third); err != nil {
		t.Fatal(err)
	}
	testnet.Eventually(t, "no chunk is mapped", mapped(0, 0))
}

// TestBlocksOutliveTheLink checks that a message can be read when its sender is gone.
func TestBlocksOutliveTheLink(t *testing.T) {
	nodes := startJob(t, 1, 1, nil)
	got := make(chan *Message, 1)
	nodes[8].handle(func(_ Process, m *Message) { got <- m })
	want := bytes.Repeat([]byte{7}, 1<<20)
	if _, err := nodes[9].Request(t.Context(), 8, &Message{Header: &pspb.Header{Request: true},
		Data: [][]byte{want}}); err != nil {
		t.Fatal(err)
	}
	m := <-got
	kill(nodes[9])
	nodes[8].until(t, "the worker is gone", func() bool { return nodes[8].lost[9] != nil })
	if m.theirs == nil || !bytes.Equal(m.Data[0], want) {
		t.Errorf("the message has changed, or is in no block: %v", m.theirs)
	}
	m.Release()
	l, err := nodes[8].link(9)
	if err != nil || l.theirs.segs != nil {
		t.Errorf("the blocks are still mapped: %v", err)
	}
}

// TestNoBlocks checks that frames are sent over the connection if there are too many blocks.
func TestNoBlocks(t *testing.T) {
	var o ownBlocks
	var taken []*block
	for range maxBlocks {
		b := o.takeBlock(SharedBytes)
		if b == nil {
			t.Fatalf("there are only %d blocks", len(taken))
		}
		taken = append(taken, b)
	}
	if o.takeBlock(1) != nil {
		t.Errorf("there are more than %d blocks", maxBlocks)
	}
	o.give(taken[0])
	if o.takeBlock(SharedBytes/2+1) != taken[0] {
		t.Error("a free block is not used again")
	}
	o.endLink()
	for _, b := range taken {
		o.give(b) // unmaps it, because the link has ended
		if b.seg.FD() >= 0 && unix.Fstat(b.seg.FD(), new(unix.Stat_t)) == nil {
			t.Fatal("a block is not closed")
		}
	}
	if o.takeBlock(1) != nil {
		t.Error("there is a block after the end")
	}
}

// TestBadBlocks checks the errors of messages whose blocks are wrong.
func TestBadBlocks(t *testing.T) {
	seg, err := shmem.Create("test", SharedBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer seg.Close()
	plain, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	for _, c := range []struct {
		frame *pspb.Frame
		fd    int
		want  string
	}{
		{&pspb.Frame{Bytes: 1, Block: 1}, -1, "it has 1 bytes in the block 1, which has fewer"},
		{&pspb.Frame{Bytes: 1, Block: 1, BlockBytes: 1}, -1, "the descriptor of a block is missing"},
		{&pspb.Frame{Bytes: 1, Block: 1, BlockBytes: SharedBytes + 1}, seg.FD(),
			"number 1 with 65536 bytes, want 65537"},
		{&pspb.Frame{Bytes: SharedBytes + 1, Block: 1, BlockBytes: SharedBytes}, seg.FD(),
			"it has 65537 bytes in the block 1"},
		{&pspb.Frame{Bytes: 1, Block: 1, BlockBytes: 1}, int(plain.Fd()), "map a block of shared memory"},
		{&pspb.Frame{Bytes: 1, Block: 1, Region: 2}, -1, "it has 1 bytes in the region 2 from byte 0 on"},
		{&pspb.Frame{Bytes: 1, Block: 1, Region: 2, BlockBytes: 1}, -1, "the descriptor of a block is missing"},
		{&pspb.Frame{Bytes: 1, Block: 1, Region: 2, BlockBytes: 1}, int(plain.Fd()),
			"map a region of shared memory"},
		{&pspb.Frame{Bytes: SharedBytes, Block: 1, Region: 2, BlockBytes: 1, Offset: 8}, seg.FD(),
			"it has 65536 bytes in the region 2 from byte 8 on, which has fewer"},
		{&pspb.Frame{Bytes: 1, Block: 1, Region: 2, BlockBytes: 1, Offset: math.MaxUint64}, seg.FD(),
			"it has 1 bytes in the region 2"},
		{&pspb.Frame{Bytes: 1, Block: 1, Region: 2, BlockBytes: 1, Offset: 1}, seg.FD(),
			"it has 1 bytes in the region 2 from byte 1 on"},
	} {
		ends := unixPair(t)
		r := newReader(ends[1])
		r.open(newLink(New(Config{}, ignore{}), Process{ID: 9}, ends[1]))
		var rights []byte
		if c.fd >= 0 {
			rights = unix.UnixRights(c.fd)
		}
		b := wire(t, &Message{Header: &pspb.Header{Frames: []*pspb.Frame{c.frame}}})
		if _, _, err := ends[0].WriteMsgUnix(b, rights, nil); err != nil {
			t.Fatal(err)
		}
		_, err = r.next()
		testnet.WantError(t, err, c.want)
		ends[0].Close()
		if _, err := r.next(); !errors.Is(err, io.EOF) {
			t.Errorf("at the end: got %v", err)
		}
		r.close()
		r.link.theirs.endLink()
		ends[1].Close()
	}
}

// TestExhausted checks that a node that cannot receive a descriptor or map a block blames itself, and that
// its peer blames it too.
func TestExhausted(t *testing.T) {
	for name, exhaust := range map[string]func(t *testing.T, s, w *node){
		"descriptors": func(t *testing.T, _, w *node) {
			m := &Message{Header: &pspb.Header{Request: true}}
			w.Allocate(8, m, SharedBytes)
			testnet.LimitDescriptors(t, 0)
			if _, err := w.Request(t.Context(), 8, m); err != nil {
				t.Fatal(err)
			}
		},
		"memory": func(t *testing.T, s, _ *node) {
			s.linkWith(t, 9).fail(fmt.Errorf("map a block of shared memory: %w", unix.ENOMEM))
		},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := startJob(t, 1, 1, nil)
			s, w := nodes[8], nodes[9]
			exhaust(t, s, w)
			s.until(t, "the link of the server has ended", func() bool { return s.lost[9] != nil })
			w.until(t, "the link of the worker has ended", func() bool { return w.lost[8] != nil })
			for _, n := range []*node{s, w} {
				wantBlamed(t, n, 8)
			}
			testnet.WantError(t, s.lossOf(9), "server 0 has no resources for the connection")
		})
	}
}

// TestPromptCopies checks that a prompt request stays prompt when the van copies its frames, into shared
// memory or because it may have to send them again.
func TestPromptCopies(t *testing.T) {
	for _, resend := range []bool{false, true} {
		nodes := startJob(t, 1, 1, func(c *Config) { c.Resend = resend })
		l := nodes[9].linkWith(t, 8)
		m := &Message{Header: &pspb.Header{Request: true}, Data: [][]byte{make([]byte, 2*SharedBytes)},
			Prompt: true}
		c := l.share(nodes[9].own(m))
		if c == m || !c.Prompt {
			t.Errorf("with resend %t, the message is copied: %t, and prompt: %t", resend, c != m, c.Prompt)
		}
		c.Drop()
		stopAll(nodes)
	}
}
