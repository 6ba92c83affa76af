package report

import (
	"errors"
	"fmt"
	"io"
)

const (
	// maxRecord bounds a record. A name has 4 KiB at most, six times that when every byte is escaped; a longer record is none of a
	// timeline's and is passed over.
	maxRecord  = 1 << 18
	scanBuffer = 1 << 16
)

// FormatError is a place where a file is not what a timeline is.
type FormatError struct {
	// File is its path. Byte and Line are the place, from 0 and from 1, in the file when unpacked.
	File string
	Byte int64
	Line int
	// Got and Want say what is there and what should be.
	Got, Want string
	// Truncated says that the file only ends too early.
	Truncated bool
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("%s: byte %d (line %d): got %s, want %s", e.File, e.Byte, e.Line, e.Got, e.Want)
}

// scanner cuts a JSON array into its records, however they are laid out: it counts brackets outside strings and reads nothing else.
// It holds one record and one buffer, whatever the file has.
type scanner struct {
	r        io.Reader
	file     string
	buf      []byte
	at, end  int
	consumed int64 // bytes of the file before buf[at]
	line     int
	record   []byte
	failed   error
	opened   bool
	// tooLong counts records that were passed over.
	tooLong int64
}

func newScanner(r io.Reader, file string) *scanner {
	return &scanner{r: r, file: file, buf: make([]byte, scanBuffer), line: 1}
}

// fill reads more. At the end it gives io.EOF.
func (s *scanner) fill() error {
	for empty := 0; empty < 100; empty++ {
		n, err := s.r.Read(s.buf)
		s.at, s.end = 0, n
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

// peek returns the next byte that is not white space, and does not take it.
func (s *scanner) peek() (byte, error) {
	for {
		for s.at < s.end {
			c := s.buf[s.at]
			switch c {
			case '\n':
				s.line++
			case ' ', '\t', '\r':
			default:
				return c, nil
			}
			s.take()
		}
		if err := s.fill(); err != nil {
			return 0, err
		}
	}
}

func (s *scanner) take() {
	s.at++
	s.consumed++
}

// fault makes the error for what stands here: err is what reading gave.
func (s *scanner) fault(err error, got, want string) error {
	f := &FormatError{File: s.file, Byte: s.consumed, Line: s.line, Got: got, Want: want}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		f.Got, f.Truncated = "the end of the file", true
	case err != nil:
		f.Got = err.Error()
	}
	return f
}

// next returns the next record, valid until the next call; io.EOF after the closing bracket; else a *FormatError, again and again.
func (s *scanner) next() ([]byte, error) {
	if s.failed != nil {
		return nil, s.failed
	}
	var record []byte
	record, s.failed = s.scan()
	return record, s.failed
}

func (s *scanner) scan() ([]byte, error) {
	if !s.opened {
		c, err := s.peek()
		if err != nil || c != '[' {
			return nil, s.fault(err, fmt.Sprintf("%q", c), "[ and the events of a timeline")
		}
		s.take()
		s.opened = true
	}
	for {
		c, err := s.peek()
		switch {
		case err != nil:
			return nil, s.fault(err, "", "another event or ]")
		case c == ',':
			s.take() // Horovod puts one after every record, the last too
		case c == ']':
			s.take()
			c, err := s.peek()
			if errors.Is(err, io.EOF) {
				return nil, io.EOF
			}
			return nil, s.fault(err, fmt.Sprintf("%q", c), "nothing after the closing ]")
		case c == '{':
			whole, err := s.scanRecord()
			if err != nil {
				return nil, err
			}
			if whole {
				return s.record, nil
			}
			s.tooLong++
		default:
			return nil, s.fault(nil, fmt.Sprintf("%q", c), "an event, as {...}, or ]")
		}
	}
}

// scanRecord takes a record, of which { is next. It is not whole if it is too long to be kept.
func (s *scanner) scanRecord() (whole bool, err error) {
	s.record = s.record[:0]
	whole = true
	begun, depth, inString, escaped := s.consumed, 0, false, false
	for {
		from := s.at
		closed := false
	bytes:
		for s.at < s.end {
			c := s.buf[s.at]
			s.at++
			if c == '\n' {
				s.line++
			}
			switch {
			case escaped:
				escaped = false
			case inString:
				switch c {
				case '"':
					inString = false
				case '\\':
					escaped = true
				}
			default:
				switch c {
				case '"':
					inString = true
				case '{', '[':
					depth++
				case '}', ']':
					if depth--; depth == 0 {
						closed = true
						break bytes
					}
				}
			}
		}
		s.consumed += int64(s.at - from)
		if whole = whole && len(s.record)+s.at-from <= maxRecord; whole {
			s.record = append(s.record, s.buf[from:s.at]...)
		}
		if closed {
			return whole, nil
		}
		if err := s.fill(); err != nil {
			return false, s.fault(err, "", fmt.Sprintf("the end of the event that begins at byte %d", begun))
		}
	}
}
