package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/hvd"
	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/memfd"
	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/message"
)

// fake is a sidecar that says what a test has it say. It is rank 1 of 2.
type fake struct {
	path string
	// answer gives what to send for a request; nil is what a sidecar says if all is well and there is nothing to say.
	answer func(f *fake, q *sidecarpb.Request) []byte

	done chan struct{} // closed when the client has gone

	mu     sync.Mutex
	conn   *net.UnixConn
	asked  []*sidecarpb.Request
	arenas map[uint32][]byte
}

func newFake(t *testing.T, answer func(f *fake, q *sidecarpb.Request) []byte) *fake {
	f := &fake{path: filepath.Join(t.TempDir(), "s"), answer: answer, done: make(chan struct{}), arenas: make(map[uint32][]byte)}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: f.path})
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		defer close(f.done)
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		f.conn = conn
		if err := f.serve(); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("the fake sidecar: %v", err)
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
		for _, b := range f.arenas {
			if err := unix.Munmap(b); err != nil {
				t.Error(err)
			}
		}
	})
	return f
}

// serve answers a client until it goes.
func (f *fake) serve() error {
	greeting := make([]byte, 8)
	if _, err := io.ReadFull(f.conn, greeting); err != nil {
		return err
	}
	if _, err := f.conn.Write(greeting); err != nil {
		return err
	}
	var (
		buf   []byte
		fds   []int
		chunk [4096]byte
		oob   [64]byte
	)
	for {
		n, oobn, _, _, err := f.conn.ReadMsgUnix(chunk[:], oob[:])
		if err != nil {
			return err
		}
		if n == 0 {
			return io.EOF
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return err
		}
		for _, m := range messages {
			got, err := unix.ParseUnixRights(&m)
			if err != nil {
				return err
			}
			fds = append(fds, got...)
		}
		for buf = append(buf, chunk[:n]...); ; {
			size, head := binary.Uvarint(buf)
			if head <= 0 || uint64(len(buf)-head) < size {
				break
			}
			q := new(sidecarpb.Request)
			if err := proto.Unmarshal(buf[head:head+int(size)], q); err != nil {
				return err
			}
			buf = buf[head+int(size):]
			if a := q.GetArena(); a != nil {
				if len(fds) != 1 {
					return fmt.Errorf("%d descriptors with an arena", len(fds))
				}
				b, err := unix.Mmap(fds[0], 0, int(a.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				if closed := unix.Close(fds[0]); closed != nil || err != nil && err != unix.EPERM {
					return errors.Join(err, closed)
				}
				if fds = nil; err == nil {
					f.arenas[a.Arena] = b // else an engine of this process has shared it with peers
				}
			}
			f.mu.Lock()
			f.asked = append(f.asked, q)
			f.mu.Unlock()
			said := f.answer(f, q)
			if said == nil {
				said = f.well(q)
			}
			if _, err := f.conn.Write(said); err != nil {
				return err
			}
		}
	}
}

// well is what a sidecar says.
func (f *fake) well(q *sidecarpb.Request) []byte {
	r := &sidecarpb.Reply{Id: q.Id}
	switch what := q.What.(type) {
	case *sidecarpb.Request_Arena:
		if f.arenas[what.Arena.Arena] == nil {
			r.Error = &sidecarpb.Error{Class: 1, Text: "hvd: arena: it is sealed"}
		}
	case *sidecarpb.Request_Init:
		r.What = &sidecarpb.Reply_Ready{Ready: &sidecarpb.Ready{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, CrossSize: 1, Epoch: 1}}
	case *sidecarpb.Request_Submit:
		done := new(sidecarpb.Completion)
		for _, t := range what.Submit.Operation.Tensors {
			done.Results = append(done.Results, &sidecarpb.Result{Shape: t.Shape, Memory: t.Output})
		}
		r.What = &sidecarpb.Reply_Completion{Completion: done}
	case *sidecarpb.Request_Bye, *sidecarpb.Request_Free:
		return nil
	}
	return frameOf(r)
}

// frameOf are replies as they travel.
func frameOf(replies ...*sidecarpb.Reply) (b []byte) {
	for _, r := range replies {
		body, err := proto.Marshal(r)
		if err != nil {
			panic(err) // of a reply that this file has made
		}
		b = append(protowire.AppendVarint(b, uint64(len(body))), body...)
	}
	return b
}

// all are the requests that f has got.
func (f *fake) all() []*sidecarpb.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.asked)
}

