package live

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/gohvd/gohvd/internal/analysis"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/trace"
)

// codec encodes or decodes the records of a rank. Each method does either, so that both have the same fields
// in the same order. The encoding consists of varints and strings. The bytes of a string are there once; if
// it occurs again, the encoding has its number. Most fields of a record have the same values as in the record
// before it, which is of the same operation, or as in the last record of the same name. For a record that is
// the same in both, the encoding has only the name and two times. An encoder does not change what it encodes.
type codec struct {
	decodes bool
	b       []byte // the encoding
	at      int    // the length of the part of b that was decoded
	err     error  // why b cannot be decoded; then all further numbers are 0 and all strings empty
	// seen has the strings so far, in the order of their numbers. The empty string has the number 0. An
	// encoder looks the number of a string up in numbers.
	seen    []seenString
	numbers map[string]int
	last    *trace.Record // the last record that was encoded or decoded
}

// seenString is a string, and the last record that has it as its name.
type seenString struct {
	value string
	last  *trace.Record
}

// none is what the first record, and the first one of a name, are compared with.
var none trace.Record

func newEncoder() *codec {
	return &codec{seen: []seenString{{"", &none}}, numbers: map[string]int{"": 0}, last: &none}
}

func newDecoder(b []byte) *codec {
	return &codec{decodes: true, b: b, seen: []seenString{{"", &none}}, last: &none}
}

// fail ends the decoding with an error, unless it has ended already.
func (c *codec) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
	c.at = len(c.b)
}

// end ends the decoding at the end of the encoding.
func (c *codec) end() error {
	if c.at < len(c.b) {
		c.fail("got %d bytes after the last element", len(c.b)-c.at)
	}
	return c.err
}

// varint decodes a number.
func (c *codec) varint() int64 {
	v, n := binary.Varint(c.b[c.at:])
	if n <= 0 {
		c.fail("there is no number after %d of %d bytes", c.at, len(c.b))
		return 0
	}
	c.at += n
	return v
}

type integer interface {
	~uint8 | ~int | ~int32 | ~uint32 | ~int64 | ~uint64
}

// number encodes or decodes a number as the difference to another one.
func number[T integer](c *codec, v *T, before T) {
	if c.decodes {
		*v = before + T(c.varint())
	} else {
		c.b = binary.AppendVarint(c.b, int64(*v-before))
	}
}

// size encodes or decodes how many elements follow. Since each of them takes a number of bytes, what is
// decoded takes memory only in proportion to the encoding.
func (c *codec) size(n, leastBytes int) int {
	number(c, &n, 0)
	if room := len(c.b) - c.at; c.decodes && (n < 0 || n > room/leastBytes) {
		c.fail("got %d elements in %d bytes, want %d bytes for each", n, room, leastBytes)
		return 0
	}
	return n
}

// list encodes or decodes a list. each does so with an element, given the one before it, or first.
func list[T any](c *codec, all *[]T, leastBytes int, first *T, each func(v, before *T)) {
	if n := c.size(len(*all), leastBytes); c.decodes && n > 0 {
		*all = make([]T, n)
	}
	for i := range *all {
		each(&(*all)[i], first)
		first = &(*all)[i]
	}
}

// integers encodes or decodes a list of numbers, each as the difference to the one before it.
func integers[T integer](c *codec, all *[]T, before T) {
	if n := c.size(len(*all), 1); c.decodes && n > 0 {
		*all = make([]T, n)
	}
	for i := range *all {
		number(c, &(*all)[i], before)
		before = (*all)[i]
	}
}

// string encodes or decodes a string, and returns its number.
func (c *codec) string(s *string) int {
	at := len(c.seen)
	if known, is := c.numbers[*s]; is {
		at = known
	}
	number(c, &at, 0)
	switch {
	case at < 0 || at > len(c.seen):
		c.fail("got string %d after %d others", at, len(c.seen))
		return 0
	case at < len(c.seen):
		if c.decodes {
			*s = c.seen[at].value
		}
		return at
	}
	n := c.size(len(*s), 1)
	if c.decodes {
		*s = string(c.b[c.at : c.at+n])
		c.at += n
	} else {
		c.b, c.numbers[*s] = append(c.b, *s...), at
	}
	c.seen = append(c.seen, seenString{*s, &none})
	return at
}

// flags encodes or decodes flags as the bits of a number.
func (c *codec) flags(all ...*bool) {
	var bits uint8
	for i, f := range all {
		if *f {
			bits |= 1 << i
		}
	}
	number(c, &bits, 0)
	for i, f := range all {
		if c.decodes {
			*f = bits>>i&1 != 0
		}
	}
}

// These are the least numbers of bytes that elements take.
const (
	leastEntryBytes, leastRecordBytes, leastActivityBytes = 3, 4, 3
	leastOffsetBytes, leastSetBytes                       = 4, 2
)

// recordsVersion changes with the encoding of records, or of the state of a rank. A rank may use another
// version of gohvd than its hvdrun.
const recordsVersion = 2

// version encodes or decodes the version, with which each encoding begins.
func (c *codec) version() {
	version := recordsVersion
	number(c, &version, 0)
	if version != recordsVersion {
		c.fail("got version %d of the encoding, want %d: use one version of gohvd", version, recordsVersion)
	}
}

