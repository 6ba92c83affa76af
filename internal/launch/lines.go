package launch

import (
	"bytes"
	"unicode/utf8"
)

// maxLineBytes is the length in bytes from which a line is passed on before its end has arrived, so that an
// incomplete line takes bounded memory.
const maxLineBytes = 64 << 10

// splitter splits a stream of bytes into pieces. A piece is a whole line with its line end, unless the line
// is longer than max or the stream ends with an incomplete line. A line ends with \n or \r\n, or with \r, as
// the lines of progress bars do. Many progress bars write \r before their text instead of behind it, so a
// line that follows a \r is passed on without waiting for its end.
type splitter struct {
	// piece is called for each piece, which is not empty and valid only during the call. The pieces together
	// equal the stream. A line end occurs only at the end of a piece. If a line is in several pieces, no
	// character in UTF-8 is.
	piece func(text []byte)
	max   int // greater than 0

	part   []byte // start of an incomplete line, at most max bytes
	redraw bool   // the incomplete line follows a \r
}

func (s *splitter) write(p []byte) {
	for len(p) > 0 {
		n := len(p)
		i := bytes.IndexAny(p, "\r\n")
		if i >= 0 {
			n = i + 1
			if p[i] == '\r' && n < len(p) && p[n] == '\n' {
				n++
			}
		}
		line := p[:n]
		if len(s.part) > 0 {
			s.part = append(s.part, line...)
			line = s.part
		}
		for len(line) > s.max {
			cut := s.max - incomplete(line[:s.max])
			if cut == 0 {
				cut = s.max
			}
			s.piece(line[:cut])
			line = line[cut:]
		}
		switch {
		case i >= 0:
			s.piece(line)
			s.redraw = line[len(line)-1] == '\r'
			line = nil
		case s.redraw:
			if whole := len(line) - incomplete(line); whole > 0 {
				s.piece(line[:whole])
				line = line[whole:]
			}
		}
		s.part = append(s.part[:0], line...)
		p = p[n:]
	}
}

// flush calls piece for the rest of the stream, if any: a line without a line end.
func (s *splitter) flush() {
	if len(s.part) > 0 {
		s.piece(s.part)
		s.part = nil
	}
}

// incomplete returns how many bytes at the end of text begin a character in UTF-8 whose other bytes are
// missing.
func incomplete(text []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if end := text[len(text)-n:]; utf8.RuneStart(end[0]) {
			if !utf8.FullRune(end) {
				return n
			}
			break
		}
	}
	return 0
}

const (
	tailLines     = 20
	maxTailBytes  = 2 << 10 // maximum length of one line
	tailCutMarker = "..."
)

// tail keeps the last lines of a stream as a terminal would show them: the text after a \r replaces the text
// before it.
type tail struct {
	lines []string
	end   byte // the last byte that was added
}

// add adds a piece of a splitter.
func (t *tail) add(text []byte) {
	line := string(bytes.TrimRight(text, "\r\n"))
	last := len(t.lines) - 1
	switch {
	case last < 0 || t.end == '\n':
		if len(t.lines) == tailLines {
			t.lines = append(t.lines[:0], t.lines[1:]...)
		}
		t.lines = append(t.lines, line)
	case t.end != '\r':
		t.lines[last] += line
	case line != "": // without text, a terminal still shows the text before \r
		t.lines[last] = line
	}
	if last = len(t.lines) - 1; len(t.lines[last]) > maxTailBytes {
		t.lines[last] = t.lines[last][:maxTailBytes] + tailCutMarker
	}
	t.end = text[len(text)-1]
}
