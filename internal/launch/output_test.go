package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/topo"
)

// cut writes texts to a splitter and returns the pieces that it passes on for each of them, and at the end.
func cut(texts ...string) (calls [][]string) {
	var pieces []string
	s := splitter{piece: func(text []byte) { pieces = append(pieces, string(text)) }, max: 4}
	for _, text := range append(texts, "end") {
		if pieces = nil; text == "end" {
			s.flush()
		} else {
			s.write([]byte(text))
		}
		calls = append(calls, pieces)
	}
	return calls
}

func TestSplitter(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want [][]string
	}{
		{[]string{""}, [][]string{nil, nil}},
		{[]string{"a\nb"}, [][]string{{"a\n"}, {"b"}}},
		{[]string{"a", "b\n", "\n"}, [][]string{nil, {"ab\n"}, {"\n"}, nil}},
		{[]string{"\x00\n\x00"}, [][]string{{"\x00\n"}, {"\x00"}}},
		{[]string{"1\r2\r3\n"}, [][]string{{"1\r", "2\r", "3\n"}, nil}},
		{[]string{"a\r\nb\r\n"}, [][]string{{"a\r\n", "b\r\n"}, nil}},
		{[]string{"a\r", "\nb", "\n"}, [][]string{{"a\r"}, {"\n"}, {"b\n"}, nil}},
		{[]string{"a\r", "", "\n"}, [][]string{{"a\r"}, nil, {"\n"}, nil}},
		{[]string{"\r1", "\r2", "%", "\r3\na"}, [][]string{{"\r", "1"}, {"\r", "2"}, {"%"}, {"\r", "3\n"}, {"a"}}},
		{[]string{"\r\xe2\x96", "\x88", "\xe2"}, [][]string{{"\r"}, {"█"}, nil, {"\xe2"}}},
		{[]string{"xxxx\n"}, [][]string{{"xxxx", "\n"}, nil}},
		{[]string{"xxxx", "\n"}, [][]string{nil, {"xxxx", "\n"}, nil}},
		{[]string{"xxxxy\n"}, [][]string{{"xxxx", "y\n"}, nil}},
		{[]string{"xxxx", "xxxx", "y"}, [][]string{nil, {"xxxx"}, {"xxxx"}, {"y"}}},
		{[]string{"xxx█\n"}, [][]string{{"xxx", "█\n"}, nil}},
		{[]string{"\x96\x96\x96\x96\x96"}, [][]string{{"\x96\x96\x96\x96"}, {"\x96"}}},
	} {
		if got := cut(c.in...); !slices.EqualFunc(got, c.want, slices.Equal[[]string]) {
			t.Errorf("%.60q: got %.200q, want %.200q", c.in, got, c.want)
		}
	}
}

// FuzzSplitter divides an input into arbitrary parts. The pieces that the splitter passes on must together
// equal the input, must not be too long, and must divide neither lines that are not too long nor characters.
func FuzzSplitter(f *testing.F) {
	f.Add([]byte("a\rb\r\nc\n\n"), uint8(3), uint8(80))
	f.Add([]byte("\r\r\n\n\r"), uint8(0), uint8(0))
	f.Add([]byte("xxxxxxxx\r\n"), uint8(5), uint8(3))
	f.Add([]byte("\r██\x00██\n███████"), uint8(1), uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, part, most uint8) {
		size, max := int(part)+1, int(most)+utf8.UTFMax
		var got []byte
		s := splitter{piece: func(text []byte) {
			if len(text) == 0 || len(text) > max || bytes.ContainsAny(bytes.TrimRight(text, "\r\n"), "\r\n") {
				t.Fatalf("got the piece %.80q of %d bytes, want at most %d and a line", text, len(text), max)
			}
			if utf8.Valid(in) && !utf8.Valid(text) {
				t.Fatalf("the piece %.80q divides a character", text)
			}
			got = append(got, text...)
		}, max: max}
		for p := range slices.Chunk(in, size) {
			s.write(p)
		}
		s.flush()
		if !bytes.Equal(got, in) {
			t.Errorf("got %q, want %q", got, in)
		}
	})
}

func TestTail(t *testing.T) {
	var last tail
	s := splitter{piece: last.add, max: 1 << 10}
	for i := range 30 {
		s.write(fmt.Appendf(nil, "%d\n", i))
	}
	s.write([]byte("\r10%\r20%\r"))
	s.write([]byte("\r30%\r"))
	s.write([]byte("\rat 4"))
	s.write([]byte("0%\r"))
	s.write([]byte("\nTraceback\r\n\x00" + strings.Repeat("y", 2*maxTailBytes)))
	s.flush()
	var want []string
	for i := 13; i < 30; i++ {
		want = append(want, fmt.Sprint(i))
	}
	want = append(want, "at 40%", "Traceback", "\x00"+strings.Repeat("y", maxTailBytes-1)+tailCutMarker)
	if !slices.Equal(last.lines, want) {
		t.Errorf("got %.300q, want %.300q", last.lines, want)
	}
}

