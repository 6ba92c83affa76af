package timeline_test

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
	"github.com/gohvd/gohvd/timeline"
	"github.com/gohvd/gohvd/timeline/timelinetest"
)

// Example writes the timeline of one rank, with one operation, and reads the operation back from the file.
func Example() {
	dir, err := os.MkdirTemp("", "timeline")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := timeline.PathOf(filepath.Join(dir, "t.json"), 1)
	t, err := timeline.Start(timeline.Config{Path: path, Rank: 1, Size: 2, MaxBytes: 1 << 30})
	if err != nil {
		panic(err)
	}
	ms := time.Millisecond
	t.Record(&trace.Operation{
		Records: []trace.Record{{Number: 1, Kind: message.Barrier, Name: "barrier", Submitted: 1 * ms,
			Sent: 2 * ms, Granted: 3 * ms, Begun: 3 * ms, Ended: 4 * ms}},
	})
	if err := t.Close(); err != nil {
		panic(err)
	}
	f, err := os.Open(path)
	if err != nil {
		panic(err)
	}
	defer func() { _ = f.Close() }()
	s, err := timelinetest.Read(f)
	if err != nil {
		panic(err)
	}
	for _, o := range s.Operations {
		fmt.Printf("%s: %s %s, negotiated for %v µs, done after %v µs\n", filepath.Base(path), o.Track,
			o.Kind, o.Granted-o.Submitted, o.Ended-o.Granted)
	}
	// Output: t.rank1.json: barrier BARRIER, negotiated for 2000 µs, done after 1000 µs
}
