package shm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/internal/transport/shm"
	"github.com/gohvd/gohvd/internal/transport/tcp"
	"github.com/gohvd/gohvd/store"
)

// child is the main function of a child process that runs one rank. dir is its XDG_RUNTIME_DIR, and
// waits is its time limit. The test writes lines to the process (<) and reads lines that it prints (>):
//
//	> its address and offer
//	< rank, the store of the job, addresses and offers of all ranks
//	> joined
//	< any line
//	> formed
//	< the name of an action (see act)
func child(dir, waits string) error {
	limit, err := time.ParseDuration(waits)
	if err != nil {
		return err
	}
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	under, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	e, err := shm.Listen(shm.Config{RuntimeDir: dir})
	if err != nil {
		return err
	}
	fmt.Println(under.Addr(), offerText(e.Offer()))
	if !in.Scan() {
		return in.Err()
	}
	words := strings.Fields(in.Text())
	ep := shm.Epoch{Job: "job", Epoch: 7}
	if _, err := fmt.Sscan(words[0], &ep.Rank); err != nil {
		return err
	}
	var addrs []string
	for i := 2; i < len(words); i += 2 {
		offer, err := offerOf(words[i+1])
		if err != nil {
			return err
		}
		addrs, ep.Offers, ep.Hosts = append(addrs, words[i]), append(ep.Offers, offer),
			append(ep.Hosts, "host")
	}
	if ep.Under, err = under.Connect(tcp.Epoch{Job: "job", Epoch: 7, Rank: ep.Rank,
		Addrs: addrs}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	kv, err := store.Dial(ctx, words[1], store.Config{})
	if err != nil {
		return err
	}
	defer kv.Close()
	s, err := join(ctx, kv, ep.Rank, len(addrs))
	if err != nil {
		return err
	}
	defer s.Close()
	ep.Agree = s.Agree
	fmt.Println("joined")
	if !in.Scan() {
		return in.Err()
	}
	m, err := e.Connect(ctx, ep)
	if err != nil {
		return err
	}
	defer m.Close()
	fmt.Println("formed", len(m.Group()), m.UnsharedReason())
	for in.Scan() {
		if err := act(ctx, m, ep.Rank, in.Text()); err != nil {
			return err
		}
	}
	return in.Err()
}

// offerText returns the offer o as JSON without spaces.
func offerText(o shm.Offer) string {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func offerOf(text string) (o shm.Offer, err error) {
	err = json.Unmarshal([]byte(text), &o)
	return o, err
}

// join checks in the given rank at the store kv and returns its session.
func join(ctx context.Context, kv store.Store, rank topo.Rank, size int) (*rendezvous.Session, error) {
	return rendezvous.Join(ctx, rendezvous.JoinConfig{
		Store: kv, Job: "job", Rank: rank, Size: size, Self: rendezvous.Record{PID: os.Getpid(),
			HostID: "host"},
	})
}

// serve serves a new store until the test ends. It returns a client of the store and the address of the
// store.
func serve(tb testing.TB) (kv store.Store, addr string) {
	tb.Helper()
	h := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", h, store.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := errors.Join(server.Close(), h.Close()); err != nil {
			tb.Error(err)
		}
	})
	return h, server.Addr()
}

