package timeline

import (
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

// Config is the configuration of a timeline.
type Config struct {
	// Path is the file of this rank (see PathOf). If the name ends in .gz, the file is compressed. If the
	// path exists and is not a regular file, such as a FIFO or /dev/stdout, the events are written to it as a
	// stream. A stream has no segments, and MaxBytes does not apply to it.
	Path       string
	Rank, Size int
	Host       string
	Epoch      uint64
	Clock      trace.Clock
	// About describes the job. Each segment repeats it.
	About About
	// MarkCycles makes Cycle record a mark for each cycle. If it is false, Cycle does nothing.
	MarkCycles bool
	// MaxBytes limits the bytes of all segments together. When the limit is reached, the oldest segments are
	// removed. 0 means no limit and only one segment.
	MaxBytes int64
	// New makes Start fail if the file or segments of an earlier timeline exist, instead of replacing them.
	New bool
	// Log receives a warning if files cannot be written, at most one per minute for each kind of problem. If
	// Log is nil, nothing is logged.
	Log *zap.Logger
}

// About describes the job of a timeline. Only people read it.
type About struct {
	// Version is the version of gohvd, and Command the command line of the program.
	Version string
	Command []string
	// Settings has the settings that were given a value, without secrets.
	Settings map[string]string
	// Sets has the members of the process sets other than 0.
	Sets map[topo.ProcessSetID][]topo.Rank
}

// knobs are sizes and times that tests may change.
type knobs struct {
	// tensors is the capacity of each of the two batches, in tensors.
	tensors int
	// interval is how long the first record in an empty batch waits for further records before the batch is
	// written. retry is the time between a failed attempt to write and the next attempt.
	interval, retry time.Duration
	// timeout limits how long Close and Write wait for the disk.
	timeout time.Duration
}

// defaultKnobs are the knobs outside of tests. docs/timeline.md promises that events are in the file after 50
// ms, so the interval leaves 10 ms for writing.
var defaultKnobs = knobs{tensors: 16 << 10, interval: 40 * time.Millisecond, retry: time.Second,
	timeout: 5 * time.Second}

// PathOf returns the path of a rank's file. For rank 0 it is the given path. For rank r it is the path with
// .rank<r> before the extension. If path is a device or under /proc, all ranks use path itself, because no
// files can be created beside it.
func PathOf(path string, rank int) string {
	if rank == 0 || outfile.Device(path) {
		return path
	}
	return beside(path, "rank"+strconv.Itoa(rank))
}

// beside returns the path with a word inserted before the extension.
func beside(path, word string) string {
	stem, ext := outfile.Split(path)
	return stem + "." + word + ext
}
