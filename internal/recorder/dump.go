package recorder

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// MaxBytes bounds an encoded dump: it must be a value of the job's store, with a little beside it.
	MaxBytes = 7 << 20
	// maxPlainBytes bounds what an encoded dump is when it is unpacked.
	maxPlainBytes = 16 << 20
	// maxPending, maxStalls, maxSets and maxMembers bound the lists of a dump.
	maxPending = 1 << 14
	maxStalls  = 256
	maxSets    = 256
	maxMembers = 1 << 16 // of all sets together
	// maxNameBytes and maxTextBytes bound names of tensors and texts; longer ones are cut. They bound no call of the user's.
	maxNameBytes = 512
	maxTextBytes = 4 << 10
	maxDims      = 64

	// operationsOfAll is how many operations the dumps of all ranks have together when hvdrun asks for them: enough to tell what
	// each was at, in a time that does not grow with the job.
	operationsOfAll = 20000
	format          = 1
)

// ErrMalformed says that something is no dump.
var ErrMalformed = errors.New("malformed dump")

// About is what a dump says besides what the recorder has.
type About struct {
	Rank, Size int
	Host       string
	PID        int
	Epoch      uint64
	// Version is that of this module.
	Version string
	// Why is why there is a dump: a text for people.
	Why string
	// Now is the time of day, and At the time since the engine's start, at which the dump is made.
	Now time.Time
	At  time.Duration
	// Clock is how the times of the dump are compared with those of others, and Offset the last measurement; the zero value if
	// there is none.
	Clock  trace.Clock
	Offset trace.Offset
	// Pending is what the rank waits for, oldest first.
	Pending []trace.Pending
	// Sets are the members of process sets other than 0, by rank, ascending. A set that is missing has those members that are
	// seen to use it.
	Sets map[topo.ProcessSetID][]topo.Rank
	// Stalls are the stalls that rank 0 knows of, as texts for people.
	Stalls []string
}

// Dump returns what the recorder has, and what the caller says about the rank. It costs some milliseconds and 2 MB for 10,000 operations;
// recording goes on meanwhile but for the time of a copy.
func (r *Recorder) Dump(about About) *analysis.Snapshot {
	slots, total := r.copy()
	d := &analysis.Snapshot{
		Format: format, Version: cut(about.Version, maxNameBytes), Why: cut(about.Why, maxTextBytes),
		Rank: about.Rank, Size: about.Size, Host: cut(about.Host, maxNameBytes), PID: about.PID, Epoch: about.Epoch,
		Time: about.Now.Round(0), At: about.At,
		Start: about.Clock.Start.Round(0), Domain: cut(about.Clock.Domain, maxNameBytes), Monotonic: about.Clock.Monotonic,
		Measured: about.Offset.At, Offset: about.Offset.Offset, OffsetError: about.Offset.Error,
		Recorded: total, Operations: make([]analysis.Record, 0, len(slots)),
		NotShown: max(len(about.Pending)-maxPending, 0),
	}
	for _, text := range about.Stalls[:min(len(about.Stalls), maxStalls)] {
		d.Stalls = append(d.Stalls, cut(text, maxTextBytes))
	}
	addSets(d, about.Sets)
	d.Pending = make([]analysis.Record, 0, len(about.Pending)-d.NotShown)
	for _, p := range about.Pending[:len(about.Pending)-d.NotShown] {
		d.Pending = append(d.Pending, analysis.Record{
			Set: uint32(p.Set), Number: p.Number, Kind: p.Kind.String(), Name: cut(p.Name, maxNameBytes), DType: word(p.DType.String(), p.DType.Valid()),
			Shape: p.Shape[:min(len(p.Shape), maxDims)], Backend: word(p.Backend.String(), p.Backend != 0),
			Submitted: p.Submitted, Sent: p.Sent, Granted: p.Granted, Begun: p.Begun,
		})
	}
	for i := range slots {
		s := &slots[i]
		o := analysis.Record{
			Set: uint32(s.set), Number: s.number, Kind: s.kind.String(), Name: cut(s.name, maxNameBytes), DType: word(s.dtype.String(), s.dtype.Valid()),
			Shape: s.shape[:min(len(s.shape), maxDims)], Bytes: s.bytes, Backend: word(s.backend.String(), s.backend != 0),
			Cached: s.cached, Absent: s.absent,
			Submitted: s.submitted, Sent: s.sent, Granted: s.granted, Begun: s.begun, Ended: s.ended,
		}
		if s.err != nil {
			o.Error = cut(s.err.Error(), maxTextBytes)
		}
		d.Operations = append(d.Operations, o)
	}
	return d
}

