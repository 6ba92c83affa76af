package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/topo"
)

// cut writes pieces to a splitter and returns, as texts, the calls of line and ended that the splitter has
// made.
func cut(pieces ...string) (calls []string) {
	s := splitter{
		line:  func(text []byte, end byte) { calls = append(calls, string(text)+fmt.Sprintf("%q", end)) },
		ended: func() { calls = append(calls, "ended") },
		max:   4,
	}
	for _, p := range pieces {
		s.write([]byte(p))
	}
	s.flush()
	return calls
}

func TestSplitter(t *testing.T) {
	const full = "xxxx"
	for _, c := range []struct{ in, want []string }{
		{[]string{""}, nil},
		{[]string{"a\nb"}, []string{`a'\n'`, `b'\x00'`}},
		{[]string{"a", "b\n", "\n"}, []string{`ab'\n'`, `'\n'`}},
		{[]string{"1\r2\r3\n"}, []string{`1'\r'`, `2'\r'`, `3'\n'`}},
		{[]string{"a\r\nb\r\n"}, []string{`a'\n'`, `b'\n'`}},
		{[]string{"a\r", "\nb\n"}, []string{`a'\r'`, "ended", `b'\n'`}},
		{[]string{"a\r", "", "\n"}, []string{`a'\r'`, "ended"}},
		{[]string{"a\r", "b"}, []string{`a'\r'`, `b'\x00'`}},
		{[]string{full + "\n"}, []string{full + `'\n'`}},
		{[]string{full, "\n"}, []string{full + `'\n'`}},
		{[]string{full + "y\n"}, []string{full + `'\x00'`, `y'\n'`}},
		{[]string{full, full, "y"}, []string{full + `'\x00'`, full + `'\x00'`, `y'\x00'`}},
	} {
		if got := cut(c.in...); !slices.Equal(got, c.want) {
			t.Errorf("%.60q: got %.200q, want %.200q", c.in, got, c.want)
		}
	}
}

