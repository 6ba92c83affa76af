package van

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/testnet"
)

// wire returns the bytes of a message on a connection.
func wire(t testing.TB, m *Message) []byte {
	head, err := m.encode(nil)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Concat(append([][]byte{head}, m.Data...)...)
}

// openReader returns a reader of a registered peer.
func openReader(b []byte) *reader {
	r := newReader(bytes.NewReader(b))
	r.open(nil)
	return r
}

func TestMessagesArriveUnchanged(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var stream []byte
	var want []*Message
	for _, sizes := range [][]int{nil, {0}, {8}, {1, 2, 3, 4}, {0, 0, 7, 0}, {8, 3 << 20}, {5 << 20, 0, 1},
		{firstBytes, 1}, {firstBytes - 10, 10, 0}} {
		m := NewMessage(&pspb.Header{Head: int32(len(want)), Body: []byte("body"), Request: true, Push: true,
			KeyList: random.Uint64()}, sizes...)
		for _, d := range m.Data {
			for j := range d {
				d[j] = byte(random.Uint32())
			}
		}
		m.SetTypes(slices.Repeat([]pspb.DataType{pspb.DataType_FLOAT}, len(sizes))...)
		want = append(want, m)
		stream = append(stream, wire(t, m)...)
	}
	r := openReader(stream)
	for i, w := range want {
		got, err := r.next()
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if !proto.Equal(got.Header, w.Header) || !slices.EqualFunc(got.Data, w.Data, bytes.Equal) {
			t.Errorf("message %d has changed: %v, want %v", i, got.Header, w.Header)
		}
		got.Release()
	}
	if _, err := r.next(); err != io.EOF {
		t.Errorf("at the end: got %v, want EOF", err)
	}
	for cut := range 60 {
		r := openReader(stream[:len(wire(t, want[0]))+cut+1])
		if _, err := r.next(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.next(); cut < 20 && err != io.ErrUnexpectedEOF {
			t.Errorf("cut after %d bytes: got %v", cut+1, err)
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	header := func(frames ...uint64) []byte {
		h := &pspb.Header{}
		for _, n := range frames {
			h.Frames = append(h.Frames, &pspb.Frame{Bytes: n})
		}
		b, err := proto.MarshalOptions{}.MarshalAppend(dial.NewFrame(0), h)
		if err != nil {
			t.Fatal(err)
		}
		return dial.SealFrame(b)
	}
	for _, c := range []struct {
		in   []byte
		open bool
		want string
	}{
		{binary.BigEndian.AppendUint32(nil, maxHeaderBytes+1), true,
			"its header has 4194305 bytes, want at most"},
		{binary.BigEndian.AppendUint32(nil, maxHelloBytes+1), false,
			"its header has 65537 bytes, want at most"},
		{[]byte{0, 0, 0, 2, 255, 255}, true, "malformed message"},
		{header(0, 0, 0, 0, 0), true, "it has more than 4 frames"},
		{header(1), false, "it has 1 data frames, but its sender has not registered yet"},
		{header(MaxDataBytes, 1), true, "have more than"},
		{header(1 << 31), true, "have more than 2147483647 bytes"},
		{header(1 << 63), true, "have more than"},
	} {
		r := newReader(bytes.NewReader(c.in))
		if c.open {
			r.open(nil)
		}
		_, err := r.next()
		testnet.WantError(t, err, c.want)
	}
	// No memory is allocated only because of a length.
	in := append(header(MaxDataBytes), 1, 2, 3)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := openReader(in).next(); err != io.ErrUnexpectedEOF {
		t.Errorf("got %v", err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
		t.Errorf("a message that says it has 2 GiB made the reader allocate %d bytes", n)
	}
}

func FuzzMessage(f *testing.F) {
	m := NewMessage(&pspb.Header{Head: 1, Body: []byte("x"), Push: true, Sequence: 9}, 8, 4)
	f.Add(wire(f, m))
	f.Add(wire(f, controlMessage(&pspb.Control{Command: pspb.Command_ADD_NODE, NumServers: 1,
		Nodes: []*pspb.Node{
			{Role: pspb.Role_WORKER, Hostname: "a", Incarnation: 1}}})))
	f.Add([]byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := openReader(in)
		for {
			m, err := r.next()
			if err != nil {
				return
			}
			if n := m.Bytes(); n > len(in) {
				t.Fatalf("%d bytes became a message of %d bytes", len(in), n)
			}
			// What was read can be sent, and is the same again.
			again, err := openReader(wire(t, &Message{Header: proto.CloneOf(m.Header), Data: m.Data})).next()
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(again.Header, m.Header) || !slices.EqualFunc(again.Data, m.Data, bytes.Equal) {
				t.Fatalf("%v became %v", m.Header, again.Header)
			}
			m.Release()
			again.Release()
		}
	})
}

// FuzzArrive passes messages of a registered peer to the scheduler. None may crash it.
func FuzzArrive(f *testing.F) {
	for _, c := range []*pspb.Control{
		{Command: pspb.Command_BARRIER, BarrierGroup: 7, Barrier: 1}, {Command: pspb.Command_LOST},
		{Command: pspb.Command_ACK, Acks: []uint64{1, 2}}, {Command: pspb.Command_TERMINATE},
		{Command: pspb.Command_BARRIER, BarrierGroup: -3, Withdraw: true}, {Command: 99},
		{Command: pspb.Command_CLOCK, Barrier: 1, Clock: 2},
		{Command: pspb.Command_CLOCK, Clock: -1 << 63, Withdraw: true},
	} {
		m := controlMessage(c)
		m.Header.Request = true
		f.Add(wire(f, m))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		v := New(Config{Role: Scheduler, NumWorkers: 1, NumServers: 1, Customers: 1}, ignore{})
		v.sched = newScheduler(v)
		if _, err := v.sched.addProcess(&pspb.Control{NumWorkers: 1, NumServers: 1, Staleness: 1,
			Nodes: []*pspb.Node{{Role: pspb.Role_WORKER, Incarnation: 1}}}); err != nil {
			t.Fatal(err)
		}
		v.members.nodes[9] = &pspb.Node{Id: 9, Incarnation: 1}
		l := newLink(v, Process{ID: 9}, nil)
		r := openReader(in)
		for {
			m, err := r.next()
			if err != nil || l.arrive(m) != nil {
				return
			}
		}
	})
}

// TestQueue checks that messages leave the queue by priority, and those of a priority in order.
func TestQueue(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	var q queue
	type entry struct {
		priority int32
		order    int
	}
	var want []entry
	for i := range 1000 {
		e := entry{random.Int32N(5), i}
		want = append(want, e)
		q.push(&flight{tries: e.order}, e.priority)
	}
	slices.SortStableFunc(want, func(a, b entry) int { return int(b.priority - a.priority) })
	for i, w := range want {
		if f := q.pop(); f.tries != w.order {
			t.Fatalf("message %d is number %d, want %v", i, f.tries, w)
		}
	}
}

// TestWindows sends messages through a lossy, reordering channel and compares both windows with plain sets.
func TestWindows(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	var (
		in      inWindow
		out     outWindow
		channel []uint64
		now     time.Time
	)
	seen, unacked := make(map[uint64]bool), make(map[uint64]bool)
	const total = 20000
	for len(seen) < total {
		now = now.Add(time.Millisecond)
		if !out.full() && out.next < total {
			f := &flight{m: &Message{Header: &pspb.Header{}}, due: now.Add(5 * time.Millisecond)}
			out.addFlight(f)
			unacked[f.m.Header.Sequence] = true
			channel = append(channel, f.m.Header.Sequence)
		}
		if out.full() != (out.next-out.base == windowMessages) || out.empty() != (len(unacked) == 0) {
			t.Fatalf("%d messages are not acknowledged, base %d, next %d", len(unacked), out.base, out.next)
		}
		out.late(now, 5*time.Millisecond, func(f *flight) { channel = append(channel, f.m.Header.Sequence) })
		for range 2 {
			if len(channel) == 0 {
				break
			}
			i := random.IntN(len(channel))
			s := channel[i]
			channel = slices.Delete(channel, i, i+1)
			if random.IntN(10) == 0 {
				continue // lost
			}
			fresh, err := in.arrive(s)
			if err != nil || fresh == seen[s] {
				t.Fatalf("message %d: fresh %v, seen %v, %v", s, fresh, seen[s], err)
			}
			seen[s] = true
			if random.IntN(10) == 0 {
				continue // the acknowledgement is lost
			}
			if f := out.ack(s); (f != nil) != unacked[s] {
				t.Fatalf("acknowledgement of %d: got %v, want %v", s, f != nil, unacked[s])
			}
			delete(unacked, s)
		}
	}
	if _, err := in.arrive(in.floor + windowMessages + 1); err == nil {
		t.Error("a message beyond the window was accepted")
	}
}

func TestIDs(t *testing.T) {
	for _, c := range []struct {
		group int
		want  []int
	}{{1, []int{1}}, {2, []int{8, 10}}, {3, []int{1, 8, 10}}, {4, []int{9, 11, 13}}, {5, []int{1, 9, 11, 13}},
		{6, []int{8, 10, 9, 11, 13}}, {7, []int{1, 8, 10, 9, 11, 13}}, {8, []int{8}}, {13, []int{13}}, {12,
			nil},
		{15, nil}, {0, nil}, {-1, nil}} {
		if got := Members(c.group, 2, 3); !slices.Equal(got, c.want) {
			t.Errorf("group %d has %v, want %v", c.group, got, c.want)
		}
	}
	for r := range 300 {
		for id, want := range map[int]string{ServerID(r): fmt.Sprint("server ", r),
			WorkerID(r): fmt.Sprint("worker ", r)} {
			if Rank(id) != r || Name(id) != want {
				t.Errorf("id %d is %s with rank %d, want %s", id, Name(id), Rank(id), want)
			}
		}
	}
}

// TestResendsBackOff checks that the time between two resends of a message doubles, up to 32 times the
// timeout.
func TestResendsBackOff(t *testing.T) {
	const timeout = 10 * time.Millisecond
	var out outWindow
	f := &flight{m: &Message{Header: &pspb.Header{}}, due: time.Time{}.Add(timeout)}
	out.addFlight(f)
	var sent []int // in timeouts since the message was sent first
	for now := time.Duration(0); now <= 1200*time.Millisecond; now += time.Millisecond {
		out.late(time.Time{}.Add(now), timeout, func(*flight) { sent = append(sent, int(now/timeout)) })
	}
	if want := []int{1, 3, 7, 15, 31, 63, 95}; !slices.Equal(sent, want) {
		t.Errorf("it was sent again after %v timeouts, want %v", sent, want)
	}
}
