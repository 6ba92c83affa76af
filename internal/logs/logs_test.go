package logs_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/testnet"
)

// settings returns the settings of a process whose environment contains only the variables in environ.
func settings(t *testing.T, environ ...string) *config.Config {
	t.Helper()
	c, err := config.Load(config.Sources{Environ: environ})
	if err != nil {
		t.Fatal(err)
	}
	return &c
}

// objects decodes lines of JSON. If a line is not an object, the test fails.
func objects(t *testing.T, b []byte) (all []map[string]any) {
	t.Helper()
	for line := range bytes.Lines(b) {
		var o map[string]any
		if err := json.Unmarshal(line, &o); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		all = append(all, o)
	}
	return all
}

func TestLevels(t *testing.T) {
	for _, test := range []struct {
		word string
		want string // levels that must be written, as the first letters of trace, debug, info, warn and error
	}{
		{"trace", "tdiwe"}, {"debug", "diwe"}, {"info", "iwe"}, {"warning", "we"}, {"error", "e"},
		{"fatal", ""},
	} {
		var out bytes.Buffer
		log := settings(t, "HOROVOD_LOG_LEVEL="+test.word).Logger(&out)
		log.Log(logs.Trace, "t")
		log.Debug("d")
		log.Info("i")
		log.Warn("w")
		log.Error("e")
		got := ""
		for _, o := range objects(t, out.Bytes()) {
			got += o["msg"].(string)
		}
		if got != test.want {
			t.Errorf("%s: got %q, want %q", test.word, got, test.want)
		}
	}
	var out bytes.Buffer
	log := new(config.Config).Logger(&out)
	log.Info("i")
	log.Warn("w")
	if all := objects(t, out.Bytes()); len(all) != 1 || all[0]["msg"] != "w" {
		t.Errorf("a zero Config logs %v", all)
	}
}

func TestJSON(t *testing.T) {
	var out bytes.Buffer
	log := settings(t).Logger(&out).Named("hvdd").With(zap.Int("rank", 3), zap.String("host", "h1"))
	log.Warn("late", zap.String("tensor", "grad/\n7"), zap.Duration("pause", 250*time.Millisecond),
		zap.Error(errors.New("gone")))
	got := objects(t, out.Bytes())[0]
	for key, want := range map[string]any{
		"level": "warn", "logger": "hvdd", "msg": "late", "rank": 3.0, "host": "h1", "tensor": "grad/\n7",
		"pause": "250ms", "error": "gone",
	} {
		if got[key] != want {
			t.Errorf("%s: got %v, want %v", key, got[key], want)
		}
	}
	at, err := time.Parse(time.RFC3339Nano, got["time"].(string))
	if since := time.Since(at); err != nil || since < 0 || since > time.Minute {
		t.Errorf("time: %v, %v ago", err, since)
	}
	out.Reset()
	settings(t, "HOROVOD_LOG_HIDE_TIME=1").Logger(&out).Warn("late")
	if got, want := out.String(), `{"level":"warn","msg":"late"}`+"\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestConsole(t *testing.T) {
	var out bytes.Buffer
	settings(t, "HVD_LOG_FORMAT=console", "HOROVOD_LOG_HIDE_TIME=1").Logger(&out).Warn("late",
		zap.Int("rank", 3))
	if got, want := out.String(), "WARN\tlate\t{\"rank\": 3}\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	out.Reset()
	settings(t, "HVD_LOG_FORMAT=console").Logger(&out).Warn("late")
	if year := time.Now().Format("2006-"); !strings.HasPrefix(out.String(), year) {
		t.Errorf("no time in %q", out.String())
	}
}

