package timeline

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// child runs the part of a test that needs a process of its own, and exits. A test starts its own binary with
// the arguments in what and args, and TestMain of the new process calls child.
func child(what string, args []string) {
	var err error
	switch what {
	case "write":
		err = writeForever(args[0], args[1])
	case "limits":
		err = writeToLimits(args[0])
	case "full":
		err = writeToFullDisk(args[0])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self := testnet.Self(t)
	return exec.CommandContext(testnet.Context(t), self, append([]string{"child"}, args...)...)
}

// writeForever records operations as fast as it can until it is killed. After each Write it prints the number
// of the last operation that it recorded before this Write.
func writeForever(path, most string) error {
	cfg := testConfig(path)
	var err error
	if cfg.MaxBytes, err = strconv.ParseInt(most, 10, 64); err != nil {
		return err
	}
	k := quick
	k.tensors = 1 << 14
	tl, err := start(cfg, k)
	if err != nil {
		return err
	}
	number := uint64(0)
	for {
		for range 1 + rand.IntN(100) { // the smallest segments hold about 7 operations each
			number++
			tl.Record(simple(number, "a", "b\n", "c"))
		}
		if err := tl.Write(); err != nil {
			return err
		}
		if tl.Dropped() == 0 { // if an operation was dropped, the last one may not be in the file
			fmt.Println(number)
		}
	}
}

// A process that writes a timeline is killed at random moments. Then the file has all operations that were
// recorded before the last Write that returned. The file is complete unless a write was in progress.
func TestKilled(t *testing.T) {
	for _, c := range []struct {
		name, most string
		kills      int
	}{{"t.json", "160000", 50}, {"t.json", "0", 10}, {"t.json.gz", "40000", 10}, {"t.json.gz", "0", 5}} {
		t.Run(c.name+" "+c.most, func(t *testing.T) {
			if testing.Short() {
				c.kills /= 5
			}
			dir, cut := t.TempDir(), 0
			path := filepath.Join(dir, c.name)
			for range c.kills {
				// When a process starts, the folder still has the files of the previous process.
				cmd := command(t, "write", path, c.most)
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.StdoutPipe()
				noError(t, err)
				noError(t, cmd.Start())
				lines := bufio.NewScanner(out)
				if !lines.Scan() {
					_ = cmd.Wait()
					t.Fatalf("the child wrote nothing: %s", stderr.String())
				}
				killer := time.AfterFunc(time.Duration(rand.Int64N(int64(8*time.Millisecond))), func() {
					_ = cmd.Process.Kill()
				})
				last := lines.Text()
				for lines.Scan() {
					last = lines.Text()
				}
				killer.Stop()
				if err := cmd.Wait(); err == nil {
					t.Fatal("the child ended by itself")
				}
				if stderr.Len() > 0 {
					t.Fatalf("the child failed: %s", stderr.String())
				}
				said, err := strconv.ParseUint(last, 10, 64)
				noError(t, err)
				s, torn := mustReadKilled(t, path)
				if torn {
					cut++
				}
				var wrote uint64
				if n := len(s.Operations); n > 0 {
					wrote = s.Operations[n-1].Number
				} else if s.Segment > 1 {
					old := mustRead(t, beside(path, strconv.Itoa(s.Segment-1)))
					wrote = old.Operations[len(old.Operations)-1].Number
				}
				if wrote < said {
					t.Errorf("got operations up to %d, but Write had returned after %d", wrote, said)
				}
				names, err := segments(path)
				noError(t, err)
				for _, name := range names {
					mustRead(t, name)
				}
			}
			t.Logf("%d of %d kills have cut a write", cut, c.kills)
			tl := mustStart(t, testConfig(path), quick)
			mustClose(t, tl)
			if left := folder(t, dir); len(left) != 1 {
				t.Errorf("got %v, want the segments of the killed gone", left)
			}
		})
	}
}

// mustReadKilled reads the file of a killed process. If the last write is incomplete, it reads the file up to
// the last complete operation and returns torn = true.
func mustReadKilled(t *testing.T, path string) (s *timelinetest.Summary, torn bool) {
	t.Helper()
	b, err := os.ReadFile(path)
	noError(t, err)
	if s, err := timelinetest.Read(bytes.NewReader(b)); err == nil {
		return s, false
	}
	if strings.HasSuffix(path, ".gz") {
		z, err := gzip.NewReader(bytes.NewReader(b))
		noError(t, err)
		b, _ = io.ReadAll(z) // if the gzip stream is incomplete, the text before the end is used
	}
	// Cut the text after the last complete event that has "fused", because only the last event of an
	// operation has this argument.
	end := bytes.LastIndex(b, []byte(`"fused":`))
	if k := bytes.IndexByte(b[max(end, 0):], '\n'); end >= 0 && k < 0 {
		end = bytes.LastIndex(b[:end], []byte(`"fused":`))
	}
	if end < 0 {
		t.Fatalf("no operation in %q", b)
	}
	end += bytes.IndexByte(b[end:], '\n')
	s, err = timelinetest.Read(bytes.NewReader(append(bytes.TrimSuffix(b[:end], []byte(",")), closing...)))
	if err != nil {
		t.Fatalf("%v\n%q", err, b[max(0, len(b)-500):])
	}
	return s, true
}

// A timeline is read while it is being written. If the size of the file does not change during the read, the
// reader gets a complete timeline, unless the writer stands still in the middle of a write: the kernel writes
// page by page.
func TestReadWhileWriting(t *testing.T) {
	// The small segments make it likely that a change of segments happens during a read. The large segments
	// have hundreds of events.
	for _, most := range []int64{80_000, 800_000} {
		path := filepath.Join(t.TempDir(), "t.json")
		cfg := testConfig(path)
		cfg.MaxBytes = most
		k := quick
		k.interval = 5 * time.Millisecond
		tl := mustStart(t, cfg, k)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var wg sync.WaitGroup
		complete, changed := 0, 0
		var incomplete error
		for range 2 {
			wg.Go(func() {
				for n := uint64(1); ctx.Err() == nil; n++ {
					tl.Record(simple(n, "a", "b"))
				}
			})
		}
		for ctx.Err() == nil && complete < 20 {
			f, err := os.Open(path)
			noError(t, err)
			before, err := f.Stat()
			noError(t, err)
			b, err := io.ReadAll(f)
			noError(t, err)
			after, err := f.Stat()
			noError(t, err)
			_ = f.Close()
			if before.Size() != after.Size() {
				changed++
				continue
			}
			if err := timelinetest.Check(bytes.NewReader(b)); err != nil {
				incomplete = err
			} else {
				complete++
			}
		}
		cancel()
		wg.Wait()
		if complete < 20 {
			t.Errorf("%d reads were complete, and the size changed in %d; the last incomplete one: %v", complete,
				changed, incomplete)
		}
		mustClose(t, tl)
		mustRead(t, path)
	}
}

// usage returns the total size of the files in a folder, without hidden files.
func usage(t *testing.T, dir string) (sum int64) {
	t.Helper()
	for _, name := range folder(t, dir) {
		// The error is ignored, because a file may be removed after folder has listed it.
		if at, err := os.Stat(filepath.Join(dir, name)); err == nil && !strings.HasPrefix(name, ".") {
			sum += at.Size()
		}
	}
	return sum
}

// The recorded operations need far more bytes than MaxBytes. The files never take more than MaxBytes, the
// oldest segments are removed, and the last operations are in the files.
func TestCap(t *testing.T) {
	for _, name := range []string{"t.json", "t.json.gz"} {
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		cfg := testConfig(path)
		cfg.MaxBytes = 1 << 18
		tl := mustStart(t, cfg, quick)
		var most int64
		number := uint64(0)
		for range 40 {
			for range 60 {
				number++
				tl.Record(simple(number, "a"+strconv.Itoa(rand.IntN(50)),
					"b"+strconv.FormatUint(rand.Uint64(), 36)))
			}
			noError(t, tl.Write())
			most = max(most, usage(t, dir))
		}
		mustClose(t, tl)
		if most = max(most, usage(t, dir)); most > cfg.MaxBytes || most < cfg.MaxBytes*3/4 {
			t.Errorf("%s: got up to %d bytes, want about %d and not more", name, most, cfg.MaxBytes)
		}
		if tl.Dropped() > 0 {
			t.Errorf("%s: %d dropped", name, tl.Dropped())
		}
		var last uint64 // the last operation, which may be in the last segment or the one before
		for _, f := range folder(t, dir) {
			for _, op := range mustRead(t, filepath.Join(dir, f)).Operations {
				last = max(last, op.Number)
			}
		}
		if s := mustRead(t, path); s.Segment < 5 || !s.Ended || last != number {
			t.Errorf("%s: got segment %d, ended %v, and operations up to %d, want all %d in late segments",
				name, s.Segment, s.Ended, last, number)
		}
		if _, err := os.Stat(beside(path, "1")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the first segment is there: %v", name, err)
		}
	}
}

// The events of one tensor are larger than a segment. The operation of this tensor is dropped, so that the
// files stay within MaxBytes, and the next operation is written.
func TestTooLarge(t *testing.T) {
	dir := t.TempDir()
	cfg := testConfig(filepath.Join(dir, "t.json"))
	cfg.MaxBytes = 64 << 10
	tl := mustStart(t, cfg, quick)
	tl.Record(simple(1, "a"))
	tl.Record(simple(2, "a", strings.Repeat("x", 9<<10), "b"))
	tl.Record(simple(3, "c"))
	mustClose(t, tl)
	s := mustRead(t, cfg.Path)
	if tl.Dropped() != 1 || s.Dropped != 1 || usage(t, dir) > cfg.MaxBytes {
		t.Errorf("got %d dropped, %d bytes, want one operation with a gap", tl.Dropped(), usage(t, dir))
	}
	if n := len(s.Operations); n == 0 || s.Operations[n-1].Track != "c" {
		t.Errorf("got %+v, want the operations after it", s.Operations)
	}
}

// A program adds and removes process sets that would not fit into a segment together.
func TestManySets(t *testing.T) {
	cfg := testConfig(filepath.Join(t.TempDir(), "t.json"))
	cfg.MaxBytes = 64 << 10
	tl := mustStart(t, cfg, quick)
	for id := range topo.ProcessSetID(400) {
		tl.Set(id+1, []topo.Rank{0, 1, 2, 3})
		tl.Record(simple(uint64(id)+1, "a"))
		tl.RemoveSet(id + 1)
		if err := tl.Write(); err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, tl)
	text, err := os.ReadFile(cfg.Path)
	if n := bytes.Count(text, []byte("hvd_set")); err != nil || tl.Dropped() != 0 || n > 100 {
		t.Errorf("got %d dropped and %d sets in the last segment, %v", tl.Dropped(), n, err)
	}
}

// One operation cannot be written, and another one waits behind it in the batch. The error of Close reports
// both, and both count as dropped.
func TestCloseCountsWhatWaits(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	noError(t, os.Mkdir(dir, 0o700))
	k := quick
	k.retry = time.Hour
	tl := mustStart(t, testConfig(filepath.Join(dir, "t.json")), k)
	for n := range uint64(2) {
		tl.Record(simple(n, "g"))
		noError(t, tl.Write())
	}
	noError(t, os.RemoveAll(dir))
	tl.Record(simple(1, "g")) // the writer takes this operation from the batch and cannot write it
	testnet.WantError(t, tl.Write(), "no such file")
	tl.Record(simple(2, "g"))
	testnet.WantError(t, tl.Close(), "2 operations")
	if tl.Dropped() != 2 {
		t.Errorf("got %d dropped, want 2", tl.Dropped())
	}
}

// Write is called again although there is no new record, and does not touch the folder. After Close, Record
// does nothing and Write returns ErrClosed.
func TestIdle(t *testing.T) {
	dir := t.TempDir()
	cfg := testConfig(filepath.Join(dir, "t.json"))
	tl := mustStart(t, cfg, quick)
	tl.Record(simple(1, "g"))
	testnet.Eventually(t, "the operation is written", func() bool { return operationsIn(cfg.Path) == 1 })
	before, err := os.Stat(dir)
	noError(t, err)
	noError(t, tl.Write())
	if after, err := os.Stat(dir); err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("the folder was touched for nothing: %v", err)
	}
	mustClose(t, tl)
	if err := tl.Close(); err != nil {
		t.Errorf("closing again: %v", err)
	}
	tl.Record(simple(2, "g"))
	if err := tl.Write(); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
	if n := len(mustRead(t, cfg.Path).Operations); n != 1 || tl.Dropped() != 0 {
		t.Errorf("got %d operations, %d dropped after Close", n, tl.Dropped())
	}
}