// act runs an action in a child process. The parameter what is the name of the action, which the test has
// sent. The actions are:
//
//   - share: share a segment and a tensor with all ranks, and read the segments and tensors of the other ranks
//   - watch: wait until the other ranks have gone, and check that their memory can still be read
//   - pong: in a job with two ranks, answer the messages of the other rank
func act(ctx context.Context, m shm.Sharer, rank topo.Rank, what string) error {
	// peer is the other rank if the job has two ranks.
	peer := 1 - rank
	switch what {
	case "share":
		b, err := m.Share(1, 4096, m.Group())
		if err != nil {
			return err
		}
		b[0] = byte(100 + rank)
		t, err := arena.Alloc(1000)
		if err != nil {
			return err
		}
		t[0] = byte(200 + rank)
		at, _ := arena.Find(t)
		for _, r := range m.Group() {
			if r == rank {
				continue
			}
			theirs, err := m.Peer(ctx, 1, r)
			if err != nil {
				return err
			}
			chunk, err := m.Arena(ctx, r, 1)
			if err != nil {
				return err
			}
			// A peer writes these bytes only after it has shared the memory, so this loop waits for them.
			for theirs[0] != byte(100+r) || chunk[at.Offset] != byte(200+r) {
				if err := m.Err(1, r); err != nil {
					return err
				}
			}
		}
		fmt.Println("shared")
	case "watch":
		var gone []string
		for _, r := range m.Group() {
			if r == rank {
				continue
			}
			c, err := m.Conn(ctx, transport.Control, r)
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			var p *transport.PeerError
			if !errors.As(err, &p) || p.Peer != r {
				return fmt.Errorf("read from rank %d: %v", r, err)
			}
			for m.Err(1, r) == nil { // the leader tells the others
				if err := ctx.Err(); err != nil {
					return fmt.Errorf("rank %d has not gone: %w", r, err)
				}
				runtime.Gosched()
			}
			gone = append(gone, fmt.Sprint(r))
		}
		b, err := m.Peer(ctx, 1, peer)
		if err != nil {
			return err
		}
		fmt.Println("gone", strings.Join(gone, " "), b[0]) // b must still be readable
	case "pong":
		c, err := m.Conn(ctx, transport.Control, peer)
		if err != nil {
			return err
		}
		fmt.Println("ready")
		pong(c, 64)
	}
	return nil
}

// process is a rank in a child process (see child).
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err strings.Builder
}

func start(tb testing.TB, dir string, limit time.Duration) *process {
	tb.Helper()
	exe := testnet.Self(tb)
	p := &process{cmd: exec.Command(exe, "rank", dir, limit.String())}
	p.cmd.Stderr = &p.err
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.kill)
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only if the process has ended already
	_ = p.cmd.Wait()         // the exit status is ignored
}

func (p *process) send(tb testing.TB, line string) {
	tb.Helper()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		tb.Fatalf("%v\n%s", err, p.err.String())
	}
}

func (p *process) receive(tb testing.TB) string {
	tb.Helper()
	if !p.out.Scan() {
		p.kill()
		tb.Fatalf("a rank ended: %v\n%s", p.out.Err(), p.err.String())
	}
	return p.out.Text()
}

// launch starts size ranks in child processes and reads their addresses and offers. It returns the processes
// and, for each rank, the line that the test sends to the rank to make it join.
func launch(tb testing.TB, dir string, size int, limit time.Duration) (ranks []*process, epoch []string) {
	tb.Helper()
	_, kv := serve(tb)
	var all strings.Builder
	all.WriteString(" " + kv)
	for range size {
		p := start(tb, dir, limit)
		ranks = append(ranks, p)
		all.WriteString(" " + p.receive(tb))
	}
	for r := range size {
		epoch = append(epoch, fmt.Sprint(r)+all.String())
	}
	return ranks, epoch
}

// meetAll sends to each rank its line in epoch, and waits until all ranks have checked in.
func meetAll(tb testing.TB, ranks []*process, epoch []string) {
	tb.Helper()
	for r, p := range ranks {
		p.send(tb, epoch[r])
	}
	for r, p := range ranks {
		if got := p.receive(tb); got != "joined" {
			tb.Fatalf("rank %d: got %q", r, got)
		}
	}
}

func form(tb testing.TB, dir string, size int) []*process {
	tb.Helper()
	ranks, epoch := launch(tb, dir, size, hangTimeout)
	meetAll(tb, ranks, epoch)
	for _, p := range ranks {
		p.send(tb, "connect")
	}
	for r, p := range ranks {
		if got, want := p.receive(tb), fmt.Sprintf("formed %d ", size); got != want {
			tb.Fatalf("rank %d: got %q, want %q", r, got, want)
		}
	}
	return ranks
}

// sockets returns the sockets of all ranks whose XDG_RUNTIME_DIR is dir.
func sockets(t *testing.T, dir string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "gohvd", "*", "s"))
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// empty checks that the runtime folder in dir has nothing in it.
func empty(tb testing.TB, when, dir string) {
	tb.Helper()
	if left, err := os.ReadDir(filepath.Join(dir, "gohvd")); err != nil || len(left) > 0 {
		tb.Errorf("%s: got %v, %v in the runtime folder, want nothing", when, left, err)
	}
}