func (f *fake) join(ctx context.Context, t *testing.T) *hvd.Engine {
	t.Helper()
	e, err := hvd.New(ctx, append(with("HVD_SIDECAR", "unix://"+f.path), hvd.WithLogger(zap.NewNop()))...)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// What a sidecar says against the protocol is its end: operations have an error that says what was wrong, and nobody hangs.
func TestBreaches(t *testing.T) {
	completion := func(results ...*sidecarpb.Memory) func(f *fake, q *sidecarpb.Request) []byte {
		return func(_ *fake, q *sidecarpb.Request) []byte {
			done := new(sidecarpb.Completion)
			for _, m := range results {
				done.Results = append(done.Results, &sidecarpb.Result{Memory: m})
			}
			return frameOf(&sidecarpb.Reply{Id: q.Id, What: &sidecarpb.Reply_Completion{Completion: done}})
		}
	}
	beyond := func(offset uint64) func(f *fake, q *sidecarpb.Request) []byte {
		return func(f *fake, q *sidecarpb.Request) []byte {
			s, err := memfd.Create("theirs", 4096)
			if err != nil {
				return nil
			}
			defer s.Close()
			shown := frameOf(&sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: 1 << 31, Bytes: 4096}}})
			if _, _, err := f.conn.WriteMsgUnix(shown, unix.UnixRights(s.FD()), nil); err != nil {
				return nil
			}
			return completion(&sidecarpb.Memory{Arena: 1 << 31, Offset: offset, Bytes: 4097})(f, q)
		}
	}
	for title, c := range map[string]struct {
		says func(f *fake, q *sidecarpb.Request) []byte
		want string
	}{
		"no message":        {func(*fake, *sidecarpb.Request) []byte { return []byte{3, 0xff, 0xff, 0xff} }, "proto"},
		"a frame too long":  {func(*fake, *sidecarpb.Request) []byte { return []byte{0xff, 0xff, 0xff, 0xff} }, "length"},
		"an unknown number": {func(_ *fake, q *sidecarpb.Request) []byte { return frameOf(&sidecarpb.Reply{Id: q.Id + 100}) }, "nobody"},
		"an answer twice": {func(f *fake, q *sidecarpb.Request) []byte {
			return append([]byte{0}, slices.Repeat(frameOf(&sidecarpb.Reply{Id: 1}), 2)...)
		}, "nobody"},
		"no completion":    {func(_ *fake, q *sidecarpb.Request) []byte { return frameOf(&sidecarpb.Reply{Id: q.Id}) }, "answered by 0"},
		"two results":      {completion(new(sidecarpb.Memory), new(sidecarpb.Memory)), "answered by 2"},
		"an unknown arena": {completion(&sidecarpb.Memory{Arena: 1 << 31, Bytes: 4}), "arena 2147483648"},
		"another's arena":  {completion(&sidecarpb.Memory{Arena: 7, Bytes: 4}), "arena 7"},
		"an arena without fd": {func(*fake, *sidecarpb.Request) []byte {
			return frameOf(&sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: 1 << 31, Bytes: 4096}}})
		}, "descriptor"},
		"beyond its arena": {beyond(0), "a result of 4097 bytes at byte 0"},
		"behind its arena": {beyond(1 << 63), "at byte 9223372036854775808"},
		"the end": {func(f *fake, _ *sidecarpb.Request) []byte {
			_ = f.conn.CloseWrite()
			return []byte{}
		}, "ended"},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			ctx := patience(t)
			f := newFake(t, func(f *fake, q *sidecarpb.Request) []byte {
				if o := q.GetSubmit().GetOperation(); o == nil || o.Kind != uint32(message.Allgather) {
					return nil
				}
				return c.says(f, q)
			})
			e := f.join(ctx, t)
			for range 2 { // so that it is the caller who reads what is said next
				if _, err := sumOf(ctx, e, "before"); err != nil {
					t.Fatal(err)
				}
			}
			_, err := hvd.Allgather(ctx, []int32{1}, hvd.On(e))
			check := func(what string, err error) {
				t.Helper()
				var peer *hvd.PeerError
				if !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) {
					t.Errorf("%s: got %v, want that rank 1 failed because of the sidecar at %s", what, err, f.path)
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
			<-e.Done()
			// The operation whose answer is wrong may say only that; everything else names the rank.
			check("the engine", e.Err())
			if !strings.Contains(e.Err().Error(), f.path) || !strings.Contains(e.Err().Error(), c.want) {
				t.Errorf("the engine: got %v, want %q and the path %s", e.Err(), c.want, f.path)
			}
			_, err = sumOf(ctx, e, "later")
			check("a later operation", err)
			check("shutdown", e.Shutdown(ctx))
			check("a second shutdown", e.Shutdown(ctx))
		})
	}
}

