package store

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store/internal/call"
)

// In the store protocol, a client sends requests. The server sends one reply to each request that the client
// has not cancelled. Replies come in any order and carry the numbers of their requests. Each request and each
// reply has all of these fields:
//
//	request: op u8, id u64, delta i64, key u16+bytes, first optional, second optional, keys list, values list
//	reply:   id u64, status u8, ok u8, number i64, value optional, values list
//	optional: 0, or 1 and u32+bytes
//	list: u32 and as many u32+bytes
//
// A ping is answered like other requests. It shows each side that the other is alive.
const (
	storeMagic   = "GHVS"
	storeVersion = 3

	// maxListBytes is the maximum total length of the keys and values in one call. Four bytes are added for
	// each key and each value, because its length is sent too.
	maxListBytes    = 4 * MaxValueBytes
	maxRequestBytes = 1 + 8 + 8 + 2 + MaxKeyBytes + 2*(5+MaxValueBytes) + 2*4 + maxListBytes
	maxReplyBytes   = 8 + 1 + 1 + 8 + 5 + MaxValueBytes + 4 + maxListBytes
)

type opcode uint8

const (
	opPing opcode = iota
	opCancel
	opSet
	opGet
	opTryGet
	opAdd
	opCompareAndSet
	opWatch
	opDelete
	opAppend
	opWait
	opCheck
	opNumKeys
	opMultiGet
	opMultiSet
	opPush
	opPop
	opTryPop
	opQueueLen
	numOps
)

var opNames = [numOps]string{
	"ping", "cancel", "set", "get", "try-get", "add", "compare-and-set", "watch", "delete", "append", "wait", "check",
	"number of keys",
	"multi-get", "multi-set", "push", "pop", "try-pop", "queue length",
}

// many reports whether a request of this operation has a list of keys, or no keys at all. A request of any
// other operation has exactly one key.
func (o opcode) many() bool {
	return o == opWait || o == opCheck || o == opNumKeys || o == opMultiGet || o == opMultiSet
}

// uses reports whether requests of this operation have the fields first, second and values of q, if q has
// them. A Client sends no other fields, and a server would keep them while the request waits.
func (o opcode) uses(q *request) bool {
	first := o == opSet || o == opCompareAndSet || o == opWatch || o == opAppend || o == opPush
	return (q.first == nil || first) && (q.second == nil || o == opCompareAndSet) &&
		(q.values == nil || o == opMultiSet) && (q.keys == nil || o.many())
}

func (o opcode) String() string {
	if o >= numOps {
		return fmt.Sprintf("opcode(%d)", uint8(o))
	}
	return opNames[o]
}

// request is a request of a client. The meaning of its fields depends on op. first is the value in set,
// append and push, the expected value in compare-and-set, and prev in watch. second is the desired value in
// compare-and-set. keys and values are used by operations for which many returns true. The operation cancel
// cancels the request with the number id.
type request struct {
	op            opcode
	id            uint64
	delta         int64
	key           string
	first, second []byte
	keys          []string
	values        [][]byte
}

