package rendezvous

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The store protocol. A client sends requests, the server one reply to each that was not cancelled, in any order:
// a reply carries the number of its request. Both are flat records with all fields always there.
//
//	request: op u8, id u64, delta i64, key u16+bytes, first optional, second optional
//	reply:   id u64, status u8, ok u8, number i64, value optional
//	optional: 0, or 1 and u32+bytes
//
// Ping is answered like the others; it tells either side that the other is alive.
const (
	storeMagic   = "GHVS"
	storeVersion = 1

	maxRequestBytes = 1 + 8 + 8 + 2 + MaxKeyBytes + 2*(5+MaxValueBytes)
	maxReplyBytes   = 8 + 1 + 1 + 8 + 5 + MaxValueBytes
)

type opcode uint8

const (
	opPing opcode = iota
	opCancel
	opSet
	opGet
	opAdd
	opCompareAndSet
	opWatch
	opDelete
	numOps
)

var opNames = [numOps]string{"ping", "cancel", "set", "get", "add", "compare-and-set", "watch", "delete"}

func (o opcode) String() string {
	if o >= numOps {
		return fmt.Sprintf("opcode(%d)", uint8(o))
	}
	return opNames[o]
}

// request is what a client asks. first is the value of set, what compare-and-set expects, or watch's prev; second
// is what compare-and-set desires. Cancel names the request that is to be given up by id.
type request struct {
	op            opcode
	id            uint64
	delta         int64
	key           string
	first, second []byte
}

type status uint8

const (
	statusOK status = iota
	statusClosed
	statusLimit
	statusNotNumber
	statusOther
	numStatuses
)

// reply is the answer to a request. Unless status is statusOK, value is the text of the error. ok is the bool of
// compare-and-set and delete.
type reply struct {
	id     uint64
	status status
	ok     bool
	number int64
	value  []byte
}

var errMalformed = errors.New("malformed frame")

func (q *request) frame() []byte {
	b := newFrame(1 + 8 + 8 + 2 + len(q.key) + 10 + len(q.first) + len(q.second))
	b = append(b, byte(q.op))
	b = binary.BigEndian.AppendUint64(b, q.id)
	b = binary.BigEndian.AppendUint64(b, uint64(q.delta))
	b = binary.BigEndian.AppendUint16(b, uint16(len(q.key)))
	b = append(b, q.key...)
	b = appendOptional(b, q.first)
	return sealFrame(appendOptional(b, q.second))
}

// decodeRequest reads a request. Its values alias body.
func decodeRequest(body []byte) (request, error) {
	d := decoder{rest: body}
	q := request{op: opcode(d.u8()), id: d.u64(), delta: int64(d.u64())}
	q.key = string(d.take(uint64(d.u16())))
	q.first, q.second = d.optional(), d.optional()
	if d.bad || len(d.rest) > 0 {
		return request{}, errMalformed
	}
	if q.op >= numOps {
		return request{}, fmt.Errorf("%w: unknown operation %d", errMalformed, q.op)
	}
	return q, nil
}

func (r *reply) frame() []byte {
	b := newFrame(8 + 1 + 1 + 8 + 5 + len(r.value))
	b = binary.BigEndian.AppendUint64(b, r.id)
	b = append(b, byte(r.status), 0)
	if r.ok {
		b[len(b)-1] = 1
	}
	b = binary.BigEndian.AppendUint64(b, uint64(r.number))
	return sealFrame(appendOptional(b, r.value))
}

// decodeReply reads a reply. Its value aliases body.
func decodeReply(body []byte) (reply, error) {
	d := decoder{rest: body}
	r := reply{id: d.u64(), status: status(d.u8()), ok: d.flag(), number: int64(d.u64()), value: d.optional()}
	if d.bad || len(d.rest) > 0 || r.status >= numStatuses {
		return reply{}, errMalformed
	}
	return r, nil
}

// fail makes r the report of err.
func (r *reply) fail(err error) {
	r.status, r.value = statusOther, []byte(err.Error())
	if why, ok := errors.AsType[*refusal](err); ok {
		r.value = []byte(why.detail)
	}
	switch {
	case errors.Is(err, ErrClosed):
		r.status = statusClosed
	case errors.Is(err, ErrLimit):
		r.status = statusLimit
	case errors.Is(err, ErrNotNumber):
		r.status = statusNotNumber
	}
}

// err is the error that r reports, or nil.
func (r *reply) err() error {
	switch r.status {
	case statusOK:
		return nil
	case statusClosed:
		return ErrClosed
	case statusLimit:
		return &refusal{ErrLimit, string(r.value)}
	case statusNotNumber:
		return &refusal{ErrNotNumber, string(r.value)}
	default:
		return fmt.Errorf("the server says: %s", r.value)
	}
}

func appendOptional(b, value []byte) []byte {
	if value == nil {
		return append(b, 0)
	}
	b = append(b, 1)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// decoder takes fields off the front of rest. After a field that is not there in full, bad is set and everything
// reads as zero.
type decoder struct {
	rest []byte
	bad  bool
}

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.rest)) {
		d.bad, d.rest = true, nil
		return nil
	}
	field := d.rest[:n:n]
	d.rest = d.rest[n:]
	return field
}

func (d *decoder) u8() uint8 {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if b := d.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (d *decoder) flag() bool {
	v := d.u8()
	if v > 1 {
		d.bad = true
	}
	return v == 1
}

// optional is nil only if the value is absent.
func (d *decoder) optional() []byte {
	if !d.flag() {
		return nil
	}
	return d.take(uint64(d.u32()))
}