func TestAuto(t *testing.T) {
	master, slave := testnet.Terminal(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for _, test := range []struct {
		format string
		to     *os.File
		from   *os.File
		want   string
	}{
		{"auto", slave, master, "WARN"}, {"auto", w, r, "{"}, {"json", slave, master, "{"},
		{"console", w, r, "WARN"},
	} {
		settings(t, "HVD_LOG_FORMAT="+test.format, "HOROVOD_LOG_HIDE_TIME=1").Logger(test.to).Warn("late")
		got, err := bufio.NewReader(test.from).ReadString('\n')
		if err != nil || !strings.HasPrefix(got, test.want) {
			t.Errorf("%s on %s: %q, %v, want %q first", test.format, test.to.Name(), got, err, test.want)
		}
	}
	if logs.IsTerminal(io.Discard) || logs.IsTerminal(w) || !logs.IsTerminal(slave) {
		t.Error("a pipe is taken for a terminal, or a terminal is not")
	}
}

// TestWhatPeersSay logs hostile text from peers, in the message and in fields. The text must not start a new
// line, move the cursor of a terminal, or make a line longer than the limit.
func TestWhatPeersSay(t *testing.T) {
	evil := "grad\n{\"level\":\"error\"}\r\x1b[2J\u009b2J\u202e\xff" + strings.Repeat("é", 5000)
	for _, format := range []string{"json", "console"} {
		t.Run(format, func(t *testing.T) {
			var out bytes.Buffer
			log := settings(t, "HVD_LOG_FORMAT="+format).Logger(&out)
			log.Warn("bad "+evil, zap.String("tensor", evil), zap.Error(fmt.Errorf("tensor %s", evil)))
			log.With(zap.String("tensor", evil)).Error("with " + evil)
			lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
			if len(lines) != 2 {
				t.Fatalf("%d lines, want 2", len(lines))
			}
			for _, l := range lines {
				if len(l) > 4500 || !strings.Contains(l, "... (") || !strings.Contains(l, "grad") {
					t.Errorf("%d bytes: %.200q", len(l), l)
				}
				if i := strings.IndexFunc(l, func(r rune) bool {
					return r < 0x20 && r != '\t' ||
						strings.ContainsRune("\x7f\u009b\u202e", r)
				}); i >= 0 {
					t.Errorf("not escaped: %.20q", l[i:])
				}
			}
		})
	}
}

// TestBound checks that a text of 1024 bytes is written in full and that a longer text is cut after 1024
// bytes. If this would split a character, the text must be cut before the character.
func TestBound(t *testing.T) {
	var out bytes.Buffer
	log := settings(t).Logger(&out)
	fits, long := strings.Repeat("a", 1024), strings.Repeat("a", 1025)
	log.Warn("m", zap.String("fits", fits), zap.String("long", long),
		zap.String("split", strings.Repeat("a", 1023)+"é"))
	got := objects(t, out.Bytes())[0]
	if want := strings.Repeat("a", 1024) + "... (1025 bytes)"; got["fits"] != fits || got["long"] != want {
		t.Errorf("got %v and %v", got["fits"], got["long"])
	}
	if want := strings.Repeat("a", 1023) + "... (1025 bytes)"; got["split"] != want {
		t.Errorf("got %v", got["split"])
	}
}

// observed returns the result of Quiet for a new logger, and the entries that it writes.
func observed() (*zap.Logger, *observer.ObservedLogs) {
	log, entries := testnet.Logs()
	return logs.Quiet(log), entries
}

// lines returns the messages of entries, joined by spaces. If an entry contains a number of dropped lines,
// lines appends a plus sign and the number to the message.
func lines(entries *observer.ObservedLogs) string {
	var all []string
	for _, e := range entries.TakeAll() {
		text := e.Message
		if n, ok := e.ContextMap()["left_out"]; ok {
			text += fmt.Sprintf("+%d", n)
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

// Each rank has such a logger and most never write to it, so it must take little memory, also if With derives
// others from it.
func TestQuietIsSmall(t *testing.T) {
	const loggers, most = 100, 4 << 10
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range loggers {
		logs.Quiet(zap.NewNop()).With(zap.Int("rank", 1)).Debug("below the level")
	}
	runtime.ReadMemStats(&after)
	if got := (after.TotalAlloc - before.TotalAlloc) / loggers; got > most {
		t.Errorf("a logger has allocated %d bytes before its first line, want at most %d", got, most)
	}
}

// TestStorm logs the same line many times. Only 20 lines may be written per minute. The first line of the
// next minute must contain the number of dropped lines.
func TestStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, entries := observed()
		storm := func(lines int) {
			for range lines {
				log.Warn("w")
			}
		}
		check := func(want string) {
			t.Helper()
			if got := lines(entries); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		storm(1000)
		check(strings.TrimSpace(strings.Repeat("w ", 20)))
		time.Sleep(time.Minute - 1)
		storm(5)
		check("")
		time.Sleep(2 * time.Nanosecond)
		storm(500)
		check("w+985" + strings.Repeat(" w", 19))
		time.Sleep(time.Minute + 1)
		log.With(zap.Int("i", 1)).Warn("w")
		check("w+480")
	})
}

// TestLeftOutIsTold checks that the next line, with any message, contains the number of dropped lines. If
// there is no such line, Sync must write a line with the number. The number must be written only once.
func TestLeftOutIsTold(t *testing.T) {
	log, entries := observed()
	for range 23 {
		log.Named("n").Warn("w")
		log.Error("e", zap.Error(io.EOF))
	}
	lines(entries)
	log.Debug("other")
	if got := lines(entries); got != "other+6" {
		t.Fatalf("got %q", got)
	}
	log.Named("n").Warn("w")
	if err := log.Sync(); err != nil {
		t.Error(err)
	}
	if got := lines(entries); got != "repeated lines were left out of the log+1" {
		t.Errorf("Sync: got %q", got)
	}
	if err := log.Sync(); err != nil || lines(entries) != "" {
		t.Errorf("told twice, %v", err)
	}
}

// TestMessagesAndLevels checks that the limit of 20 lines applies to each message and level separately.
func TestMessagesAndLevels(t *testing.T) {
	log, entries := observed()
	for range 100 {
		log.Warn("a")
	}
	lines(entries)
	log.Warn("b")
	log.Info("a")
	if got := lines(entries); got != "b+80 a" {
		t.Errorf("got %q", got)
	}
}

// TestQuietTwice passes a logger that Quiet has returned to Quiet again. Quiet must return it unchanged, so
// that lines are not counted twice. The logger that Quiet returns for a nil logger must write nothing.
func TestQuietTwice(t *testing.T) {
	log, entries := observed()
	inner := log.With(zap.Int("i", 1))
	twice := logs.Quiet(inner)
	for range 25 {
		twice.Warn("w")
	}
	if err := inner.Sync(); err != nil {
		t.Error(err)
	}
	if got, want := lines(entries), strings.Repeat("w ", 20)+
		"repeated lines were left out of the log+5"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	logs.Quiet(nil).Warn("nobody hears")
}

// TestLevelsBelow passes a logger with several cores to Quiet. Each core must write only entries of the
// levels for which it is enabled.
func TestLevelsBelow(t *testing.T) {
	all, allSeen := observer.New(zapcore.DebugLevel)
	some, someSeen := observer.New(zapcore.ErrorLevel)
	log := logs.Quiet(zap.New(zapcore.NewTee(all, some)))
	log.Warn("w")
	log.Error("e")
	if got := lines(allSeen) + ", " + lines(someSeen); got != "w e, e" {
		t.Errorf("got %q", got)
	}
}

// TestFullDisk lets the writing of a line fail. The error output of the logger must receive the error.
func TestFullDisk(t *testing.T) {
	var said bytes.Buffer
	bad := zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()),
		zapcore.AddSync(failing{}), zapcore.DebugLevel)
	log := logs.Quiet(zap.New(bad, zap.ErrorOutput(zapcore.AddSync(&said))))
	log.Warn("w")
	if !strings.Contains(said.String(), "no room") {
		t.Errorf("got %q", said.String())
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("no room") }

// TestManyGoroutines lets several goroutines log the same line. Each line must be either written or counted
// as dropped, not both.
func TestManyGoroutines(t *testing.T) {
	var out bytes.Buffer
	log := settings(t).Logger(&out)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 250 {
				log.Warn("w")
			}
		})
	}
	wg.Wait()
	if err := log.Sync(); err != nil {
		t.Error(err)
	}
	// The line that contains the number of dropped lines may itself be a line "w". At the start, the sampler
	// begins to count again if a goroutine was stopped while it called the sampler for the first time.
	written, leftOut := 0, 0.0
	for _, line := range objects(t, out.Bytes()) {
		if line["msg"] == "w" {
			written++
		}
		if n, ok := line["left_out"].(float64); ok {
			leftOut += n
		}
	}
	if written < 20 || written > 4*20 || written+int(leftOut) != 1000 {
		t.Errorf("%d lines were written and %v left out, of 1000", written, leftOut)
	}
}

