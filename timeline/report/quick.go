package report

import (
	"math"

	"github.com/gohvd/gohvd/internal/topo"
)

// quick decodes events of the kinds that package timeline writes most often, in the way in which it writes
// them: without blanks, escapes, exponents, and characters that are not ASCII. Any event that it decodes is
// valid, and parse decodes it to the same. It allocates no memory, except for strings that it has not seen
// lately.
type quick struct {
	text   []byte // ends with a 0 byte, which no event contains
	at     int
	failed bool
	rare   Rare // is always empty
	seen   [256]string
}

// maxSeen limits the bytes of a string that quick remembers.
const maxSeen = 128

// event decodes the event at the beginning of text into e and returns its length. If it cannot decode the
// event, it returns 0. text must end with a 0 byte.
func (q *quick) event(text []byte, e *event) int {
	q.text, q.at, q.failed = text, 0, false
	e.reset(&q.rare)
	for q.take('{'); !q.failed; q.take(',') {
		switch string(q.key()) {
		case "name":
			e.Name = q.string()
		case "ph":
			e.Phase = q.string()
		case "ts":
			e.Time = q.stamp()
		case "dur":
			e.Duration = q.stamp()
		case "cat":
			e.Category = q.string()
		case "pid":
			e.PID = q.integer()
		case "tid":
			e.TID = q.integer()
		case "s":
			q.string()
		case "args":
			q.args(&e.Args)
		default:
			q.failed = true
		}
		if !q.failed && q.text[q.at] == '}' {
			return q.at + 1
		}
	}
	return 0
}

// args decodes arguments.
func (q *quick) args(a *args) {
	for q.take('{'); !q.failed; q.take(',') {
		switch string(q.key()) {
		case "set":
			n := q.natural()
			q.failed = q.failed || n > math.MaxUint32
			a.Set = topo.ProcessSetID(n)
		case "op":
			a.Op = q.natural()
		case "submitted":
			a.Submitted = q.stamp()
		case "at":
			a.At = q.stamp()
		case "sent":
			a.Sent = q.stamp()
		case "cached":
			a.Cached = q.text[q.at] == 't'
			if a.Cached {
				q.word("true")
			} else {
				q.word("false")
			}
		case "dtype":
			a.DType = q.string()
		case "shape":
			a.Shape = q.string()
		case "bytes":
			a.Bytes = q.integer()
		case "fused":
			a.Fused = q.integer()
		case "backend":
			q.failed = a.Backend.UnmarshalText(q.bytes()) != nil || q.failed
		case "algorithm":
			q.failed = a.Algorithm.UnmarshalText(q.bytes()) != nil || q.failed
		case "peer":
			n := q.natural()
			q.failed = q.failed || n > math.MaxInt32
			a.Peer = topo.Rank(n)
		case "error":
			a.Error = q.string()
		case "step":
			a.Step = q.natural()
		case "tensor":
			a.Tensor = q.string()
		case "name":
			a.Name = q.string()
		case "last", "late_us", "sort_index": // not used
			q.stamp()
		default:
			q.failed = true
		}
		if !q.failed && q.text[q.at] == '}' {
			q.at++
			return
		}
	}
}

// take goes over the next byte, which must be c.
func (q *quick) take(c byte) {
	if q.text[q.at] != c {
		q.failed = true
		return
	}
	q.at++
}

// word goes over a word.
func (q *quick) word(w string) {
	for i := range len(w) {
		if !q.failed {
			q.take(w[i])
		}
	}
}

// key returns the name of a member, and goes over it and its colon.
func (q *quick) key() []byte {
	if q.failed {
		return nil
	}
	key := q.bytes()
	if !q.failed {
		q.take(':')
	}
	return key
}

// bytes returns the text of a string.
func (q *quick) bytes() []byte {
	if q.text[q.at] != '"' {
		q.failed = true
		return nil
	}
	rest := q.text[q.at+1:]
	for i, c := range rest {
		if c == '"' {
			q.at += i + 2
			return rest[:i]
		}
		if c < ' ' || c >= 0x7f || c == '\\' {
			break
		}
	}
	q.failed = true
	return nil
}

// string returns a string.
func (q *quick) string() string {
	text := q.bytes()
	if len(text) == 0 || len(text) > maxSeen {
		return string(text)
	}
	hash := uint32(len(text))
	for _, c := range text[max(0, len(text)-8):] {
		hash = hash*31 + uint32(c)
	}
	seen := &q.seen[hash%uint32(len(q.seen))]
	if *seen != string(text) {
		*seen = string(text)
	}
	return *seen
}

// digits returns a number without a sign. It has at most the given number of digits, and no leading zeros.
func (q *quick) digits(most int) (n uint64) {
	begin := q.at
	for {
		c := q.text[q.at] - '0'
		if c > 9 {
			break
		}
		n = n*10 + uint64(c)
		q.at++
	}
	if k := q.at - begin; k == 0 || k > most || k > 1 && q.text[begin] == '0' {
		q.failed = true
	}
	return n
}

// natural returns an integer that is not negative.
func (q *quick) natural() uint64 { return q.digits(18) }

// integer returns an integer.
func (q *quick) integer() int64 {
	if q.text[q.at] == '-' {
		q.at++
		return -int64(q.digits(18))
	}
	return int64(q.digits(18))
}

// stamp returns a time.
func (q *quick) stamp() stamp {
	negative := q.text[q.at] == '-'
	if negative {
		q.at++
	}
	ns := q.digits(15) * nanosPerMicro
	if q.text[q.at] == '.' {
		q.at++
		begin := q.at
		for unit := uint64(nanosPerMicro / 10); ; unit /= 10 {
			c := q.text[q.at] - '0'
			if c > 9 {
				break
			}
			ns += uint64(c) * unit
			q.at++
		}
		if k := q.at - begin; k == 0 || k > 3 {
			q.failed = true
		}
	}
	if negative {
		return -stamp(ns)
	}
	return stamp(ns)
}
