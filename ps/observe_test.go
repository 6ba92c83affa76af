package ps

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// TestTimeline checks that workers and servers write their pushes and pulls to timelines, and that events of
// requests that are in flight at the same time are on different tracks, which later events use again.
func TestTimeline(t *testing.T) {
	const pushes = 10
	path := filepath.Join(t.TempDir(), "t.json")
	j := job{t: t, servers: 1, workers: 1, settings: map[string]string{"HOROVOD_TIMELINE": path}}
	kv(j, Sum[float32], func(_ *Node, _ int, w *KVWorker[float32]) {
		var got []float32
		var flying []*Request
		for range pushes {
			flying = append(flying, must(w.PushAsync(t.Context(), []uint64{1, 2}, make([]float32, 6))))
		}
		r, err := w.PushPullAsync(t.Context(), []uint64{1, 2}, make([]float32, 6), &got)
		flying = append(flying, r)
		wait(t, r, err)
		for _, r := range flying {
			wait(t, r, nil)
		}
		testnet.WantError(t, w.Pull(t.Context(), []uint64{1, 3}, &got), "there is no key 3 here")
	})
	for process, node := range []string{"scheduler", "server 0", "worker 0"} {
		name := path
		if process > 0 {
			name = strings.TrimSuffix(path, ".json") + fmt.Sprintf(".rank%d.json", process)
		}
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s, err := timelinetest.Read(f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		kinds, tracks := make(map[string]int), make(map[string]bool)
		for i := range s.Operations {
			op := &s.Operations[i]
			kinds[op.Kind]++
			tracks[op.Track] = true
			if !strings.HasPrefix(op.Track, node+", request ") || op.DType != "float32" || op.Shape != "[2]" ||
				op.Peer != 3-process || (op.Fail != "") != (op.Kind == "PULL") ||
				op.Kind == "PUSH" && op.Bytes != 24 || op.Kind == "PUSHPULL" && process == 1 && op.Bytes != 48 {
				t.Errorf("%s has %+v", node, *op)
			}
			if op.Submitted != op.Begin {
				t.Errorf("%s: events on a track overlap: the bar begins later than %+v", node, *op)
			}
		}
		if n := len(tracks); n > 0 && n == len(s.Operations) { // the last one began after the others
			t.Errorf("%s has %d tracks, one for each event", node, n)
		}
		want := map[string]int{"PUSH": pushes, "PUSHPULL": 1, "PULL": 1}
		if process == 0 {
			want = map[string]int{}
		}
		if fmt.Sprint(kinds) != fmt.Sprint(want) || s.Rank != process || s.Size != 3 || !s.Ended {
			t.Errorf("%s has the operations %v, want %v; rank %d of %d", node, kinds, want, s.Rank, s.Size)
		}
	}
}

// slowDisk is a handler of log records. With the record that a dump was written, the program waits until the
// channel is closed, as if writing had taken so long.
type slowDisk struct {
	slog.Handler
	until <-chan struct{}
}

func (h slowDisk) Enabled(context.Context, slog.Level) bool { return true }
func (h slowDisk) WithAttrs([]slog.Attr) slog.Handler       { return h }

func (h slowDisk) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "wrote a dump") {
		<-h.until
	}
	return nil
}

// TestDump checks that a worker writes its last requests, and those that wait, to a file if a server dies.
// Requests to the server fail although the file system takes long.
func TestDump(t *testing.T) {
	dir := t.TempDir()
	asked, failed := make(chan struct{}), make(chan struct{})
	j := job{t: t, servers: 1, workers: 1, leave: true, settings: map[string]string{"HVD_DUMP_DIR": dir},
		logger: slog.New(slowDisk{discard.Handler(), failed})}
	j.run(func(po *Node) {
		switch {
		case po.Role() == Server:
			handler := func(meta KVMeta, _ KVPairs[int8], s *KVServer[int8]) {
				if meta.Pull {
					close(asked) // and never answer
				} else if err := s.Respond(meta, KVPairs[int8]{}); err != nil {
					t.Error(err)
				}
			}
			noError(t, server(po, 0, KVHandler[int8](handler)))
			<-asked
		case po.Role() == Worker:
			defer close(failed)
			w := must(NewKVWorker[int8](po))
			noError(t, w.Push(t.Context(), []uint64{1}, []int8{1}))
			var got []int8
			testnet.WantError(t, w.Pull(testnet.Context(t), []uint64{1}, &got), "server 0 is gone")
		default:
			<-asked
		}
	})
	text := testnet.ReadFile(t, filepath.Join(dir, "rank2.json"))
	var d analysis.Snapshot
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Operations) != 1 || d.Operations[0].Kind != message.Push || len(d.Pending) != 1 ||
		d.Pending[0].Name != "pull of 1 keys" || !strings.Contains(d.Why, "server 0 is gone") {
		t.Errorf("got the dump %s", text)
	}
}
