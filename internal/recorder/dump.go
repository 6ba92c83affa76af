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
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// MaxBytes limits the size of an encoded dump. A dump is sent as a value in the job's store, so MaxBytes
	// is a little less than the store's limit for a value.
	MaxBytes = 7 << 20
	// maxPlainBytes limits the size of an encoded dump before compression.
	maxPlainBytes = 16 << 20
	// maxPending and maxMembers limit what a dump has of a program that has very many operations or process
	// sets at once. maxMembers is for all sets and pending operations together.
	maxPending = 1 << 14
	maxMembers = 1 << 16
	// maxNameBytes and maxTextBytes limit tensor names and other texts in a dump. Longer ones are cut.
	// Outside of dumps, names have no such limit.
	maxNameBytes = 512
	maxTextBytes = 4 << 10

	// operationsOfAll is the total number of operations in the dumps of all ranks when hvdrun asks for dumps.
	// It is enough to show what each rank was doing. Because of the limit, the time to collect the dumps does
	// not grow with the job.
	operationsOfAll = 20000
	format          = 1
)

// ErrMalformed reports that data is not a valid dump or stall.
var ErrMalformed = errors.New("malformed dump")

// About is the content of a dump in addition to the recorded operations.
type About struct {
	Rank, Size int
	Host       string
	PID        int
	Epoch      uint64
	// Version is the version of this module.
	Version string
	// Why says why the dump was taken, as text for people.
	Why string
	// Now is the time of day at which the dump was taken. At is the same moment as the time since the
	// engine's start.
	Now time.Time
	At  time.Duration
	// Clock is the clock of the times in the dump. Offset is the last measurement of this clock, or the zero
	// value if there is none.
	Clock  trace.Clock
	Offset trace.Offset
	// Pending has the operations that have not ended at the rank, the oldest first.
	Pending []trace.Record
	// MaxOperations and MaxPending limit the number of operations in the dump that have ended, the most
	// recent ones, and that are pending, the oldest ones. 0 means all that the recorder has, and as many
	// pending operations as a dump can have.
	MaxOperations, MaxPending int
	// Sets maps process sets other than 0 to their members, in ascending order. If a set is missing, the
	// ranks that have operations in the set count as its members.
	Sets map[topo.ProcessSetID][]topo.Rank
	// Stalls has descriptions of the stalls that the coordinator knows of, as text for people. It is empty
	// except at rank 0.
	Stalls []string
}

// Dump returns a snapshot that has the recorded operations and the content of about. For 10,000 operations it
// takes a few milliseconds and 2 MB. It blocks Record only while it copies the slots.
func (r *Recorder) Dump(about About) *analysis.Snapshot {
	slots, total := r.copy(cmp.Or(about.MaxOperations, math.MaxInt))
	mostPending := min(cmp.Or(about.MaxPending, maxPending), maxPending)
	d := &analysis.Snapshot{
		Format: format, Version: clip(about.Version), Why: cut(about.Why, maxTextBytes),
		Rank: about.Rank, Size: about.Size, Host: clip(about.Host), PID: about.PID,
		Epoch: about.Epoch,
		Time:  about.Now.Round(0), At: about.At,
		Start: about.Clock.Start.Round(0), Domain: clip(about.Clock.Domain),
		Monotonic: about.Clock.Monotonic,
		Measured:  about.Offset.At, Offset: about.Offset.Offset, OffsetError: about.Offset.Error,
		Off: r == nil, Recorded: total, Operations: slots, NotShown: max(len(about.Pending)-mostPending, 0),
	}
	for _, text := range about.Stalls {
		d.Stalls = append(d.Stalls, cut(text, maxTextBytes))
	}
	addSets(d, about.Sets)
	d.Pending = append([]trace.Record{}, about.Pending[:len(about.Pending)-d.NotShown]...)
	room := maxMembers - members(d)
	for i := range d.Pending {
		p := &d.Pending[i]
		p.Among = p.Among[:min(len(p.Among), max(room, 0))]
		room -= len(p.Among)
	}
	for _, records := range [][]trace.Record{d.Pending, d.Operations} {
		for i := range records {
			r := &records[i]
			r.Name, r.Error = clip(r.Name), cut(r.Error, maxTextBytes)
		}
	}
	return d
}