// word leaves out what says nothing.
func word(text string, says bool) string {
	if !says {
		return ""
	}
	return text
}

// cut bounds a text. What is no UTF-8 would not come out of JSON as it went in.
func cut(text string, most int) string {
	if len(text) > most {
		text = text[:most]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// OperationsOf returns how many operations of each rank a dump that hvdrun asks for has in a job of a size.
func OperationsOf(size int) int { return min(max(operationsOfAll/max(size, 1), 16), DefaultOperations) }

// Encode makes JSON of a dump and its last operations, packed by gzip: as many as are wanted, or fewer so that it has at most
// MaxBytes. It takes some 5 us per operation.
func Encode(d *analysis.Snapshot, operations int) ([]byte, error) {
	return encodeWithin(d, operations, MaxBytes)
}

func encodeWithin(d *analysis.Snapshot, operations, most int) ([]byte, error) {
	few := *d
	for n := min(operations, len(d.Operations)); ; n /= 2 {
		few.Operations = d.Operations[len(d.Operations)-n:]
		plain, err := json.Marshal(&few)
		if err != nil {
			return nil, fmt.Errorf("recorder: encode dump of rank %d: %w", d.Rank, err)
		}
		var b bytes.Buffer
		if len(plain) <= maxPlainBytes {
			if err := pack(&b, plain); err != nil {
				return nil, fmt.Errorf("recorder: encode dump of rank %d: %w", d.Rank, err)
			}
			if b.Len() <= most {
				return b.Bytes(), nil
			}
		}
		if n == 0 {
			return nil, fmt.Errorf("recorder: dump of rank %d has %d bytes without operations, %d packed, want at most %d packed", d.Rank, len(plain), b.Len(), most)
		}
	}
}

func pack(b *bytes.Buffer, plain []byte) error {
	z, err := gzip.NewWriterLevel(b, gzip.BestSpeed)
	if err != nil {
		return err
	}
	if _, err = z.Write(plain); err != nil {
		return err
	}
	return z.Close()
}

// Decode reads what Encode has made. Whatever text is, it takes memory for at most maxPlainBytes of JSON.
func Decode(text []byte) (*analysis.Snapshot, error) {
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("recorder: %w: %d bytes, want at most %d", ErrMalformed, len(text), MaxBytes)
	}
	z, err := gzip.NewReader(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("recorder: %w: %w", ErrMalformed, err)
	}
	plain, err := io.ReadAll(io.LimitReader(z, maxPlainBytes+1))
	if err != nil {
		return nil, fmt.Errorf("recorder: %w: %w", ErrMalformed, err)
	}
	if len(plain) > maxPlainBytes {
		return nil, fmt.Errorf("recorder: %w: more than %d bytes unpacked", ErrMalformed, maxPlainBytes)
	}
	d := new(analysis.Snapshot)
	if err := json.Unmarshal(plain, d); err != nil {
		return nil, fmt.Errorf("recorder: %w: %w", ErrMalformed, err)
	}
	if err := check(d); err != nil {
		return nil, fmt.Errorf("recorder: %w: %w", ErrMalformed, err)
	}
	return d, nil
}

// check finds what a report cannot be made of.
func check(d *analysis.Snapshot) error {
	members := 0
	for _, s := range d.Sets {
		members += len(s.Ranks)
		for _, r := range s.Ranks {
			if r < 0 || r >= d.Size {
				return fmt.Errorf("rank %d in process set %d of a job of %d", r, s.ID, d.Size)
			}
		}
	}
	switch {
	case d.Format != format:
		return fmt.Errorf("format %d, want %d", d.Format, format)
	case d.Size < 1 || d.Rank < 0 || d.Rank >= d.Size:
		return fmt.Errorf("rank %d of %d", d.Rank, d.Size)
	case len(d.Pending) > maxPending:
		return fmt.Errorf("%d pending operations, want at most %d", len(d.Pending), maxPending)
	case len(d.Operations) > DefaultOperations:
		return fmt.Errorf("%d operations, want at most %d", len(d.Operations), DefaultOperations)
	case len(d.Stalls) > maxStalls:
		return fmt.Errorf("%d stalls, want at most %d", len(d.Stalls), maxStalls)
	case len(d.Sets) > maxSets || members > maxMembers:
		return fmt.Errorf("%d process sets with %d members, want at most %d with %d", len(d.Sets), members, maxSets, maxMembers)
	}
	return nil
}

// Stall is a tensor that has waited for too long, as rank 0 tells hvdrun, so that a report is made.
type Stall struct {
	Set  uint32 `json:"set"`
	Name string `json:"name"`
	// Text says it for people.
	Text string `json:"text"`
}

// EncodeStall makes JSON of what DecodeStall reads. What is long is cut.
func EncodeStall(s Stall) ([]byte, error) {
	s.Name, s.Text = cut(s.Name, maxNameBytes), cut(s.Text, maxTextBytes)
	text, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("recorder: encode stall: %w", err)
	}
	return text, nil
}

