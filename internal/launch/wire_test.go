package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"
)

// messages returns orders and notices, one of each kind.
func messages() (orders []order, notices []notice) {
	job := hostJob{
		Dir: words{"/\xff"}, Command: words{"a", "", "b"}, Env: words{"A=\xfe", "B="},
		Ranks:  []words{{"R=0"}, nil},
		Stores: []string{"[::1]:7"}, Secret: words{"hush"}, Scheduler: true, Restarts: true, Grace: 1, Starter: true,
	}
	orders = []order{{Job: &job}, {Begin: true}, {Signal: unix.SIGKILL}, {Force: true}, {Start: new(int)}}
	notices = []notice{
		{Ready: true}, {Refused: &refusal{Text: "no", Command: "x", Status: 127}},
		{Rank: 2, Report: &report{Ended: true, At: 5, Code: 255, Signal: 9, Sent: 15}},
		{Rank: 1, Report: &report{Errno: unix.ENOEXEC}},
		{Report: &report{PID: 7}}, {Rank: 3, Report: &report{Gone: true}}, {Over: true}, {Bye: true},
	}
	return orders, notices
}

// TestMessages checks that each order and each notice arrives unchanged, and that receive returns an error
// for a message above the limit.
func TestMessages(t *testing.T) {
	var b bytes.Buffer
	orders, notices := messages()
	for _, want := range orders {
		var got order
		if err := errors.Join(send(&b, want), receive(&b, maxOrderBytes, &got)); err != nil ||
			!reflect.DeepEqual(got, want) {
			t.Errorf("got %+v and error %v, want %+v", got, err, want)
		}
	}
	for _, want := range notices {
		var got notice
		if err := errors.Join(send(&b, want), receive(&b, maxNoticeBytes, &got)); err != nil ||
			!reflect.DeepEqual(got, want) {
			t.Errorf("got %+v and error %v, want %+v", got, err, want)
		}
	}
	if err := send(&b, order{
		Job: &hostJob{Stores: []string{strings.Repeat("x", maxNoticeBytes)}}}); err != nil {
		t.Fatal(err)
	}
	if err := receive(&b, maxNoticeBytes, new(notice)); err == nil ||
		!strings.Contains(err.Error(), "want at most") {
		t.Errorf("a message above the limit: got error %v", err)
	}
}

