package report

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
)

// event is a record of the file. Its strings lie in the scanner's record and are gone with it.
type event struct {
	phase byte
	name  []byte
	// at is its time in ns since the file's start, and timed says that it has one.
	at    int64
	timed bool
	// shift is what was added to at to make it a time of the rank's first file; not to those in args.
	shift int64
	pid   int64
	args  args
	// raw is all of args, as it is written.
	raw []byte
}

// args are those of all events that are read; an event has some.
type args struct {
	name, dtype, shape, backend, host, domain, err, job []byte

	set, op, bytes, fused, rank, size, epoch, segment, dropped, startMicros int64

	// Times, in ns. submitted and at are of events whose own time could not be that, because a track's times never go back.
	monotonic, offset, clockError, submitted, at int64

	cached, cachedKnown, hasRank, hasSubmitted, hasAt bool
}

const (
	// maxTime bounds times, in ns: 31 years. Sums of a few cannot overflow then.
	maxTime  = 1_000_000_000_000_000_000
	maxDepth = 32
)

var (
	errJSON  = errors.New("not JSON")
	errRange = errors.New("a number beyond its range")
	errDepth = errors.New("nested too deeply")
)

// cursor reads a record.
type cursor struct {
	b  []byte
	at int
}

func (c *cursor) space() {
	for c.at < len(c.b) {
		switch c.b[c.at] {
		case ' ', '\t', '\r', '\n':
			c.at++
		default:
			return
		}
	}
}

// is takes a byte if it is next.
func (c *cursor) is(want byte) bool {
	c.space()
	if c.at < len(c.b) && c.b[c.at] == want {
		c.at++
		return true
	}
	return false
}

func (c *cursor) next() byte {
	c.space()
	if c.at < len(c.b) {
		return c.b[c.at]
	}
	return 0
}

func (c *cursor) text() ([]byte, error) {
	if !c.is('"') {
		return nil, errJSON
	}
	from, plain := c.at, true
	for c.at < len(c.b) {
		switch c.b[c.at] {
		case '"':
			c.at++
			if plain {
				return c.b[from : c.at-1], nil
			}
			var s string
			if json.Unmarshal(c.b[from-1:c.at], &s) != nil {
				return nil, errJSON
			}
			return []byte(s), nil
		case '\\':
			plain = false
			c.at++
		}
		c.at++
	}
	return nil, errJSON
}

func (c *cursor) word() []byte {
	c.space()
	from := c.at
	for c.at < len(c.b) {
		switch b := c.b[c.at]; {
		case b >= '0' && b <= '9', b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', b == '-', b == '+', b == '.':
			c.at++
		default:
			return c.b[from:c.at]
		}
	}
	return c.b[from:c.at]
}

// number reads a decimal times scale, of a magnitude of at most limit. What is below 1 of the result is cut off.
func (c *cursor) number(scale, limit int64) (int64, error) {
	w := c.word()
	i, negative := 0, false
	if len(w) > 0 && w[0] == '-' {
		i, negative = 1, true
	}
	if i == len(w) || w[i] < '0' || w[i] > '9' {
		return 0, errJSON
	}
	n, fraction, whole := int64(0), false, scale
	for ; i < len(w); i++ {
		b := w[i]
		switch {
		case b == '.' && !fraction:
			fraction = true
			n *= scale
		case b < '0' || b > '9':
			return slowNumber(w, whole, limit)
		case fraction:
			scale /= 10
			n += int64(b-'0') * scale
		default:
			if n = n*10 + int64(b-'0'); n > limit/scale {
				return 0, errRange
			}
		}
	}
	if !fraction {
		n *= scale
	}
	if negative {
		n = -n
	}
	return n, nil
}

// slowNumber reads what has an exponent.
func slowNumber(w []byte, scale, limit int64) (int64, error) {
	var f float64
	if json.Unmarshal(w, &f) != nil {
		return 0, errJSON
	}
	if f *= float64(scale); math.Abs(f) > float64(limit) {
		return 0, errRange
	}
	return int64(f), nil
}

// skip passes over a value.
func (c *cursor) skip(depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	switch c.next() {
	case '"':
		_, err := c.text()
		return err
	case '{':
		return c.object(func([]byte) error { return c.skip(depth + 1) })
	case '[':
		c.at++
		if c.is(']') {
			return nil
		}
		for {
			if err := c.skip(depth + 1); err != nil {
				return err
			}
			if c.is(']') {
				return nil
			}
			if !c.is(',') {
				return errJSON
			}
		}
	}
	switch w := c.word(); string(w) {
	case "true", "false", "null":
		return nil
	default:
		if !json.Valid(w) {
			return errJSON
		}
		return nil
	}
}