// Operations that wait are over with the sidecar, in whatever state they are.
func TestSidecarGone(t *testing.T) {
	ctx := patience(t)
	f := newFake(t, func(f *fake, q *sidecarpb.Request) []byte {
		if q.GetSubmit() != nil && q.GetSubmit().Operation.Name == "last" {
			_ = f.conn.Close()
		}
		if q.GetSubmit() != nil {
			return []byte{}
		}
		return nil
	})
	e := f.join(ctx, t)
	var handles []*hvd.Handle[int32]
	for i := range 11 {
		name := fmt.Sprint("waits", i)
		if i == 10 {
			name = "last"
		}
		h, err := hvd.AllreduceAsync(make([]int32, 1000*i), hvd.Name(name), hvd.On(e))
		if err != nil {
			t.Fatal(err)
		}
		handles = append(handles, h)
	}
	for i, h := range handles {
		var peer *hvd.PeerError
		if _, err := h.Wait(ctx); !errors.As(err, &peer) || !slices.Equal(peer.Ranks, []int{1}) || !strings.Contains(err.Error(), f.path+" is gone") {
			t.Errorf("operation %d: got %v, want that rank 1 failed because the sidecar at %s is gone", i, err, f.path)
		}
	}
	var peer *hvd.PeerError
	if err := e.Shutdown(ctx); !errors.As(err, &peer) {
		t.Errorf("shutdown: got %v, want that a rank failed", err)
	}
}