// cut shortens text to at most the given number of bytes. It replaces invalid UTF-8, because JSON cannot
// represent it.
func cut(text string, most int) string {
	if len(text) > most {
		text = text[:most]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// clip shortens a name that is longer than maxNameBytes, so that it stays different from others, by which the
// analysis tells operations apart. It replaces invalid UTF-8 too.
func clip(name string) string {
	return logs.Clip(strings.ToValidUTF8(name, "\uFFFD"), maxNameBytes)
}

// OperationsOf returns the maximum number of operations in the dump of each rank when hvdrun asks for dumps.
// size is the number of ranks in the job.
func OperationsOf(size int) int { return min(max(operationsOfAll/max(size, 1), 16), DefaultOperations) }

// Encode encodes a dump as JSON, compressed by gzip. The result has only the most recent operations, at most
// the given number of them. If the result would exceed MaxBytes, Encode leaves out more operations. It fails
// if the result exceeds MaxBytes even without operations. It takes about 5 us per operation.
func Encode(d *analysis.Snapshot, operations int) ([]byte, error) {
	return encodeWithin(d, operations, MaxBytes)
}

// encodeWithin encodes like Encode, but with the argument most as the limit instead of MaxBytes.
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
			return nil, fmt.Errorf(
				"recorder: dump of rank %d: even without operations it has %d bytes, and %d bytes when compressed, want at most %d compressed bytes", d.Rank, len(plain), b.Len(), most)
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

// Decode decodes the result of Encode. It returns ErrMalformed if the input is not valid. For any input, it
// uses at most as much memory as for maxPlainBytes bytes of JSON. A rank has proved the secret of the job, so
// Decode does not check what the dump says.
func Decode(text []byte) (*analysis.Snapshot, error) {
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("recorder: %w: got %d bytes, want at most %d", ErrMalformed, len(text),
			MaxBytes)
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
		return nil, fmt.Errorf("recorder: %w: got more than %d uncompressed bytes", ErrMalformed,
			maxPlainBytes)
	}
	d := new(analysis.Snapshot)
	if err := json.Unmarshal(plain, d); err != nil {
		return nil, fmt.Errorf("recorder: %w: %w", ErrMalformed, err)
	}
	if d.Format != format {
		return nil, fmt.Errorf("recorder: %w: got format %d, want %d", ErrMalformed, d.Format, format)
	}
	return d, nil
}

// Stall is a tensor that has waited too long for some ranks to submit it. Rank 0 sends it to hvdrun, which
// then collects dumps for a report.
type Stall struct {
	Set  topo.ProcessSetID `json:"set"`
	Name string            `json:"name"`
	// Text describes the stall for people.
	Text string `json:"text"`
}

// Cut returns the stall with texts that are shortened as those of a dump are.
func (s Stall) Cut() Stall {
	s.Name, s.Text = clip(s.Name), cut(s.Text, maxTextBytes)
	return s
}

// EncodeStall encodes a stall as JSON and shortens its texts if they are too long.
func EncodeStall(s Stall) ([]byte, error) {
	text, err := json.Marshal(s.Cut())
	if err != nil {
		return nil, fmt.Errorf("recorder: encode a stall: %w", err)
	}
	return text, nil
}

// DecodeStall decodes the result of EncodeStall. It returns ErrMalformed if the input is not valid.
func DecodeStall(text []byte) (s Stall, err error) {
	if err := json.Unmarshal(text, &s); err != nil {
		return Stall{}, fmt.Errorf("recorder: %w: stall: %w", ErrMalformed, err)
	}
	return s, nil
}

// WriteFile writes the dump of rank N as JSON to the file rankN.json in dir and returns the path. It creates
// dir if needed. An existing file is replaced atomically: readers see either the old file or the new one.
// Only the user can read the file, because tensor names may reveal the structure of a model.
func WriteFile(dir string, d *analysis.Snapshot) (path string, err error) {
	text, err := d.JSON()
	if err != nil {
		return "", err
	}
	return WriteText(dir, fmt.Sprintf("rank%d.json", d.Rank), text)
}

// WriteText writes a text to the file with the given name in dir and returns the path. It writes the file in
// the same way as WriteFile.
func WriteText(dir, name string, text []byte) (path string, err error) {
	if dir, err = outfile.Folder(dir, 0o700); err != nil {
		return "", fmt.Errorf("recorder: make the dump folder: %w", err)
	}
	f, err := os.CreateTemp(dir, "."+name+".*") // creates the file with mode 0600
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

// addSets adds process sets with their members to a snapshot, sorted by the number of the set. It stops
// before the first set that would exceed a limit.
func addSets(d *analysis.Snapshot, sets map[topo.ProcessSetID][]topo.Rank) {
	members := 0
	for _, id := range slices.Sorted(maps.Keys(sets)) {
		members += len(sets[id])
		if members > maxMembers {
			return
		}
		d.Sets = append(d.Sets, analysis.Set{ID: id, Ranks: sets[id]})
	}
}

// members returns the number of ranks in the lists of members of all sets, and of the ranks that take part in
// pending operations.
func members(d *analysis.Snapshot) (n int) {
	for _, s := range d.Sets {
		n += len(s.Ranks)
	}
	for i := range d.Pending {
		n += len(d.Pending[i].Among)
	}
	return n
}