func TestBadPaths(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct{ path, want string }{
		{dir, "is a folder"}, {filepath.Join(dir, "none", "t.json"), "no such file"},
		{filepath.Join(dir, strings.Repeat("x", 254)), "name too long"}, {"/proc/gohvd.json", "no such file"},
	} {
		cfg := testConfig(c.path)
		cfg.Rank = 3
		tl, err := Start(cfg)
		testnet.WantError(t, err, "rank 3", c.want)
		if err == nil {
			_ = tl.Close()
		}
	}
	if left := folder(t, dir); len(left) != 0 {
		t.Errorf("got files %v", left)
	}
}

// A timeline and its segments replace only those of an earlier timeline with the same path, and no other
// files, as the timeline t.2.json, which is at its segment 2. With Config.New they replace none.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.json")
	for _, name := range []string{"t.1.json", "t.x.json", "t.03.json", ".t.json.new"} {
		noError(t, os.WriteFile(filepath.Join(dir, name), []byte("mine"), 0o600))
	}
	mustClose(t, mustStart(t, testConfig(PathOf(path, 1)), quick))
	for _, of := range []string{filepath.Join(dir, "t.2.json"), path} {
		cfg := testConfig(of)
		cfg.New, cfg.MaxBytes = true, 8*4000
		tl := mustStart(t, cfg, quick)
		for i := uint64(1); mustRead(t, of).Segment < 2; i++ {
			tl.Record(simple(i, "g"))
			if err := tl.Write(); err != nil {
				t.Fatal(err)
			}
		}
		mustClose(t, tl)
	}
	if got, want := fmt.Sprint(folder(t, dir)),
		"[t.03.json t.1.json t.2.1.json t.2.json t.3.json t.json t.rank1.json t.x.json]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fresh := testConfig(path)
	fresh.New = true
	_, err := Start(fresh)
	testnet.WantError(t, err, "t.3.json exists: choose another name")
	link := filepath.Join(dir, "link.json")
	noError(t, os.WriteFile(path, nil, 0o600))
	noError(t, os.Symlink("t.json", link))
	tl := mustStart(t, testConfig(link), quick)
	tl.Record(simple(1, "g"))
	mustClose(t, tl)
	if n := len(mustRead(t, path).Operations); n != 1 {
		t.Errorf("got %d operations in the file that the link names", n)
	}
	if got, want := fmt.Sprint(folder(t, dir)),
		"[link.json t.03.json t.1.json t.2.1.json t.2.json t.json t.rank1.json t.x.json]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// The files of a timeline can only be read by their user. A link or a FIFO of another user is refused, and
