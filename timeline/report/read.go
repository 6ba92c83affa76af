package report

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

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

// scanner reads the events of a JSON array. It keeps at most one event in memory, besides its buffer, even if
// the file is malformed.
//
// quick decodes nearly all events that package timeline writes, and parse the others. From the first event on
// that neither of them decodes, the decoder of package json reads the rest of the file. So all errors are its
// errors.
type scanner struct {
	r    io.Reader
	file string
	quick
	// buf[i:n] has been read and not been decoded. A 0 byte follows, which quick needs. base is the offset
	// of buf in the file, and err the error of the last read.
	buf  []byte
	i, n int
	base int64
	err  error
	// any says that an event has been decoded, and began is its offset in the file.
	any    bool
	began  int64
	rest   *rest // reads the rest of the file, unless it is nil
	failed error
}

func newScanner(r io.Reader, file string) *scanner {
	return &scanner{r: r, file: file, buf: make([]byte, scanBuffer+1)}
}

// next decodes the next event into e, and returns its text, which is valid until the next call of next. If
// the error is a violation, the events after this one can be read. Other errors are final, and next returns
// them again: after the closing bracket io.EOF, and if the file violates the format, a *FormatError.
func (s *scanner) next(e *event) (jsontext.Value, error) {
	if s.failed != nil {
		return nil, s.failed
	}
	if s.rest == nil {
		if text := s.buffered(e); text != nil {
			return text, nil
		}
		s.rest = s.general()
	}
	text, err := s.rest.next()
	if err != nil {
		s.failed = err
		return nil, err
	}
	s.began = s.rest.base + s.rest.InputOffset() - int64(len(text))
	return text, parse(text, e)
}

// buffered decodes the next event and returns its text. If it cannot, or the buffer has no room for the
// event, it returns nil.
func (s *scanner) buffered(e *event) jsontext.Value {
	at := s.separator()
	n := 0
	if at >= 0 {
		n = s.quick.event(s.buf[s.i+at:s.n+1], e)
	}
	if n == 0 && s.fill() {
		if at = s.separator(); at >= 0 {
			n = s.quick.event(s.buf[s.i+at:s.n+1], e)
		}
	}
	if at < 0 {
		return nil
	}
	text := s.buf[s.i+at : s.n]
	if n == 0 {
		if n = objectLen(text); n == 0 || parse(text[:n], e) != nil {
			return nil
		}
	}
	s.any, s.began = true, s.base+int64(s.i+at)
	s.i += at + n
	return text[:n]
}

// objectLen returns the length of the JSON object at the beginning of text if it is valid and complete. If it
// is not, the result may be any.
func objectLen(text []byte) int {
	depth, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\':
			i++
		case quoted:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}

// separator returns the number of bytes that precede the next event, or -1 if they are not the bracket or
// comma and blanks, or not read yet.
func (s *scanner) separator() int {
	want := byte('[')
	if s.any {
		want = ','
	}
	for i, c := range s.buf[s.i:s.n] {
		switch {
		case c == want:
			want = '{'
			if c == '{' {
				return i
			}
		case c != ' ' && c != '\n' && c != '\t' && c != '\r':
			return -1
		}
	}
	return -1
}

// fill reads until the buffer is full, or to the end of the file, and reports whether there was more.
func (s *scanner) fill() bool {
	s.n = copy(s.buf, s.buf[s.i:s.n])
	s.base += int64(s.i)
	s.i = 0
	before := s.n
	for n := 0; s.n < len(s.buf)-1 && s.err == nil; s.n += n {
		n, s.err = s.r.Read(s.buf[s.n : len(s.buf)-1])
	}
	s.buf[s.n] = 0
	return s.n > before
}

// rest reads the rest of a file with the decoder of package json.
type rest struct {
	*jsontext.Decoder
	limit  *limited
	file   string
	base   int64 // the offset in the file at which the decoder began
	opened bool
}

// limited is a reader that fails after a number of bytes, given by its field left. It is used to limit the
// length of an event.
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

// broken is a reader that only returns an error.
type broken struct{ error }

func (b broken) Read([]byte) (int, error) { return 0, b.error }

// lenient are decoding options that accept duplicate object names and invalid UTF-8.
var lenient = json.JoinOptions(jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))

// general returns a rest that reads what has not been decoded yet.
func (s *scanner) general() *rest {
	before := "" // stands for the events that have been decoded
	if s.any {
		before = "[{}"
	}
	more := s.r
	if s.err != nil {
		more = broken{s.err}
	}
	l := &limited{io.MultiReader(strings.NewReader(before), bytes.NewReader(s.buf[s.i:s.n]), more),
		maxRecord + scanBuffer}
	r := &rest{Decoder: jsontext.NewDecoder(l, lenient), limit: l, file: s.file,
		base: s.base + int64(s.i-len(before))}
	if s.any {
		_, _ = r.next() // cannot fail
	}
	return r
}

