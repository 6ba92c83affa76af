package report

import (
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

const (
	// maxRecord limits the bytes of one event. A tensor name has at most 4 KiB. It takes 24 KiB if every byte
	// is escaped.
	maxRecord  = 1 << 18
	scanBuffer = 1 << 16
)

// FormatError reports that a file violates the timeline format.
type FormatError struct {
	File string
	// Byte is the offset in the uncompressed file at which the violation was found. The first byte has offset
	// 0.
	Byte int64
	// Truncated is set if the file ends too early and has no other violation.
	Truncated bool
	Err       error
}

func (e *FormatError) Error() string { return fmt.Sprintf("%s: byte %d: %v", e.File, e.Byte, e.Err) }

// Unwrap returns Err.
func (e *FormatError) Unwrap() error { return e.Err }

var (
	errNoArray  = errors.New("want the JSON array of a timeline, which begins with [")
	errNoEvent  = errors.New("want an event {...} or the closing ]")
	errAfterEnd = errors.New("want the end of the file after the closing ]")
	errTooLong  = fmt.Errorf("got an event of more than %d bytes", maxRecord)
)

// scanner splits a JSON array into its events. It keeps at most one event in memory, even if the file is
// malformed.
type scanner struct {
	*jsontext.Decoder
	limit  *limited
	file   string
	failed error
	opened bool
}

// limited is a reader that fails after a number of bytes, given by its field left. The scanner uses it to
// limit the length of an event.
type limited struct {
	io.Reader
	left int
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooLong
	}
	n, err := l.Reader.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// lenient are decoding options that accept duplicate object names and invalid UTF-8.
var lenient = json.JoinOptions(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))

func newScanner(r io.Reader, file string) *scanner {
	l := &limited{Reader: r}
	return &scanner{Decoder: jsontext.NewDecoder(l, lenient), limit: l, file: file}
}

// next returns the text of the next event. The text is valid until the next call of next. After the closing
// bracket the error is io.EOF. If the file violates the format, the error is a *FormatError. After an error,
// next always returns the same error.
func (s *scanner) next() (event jsontext.Value, err error) {
	if s.failed == nil {
		s.limit.left = maxRecord + scanBuffer
		event, s.failed = s.scan()
	}
	return event, s.failed
}

func (s *scanner) scan() (jsontext.Value, error) {
	if !s.opened {
		if s.PeekKind() != '[' {
			_, err := s.ReadToken()
			return nil, s.fault(err, errNoArray)
		}
		if _, err := s.ReadToken(); err != nil {
			return nil, s.fault(err, nil)
		}
		s.opened = true
	}
	switch s.PeekKind() {
	case '{':
		event, err := s.ReadValue()
		if err != nil {
			return nil, s.fault(err, nil)
		}
		return event, nil
	case ']':
		if _, err := s.ReadToken(); err != nil {
			return nil, s.fault(err, nil)
		}
		if _, err := s.ReadToken(); !errors.Is(err, io.EOF) {
			return nil, s.fault(err, errAfterEnd)
		}
		return nil, io.EOF
	}
	_, err := s.ReadValue()
	return nil, s.fault(err, errNoEvent)
}

// fault returns the error for the current position in the file. err is the error of a failed read, or nil if
// the text violates the format. want is the violation.
func (s *scanner) fault(err, want error) error {
	f := &FormatError{File: s.file, Byte: s.InputOffset(), Err: err}
	var syntax *jsontext.SyntacticError
	if errors.As(err, &syntax) {
		f.Byte, f.Err = syntax.ByteOffset, syntax.Err
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		f.Truncated, f.Err = true, errors.New("the file ends before the closing ]")
	case err == nil:
		f.Err = want
	case want == errNoArray:
		f.Err = fmt.Errorf("%w: %w", f.Err, want)
	}
	return f
}

// violation is an error of an event that is valid JSON but violates the format.
type violation struct{ error }

func violationf(format string, args ...any) error { return violation{fmt.Errorf(format, args...)} }