// the file that the link names stays.
func TestOtherUsers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.json")
	mustClose(t, mustStart(t, testConfig(path), quick))
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("got %v, %v, want mode 0600", info.Mode(), err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	link, fifo := filepath.Join(dir, "link.json"), filepath.Join(dir, "fifo.json")
	noError(t, errors.Join(os.WriteFile(path, []byte("precious"), 0o600), os.Symlink(path, link),
		syscall.Mkfifo(fifo, 0o666), os.Lchown(link, 1234, 1234), os.Lchown(fifo, 1234, 1234)))
	for _, at := range []string{link, fifo} {
		_, err := start(testConfig(at), quick)
		testnet.WantError(t, err, at, "user 1234")
	}
	if got, err := os.ReadFile(path); string(got) != "precious" || err != nil {
		t.Errorf("the file that the link names has %q, %v", got, err)
	}
}

// If the folder of the timeline is removed, operations are dropped and counted until the folder exists again.
// If another file replaces the timeline file, the timeline begins a new file and loses no operation.
func TestRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	noError(t, os.Mkdir(dir, 0o700))
	log, entries := testnet.Logs()
	cfg := testConfig(filepath.Join(dir, "t.json"))
	cfg.Log = log
	k := quick
	k.tensors = 16
	tl := mustStart(t, cfg, k)
	noError(t, os.RemoveAll(dir))
	number := uint64(0)
	testnet.Eventually(t, "operations are dropped", func() bool {
		number++
		tl.Record(simple(number, "g"))
		return tl.Dropped() > 20
	})
	testnet.Eventually(t, "the log says so", func() bool {
		return testnet.Logged(entries, "t.json", "no such file")
	})
	if err := tl.Write(); err == nil {
		t.Error("Write says that it has written")
	}
	noError(t, os.Mkdir(dir, 0o700))
	testnet.Eventually(t, "it is written again", func() bool {
		return testnet.Logged(entries, "works again")
	})
	tl.Record(simple(number+1, "g"))
	noError(t, tl.Write())
	s := mustRead(t, cfg.Path)
	if n := len(s.Operations); n == 0 || s.Operations[n-1].Number != number+1 || s.Segment < 2 {
		t.Errorf("got %+v, want a new segment with the last operation", s)
	}

	foreign := filepath.Join(dir, "foreign")
	noError(t, os.WriteFile(foreign, nil, 0o600))
	noError(t, os.Rename(foreign, cfg.Path))
	before := tl.Dropped()
	tl.Record(simple(number+2, "g"))
	testnet.Eventually(t, "it goes on", func() bool { // Write may be the first to notice
		err := tl.Write()
		if err != nil {
			testnet.WantError(t, err, "replaced")
		}
		return err == nil
	})
	tl.Record(simple(number+3, "g"))
	mustClose(t, tl)
	if tl.Dropped() != before {
		t.Errorf("got %d more dropped, want none", tl.Dropped()-before)
	}
	if s := mustRead(t, cfg.Path); !slices.Equal(numbers(s), []uint64{number + 2, number + 3}) {
		t.Errorf("got %+v, want the operations since it was replaced", s)
	}
	if entries.Len() > 4 {
		t.Errorf("the log has %d lines: %v", entries.Len(), entries.All())
	}
}