// check checks the lengths in a request before it is sent.
func (q *request) check() error {
	if n := listBytes(q.keys) + listBytes(q.values); n > maxListBytes {
		return errTooMuch(n)
	}
	errs := []error{call.CheckValue(q.first), call.CheckValue(q.second), call.CheckKeys(q.keys)}
	if len(q.keys) == 0 && !q.op.many() {
		errs = append(errs, call.CheckKey(q.key))
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

type status uint8

const (
	statusOK status = iota
	statusClosed
	statusLimit
	statusNotNumber
	statusUnsupported
	statusOther
	numStatuses
)

// reply is the answer to a request. If status is not statusOK, value is the text of the error. ok is the bool
// that compare-and-set, delete, check, try-get and try-pop return. values are the values that multi-get
// returns.
type reply struct {
	id     uint64
	status status
	ok     bool
	number int64
	value  []byte
	values [][]byte
}

var errMalformed = errors.New("malformed frame")

func (q *request) frame() []byte {
	b := dial.NewFrame(1 + 8 + 8 + 2 + len(q.key) + 10 + len(q.first) + len(q.second))
	b = append(b, byte(q.op))
	b = binary.BigEndian.AppendUint64(b, q.id)
	b = binary.BigEndian.AppendUint64(b, uint64(q.delta))
	b = binary.BigEndian.AppendUint16(b, uint16(len(q.key)))
	b = append(b, q.key...)
	b = appendOptional(b, q.first)
	b = appendOptional(b, q.second)
	b = appendList(b, q.keys)
	return dial.SealFrame(appendList(b, q.values))
}

// elementBytes is the memory that an element of a list takes besides its bytes, while the list grows.
const elementBytes = 48

// memory returns the memory that a request takes if its frame has n bytes.
func (q *request) memory(n int64) int64 { return n + elementBytes*int64(len(q.keys)+len(q.values)) }

// mostMemory returns the most that memory can return for a frame of n bytes. An element takes at least four
// bytes of the frame, and each of the two lists has at most MaxKeys.
func mostMemory(n int64) int64 { return n + elementBytes*min(n/4, 2*MaxKeys) }

// decodeRequest decodes a request. Its values are slices of body.
func decodeRequest(body []byte) (request, error) {
	d := decoder{rest: body}
	q := request{op: opcode(d.u8()), id: d.u64(), delta: int64(d.u64())}
	q.key = string(d.take(uint64(d.u16())))
	q.first, q.second = d.optional(), d.optional()
	for _, k := range d.list() {
		q.keys = append(q.keys, string(k))
	}
	q.values = d.list()
	if d.bad || len(d.rest) > 0 {
		return request{}, errMalformed
	}
	if q.op >= numOps {
		return request{}, fmt.Errorf("%w: unknown operation %d", errMalformed, q.op)
	}
	if !q.op.uses(&q) {
		return request{}, fmt.Errorf("%w: %v has fields that it does not use", errMalformed, q.op)
	}
	return q, nil
}

func (r *reply) frame() []byte {
	b := dial.NewFrame(8 + 1 + 1 + 8 + 5 + len(r.value))
	b = binary.BigEndian.AppendUint64(b, r.id)
	b = append(b, byte(r.status), 0)
	if r.ok {
		b[len(b)-1] = 1
	}
	b = binary.BigEndian.AppendUint64(b, uint64(r.number))
	b = appendOptional(b, r.value)
	return dial.SealFrame(appendList(b, r.values))
}

// decodeReply decodes a reply. Its values are slices of body.
func decodeReply(body []byte) (reply, error) {
	d := decoder{rest: body}
	r := reply{id: d.u64(), status: status(d.u8()), ok: d.flag(), number: int64(d.u64()), value: d.optional(),
		values: d.list()}
	if d.bad || len(d.rest) > 0 || r.status >= numStatuses {
		return reply{}, errMalformed
	}
	return r, nil
}

// fail makes r a reply that reports err.
func (r *reply) fail(err error) {
	r.status, r.value = statusOther, []byte(err.Error())
	if why, ok := errors.AsType[*call.Refusal](err); ok {
		r.value = []byte(why.Detail)
	}
	switch {
	case errors.Is(err, ErrClosed):
		r.status = statusClosed
	case errors.Is(err, ErrLimit):
		r.status = statusLimit
	case errors.Is(err, ErrNotNumber):
		r.status = statusNotNumber
	case errors.Is(err, ErrUnsupported):
		r.status = statusUnsupported
	}
}

// err returns the error that r reports, or nil.
func (r *reply) err() error {
	switch r.status {
	case statusOK:
		return nil
	case statusClosed:
		return ErrClosed
	case statusLimit:
		return call.Refuse(ErrLimit, string(r.value))
	case statusNotNumber:
		return call.Refuse(ErrNotNumber, string(r.value))
	case statusUnsupported:
		return ErrUnsupported
	default:
		return fmt.Errorf("the server returned an error: %s", r.value)
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

func appendList[T ~string | ~[]byte](b []byte, list []T) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(list)))
	for _, v := range list {
		b = binary.BigEndian.AppendUint32(b, uint32(len(v)))
		b = append(b, v...)
	}
	return b
}

// listBytes returns how many bytes a list counts against the limit maxListBytes.
func listBytes[T ~string | ~[]byte](list []T) (n int) {
	for _, v := range list {
		n += 4 + len(v)
	}
	return n
}

// decoder decodes fields and removes them from the front of d.rest. If a field is incomplete, the decoder
// sets d.bad and returns zero for this field and all later fields.
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

// list decodes a list. It returns nil for an empty list. Each element takes at least four bytes, so list
// refuses a count that needs more bytes than d.rest has, and also one that is above MaxKeys.
func (d *decoder) list() (list [][]byte) {
	n := d.u32()
	if uint64(n) > uint64(len(d.rest)/4) || n > MaxKeys {
		d.bad, d.rest = true, nil
		return nil
	}
	for range n {
		v := d.take(uint64(d.u32()))
		if d.bad {
			return nil
		}
		list = append(list, v)
	}
	return list
}

// optional decodes an optional value. It returns nil if there is no value.
func (d *decoder) optional() []byte {
	if !d.flag() {
		return nil
	}
	return d.take(uint64(d.u32()))
}