// FuzzSplitter divides an input into arbitrary pieces. The lines and line ends that the splitter returns must
// together equal the input.
func FuzzSplitter(f *testing.F) {
	f.Add([]byte("a\rb\r\nc\n\n"), uint8(3), uint8(80))
	f.Add([]byte("\r\r\n\n\r"), uint8(0), uint8(0))
	f.Add([]byte("xxxxxxxx\r\n"), uint8(5), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, piece, most uint8) {
		size, max := int(piece)+1, int(most)+1
		var got []byte
		s := splitter{
			line: func(text []byte, end byte) {
				if len(text) > max || bytes.ContainsAny(text, "\r\n") {
					t.Fatalf("got the line %.80q of %d bytes, want at most %d", text, len(text), max)
				}
				got = append(got, text...)
				if end != 0 {
					got = append(got, end)
				}
			},
			ended: func() { got[len(got)-1] = '\n' },
			max:   max,
		}
		for p := range slices.Chunk(in, size) {
			s.write(p)
		}
		s.flush()
		if want := bytes.ReplaceAll(in, []byte("\r\n"), []byte("\n")); !bytes.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestTail(t *testing.T) {
	var last tail
	s := splitter{line: last.add, ended: func() { last.open = false }, max: maxLineBytes}
	for i := range 30 {
		s.write(fmt.Appendf(nil, "%d\n", i))
	}
	s.write([]byte("\r10%\r20%\r"))
	s.write([]byte("\r30%\r"))
	s.write([]byte("\nTraceback\n" + strings.Repeat("y", maxTailBytes+1)))
	s.flush()
	var want []string
	for i := 13; i < 30; i++ {
		want = append(want, fmt.Sprint(i))
	}
	want = append(want, "30%", "Traceback", strings.Repeat("y", maxTailBytes)+tailCutMarker)
	if !slices.Equal(last.lines, want) {
		t.Errorf("got %.300q, want %.300q", last.lines, want)
	}
}

// text is a writer that records all writes in their order.
type text struct{ bytes.Buffer }

// TestConsoleEndsOpenLines checks that the console ends a line of one stream that ends with \r before it
// writes a line of another stream.
func TestConsoleEndsOpenLines(t *testing.T) {
	var out text
	c := newConsole(&out, &out)
	a, b := new(stream), new(stream)
	for _, k := range []chunk{
		{from: a, text: []byte("a1\r")},
		{from: a, text: []byte("a2\r")},
		{from: b, text: []byte("b1\n")},
		{from: a},                       // writes nothing, because the line of a has ended already
		{from: a, text: []byte("a3\r")}, // leaves another line of a open
		{from: a},                       // ends that other line
		{text: []byte("hvdrun\n")},
		{from: b, text: []byte("b2\r")},
	} {
		c.put(k)
	}
	c.close()
	if want := "a1\ra2\r\nb1\na3\r\nhvdrun\nb2\r\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

// stuck is a terminal that hangs. Its first write sends on the channel entered and blocks until the channel
// release is closed. A second write blocks for ever.
type stuck struct{ entered, release chan struct{} }

func (s stuck) Write(p []byte) (int, error) {
	s.entered <- struct{}{} // a second write blocks here, because nothing receives
	<-s.release
	return len(p), nil
}

// TestStuckConsoleHoldsUpOnlyOutput checks that note does not block on a terminal that hangs, and that
// abandon ends a put that blocks.
func TestStuckConsoleHoldsUpOnlyOutput(t *testing.T) {
	terminal := stuck{make(chan struct{}), make(chan struct{})}
	c := newConsole(terminal, terminal)
	c.put(chunk{text: []byte("x\n")})
	<-terminal.entered
	for range 2 * queuedChunks { // more than the queue holds; must not block
		c.note("x")
	}
	put := make(chan struct{})
	go func() {
		c.put(chunk{text: []byte("y\n")}) // must block, but only until abandon
		close(put)
	}()
	c.abandon()
	<-put
	close(terminal.release)
	<-c.done
}

func TestConsoleReportsTheFirstFailure(t *testing.T) {
	c := newConsole(failing{}, failing{})
	c.put(chunk{text: []byte("x\n")})
	c.close()
	if !errors.Is(c.lost, io.ErrShortWrite) {
		t.Errorf("got error %v, want %v", c.lost, io.ErrShortWrite)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

// TestStreamFinishesWithAnOpenPipe checks that a stream ends after finish even if a process outside the job
// keeps the pipe open.
func TestStreamFinishesWithAnOpenPipe(t *testing.T) {
	mine, theirs, err := pipe(true)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(theirs)
	var out text
	c := newConsole(&out, io.Discard)
	in := &pipeSource{file: mine}
	s := &stream{in: in, console: c, prefix: "p:", done: make(chan struct{})}
	if _, err := unix.Write(theirs, []byte("one\ntwo")); err != nil {
		t.Fatal(err)
	}
	in.finish() // called before run has read anything
	done := make(chan struct{})
	go func() { s.run(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("the stream waits for an end that does not come")
	}
	c.close()
	if want := "p:one\np:two\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

// TestStreamGoesOnWithoutItsFile uses an output file on a full disk. The file stays incomplete, but the
// console must still get all output.
func TestStreamGoesOnWithoutItsFile(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	mine, theirs, err := pipe(true)
	if err != nil {
		t.Fatal(err)
	}
	var out text
	c := newConsole(&out, io.Discard)
	s := &stream{in: &pipeSource{file: mine}, console: c, file: full, done: make(chan struct{})}
	if _, err := unix.Write(theirs, []byte("one\n")); err != nil {
		t.Fatal(err)
	}
	unix.Close(theirs)
	s.run()
	c.close()
	if out.String() != "one\n" || !errors.Is(s.fileErr, unix.ENOSPC) {
		t.Errorf("got %q and error %v, want the line and %v", out.String(), s.fileErr, unix.ENOSPC)
	}
}

func TestPipesAreNotInherited(t *testing.T) {
	for _, reading := range []bool{true, false} {
		mine, theirs, err := pipe(reading)
		if err != nil {
			t.Fatal(err)
		}
		defer mine.Close()
		defer unix.Close(theirs)
		flags, err := unix.FcntlInt(uintptr(theirs), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_NONBLOCK != 0 {
			t.Errorf("the rank's end does not block: flags %#x, error %v", flags, err)
		}
		raw, err := mine.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) {
			for _, fd := range []uintptr{fd, uintptr(theirs)} {
				if flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil ||
					flags&unix.FD_CLOEXEC == 0 {
					t.Errorf("descriptor %d is inherited: flags %#x, error %v", fd, flags, err)
				}
			}
		})
	}
}

// TestParseStat checks that parseStat finds the parent and the group even if the name of the program contains
// parentheses and blanks.
func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		text       string
		ppid, pgrp int
		ok         bool
	}{
		{"12 (sh) S 7 12 12 0 -1", 7, 12, true},
		{"12 (a) R 9 (b) c) S 7 -1 12 0", 7, -1, true},
		{"12 (sh) S 7", 0, 0, false},
		{"12 (sh) S x 12 1", 0, 0, false},
		{"", 0, 0, false},
	} {
		ppid, pgrp, err := parseStat(c.text)
		if (err == nil) != c.ok || c.ok && (ppid != c.ppid || pgrp != c.pgrp) {
			t.Errorf("%q: got %d, %d, %v", c.text, ppid, pgrp, err)
		}
	}
}

// TestJudge checks the root cause and the exit status that judge finds for ranks that end in different ways,
// with and without a verdict.
func TestJudge(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(1e12 + ms)) }
	ok := Exit{At: at(0)}
	names := func(ranks ...topo.Rank) *joblink.Verdict { return &joblink.Verdict{Ranks: ranks} }
	for _, c := range []struct {
		name   string
		exits  []Exit
		v      *joblink.Verdict
		roots  []int
		status int
	}{
		{"earliest", []Exit{ok, {Code: 5, At: at(3)}, {Code: 6, At: at(2)}}, nil, []int{2}, 6},
		{"earliest of equals is the lowest", []Exit{{Code: 5, At: at(3)}, {Code: 6, At: at(3)}}, nil,
			[]int{0}, 5},
		{"a rank that was sent a signal is last", []Exit{{Signal: 15, Sent: 15, At: at(1)},
			{Code: 6, At: at(2)}}, nil, []int{1}, 6},
		{"all were sent a signal", []Exit{{Signal: 15, Sent: 15, At: at(2)}, {Signal: 9, Sent: 9, At: at(1)}},
			nil, []int{1}, 137},
		{"verdict", []Exit{{Code: 1, At: at(1)}, {Signal: 9, At: at(2)}}, names(1), []int{1}, 137},
		{"verdict on two, the earlier counts", []Exit{{Code: 1, At: at(1)}, {Code: 8, At: at(3)},
			{Code: 7, At: at(2)}}, names(2, 1), []int{1, 2}, 7},
		{"verdict on one that hung", []Exit{{Code: 1, At: at(1)}, {Signal: 9, Sent: 9, At: at(9)}}, names(1),
			[]int{1}, 137},
		{"verdict on one that ended well", []Exit{{Code: 4, At: at(1)}, ok}, names(1), []int{1}, 1},
		{"verdict on a rank that is not there", []Exit{{Code: 4, At: at(1)}}, names(3), []int{0}, 4},
	} {
		if roots, status := judge(c.exits, c.v, -1); !slices.Equal(roots, c.roots) || status != c.status {
			t.Errorf("%s: got %v with status %d, want %v with %d", c.name, roots, status, c.roots, c.status)
		}
	}
}