// FuzzNotices sends arbitrary bytes to the launcher on the control stream of an agent. The launcher must
// handle them as notices or end the connection with an error. It must not hang or panic.
func FuzzNotices(f *testing.F) {
	_, notices := messages()
	var all bytes.Buffer
	for _, n := range notices {
		var b bytes.Buffer
		if err := send(io.MultiWriter(&b, &all), n); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Add(all.Bytes())
	f.Add([]byte("\x00\x00\x00\x02{}\x00\x00\x00\x01{"))
	f.Fuzz(func(t *testing.T, text []byte) {
		_ = receive(bytes.NewReader(text), maxOrderBytes, new(order))
		j := newJob(&spec{several: true,
			o: &Options{Command: []string{"x"}, Stderr: io.Discard, Stdout: io.Discard}})
		j.phase, j.begun, j.agents.open = running, true, 1
		c := &agentConn{host: "h", orders: make(chan order, maxOrders)}
		for r := range 2 {
			c.ranks = append(c.ranks, &rank{number: r, conn: c})
		}
		j.ranks, j.agents.conns = c.ranks, []*agentConn{c}
		heard := make(chan error, 1)
		go func() {
			defer close(j.inbox.done)
			for {
				select {
				case f := <-j.inbox.calls:
					f()
				case err := <-heard:
					heard <- err
					return
				}
			}
		}()
		heard <- j.agents.handleNotices(c, bytes.NewReader(text))
		<-j.inbox.done
		if err := <-heard; err != nil {
			j.handleLoss(c, err, time.Now())
		}
		if j.agents.open != 0 {
			t.Errorf("%d hosts are open after the end of the connection", j.agents.open)
		}
		j.console.close()
	})
}

// TestHello checks that readHello finds hello after any text that a login may print, and returns an error if
// there is no valid hello.
func TestHello(t *testing.T) {
	read := func(text string) error { return readHello(strings.NewReader(text)) }
	banner := strings.Repeat("\x00hvdrun host ", maxBannerBytes/13)
	for _, before := range []string{"", "Welcome\n", "\x00hvdrun host \x00", banner} {
		if err := read(before + string(hello())); err != nil {
			t.Errorf("after %d bytes: %v", len(before), err)
		}
	}
	for text, want := range map[string]string{
		"": "EOF", "menu": `got "menu", want the greeting`, helloMagic + "\x00\x00": "EOF", helloMagic +
			"\x00\x00\x00\x07": "got version 7",
		strings.Repeat("x", maxBannerBytes+1) + string(hello()): "without the greeting",
	} {
		if err := read(text); err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 500 {
			t.Errorf("%.20q: got error %v, want one with %q", text, err, want)
		}
	}
}

// TestWords checks that encoding and decoding do not change a list of texts, even if the texts are not
// UTF-8.
func TestWords(t *testing.T) {
	for _, w := range []words{nil, {""}, {"", ""}, {"a"}, {"a", "", "\xff\n"}} {
		text, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		var got words
		if err := json.Unmarshal(text, &got); err != nil || !slices.Equal(got, w) {
			t.Errorf("got %q and error %v, want %q", got, err, w)
		}
	}
}

// TestStreamThatNobodyReads writes to a stream that nothing reads. Output on other streams, notices and
// orders must arrive without delay.
func TestStreamThatNobodyReads(t *testing.T) {
	here, there := net.Pipe()
	launcher, err := newSession(yamux.Client, &link{in: here, out: here}, minLiveness)
	if err != nil {
		t.Fatal(err)
	}
	defer launcher.Close()
	agent, err := newSession(yamux.Server, &link{in: there, out: there}, minLiveness)
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	var mine, theirs [3]*yamux.Stream // the control stream, a stream that is not read, and one that is read
	for i := range mine {
		if mine[i], err = launcher.OpenStream(); err == nil {
			theirs[i], err = agent.AcceptStream()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	stuck := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(theirs[1], zeros{})
		stuck <- n
	}()
	for range 100 {
		const numBytes = 1 << 20
		go func() { _, _ = theirs[2].Write(make([]byte, numBytes)) }()
		if n, err := io.CopyN(io.Discard, mine[2], numBytes); n != numBytes || err != nil {
			t.Fatalf("got %d bytes and error %v", n, err)
		}
		if err := errors.Join(send(mine[0], order{Begin: true}), receive(theirs[0], maxOrderBytes,
			new(order))); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(send(theirs[0], notice{Bye: true}), receive(mine[0], maxNoticeBytes,
			new(notice))); err != nil {
			t.Fatal(err)
		}
	}
	launcher.Close()
	if n := <-stuck; n > 256<<10 {
		t.Errorf("%d bytes wait, want at most 256 KiB", n)
	}
}

// slow is a link that accepts each write at once and delivers it later in small pieces, like a slow network.
type slow struct {
	net.Conn
	written chan []byte
}

func newSlow(t *testing.T, c net.Conn) *slow {
	s := &slow{c, make(chan []byte, 1000)}
	go func() {
		for {
			select {
			case b := <-s.written:
				time.Sleep(time.Duration(len(b)) * 3 * time.Microsecond)
				if _, err := c.Write(b); err != nil {
					return
				}
			case <-t.Context().Done():
				return
			}
		}
	}()
	return s
}

func (s *slow) Write(b []byte) (int, error) {
	for piece := range slices.Chunk(slices.Clone(b), 16<<10) {
		s.written <- piece
	}
	return len(b), nil
}

// TestSlowLink checks that a peer counts as alive while it sends data, even if its reply to a ping waits
// behind so much output that it arrives later than liveness permits.
func TestSlowLink(t *testing.T) {
	const liveness, streams, numBytes = 2 * time.Second, 4, 256 << 10
	here, there := net.Pipe()
	launcher, err := newSession(yamux.Client, &link{in: here, out: here}, liveness)
	if err != nil {
		t.Fatal(err)
	}
	defer launcher.Close()
	agent, err := newSession(yamux.Server, &link{in: there, out: newSlow(t, there)}, liveness)
	if err != nil {
		t.Fatal(err)
	}
	defer agent.Close()
	var readers sync.WaitGroup
	for range streams {
		in, err := launcher.OpenStream()
		if err != nil {
			t.Fatal(err)
		}
		out, err := agent.AcceptStream()
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = out.Write(make([]byte, numBytes)) }()
		readers.Go(func() {
			if n, err := io.CopyN(io.Discard, in, numBytes); err != nil {
				t.Errorf("got %d of %d bytes and error %v", n, numBytes, launcher.reason(err))
			}
		})
	}
	readers.Wait()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// TestIsOfHost checks which environment variables stay on their host and which are sent to other hosts.
func TestIsOfHost(t *testing.T) {
	for _, name := range []string{"HOSTNAME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "HOME", "TMPDIR",
		"CUDA_VISIBLE_DEVICES", "HVD_HOSTID", "_", "PWD"} {
		if !IsOfHost(name) {
			t.Errorf("%s would be sent to other hosts", name)
		}
	}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "HOROVOD_RANK", "HOROVOD_HOSTNAME", "HOMER",
		"PYTHONPATH", "", "VISIBLE_DEVICES_OF_MINE"} {
		if IsOfHost(name) {
			t.Errorf("%s would not be sent to other hosts", name)
		}
	}
}
