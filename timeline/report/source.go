package report

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/outfile"
)

const (
	// maxRanks limits the number of ranks, so that a malformed file cannot make the report use much memory.
	maxRanks = 1 << 16
	// maxSets and maxPending limit the process sets and the pending operations of a file.
	maxSets, maxPending = 1 << 10, 1 << 10
)

// source is one timeline file of a rank, or what a rank of a running job has recorded.
type source struct {
	path    string
	given   bool         // whether Open got this path, not only that of its folder or of rank 0's file
	entries []live.Entry // used instead of a file if path is empty

	// survey sets the following fields. Times are in ns, except that start is in microseconds since 1970.
	rank, size       int
	host, domain     string
	job              string // the name of the job; empty if the file does not contain it
	epoch, segment   int64
	monotonic, start int64
	points           []clockPoint
	dropped          int64
	steps            int // the number of marked steps
	about            About
	pending          []pendingOp
	ended            bool // whether the timeline was closed, or the rank knew that the job had failed
	// problem is a *FormatError if only the beginning of the file can be used, as far as it has been read.
	// Otherwise it is nil.
	problem error
}

// clockPoint is a clock measurement. When this rank's clock showed the time in the field at, rank 0's clock
// showed at + offset, with an error of at most err. All three are in ns.
type clockPoint struct{ at, offset, err int64 }

// These match the text between the stem and the extension of rank 0's file in the names of the files and
// segments of all ranks (timeline.PathOf). If rank 0's file has no extension, .rank1 is the extension of rank
// 1's files.
var (
	siblingPart = regexp.MustCompile(`^(\.rank[0-9]{1,5})?(\.[0-9]{1,9})?$`)
	plainPart   = regexp.MustCompile(`^(\.[0-9]{1,9})?(\.rank[0-9]{1,5})?$`)
	segmentPart = regexp.MustCompile(`^(\.[0-9]{1,9})?$`)
	rankEnd     = regexp.MustCompile(`\.rank[0-9]{1,5}$`)
)

// find returns the files that belong to a path. If the path is a folder, these are the files in the folder.
// If it is a rank's file, these are the file and its older segments. If it is rank 0's file, the files and
// segments of the other ranks in the same folder belong to it too.
func find(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	keep := func(name string) bool { return !strings.HasPrefix(name, ".") }
	dir := path
	if !info.IsDir() {
		var base string
		dir, base = filepath.Split(path)
		stem, extension := outfile.Split(base)
		kind := strings.TrimSuffix(extension, ".gz")
		part := siblingPart
		switch {
		case rankEnd.MatchString(stem) || rankEnd.MatchString(kind):
			part = segmentPart
		case kind == "":
			part = plainPart
		}
		keep = func(name string) bool {
			rest, starts := strings.CutPrefix(name, stem)
			middle, ends := strings.CutSuffix(rest, extension)
			return starts && ends && part.MatchString(middle)
		}
		dir = filepath.Clean(dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, e := range entries {
		if at := filepath.Join(dir, e.Name()); keep(e.Name()) {
			if i, err := os.Stat(at); err == nil && i.Mode().IsRegular() {
				all = append(all, at)
			}
		}
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: got %v, want a regular file, because a report reads it twice", path, info.Mode())
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: the folder contains no timeline files", path)
	}
	return all, nil
}

// errStop ends the reading of a file without an error.
var errStop = errors.New("stop")

// events passes each event and its text to the function do, until do returns an error. malformed says why the
// event is one that cannot be decoded, or is nil. events returns the error of reading or of do, but nil for
// errStop. If the file violates the format, or do says that an event does, it sets s.problem and returns nil:
// the part before the violation can be used.
func (s *source) events(do func(e *event, text jsontext.Value, malformed error) error) (err error) {
	f, err := os.Open(s.path)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, f.Close()) }()
	var r io.Reader = f
	var head [2]byte
	if _, err := f.ReadAt(head[:], 0); err == nil && head == [2]byte{0x1f, 0x8b} {
		if r, err = gzip.NewReader(bufio.NewReaderSize(f, scanBuffer)); err != nil {
			return fmt.Errorf("%s: %w", s.path, err)
		}
	}
	scan := newScanner(r, s.path)
	var e event
	for {
		text, err := scan.next(&e)
		if text != nil {
			if err = do(&e, text, err); err == nil {
				continue
			}
			if violation := (violation{}); errors.As(err, &violation) {
				err = &FormatError{File: s.path, Byte: scan.began, Err: err}
			}
		}
		switch damage := (*FormatError)(nil); {
		case errors.Is(err, io.EOF), errors.Is(err, errStop):
			return nil
		case errors.As(err, &damage):
			s.problem = err
			return nil
		}
		return err
	}
}