// DecodeStall reads a stall.
func DecodeStall(text []byte) (s Stall, err error) {
	// A byte takes 6 at most in JSON.
	if most := 6*(maxNameBytes+maxTextBytes) + 64; len(text) > most {
		return Stall{}, fmt.Errorf("recorder: %w: stall of %d bytes, want at most %d", ErrMalformed, len(text), most)
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return Stall{}, fmt.Errorf("recorder: %w: stall: %w", ErrMalformed, err)
	}
	return s, nil
}

// WriteFile leaves a dump as JSON in rankN.json of a folder, which is made if it is not there, and returns the file's path. A file of that
// name is replaced; whoever reads it sees the old one or the new one. Only its user can read it: names of tensors may tell what a
// model is.
func WriteFile(dir string, d *analysis.Snapshot) (path string, err error) {
	text, err := d.JSON()
	if err != nil {
		return "", err
	}
	return WriteText(dir, fmt.Sprintf("rank%d.json", d.Rank), text)
}

// WriteText leaves a text in a file of a folder as WriteFile does.
func WriteText(dir, name string, text []byte) (path string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("recorder: dump folder: %w", err)
	}
	f, err := os.CreateTemp(dir, "."+name+".*") // with mode 0600
	if err != nil {
		return "", fmt.Errorf("recorder: %w", err)
	}
	_, err = f.Write(text)
	err = cmp.Or(err, f.Close())
	path = filepath.Join(dir, name)
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("recorder: %w", err), os.Remove(f.Name()))
	}
	return path, nil
}

// addSets takes in the members of process sets, by number.
func addSets(d *analysis.Snapshot, sets map[topo.ProcessSetID][]topo.Rank) {
	members := 0
	for _, id := range slices.Sorted(maps.Keys(sets)) {
		members += len(sets[id])
		if len(d.Sets) == maxSets || members > maxMembers {
			return
		}
		s := analysis.Set{ID: uint32(id), Ranks: make([]int, 0, len(sets[id]))}
		for _, r := range sets[id] {
			s.Ranks = append(s.Ranks, int(r))
		}
		d.Sets = append(d.Sets, s)
	}
}