// object reads {...}; member reads the value of each key.
func (c *cursor) object(member func(key []byte) error) error {
	if !c.is('{') {
		return errJSON
	}
	if c.is('}') {
		return nil
	}
	for {
		key, err := c.text()
		if err != nil {
			return err
		}
		if !c.is(':') {
			return errJSON
		}
		if err := member(key); err != nil {
			return err
		}
		if c.is('}') {
			return nil
		}
		if !c.is(',') {
			return errJSON
		}
	}
}

// optionalText reads a string and passes over what is none.
func (c *cursor) optionalText(into *[]byte) (err error) {
	if c.next() != '"' {
		return c.skip(0)
	}
	*into, err = c.text()
	return err
}

const (
	nanosPerMicro = 1000
	maxWhole      = math.MaxInt64 / 100 // one digit more does not overflow
)

// parse reads a record into e.
func parse(record []byte, e *event) error {
	*e = event{}
	c := cursor{b: record}
	err := c.object(func(key []byte) (err error) {
		switch string(key) {
		case "ph":
			var ph []byte
			if ph, err = c.text(); err == nil && len(ph) == 1 {
				e.phase = ph[0]
			}
		case "name":
			err = c.optionalText(&e.name)
		case "ts":
			e.at, err = c.number(nanosPerMicro, maxTime)
			e.timed = true
		case "pid":
			if c.next() == '"' {
				return c.skip(0)
			}
			e.pid, err = c.number(1, maxWhole)
		case "args":
			if c.next() != '{' {
				return c.skip(0)
			}
			from := c.at
			err = c.object(func(key []byte) error { return c.arg(key, &e.args) })
			e.raw = c.b[from:c.at]
		default:
			err = c.skip(0)
		}
		return err
	})
	if err != nil {
		return err
	}
	if c.next() != 0 || c.at != len(c.b) || e.phase == 0 {
		return errJSON
	}
	return nil
}

// arg reads a value of args.
func (c *cursor) arg(key []byte, a *args) (err error) {
	whole := func(into *int64) error {
		if b := c.next(); b == '"' || b == 'n' {
			return c.skip(0)
		}
		*into, err = c.number(1, maxWhole)
		return err
	}
	micros := func(into *int64) error {
		*into, err = c.number(nanosPerMicro, maxTime)
		return err
	}
	switch string(key) {
	case "name":
		return c.optionalText(&a.name)
	case "dtype":
		return c.optionalText(&a.dtype)
	case "shape":
		return c.optionalText(&a.shape)
	case "backend":
		return c.optionalText(&a.backend)
	case "host":
		return c.optionalText(&a.host)
	case "clock_domain":
		return c.optionalText(&a.domain)
	case "error":
		return c.optionalText(&a.err)
	case "job":
		return c.optionalText(&a.job)
	case "set":
		return whole(&a.set)
	case "op":
		return whole(&a.op)
	case "bytes":
		return whole(&a.bytes)
	case "fused":
		return whole(&a.fused)
	case "rank":
		a.hasRank = true
		return whole(&a.rank)
	case "size":
		return whole(&a.size)
	case "epoch":
		return whole(&a.epoch)
	case "segment":
		return whole(&a.segment)
	case "dropped":
		return whole(&a.dropped)
	case "start_time_since_epoch_in_micros":
		return whole(&a.startMicros)
	case "monotonic_us":
		return micros(&a.monotonic)
	case "offset_us":
		return micros(&a.offset)
	case "error_us":
		return micros(&a.clockError)
	case "submitted":
		a.hasSubmitted = true
		return micros(&a.submitted)
	case "at":
		a.hasAt = true
		return micros(&a.at)
	case "cached":
		switch string(c.word()) {
		case "true":
			a.cached, a.cachedKnown = true, true
		case "false":
			a.cachedKnown = true
		default:
			return errJSON
		}
		return nil
	}
	return c.skip(0)
}

// position is the number that names a tick.
func (e *event) position() (int, bool) {
	n, err := strconv.Atoi(string(e.name))
	return n, err == nil && n >= 0 && n < maxRanks
}