// text is a writer that records all writes in their order.
type text struct{ bytes.Buffer }

// TestOutputOfSeveralStreams copies texts of two streams in turn to one file. Nothing may be added to them
// except prefixes and, if texts of the other stream or of the launcher follow an incomplete line, line ends.
func TestOutputOfSeveralStreams(t *testing.T) {
	for _, c := range []struct{ in, want string }{ // in: texts, each with its stream (a, b or h) before it
		{"a1\n b1\n a2\n", "a:1\nb:1\na:2\n"},
		{"a1\r a2\r b1\n a\n a3\r a\n hnote\n b2\r", "a:1\ra:2\r\nb:1\na:3\r\nnote\nb:2\r"},
		{"a1\r a\nx\n", "a:1\r\na:x\n"},
		{"a1\r b1\n a\nx\n", "a:1\r\nb:1\na:x\n"},
		{"a\r1% a\r2% a\r a3% a\n", "a:\ra:1%\ra:2%\ra:3%\n"},
		{"a\r1% b\r1% a\r2% b\n a3 a\n", "a:\ra:1%\nb:\rb:1%\na:2%3\n"},
		{"a\r1% b1\n a% a\r\n", "a:\ra:1%\nb:1\na:%\r\n"},
		{"axxxxxxxxx axxx\n", "a:xxxxxxxxxxxx\n"},
		{"axxxxxxxxx b1\n axxx\n", "a:xxxxxxxx\nb:1\na:xxxx\n"},
		{"axxxxxxxx a\n b1\n", "a:xxxxxxxx\nb:1\n"},
		{"a1 b1 a2\n", "a:12\nb:1"},
		{"a1\n a b1\r\n", "a:1\nb:1\r\n"},
	} {
		var out bytes.Buffer
		console := newConsole(&out, &out)
		streams := map[byte]*stream{}
		splits := map[byte]*splitter{}
		for _, name := range []byte("ab") {
			s := &stream{console: console, err: name == 'b', prefix: string(name) + ":", end: '\n'}
			streams[name], splits[name] = s, &splitter{piece: s.piece, max: 8}
		}
		for text := range strings.SplitSeq(c.in, " ") {
			if text[0] == 'h' {
				console.put(chunk{err: true, text: []byte(text[1:])})
				continue
			}
			splits[text[0]].write([]byte(text[1:]))
			streams[text[0]].flush()
		}
		for _, name := range []byte("ab") {
			splits[name].flush()
			streams[name].flush()
		}
		if console.close(); out.String() != c.want {
			t.Errorf("%q: got %q, want %q", c.in, out.String(), c.want)
		}
	}
}

// TestIncompleteLinesOfSeveralFiles checks that an incomplete line at the end of standard output gets no line
// end because of a line on standard error, unless both are the same file.
func TestIncompleteLinesOfSeveralFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	var files [3]*os.File
	for i := range files {
		var err error
		name := fmt.Sprint(path, i/2) // the first two are the same file
		if files[i], err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
			t.Fatal(err)
		}
		defer files[i].Close()
	}
	for _, c := range []struct {
		out, err *os.File
		want     string
	}{{files[0], files[1], "1\r\n2\n3"}, {files[0], files[2], "1\r3"}} {
		if err := c.out.Truncate(0); err != nil {
			t.Fatal(err)
		}
		console, streams := newConsole(c.out, c.err), [2]*stream{{}, {}}
		for _, k := range []chunk{{text: []byte("1\r")}, {err: true, text: []byte("2\n")}, {text: []byte("3")}} {
			k.from = streams[0]
			if k.err {
				k.from = streams[1]
			}
			console.put(k)
		}
		console.close()
		if got, err := os.ReadFile(path + "0"); err != nil || string(got) != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
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

// TestPutAfterClose checks that chunks are dropped after the end of the console, because the standard error
// of a command that cannot be killed may go on.
func TestPutAfterClose(t *testing.T) {
	c := newConsole(io.Discard, io.Discard)
	c.close()
	for range 2 * queuedChunks { // more than the queue holds; must not block
		c.put(chunk{text: []byte("late\n")})
		c.note("late")
	}
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
	if want := "p:one\np:two"; out.String() != want {
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