// survey reads the file once. It finds out which rank wrote the file, which clock the rank read, and whether
// the file can be read to its end. It returns an error if nothing in the file can be used.
func (s *source) survey() error {
	records, merged, ours := 0, false, false
	err := s.events(func(e *event, text jsontext.Value, malformed error) error {
		records++
		// Only these events describe the file itself. Errors in other events are found when the file is read
		// for the report.
		if malformed != nil {
			if bytes.Contains(text, []byte(`"hvd_`)) || bytes.Contains(text, []byte(`start_time_since`)) {
				return malformed
			}
			return nil
		}
		switch a := &e.Args; e.Name {
		case "process_name":
			if e.PID == 0 && a.Start != 0 {
				s.start = a.Start
			}
		case "hvd_merged":
			merged = true
			return errStop
		case "hvd_rank":
			if a.Rank < 0 || a.Rank >= maxRanks || a.Size < 0 || a.Size > maxRanks {
				return violation{fmt.Errorf("got rank %d of %d, want 0 to %d", a.Rank, a.Size, maxRanks-1)}
			}
			ours, s.rank, s.size = true, int(a.Rank), int(a.Size)
			s.host, s.domain = clip(a.Host), clip(a.Domain)
			s.epoch, s.segment, s.monotonic = a.Epoch, a.Segment, int64(a.Uptime)
			s.dropped = max(s.dropped, a.Dropped)
		case "hvd_clock":
			p := clockPoint{int64(e.Time), int64(a.Offset), int64(max(a.ClockErr, 0))}
			if len(s.points) == 0 || p.at > s.points[len(s.points)-1].at {
				s.points = append(s.points, p)
			}
			s.job = cmp.Or(clip(a.Job), s.job)
		case "hvd_step":
			s.steps++
		case "hvd_job":
			s.about.Version, s.about.Command, s.about.Settings = clip(a.Gohvd), a.Command, a.Settings
		case "hvd_set":
			if len(s.about.Sets) < maxSets && len(a.Ranks) <= maxRanks {
				s.about.Sets = append(s.about.Sets, ProcessSet{a.Set, a.Ranks})
			}
		case "hvd_pending":
			s.ended = true
			if len(s.pending) < maxPending {
				s.pending = append(s.pending, pendingOp{clip(a.Tensor), clip(a.Kind), a.Set,
					max(a.Submitted, 0), e.Time, a.Granted != nil})
			}
		case "hvd_end":
			s.ended = true
			s.dropped = max(s.dropped, a.Dropped)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case records == 0 && s.problem != nil:
		return s.problem
	case merged:
		return fmt.Errorf("%s: got a merged trace, want the timeline files of the ranks", s.path)
	case !ours && s.problem != nil:
		return s.problem
	case !ours:
		return fmt.Errorf("%s: got a trace without the event hvd_rank, want a timeline of gohvd", s.path)
	}
	return nil
}

// surveyed is a file after its survey.
type surveyed struct {
	source *source
	err    error
}

// surveyAll surveys files, several at a time.
func surveyAll(paths []string) []surveyed {
	all := make([]surveyed, len(paths))
	var next atomic.Int64
	var running sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(paths)) {
		running.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(paths)); i = next.Add(1) - 1 {
				s := &source{path: paths[i]}
				all[i] = surveyed{s, s.survey()}
			}
		})
	}
	running.Wait()
	return all
}

// rankFiles has the files of one rank, in the order of their segments.
type rankFiles struct {
	rank     int
	segments []*source
	clock    clock
}

// Job has the timeline files of the ranks of one job.
type Job struct {
	// ranks are the ranks that have files, in ascending order.
	ranks []*rankFiles
	size  int
	// problems has texts for the report that say what is wrong with the files.
	problems []string
	// running says that this is a running job, without files.
	running bool
}

// Open finds and surveys the files of a job. Each path is a folder or a rank's file. If a path is rank 0's
// file, Open also uses the files of the other ranks in the same folder. It leaves out files that it cannot
// read. If there are files of several jobs, it uses those of one: the job of the newest file among paths, or,
// if paths has only folders, that of the newest file in them. bad is set if a path does not exist, or if a
// path names a file that cannot be read. err is set if no file can be used.
//
// A report reads each file twice, and a merge reads it once more.
func Open(paths []string) (job *Job, bad error, err error) {
	j := &Job{}
	var sources []*source
	var seen []string
	for _, p := range paths {
		found, err := find(p)
		if err != nil {
			bad = errors.Join(bad, err)
			continue
		}
		all := surveyAll(slices.DeleteFunc(slices.Clone(found), func(path string) bool {
			return slices.Contains(seen, path)
		}))
		for i := range all {
			s, err := all[i].source, all[i].err
			path := s.path
			seen = append(seen, path)
			s.given = slices.ContainsFunc(paths, func(p string) bool { return filepath.Clean(p) == path })
			if err == nil {
				sources = append(sources, s)
				continue
			}
			if len(found) == 1 || s.given {
				bad = errors.Join(bad, err)
			}
			j.problems = append(j.problems, "a file is left out: "+err.Error())
		}
	}
	if len(sources) == 0 {
		if bad == nil {
			bad = errors.New(strings.Join(j.problems, "\n"))
		}
		return nil, nil, bad
	}
	j.arrange(sources)
	return j, bad, nil
}