// event is an event of a file in decoded form.
type event struct {
	Phase string `json:"ph"`
	Name  string `json:"name"`
	// Time is the time of the event in microseconds since the start of the file.
	Time float64 `json:"ts"`
	// Duration is that of a span of the program, in microseconds. Category says what the program did, and TID
	// is the lane of the span.
	Duration float64 `json:"dur"`
	Category string  `json:"cat"`
	PID      int64   `json:"pid"`
	TID      int64   `json:"tid"`
	Args     args    `json:"args"`

	at int64 // Time, in ns
}

// args has the arguments that the report reads. An event has only some of them, depending on its kind. Times
// are in microseconds.
type args struct {
	Name      string            `json:"name"`
	DType     string            `json:"dtype"`
	Shape     string            `json:"shape"`
	Backend   message.Backend   `json:"backend"`
	Algorithm message.Algorithm `json:"algorithm"`
	Error     string            `json:"error"`
	Set       topo.ProcessSetID `json:"set"`
	Op        uint64            `json:"op"`
	Bytes     int64             `json:"bytes"`
	Fused     int64             `json:"fused"`
	Peer      *topo.Rank        `json:"peer"`
	Cached    bool              `json:"cached"`
	Dropped   int64             `json:"dropped"`
	Start     int64             `json:"start_time_since_epoch_in_micros"`
	Rank      int64             `json:"rank"`
	Size      int64             `json:"size"`
	Epoch     int64             `json:"epoch"`
	Segment   int64             `json:"segment"`
	Host      string            `json:"host"`
	Domain    string            `json:"clock_domain"`
	Job       string            `json:"job"`
	Uptime    float64           `json:"monotonic_us"`
	Offset    float64           `json:"offset_us"`
	ClockErr  float64           `json:"error_us"`
	// Submitted and At are the exact times of events. The ts of such an event may be later, because the times
	// on a track must not decrease. Sent is missing if it differs from Submitted by less than a microsecond.
	Submitted *float64 `json:"submitted"`
	Step      uint64   `json:"step"`
	Tensor    string   `json:"tensor"`
	// These are of the events hvd_job, hvd_set and hvd_pending.
	Gohvd    string            `json:"gohvd"`
	Command  []string          `json:"command"`
	Settings map[string]string `json:"settings"`
	Ranks    []topo.Rank       `json:"ranks"`
	Kind     string            `json:"kind"`
	Granted  *float64          `json:"granted"`
	At       *float64          `json:"at"`
	Sent     *float64          `json:"sent"`
}

const (
	nanosPerMicro = 1000
	// maxMicros limits a time to 31 years, so that the sum of a few times in ns does not overflow.
	maxMicros = 1e15
)

// parse decodes the text of an event into e.
func parse(text jsontext.Value, e *event) error {
	*e = event{}
	if err := json.Unmarshal(text, e, lenient); err != nil {
		return violation{err}
	}
	a := &e.Args
	times := [...]float64{e.Time, e.Duration, a.Uptime, a.Offset, a.ClockErr, valueOf(a.Submitted),
		valueOf(a.At), valueOf(a.Sent), valueOf(a.Granted)}
	for _, us := range times {
		if math.Abs(us) > maxMicros {
			return violationf("got a time of more than %g us", maxMicros)
		}
	}
	e.at = nanos(e.Time)
	return nil
}

// parseShape parses the text of a shape, such as [2, 3].
func parseShape(text string) (s tensor.Shape, err error) {
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return nil, violationf("got the shape %.64q: %w", text, err)
	}
	return s, nil
}

func valueOf(us *float64) float64 {
	if us == nil {
		return 0
	}
	return *us
}

// argsOf returns the arguments of an event in encoded form. It returns nil if the event has no arguments.
func argsOf(text jsontext.Value) map[string]jsontext.Value {
	var e struct {
		Args map[string]jsontext.Value `json:"args"`
	}
	if json.Unmarshal(text, &e, lenient) != nil {
		return nil
	}
	return e.Args
}

func nanos(us float64) int64 { return int64(math.Round(us * nanosPerMicro)) }
