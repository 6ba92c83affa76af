package launch

import "bytes"

// maxLineBytes is the maximum length of a line in bytes. A longer line is broken into pieces, so that an
// incomplete line takes bounded memory.
const maxLineBytes = 64 << 10

// splitter splits a stream of bytes into lines. A line ends with \n or \r\n, or with \r, as the lines of
// progress bars do.
type splitter struct {
	// line is called for each line. text is the line without its line end, and is valid only during the call.
	// end is '\n' if the line ends with \n or \r\n, and '\r' if it ends with \r. end is 0 for a piece of a
	// line that is too long, and for a last line without a line end.
	line func(text []byte, end byte)
	// ended is called if line was called with '\r' and the next byte of the stream is \n. In this case the
	// line ended with \r\n.
	ended func()
	max   int // maximum length of a line in bytes, greater than 0

	part []byte // start of an incomplete line, at most max bytes
	cr   bool   // the last byte was \r
}

func (s *splitter) write(p []byte) {
	if s.cr && len(p) > 0 {
		s.cr = false
		if p[0] == '\n' {
			s.ended()
			p = p[1:]
		}
	}
	for len(p) > 0 {
		room := s.max - len(s.part)
		i := bytes.IndexAny(p[:min(len(p), room+1)], "\r\n")
		if i < 0 {
			n := min(len(p), room)
			s.part = append(s.part, p[:n]...)
			if p = p[n:]; len(p) > 0 {
				s.line(s.part, 0)
				s.part = s.part[:0]
			}
			continue
		}
		text, end := p[:i], p[i]
		p = p[i+1:]
		if end == '\r' {
			switch {
			case len(p) == 0:
				s.cr = true
			case p[0] == '\n':
				end, p = '\n', p[1:]
			}
		}
		if len(s.part) > 0 {
			s.part = append(s.part, text...)
			text = s.part
		}
		s.line(text, end)
		s.part = s.part[:0]
	}
}

// flush calls line for the rest of the stream, if any: a line without a line end.
func (s *splitter) flush() {
	if len(s.part) > 0 {
		s.line(s.part, 0)
		s.part = nil
	}
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
	open  bool // the last line ended in \r
}

func (t *tail) add(text []byte, end byte) {
	if len(text) > maxTailBytes {
		text = append(text[:maxTailBytes:maxTailBytes], tailCutMarker...)
	}
	switch {
	case t.open && len(text) == 0: // a terminal still shows the text before \r
	case t.open:
		t.lines[len(t.lines)-1] = string(text)
	default:
		if len(t.lines) == tailLines {
			t.lines = append(t.lines[:0], t.lines[1:]...)
		}
		t.lines = append(t.lines, string(text))
	}
	t.open = end == '\r'
}