// A number that another client has for an arena is not used: the next is tried, and what needs the arena waits for it.
func TestArenaNumberTaken(t *testing.T) {
	ctx := patience(t)
	refusals := 2
	f := newFake(t, func(_ *fake, q *sidecarpb.Request) []byte {
		if q.GetArena() == nil || refusals == 0 {
			return nil
		}
		refusals--
		return frameOf(&sidecarpb.Reply{Id: q.Id, Error: &sidecarpb.Error{Class: 1, Text: "there is an arena of the number"}})
	})
	e := f.join(ctx, t)
	if _, err := sumOf(ctx, e, "x"); err != nil {
		t.Error(err)
	}
	var numbers []uint32
	for _, q := range f.all() {
		if a := q.GetArena(); a != nil {
			numbers = append(numbers, a.Arena)
			if a.Arena == 0 || a.Arena >= 1<<31 || slices.Contains(numbers[:len(numbers)-1], a.Arena) {
				t.Errorf("an arena has the number %d, after %d", a.Arena, numbers)
			}
		}
		if o := q.GetSubmit().GetOperation(); o != nil && !slices.Contains(numbers[2:], o.Tensors[0].Input.Arena) {
			t.Errorf("an operation uses arena %d, want none of the first two of %d, which were refused", o.Tensors[0].Input.Arena, numbers)
		}
	}
	if len(numbers) < 3 {
		t.Errorf("got the arenas %d, want three at least", numbers)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// A sidecar that takes no memory at all fails operations, not the job.
func TestNoArenaTaken(t *testing.T) {
	ctx := patience(t)
	f := newFake(t, func(_ *fake, q *sidecarpb.Request) []byte {
		if q.GetArena() == nil {
			return nil
		}
		return frameOf(&sidecarpb.Reply{Id: q.Id, Error: &sidecarpb.Error{Class: 1, Text: "hvd: arena: none is taken"}})
	})
	e := f.join(ctx, t)
	for range 2 {
		if _, err := sumOf(ctx, e, "x"); err == nil || !strings.Contains(err.Error(), "none is taken") {
			t.Errorf("got %v, want why no memory was taken", err)
		}
	}
	if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
		t.Error(err)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// Memory of hvd.Alloc is named as it is, other memory by a copy that has the contents. Operations go on with chunks that come and go.
func TestWhatIsCopied(t *testing.T) {
	ctx := patience(t)
	const large = 65 << 20 // more than a chunk that is shared with others
	var wrong []string
	f := newFake(t, func(f *fake, q *sidecarpb.Request) []byte {
		for _, x := range q.GetSubmit().GetOperation().GetTensors() {
			b := f.arenas[x.Input.Arena]
			if b == nil || x.Input.Offset+x.Input.Bytes > uint64(len(b)) {
				wrong = append(wrong, fmt.Sprint("no memory at ", x.Input))
				continue
			}
			if in := b[x.Input.Offset:][:x.Input.Bytes]; bytes.Count(in, []byte{1}) != len(in) {
				wrong = append(wrong, fmt.Sprint("other contents at ", x.Input))
			}
			copy(f.arenas[x.Output.Arena][x.Output.Offset:], bytes.Repeat([]byte{2}, int(x.Output.Bytes)))
		}
		return nil
	})
	e := f.join(ctx, t)
	for _, elems := range []int{1, 100, 1 << 20, large} {
		for _, arena := range []bool{false, true} {
			x, before := make([]uint8, elems), len(f.all())
			if arena {
				var err error
				if x, err = hvd.Alloc[uint8](elems); err != nil {
					t.Fatal(err)
				}
			}
			copy(x, bytes.Repeat([]byte{1}, len(x)))
			name := fmt.Sprint(elems, arena)
			y, err := hvd.Allreduce(ctx, x, hvd.InPlace(), hvd.Op(hvd.Max), hvd.Name(name), hvd.On(e))
			if err != nil || y[0] != 2 || y[elems-1] != 2 {
				t.Errorf("%d elements, arena %v: got %d ... %d and error %v, want 2", elems, arena, y[0], y[elems-1], err)
			}
			number := uint32(0) // of the first arena that was given since
			for _, q := range f.all()[before:] {
				if o := q.GetSubmit().GetOperation(); o != nil && !proto.Equal(o.Tensors[0].Input, o.Tensors[0].Output) {
					t.Errorf("%v: in place at %v and %v", o.Name, o.Tensors[0].Input, o.Tensors[0].Output)
				}
				if a := q.GetArena(); a != nil && number == 0 {
					number = a.Arena
				}
				// A tensor of this size has a chunk of its own, which nobody else has been given.
				if o := q.GetSubmit().GetOperation(); o != nil && arena && elems == large && o.Tensors[0].Input.Arena != number {
					t.Errorf("a tensor of hvd.Alloc in arena %d is copied, to arena %d", number, o.Tensors[0].Input.Arena)
				}
			}
			if arena {
				if err := hvd.Free(x); err != nil {
					t.Error(err)
				}
			}
		}
	}
	// Of what is in place but not the same, the part is copied: the sidecar takes no overlap.
	x, err := hvd.Alloc[uint8](large)
	if err != nil {
		t.Fatal(err)
	}
	before := len(f.all())
	copy(x, bytes.Repeat([]byte{1}, len(x)))
	part, err := hvd.Reducescatter(ctx, x, hvd.InPlace(), hvd.On(e))
	if err != nil || len(part) != large/2 || part[0] != 2 || part[len(part)-1] != 2 || x[0] != 1 || x[large-1] != 2 {
		t.Errorf("reducescatter in place: error %v, %d elements, from %d to %d", err, len(part), x[0], x[large-1])
	}
	copy(x, bytes.Repeat([]byte{1}, len(x)))
	whole, err := hvd.Allgather(ctx, x, hvd.InPlace(), hvd.On(e))
	if err != nil || len(whole) != large || whole[0] != 2 || whole[large-1] != 2 {
		t.Errorf("allgather in place: error %v, %d elements", err, len(whole))
	}
	for _, q := range f.all()[before:] {
		if o := q.GetSubmit().GetOperation(); o != nil && o.Tensors[0].Input.Arena == o.Tensors[0].Output.Arena {
			t.Errorf("%s: from %v to %v, want apart", o.Name, o.Tensors[0].Input, o.Tensors[0].Output)
		}
	}
	if err := hvd.Free(x); err != nil {
		t.Error(err)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	<-f.done
	if all := f.all(); all[len(all)-1].GetBye() == nil || all[len(all)-2].GetShutdown() == nil {
		t.Errorf("the last requests are %v and %v, want a shutdown and a farewell", all[len(all)-2], all[len(all)-1])
	}
	if len(wrong) > 0 {
		t.Error(wrong)
	}
	given, dropped := 0, 0
	for _, q := range f.all() {
		if q.GetArena() != nil {
			given++
		}
		if q.GetDropArena() != nil {
			dropped++
		}
	}
	// The large tensors have chunks of their own, of which that of the program's is given back.
	if given < 4 || dropped < 1 {
		t.Errorf("%d arenas were given and %d taken back, want at least 4 and 1", given, dropped)
	}
}

// A sidecar that does not answer keeps nobody longer than they want to wait.
func TestSilence(t *testing.T) {
	ctx := patience(t)
	f := newFake(t, func(_ *fake, q *sidecarpb.Request) []byte {
		if q.GetInit() != nil || q.GetArena() != nil {
			return nil
		}
		return []byte{}
	})
	e := f.join(ctx, t)
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	h, err := hvd.AllreduceAsync([]int32{1}, hvd.On(e))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait: got %v, want %v", err, context.DeadlineExceeded)
	}
	if err := e.Shutdown(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("shutdown: got %v, want %v", err, context.DeadlineExceeded)
	}
	if _, err := h.Wait(ctx); !errors.Is(err, hvd.ErrClosed) {
		t.Errorf("the operation: got %v, want %v", err, hvd.ErrClosed)
	}
}

// A result in memory of the sidecar's is copied out, and the memory given back.
func TestResultOfTheSidecar(t *testing.T) {
	ctx := patience(t)
	s, err := memfd.Create("theirs", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	copy(s.Bytes()[128:], []byte{5, 6, 7})
	shown := false
	f := newFake(t, func(f *fake, q *sidecarpb.Request) []byte {
		if q.GetSubmit() == nil {
			return nil
		}
		if !shown {
			shown = true
			news := frameOf(&sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: 1<<31 + 5, Bytes: 4096}}})
			if _, _, err := f.conn.WriteMsgUnix(news, unix.UnixRights(s.FD()), nil); err != nil {
				t.Error(err)
			}
		}
		return frameOf(&sidecarpb.Reply{Id: q.Id, What: &sidecarpb.Reply_Completion{Completion: &sidecarpb.Completion{
			Results: []*sidecarpb.Result{{Memory: &sidecarpb.Memory{Arena: 1<<31 + 5, Offset: 128, Bytes: 3}}},
		}}})
	})
	e := f.join(ctx, t)
	for range 2 {
		got, err := hvd.Allgather(ctx, []uint8{1}, hvd.On(e))
		if err != nil || !slices.Equal(got, []uint8{5, 6, 7}) {
			t.Errorf("got %v and error %v, want [5 6 7]", got, err)
		}
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	<-f.done
	freed := 0
	for _, q := range f.all() {
		if at := q.GetFree(); at != nil && at.Arena == 1<<31+5 && at.Offset == 128 {
			freed++
		}
	}
	if freed != 2 {
		t.Errorf("the results were given back %d times, want 2", freed)
	}
}

// theirMaps is how often this process maps to read what a memfd of the given name has, as a client does with a sidecar's arenas.
func theirMaps(t *testing.T, name string) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, " r--s ") && strings.Contains(line, "/memfd:"+name+" ") {
			n++
		}
	}
	return n
}