// TestKill kills one of three processes that share memory. The other two must notice it at once, and must
// still be able to read the memory that the killed process shared. No file may be left in the socket
// directory or in /dev/shm.
func TestKill(t *testing.T) {
	dir := t.TempDir()
	ranks := form(t, dir, 3)
	empty(t, "formed", dir)
	for _, p := range ranks {
		p.send(t, "share")
	}
	for _, p := range ranks {
		if got := p.receive(t); got != "shared" {
			t.Fatalf("got %q", got)
		}
	}
	for _, p := range ranks[:2] { // rank 0 waits for ranks 1 and 2, and rank 1 waits for ranks 0 and 2
		p.send(t, "watch")
	}
	began := time.Now()
	ranks[2].kill()
	ranks[1].kill()
	if got := ranks[0].receive(t); got != "gone 1 2 101" {
		t.Errorf("got %q, want both", got)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("noticing the death took %v", took)
	}
	empty(t, "killed", dir)
	entries, err := os.ReadDir("/dev/shm")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), "gohvd") {
			t.Errorf("%s is in /dev/shm", e.Name())
		}
	}
}

// TestKillBeforeConnect kills two ranks before they call Connect. Their sockets must stay until the next
// Listen, which must remove them.
func TestKillBeforeConnect(t *testing.T) {
	dir := t.TempDir()
	ranks, _ := launch(t, dir, 2, hangTimeout)
	for _, p := range ranks {
		p.kill()
	}
	if left := sockets(t, dir); len(left) != 2 {
		t.Errorf("got %v, want two sockets", left)
	}
	e, err := shm.Listen(shm.Config{RuntimeDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if left := sockets(t, dir); !slices.Equal(left, []string{e.Offer().Socket}) {
		t.Errorf("got %v, want only the new one, %s", left, e.Offer().Socket)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	empty(t, "closed", dir)
}

// TestKillInConnect kills a rank before it has connected to a peer. The other ranks must report its death and
// must not wait for it.
func TestKillInConnect(t *testing.T) {
	dir := t.TempDir()
	ranks, epoch := launch(t, dir, 3, hangTimeout)
	meetAll(t, ranks, epoch)
	for _, r := range []int{0, 1} {
		ranks[r].send(t, "connect")
	}
	ranks[2].kill()
	for _, r := range []int{0, 1} {
		if ranks[r].out.Scan() {
			t.Errorf("rank %d said %q, want an error", r, ranks[r].out.Text())
		}
		if err := ranks[r].cmd.Wait(); err == nil ||
			!strings.Contains(ranks[r].err.String(), "rank 2 failed: the process closed its connection during Init") {
			t.Errorf("rank %d: %v\n%s", r, err, ranks[r].err.String())
		}
	}
}

// BenchmarkProcesses is like BenchmarkPingPong, but the rank that answers runs in a child process. Both ranks
// poll.
func BenchmarkProcesses(b *testing.B) {
	dir := b.TempDir()
	other := start(b, dir, hangTimeout)
	words := strings.Fields(other.receive(b))
	offer, err := offerOf(words[1])
	if err != nil {
		b.Fatal(err)
	}
	under, err := tcp.Listen(tcp.Config{ListenAddr: "127.0.0.1:0"})
	if err != nil {
		b.Fatal(err)
	}
	e, err := shm.Listen(shm.Config{RuntimeDir: dir})
	if err != nil {
		b.Fatal(err)
	}
	addrs := []string{under.Addr(), words[0]}
	kv, at := serve(b)
	other.send(b, fmt.Sprintf("1 %s %s %s %s %s", at, addrs[0], offerText(e.Offer()), words[0], words[1]))
	s, err := join(b.Context(), kv, 0, 2)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	other.receive(b)
	other.send(b, "connect")
	mesh, err := under.Connect(tcp.Epoch{Job: "job", Epoch: 7, Rank: 0, Addrs: addrs})
	if err != nil {
		b.Fatal(err)
	}
	m, err := e.Connect(b.Context(), shm.Epoch{
		Job: "job", Epoch: 7, Rank: 0, Hosts: []string{"host", "host"}, Offers: []shm.Offer{e.Offer(), offer},
		Under: mesh, Agree: s.Agree,
	})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	other.receive(b)
	other.send(b, "pong")
	c, err := m.Conn(b.Context(), transport.Control, 1)
	if err != nil {
		b.Fatal(err)
	}
	other.receive(b)
	measure(b, c, 64)
}