// problemf adds a formatted text to j.problems.
func (j *Job) problemf(format string, args ...any) {
	j.problems = append(j.problems, fmt.Sprintf(format, args...))
}

// arrange sorts the files of a job by rank and segment. If the files belong to several jobs, arrange keeps
// only the files of one: among the given files, or all files if none is given, that which started last.
func (j *Job) arrange(sources []*source) {
	slices.SortStableFunc(sources, func(a, b *source) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.segment, b.segment),
			cmp.Compare(a.start, b.start))
	})
	newest := slices.MaxFunc(sources, func(a, b *source) int {
		switch {
		case a.given == b.given:
			return cmp.Compare(a.start, b.start)
		case a.given:
			return 1
		}
		return -1
	})
	j.size = newest.size
	named := newest // the newest file of this job that contains the job's name
	for _, s := range sources {
		if s.job != "" && s.epoch == newest.epoch && s.size == newest.size && newest.job == "" &&
			(named.job == "" || s.start > named.start) {
			named = s
		}
	}
	type part struct{ epoch, size int64 }
	others := make(map[part][]string) // the files of other epochs or jobs
	for _, s := range sources {
		switch last := len(j.ranks) - 1; {
		case s.epoch != newest.epoch || s.size != newest.size:
			of := part{s.epoch, int64(s.size)}
			others[of] = append(others[of], s.path)
			continue
		case s.job != named.job && s.job != "" && named.job != "":
			j.problemf("%s is left out: it is of another job, whose rank started at %s, but the rank of %s started at %s", s.path,
				s.started(), named.path, named.started())
			continue
		case last < 0 || j.ranks[last].rank != s.rank:
			j.ranks = append(j.ranks, &rankFiles{rank: s.rank, segments: []*source{s}})
		case j.ranks[last].segments[len(j.ranks[last].segments)-1].segment == s.segment:
			j.problemf("%s is left out: another file is already segment %d of rank %d", s.path,
				s.segment, s.rank)
			continue
		default:
			j.ranks[last].segments = append(j.ranks[last].segments, s)
		}
	}
	for _, of := range slices.SortedFunc(maps.Keys(others), func(a, b part) int {
		return cmp.Or(cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.size, b.size))
	}) {
		files := others[of]
		is := " is left out: it is"
		if len(files) > 1 {
			is = fmt.Sprintf(" and %d more are left out: they are", len(files)-1)
		}
		j.problemf("%s%s of another epoch or job, with epoch %d and %d ranks, but %s has epoch %d and %d ranks",
			files[0], is, of.epoch, of.size, newest.path, newest.epoch, newest.size)
	}
	j.setClocks()
}

// damages returns texts that say which files were used only in part.
func (j *Job) damages() (texts []string) {
	for _, r := range j.ranks {
		for _, s := range r.segments {
			if s.problem == nil {
				continue
			}
			what := "damaged"
			var f *FormatError
			if errors.As(s.problem, &f) && f.Truncated {
				what = "truncated"
			}
			texts = append(texts, fmt.Sprintf("a %s file is used only up to the error: %v", what, s.problem))
		}
	}
	return texts
}

// started returns, as text, the time of day at which the rank started according to its own clock.
func (s *source) started() string { return time.UnixMicro(s.start).UTC().Format(time.RFC3339) }

// dropped returns the number of operations that the rank dropped, as stated in its files.
func (r *rankFiles) dropped() (n int64) {
	for _, s := range r.segments {
		n = max(n, s.dropped) // each segment states the total number so far
	}
	return n
}

// marked reports whether the program has marked its steps. Two marks are not enough for a complete step after
// the start-up.
func (r *rankFiles) marked() bool {
	n := 0
	for _, s := range r.segments {
		n += s.steps
	}
	return n > 2
}

// host returns the name of the host on which the rank ran.
func (r *rankFiles) host() string { return r.segments[len(r.segments)-1].host }

// maxText limits the bytes of a text that is taken from a file and kept in memory.
const maxText = 200

// clip shortens a text that is longer than maxText.
func clip(s string) string { return logs.Clip(s, maxText) }