// If Close cannot write operations, it returns an error and counts the operations as dropped.
func TestCloseFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	noError(t, os.Mkdir(dir, 0o700))
	cfg := testConfig(filepath.Join(dir, "t.json"))
	k := quick
	k.interval = time.Hour
	tl := mustStart(t, cfg, k)
	tl.Record(simple(1, "g"))
	tl.Record(simple(2, "g"))
	noError(t, os.RemoveAll(dir))
	err := tl.Close()
	testnet.WantError(t, err, "close ", "2 operations", "no such file")
	if tl.Dropped() != 2 || !errors.Is(tl.Close(), err) {
		t.Errorf("got %d dropped, and %v from a second Close", tl.Dropped(), tl.Close())
	}
}

func TestDevices(t *testing.T) {
	tl := mustStart(t, testConfig("/dev/null"), quick)
	tl.Record(simple(1, "g"))
	mustClose(t, tl)
	_, err := Start(testConfig("/dev/full"))
	testnet.WantError(t, err, "no space")
}

// A timeline is written to a FIFO. The reader of the FIFO gets the complete timeline.
func TestFIFO(t *testing.T) {
	for _, name := range []string{"t.json", "t.json.gz"} {
		path := filepath.Join(t.TempDir(), name)
		noError(t, syscall.Mkfifo(path, 0o600))
		k := quick
		k.tensors = 1 << 12
		tl := mustStart(t, testConfig(path), k)
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		noError(t, err)
		var wg sync.WaitGroup
		var s *timelinetest.Summary
		wg.Go(func() { s, err = timelinetest.Read(f) })
		for n := range uint64(300) { // their text is four times as large as the buffer of a pipe
			tl.Record(simple(n+1, "g"))
		}
		mustClose(t, tl)
		wg.Wait()
		_ = f.Close()
		if err != nil || !s.Ended || len(s.Operations) != 300 {
			t.Errorf("%s: got %+v, %v, want 300 operations", name, s, err)
		}
	}
}