// records encodes or decodes the records of a rank.
func (c *codec) records(r *Records) {
	c.version()
	number(c, &r.Rank, 0)
	number(c, &r.Size, 0)
	number(c, &r.Epoch, 0)
	number(c, &r.First, 0)
	c.string(&r.Host)
	start := r.Clock.Start.UnixMicro()
	number(c, &start, 0)
	if c.decodes {
		r.Clock.Start = time.UnixMicro(start)
	}
	number(c, &r.Clock.Monotonic, 0)
	c.string(&r.Clock.Domain)
	list(c, &r.Offsets, leastOffsetBytes, new(trace.Offset), func(o, before *trace.Offset) {
		number(c, &o.At, before.At)
		number(c, &o.Offset, before.Offset)
		number(c, &o.Error, before.Error)
		c.string(&o.Job)
	})
	list(c, &r.Sets, leastSetBytes, nil, func(s, _ *Set) {
		number(c, &s.ID, 0)
		integers(c, &s.Ranks, 0)
	})
	list(c, &r.Entries, leastEntryBytes, nil, func(e, _ *Entry) { c.entry(e) })
}

// state encodes or decodes the records of a snapshot.
func (c *codec) state(s *analysis.Snapshot) {
	list(c, &s.Pending, leastRecordBytes, &none, c.record)
	list(c, &s.Operations, leastRecordBytes, &none, c.record)
}

// These are the kinds of entries.
const (
	operationEntry = iota
	spanEntry
	stepEntry
)

func (c *codec) entry(e *Entry) {
	kind := operationEntry
	switch {
	case e.Span != nil:
		kind = spanEntry
	case e.Step != nil:
		kind = stepEntry
	}
	number(c, &kind, 0)
	switch kind {
	case operationEntry:
		if c.decodes {
			e.Operation = new(trace.Operation)
		}
		o := e.Operation
		list(c, &o.Records, leastRecordBytes, c.last, c.record)
		if len(o.Records) == 0 {
			c.fail("got an operation without tensors")
			return
		}
		c.last = &o.Records[len(o.Records)-1]
		list(c, &o.Activities, leastActivityBytes, &trace.Activity{Begun: c.last.Begun, End: c.last.Begun},
			func(a, before *trace.Activity) {
				c.string(&a.Name)
				number(c, &a.Begun, before.Begun)
				number(c, &a.End, before.End)
			})
		integers(c, &e.Arrivals, c.last.Submitted)
	case spanEntry:
		if c.decodes {
			e.Span = new(trace.Span)
		}
		number(c, &e.Span.Kind, 0)
		c.string(&e.Span.Name)
		number(c, &e.Span.Begun, c.last.Ended)
		number(c, &e.Span.End, e.Span.Begun)
	case stepEntry:
		if c.decodes {
			e.Step = new(Mark)
		}
		number(c, &e.Step.At, c.last.Ended)
		number(c, &e.Step.Number, 0)
	default:
		c.fail("got an entry of kind %d", kind)
	}
}

// record encodes or decodes a record without Partial, which a reader does not need: an entry with such a
// record has no arrivals.
func (c *codec) record(r, before *trace.Record) {
	name := c.string(&r.Name)
	last := c.seen[name].last
	sameOperation, sameTensor := isOperation(r, before), isTensor(r, last)
	c.flags(&sameOperation, &sameTensor)
	number(c, &r.Submitted, before.Submitted)
	number(c, &r.Sent, before.Sent)
	switch {
	case !sameOperation:
		number(c, &r.Set, before.Set)
		number(c, &r.Peer, before.Peer)
		number(c, &r.Number, before.Number)
		number(c, &r.Kind, before.Kind)
		number(c, &r.Backend, before.Backend)
		number(c, &r.Algorithm, before.Algorithm)
		number(c, &r.Granted, before.Granted)
		number(c, &r.Begun, before.Begun)
		number(c, &r.Ended, before.Ended)
		c.string(&r.Error)
		integers(c, &r.Among, 0)
	case c.decodes:
		r.Set, r.Peer, r.Number, r.Kind = before.Set, before.Peer, before.Number, before.Kind
		r.Backend, r.Algorithm, r.Error = before.Backend, before.Algorithm, before.Error
		r.Among, r.Granted, r.Begun, r.Ended = before.Among, before.Granted, before.Begun, before.Ended
	}
	switch {
	case !sameTensor:
		number(c, &r.DType, last.DType)
		c.flags(&r.Cached, &r.Absent, &r.Refused)
		integers(c, (*[]int64)(&r.Shape), 0)
		number(c, &r.Bytes, last.Bytes)
		number(c, &r.Parts, last.Parts)
	case c.decodes:
		r.DType, r.Cached, r.Absent, r.Refused = last.DType, last.Cached, last.Absent, last.Refused
		r.Shape, r.Bytes, r.Parts = last.Shape, last.Bytes, last.Parts
	}
	if int(r.Kind) >= message.NumKinds || int(r.Backend) >= message.NumBackends {
		c.fail("got an operation of %v over %v", r.Kind, r.Backend)
	}
	c.seen[name].last = r
}

// isOperation reports whether two records are the same in what belongs to the operation.
func isOperation(r, s *trace.Record) bool {
	return r.Number == s.Number && r.Set == s.Set && r.Peer == s.Peer && r.Kind == s.Kind &&
		r.Backend == s.Backend && r.Algorithm == s.Algorithm && r.Error == s.Error &&
		r.Granted == s.Granted && r.Begun == s.Begun && r.Ended == s.Ended && slices.Equal(r.Among, s.Among)
}

// isTensor reports whether two records of the same name are the same in what belongs to the tensor, except
// for the times.
func isTensor(r, s *trace.Record) bool {
	return r.DType == s.DType && r.Cached == s.Cached && r.Absent == s.Absent && r.Refused == s.Refused &&
		r.Bytes == s.Bytes && r.Parts == s.Parts && slices.Equal(r.Shape, s.Shape)
}