// next returns the text of the next event. Its errors are those of scanner.next.
func (r *rest) next() (jsontext.Value, error) {
	r.limit.left = maxRecord + scanBuffer
	if !r.opened {
		if r.PeekKind() != '[' {
			_, err := r.ReadToken()
			return nil, r.fault(err, errNoArray)
		}
		if _, err := r.ReadToken(); err != nil {
			return nil, r.fault(err, nil)
		}
		r.opened = true
	}
	switch r.PeekKind() {
	case '{':
		event, err := r.ReadValue()
		if err != nil {
			return nil, r.fault(err, nil)
		}
		return event, nil
	case ']':
		if _, err := r.ReadToken(); err != nil {
			return nil, r.fault(err, nil)
		}
		if _, err := r.ReadToken(); !errors.Is(err, io.EOF) {
			return nil, r.fault(err, errAfterEnd)
		}
		return nil, io.EOF
	}
	_, err := r.ReadValue()
	return nil, r.fault(err, errNoEvent)
}

// fault returns the error for the current position in the file. err is the error of a failed read, or nil if
// the text violates the format. want is the violation.
func (r *rest) fault(err, want error) error {
	f := &FormatError{File: r.file, Byte: r.base + r.InputOffset(), Err: err}
	var syntax *jsontext.SyntacticError
	if errors.As(err, &syntax) {
		f.Byte, f.Err = r.base+syntax.ByteOffset, syntax.Err
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
	// Time is the time of the event since the start of the file.
	Time stamp `json:"ts"`
	// Duration is that of a span of the program. Category says what the program did, and TID is the lane of
	// the span.
	Duration stamp  `json:"dur"`
	Category string `json:"cat"`
	PID      int64  `json:"pid"`
	TID      int64  `json:"tid"`
	Args     args   `json:"args"`
}

// args has the arguments that the report reads. An event has only some of them, depending on its kind.
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
	// Peer is noPeer if it is missing.
	Peer   topo.Rank `json:"peer"`
	Cached bool      `json:"cached"`
	// Submitted and At are the exact times of events. The ts of such an event may be later, because the times
	// on a track must not decrease. Sent is missing if it differs from Submitted by less than a microsecond.
	// Times that are missing are never.
	Submitted stamp  `json:"submitted"`
	At        stamp  `json:"at"`
	Sent      stamp  `json:"sent"`
	Step      uint64 `json:"step"`
	Tensor    string `json:"tensor"`
	*Rare     `json:",inline"`
}

// Rare has the arguments of events that occur seldom. It is exported only because package json demands that.
type Rare struct {
	Dropped  int64  `json:"dropped"`
	Start    int64  `json:"start_time_since_epoch_in_micros"`
	Rank     int64  `json:"rank"`
	Size     int64  `json:"size"`
	Epoch    int64  `json:"epoch"`
	Segment  int64  `json:"segment"`
	Host     string `json:"host"`
	Domain   string `json:"clock_domain"`
	Job      string `json:"job"`
	Uptime   stamp  `json:"monotonic_us"`
	Offset   stamp  `json:"offset_us"`
	ClockErr stamp  `json:"error_us"`
	// These are of the events hvd_job, hvd_set and hvd_pending.
	Gohvd    string            `json:"gohvd"`
	Command  []string          `json:"command"`
	Settings map[string]string `json:"settings"`
	Ranks    []topo.Rank       `json:"ranks"`
	Kind     string            `json:"kind"`
	Granted  *stamp            `json:"granted"`
}

const (
	nanosPerMicro = 1000
	// maxMicros limits a time to 31 years, so that the sum of a few times in ns does not overflow.
	maxMicros = 1e15
)

// noPeer is a peer that an event does not have.
const noPeer topo.Rank = -1

// stamp is a time in ns. Files have times in microseconds.
type stamp int64

// UnmarshalJSONFrom implements json.UnmarshalerFrom. It ignores null.
func (s *stamp) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	var us *float64
	switch err := json.UnmarshalDecode(d, &us); {
	case err != nil:
		return err
	case us == nil:
		return nil
	case math.Abs(*us) > maxMicros:
		return violationf("got a time of more than %g us", maxMicros)
	}
	*s = stamp(math.Round(*us * nanosPerMicro))
	return nil
}

// reset removes what e has.
func (e *event) reset(rare *Rare) {
	*e = event{Args: noArgs(rare)}
}

// noArgs returns arguments of which all are missing.
func noArgs(rare *Rare) args {
	return args{Peer: noPeer, Submitted: never, At: never, Sent: never, Rare: rare}
}

// parse decodes the text of an event into e.
func parse(text jsontext.Value, e *event) error {
	e.reset(new(Rare))
	if err := json.Unmarshal(text, e, lenient); err != nil {
		return violation{err}
	}
	if e.Args.Rare == nil { // the arguments are null, which is the same as no arguments
		e.Args = noArgs(new(Rare))
	}
	return nil
}

// parseShape parses the text of a shape, such as [2, 3].
func parseShape(text string) (s tensor.Shape, err error) {
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return nil, violationf("got the shape %.64q: %w", text, err)
	}
	return s, nil
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