// ExampleNew shows a line of the log as JSON.
func ExampleNew() {
	c := config.Defaults()
	c.LogHideTime = true
	log := c.Logger(os.Stdout).With(zap.Int("rank", 1), zap.Int("size", 4), zap.String("host", "h1"),
		zap.Uint64("epoch", 1))
	log.Warn("an operation failed", zap.String("tensor", "grad/7"))
	log.Info("not at this level")
	// Output:
	// {"level":"warn","msg":"an operation failed","rank":1,"size":4,"host":"h1","epoch":1,"tensor":"grad/7"}
}

// TestTrace checks that the level Trace has a name in both formats. At this level no line may be dropped, and
// long texts must not be shortened.
func TestTrace(t *testing.T) {
	for format, want := range map[string]string{"json": `"level":"trace"`, "console": "TRACE"} {
		var out bytes.Buffer
		log := settings(t, "HOROVOD_LOG_LEVEL=trace", "HVD_LOG_FORMAT="+format).Logger(&out)
		const lines = 100
		for range lines {
			log.Log(logs.Trace, "a cycle", zap.String("frame", strings.Repeat("x", 3000)+"\nend"))
			log.Debug("a storm")
		}
		text := out.String()
		if n := strings.Count(text, "a cycle"); n != lines || strings.Count(text, want) != lines {
			t.Errorf("%s: got %d of %d lines in\n%.300s", format, n, lines, text)
		}
		if n := strings.Count(text, strings.Repeat("x", 3000)+`\n`+"end"); n != lines {
			t.Errorf("%s: %d of %d frames are whole and on one line", format, n, lines)
		}
		if n := strings.Count(text, "a storm"); n >= lines {
			t.Errorf("%s: %d equal lines at the level debug", format, n)
		}
	}
}