// An arena of the sidecar's that has gone is unmapped, at once; its number may then be another's. That one goes that the client has
// not is none of its business.
func TestArenaGoes(t *testing.T) {
	const name, rounds = "theirs that go", 5
	ctx := patience(t)
	f := newFake(t, func(f *fake, q *sidecarpb.Request) []byte {
		dropped := func(number uint32) *sidecarpb.Reply {
			return &sidecarpb.Reply{What: &sidecarpb.Reply_DropArena{DropArena: &sidecarpb.DropArena{Arena: number}}}
		}
		if at := q.GetFree(); at != nil {
			return frameOf(dropped(at.Arena), dropped(at.Arena), dropped(7))
		}
		if o := q.GetSubmit().GetOperation(); o == nil || o.Kind != uint32(message.Allgather) {
			return nil
		}
		s, err := memfd.Create(name, 4096)
		if err != nil {
			t.Error(err)
			return nil
		}
		defer s.Close()
		copy(s.Bytes(), []byte{5, 6, 7})
		news := frameOf(&sidecarpb.Reply{What: &sidecarpb.Reply_Arena{Arena: &sidecarpb.Arena{Arena: 1 << 31, Bytes: 4096}}})
		if _, _, err := f.conn.WriteMsgUnix(news, unix.UnixRights(s.FD()), nil); err != nil {
			t.Error(err)
		}
		return frameOf(&sidecarpb.Reply{Id: q.Id, What: &sidecarpb.Reply_Completion{Completion: &sidecarpb.Completion{
			Results: []*sidecarpb.Result{{Memory: &sidecarpb.Memory{Arena: 1 << 31, Bytes: 3}}},
		}}})
	})
	e := f.join(ctx, t)
	for i := range rounds {
		got, err := hvd.Allgather(ctx, []uint8{1}, hvd.On(e))
		if err != nil || !slices.Equal(got, []uint8{5, 6, 7}) {
			t.Fatalf("got %v and error %v, want [5 6 7]", got, err)
		}
		if _, err := sumOf(ctx, e, "x"); err != nil { // which is answered after the news
			t.Fatal(err)
		}
		if n := theirMaps(t, name); n != 0 {
			t.Errorf("after %d results whose arenas have gone, %d are mapped", i+1, n)
		}
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// Results that are larger than what is kept take no more memory the more there are of them.
func TestLargeResults(t *testing.T) {
	const large, rounds = 66 << 20, 8
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprint("ranks=", n), func(t *testing.T) {
			before := theirMaps(t, "gohvd-arena")
			ways[1].run(t, n, func(ctx context.Context, t *testing.T, e *hvd.Engine) {
				mine := make([]uint8, large/n)
				for i := range rounds {
					mine[0], mine[len(mine)-1] = uint8(i+e.Rank()), uint8(i+e.Rank())
					got, err := hvd.Allgather(ctx, mine, hvd.Name("x"), hvd.On(e))
					if err != nil || len(got) != large || got[0] != uint8(i) || got[large-1] != uint8(i+n-1) {
						t.Errorf("rank %d: got %d bytes and error %v", e.Rank(), len(got), err)
						return
					}
				}
				// Answered behind the news of what has gone.
				if err := hvd.Barrier(ctx, hvd.On(e)); err != nil {
					t.Error(err)
				}
				// The sidecars, in this process too, map each other's memory and unmap it when they hear that it has gone.
				for mapped := rounds; mapped >= rounds; {
					if mapped = theirMaps(t, "gohvd-arena") - before; ctx.Err() != nil {
						t.Errorf("rank %d: %d arenas more are mapped after %d results, want fewer than results", e.Rank(), mapped, rounds)
						return
					}
					runtime.Gosched()
				}
			})
		})
	}
}

// Chunks of other processes are not this one's to give.
func TestAdoptedChunksAreNotGiven(t *testing.T) {
	ctx := patience(t)
	f := newFake(t, func(*fake, *sidecarpb.Request) []byte { return nil })
	e := f.join(ctx, t)
	const numBytes = 3 << 12
	s, err := memfd.CreateOpen("another's", numBytes)
	if err != nil {
		t.Fatal(err)
	}
	c := arena.Adopt(s)
	if _, err := sumOf(ctx, e, "x"); err != nil {
		t.Error(err)
	}
	if err := arena.Abandon(c.ID); err != nil {
		t.Error(err)
	}
	if err := e.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	<-f.done
	for _, q := range f.all() {
		if q.GetArena().GetBytes() == numBytes {
			t.Error("a chunk that was adopted was given to the sidecar")
		}
	}
}