func TestStuck(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	noError(t, syscall.Mkfifo(path, 0o600))
	k := quick
	k.timeout = 100 * time.Millisecond
	tl := mustStart(t, testConfig(path), k)
	// A pipe holds 64 KiB, and the batches hold some further operations. Most of these operations are
	// dropped, because nobody reads the pipe.
	for n := range uint64(20_000) {
		tl.Record(simple(n+1, "g", "h"))
	}
	if tl.Dropped() == 0 {
		t.Error("nothing was dropped")
	}
	testnet.WantError(t, tl.Write(), "100ms")
	begin := time.Now()
	if err := tl.Close(); err == nil {
		t.Error("Close says that all is written")
	}
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("Close took %v", d)
	}
	testnet.Eventually(t, "the writer has ended and counted the rest", func() bool {
		select {
		case <-tl.done:
			return true
		default:
			return false
		}
	})
	if n := tl.Dropped(); n < 18_000 || n > 20_000 {
		t.Errorf("got %d dropped of 20000, of which a pipe holds less than 100", n)
	}
}

// A child process mounts a tmpfs of 256 KiB in a mount namespace of its own and fills it. While the tmpfs is
// full, operations are dropped. When there is room again, operations are written again.
func TestFullDisk(t *testing.T) {
	cmd := command(t, "full", t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err := cmd.Run()
	if errors.Is(err, syscall.EPERM) || strings.Contains(stderr.String(), "mount: operation not permitted") {
		t.Skipf("no mount namespaces here: %v", err)
	}
	if err != nil {
		t.Errorf("%v: %s", err, stderr.String())
	}
}

func writeToFullDisk(dir string) error {
	if err := syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	for _, name := range []string{"t.json", "t.json.gz"} {
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
			return fmt.Errorf("mount: %w", err)
		}
		if err := fillDisk(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := readOnly(filepath.Join(dir, "ro"+name)); err != nil {
			return fmt.Errorf("read-only: %s: %w", name, err)
		}
		if err := syscall.Unmount(dir, 0); err != nil {
			return err
		}
	}
	return nil
}

// readBetweenWrites reads the file of a timeline that is still written. The file is complete before and after
// each write, but not during a write, which the timeline tries again and again while the disk is full.
func readBetweenWrites(path string, tl *Timeline, number *uint64) (s *timelinetest.Summary, err error) {
	limit := until("a complete file", tl, number, func() bool {
		s, err = readFile(path)
		return err == nil
	})
	return s, errors.Join(limit, err)
}

func readFile(path string) (*timelinetest.Summary, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return timelinetest.Read(f)
}

// until records operations repeatedly, and returns as soon as the function cond returns true. After 30 s it
// returns an error.
func until(what string, tl *Timeline, number *uint64, cond func() bool) error {
	begin := time.Now()
	for !cond() {
		*number++
		// The names are random, so that the text compresses badly.
		tl.Record(simple(*number, strconv.FormatUint(rand.Uint64(), 36), strconv.FormatUint(rand.Uint64(),
			36)))
		if time.Since(begin) > 30*time.Second {
			return fmt.Errorf("%s: not after 30 s and %d operations", what, *number)
		}
	}
	return nil
}

func fillDisk(path string) error {
	log, entries := testnet.Logs()
	cfg := testConfig(path)
	cfg.Log = log
	k := quick
	k.tensors = 16 // the batches are small, so that they fit on the disk as soon as it has a little room
	ballast := filepath.Join(filepath.Dir(path), "ballast")
	if err := os.WriteFile(ballast, make([]byte, 150<<10), 0o600); err != nil {
		return err
	}
	tl, err := start(cfg, k)
	if err != nil {
		return err
	}
	number := uint64(0)
	// Because MaxBytes is not set, the timeline fills the disk. After that, the batches become full.
	full := func() bool { return testnet.Logged(entries, "no space left") && tl.Write() != nil }
	if err := until("full", tl, &number, full); err != nil {
		return err
	}
	dropped := tl.Dropped()
	if err := until("dropped", tl, &number, func() bool { return tl.Dropped() > dropped }); err != nil {
		return err
	}
	before, err := readBetweenWrites(path, tl, &number)
	if err != nil {
		return err
	}
	if len(before.Operations) == 0 {
		return errors.New("nothing is in the file")
	}
	if err := os.Remove(ballast); err != nil {
		return err
	}
	if err := until("room again", tl, &number, func() bool {
		return testnet.Logged(entries, "works again")
	}); err != nil {
		return err
	}
	_ = tl.Write() // the error is ignored: the disk may be full again
	after, err := readBetweenWrites(path, tl, &number)
	if err != nil {
		return err
	}
	if len(after.Operations) <= len(before.Operations) {
		return fmt.Errorf("got %d operations after there was room again, and %d before",
			len(after.Operations), len(before.Operations))
	}
	if err := until("full again", tl, &number, full); err != nil {
		return err
	}
	_ = tl.Close() // the error is ignored: there may be no room for hvd_end
	<-tl.done      // Close waits only for a limited time
	last, err := readFile(path)
	if err != nil {
		return err
	}
	seen := map[uint64]int{}
	for _, o := range last.Operations {
		if seen[o.Number]++; seen[o.Number] > 2 {
			return fmt.Errorf("operation %d is there %d times", o.Number, seen[o.Number])
		}
	}
	if n := uint64(len(seen)) + tl.Dropped(); n < number || n > number+1 {
		return fmt.Errorf("%d operations in the file and %d dropped, of %d", len(seen), tl.Dropped(), number)
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); err != nil || len(left) > 0 {
		return fmt.Errorf("left behind: %v, %v", left, err)
	}
	return os.Remove(path)
}

// readOnly makes the folder read-only while a timeline writes to a file in it. It checks that a second
// timeline cannot be started there, and that the first timeline still completes its file.
func readOnly(path string) error {
	dir := filepath.Dir(path)
	cfg := testConfig(path)
	tl, err := start(cfg, quick)
	if err != nil {
		return err
	}
	// Only a bind mount of the folder becomes read-only, because a whole file system cannot become read-only
	// while a file in it is open for writing.
	if err := syscall.Mount(dir, dir, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	if err := syscall.Mount("", dir, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY,
		""); err != nil {
		return err
	}
	cfg.Path = filepath.Join(dir, "new.json")
	if other, err := start(cfg, quick); err == nil || !strings.Contains(err.Error(), "read-only") {
		if err == nil {
			_ = other.Close()
		}
		return fmt.Errorf("starting: got %v", err)
	}
	if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
		return err
	}
	if err := tl.Close(); err != nil {
		return err
	}
	s, err := readFile(path)
	if err == nil && !s.Ended {
		err = errors.New("no end")
	}
	return errors.Join(err, os.Remove(path))
}

// Several goroutines call all methods of a Timeline at the same time. Afterwards the file has all operations,
// cycles and clock measurements.
func TestConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	cfg := testConfig(path)
	cfg.MarkCycles = true
	k := quick
	k.tensors = 1 << 14
	tl := mustStart(t, cfg, k)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for n := range uint64(500) {
				tl.Record(simple(n+1, "g"+strconv.Itoa(g)))
				tl.Cycle(time.Duration(n) * time.Millisecond)
				tl.Offset(trace.Offset{At: time.Duration(n)})
				if n%100 == 0 {
					if err := tl.Write(); err != nil {
						t.Error(err)
					}
				}
				tl.Dropped()
			}
		})
	}
	wg.Wait()
	for range 3 {
		wg.Go(func() {
			if err := tl.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := mustRead(t, path); len(s.Operations) != 2000 || s.Cycles != 2000 || len(s.Clocks) != 2001 ||
		tl.Dropped() != 0 {
		t.Errorf("got %d operations, %d cycles, %d clocks, %d dropped", len(s.Operations), s.Cycles,
			len(s.Clocks), tl.Dropped())
	}
}
