package message

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Requests and responses are protobuf messages (messagepb/message.proto). They are encoded here, and not by
// the generated code, because the tables of package proto for the two messages take 50 KiB in each rank.

// These are the wire types of the fields.
const (
	varint = uint32(protowire.VarintType)
	fixed  = uint32(protowire.Fixed64Type)
	sized  = uint32(protowire.BytesType)
)

var errUTF8 = errors.New("a text is not valid UTF-8")

func appendRequest(b []byte, r *Request) ([]byte, error) {
	if !utf8.ValidString(r.Name) || !utf8.ValidString(r.Group) {
		return b, errUTF8
	}
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	b = appendUint(b, 1, uint64(r.Kind))
	b = appendString(b, 2, r.Name)
	b = appendUint(b, 3, uint64(r.DType))
	b = appendInts(b, 4, r.Shape)
	b = appendUint(b, 5, uint64(r.Op))
	b = appendDouble(b, 6, r.Prescale)
	b = appendDouble(b, 7, r.Postscale)
	b = appendUint(b, 8, uint64(r.Root))
	b = appendUint(b, 9, uint64(r.Wire))
	b = appendString(b, 10, r.Group)
	b = appendUint(b, 11, uint64(r.GroupSize))
	b = appendUint(b, 12, protowire.EncodeBool(r.Empty))
	b = appendInts(b, 13, r.Ranks)
	b = appendUint(b, 14, uint64(r.Set))
	b = appendInts(b, 15, r.Parts)
	b = appendUint(b, 16, protowire.EncodeBool(r.MembersOnly))
	b = appendUint(b, 17, uint64(r.Device))
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-4))
	return b, nil
}

func (d *decoder) request(r *Request) {
	d.requestFields(r)
	if d.err != nil {
		return
	}
	if err := r.Check(); err != nil {
		d.fail(err)
	}
}

// requestFields decodes r without a check of its values.
func (d *decoder) requestFields(r *Request) {
	*r = Request{}
	d.fields(func(f *field) {
		switch f.key {
		case 1<<3 | varint:
			r.Kind = Kind(f.narrow())
		case 2<<3 | sized:
			r.Name = f.text()
		case 3<<3 | varint:
			r.DType = tensor.DType(f.narrow())
		case 4<<3 | sized, 4<<3 | varint:
			decodeInts(f, &r.Shape)
		case 5<<3 | varint:
			r.Op = tensor.ReduceOp(f.narrow())
		case 6<<3 | fixed:
			r.Prescale = math.Float64frombits(f.number)
		case 7<<3 | fixed:
			r.Postscale = math.Float64frombits(f.number)
		case 8<<3 | varint:
			r.Root = topo.Rank(f.number)
		case 9<<3 | varint:
			r.Wire = tensor.DType(f.narrow())
		case 10<<3 | sized:
			r.Group = f.text()
		case 11<<3 | varint:
			r.GroupSize = int32(f.number)
		case 12<<3 | varint:
			r.Empty = protowire.DecodeBool(f.number)
		case 13<<3 | sized, 13<<3 | varint:
			decodeInts(f, &r.Ranks)
		case 14<<3 | varint:
			r.Set = topo.ProcessSetID(f.number)
		case 15<<3 | sized, 15<<3 | varint:
			decodeInts(f, &r.Parts)
		case 16<<3 | varint:
			r.MembersOnly = protowire.DecodeBool(f.number)
		case 17<<3 | varint:
			r.Device = tensor.Device(f.number)
		}
	})
}

func appendResponse(b []byte, r *Response) ([]byte, error) {
	if !utf8.ValidString(r.Name) || !utf8.ValidString(r.Group) {
		return b, errUTF8
	}
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	b = appendUint(b, 1, uint64(r.Kind))
	b = appendString(b, 2, r.Name)
	b = appendUint(b, 3, uint64(r.DType))
	b = appendInts(b, 4, r.Shape)
	b = appendInts(b, 5, r.FirstDims)
	b = appendUint(b, 6, uint64(r.Op))
	b = appendDouble(b, 7, r.Prescale)
	b = appendDouble(b, 8, r.Postscale)
	b = appendUint(b, 9, uint64(r.Root))
	b = appendString(b, 10, truncateText(r.Text))
	b = appendUint(b, 11, uint64(r.Wire))
	b = appendString(b, 12, r.Group)
	b = appendUint(b, 13, uint64(r.GroupSize))
	b = appendInts(b, 14, r.Ranks)
	b = appendUint(b, 15, uint64(r.Set))
	b = appendInts(b, 16, r.Parts)
	b = appendInts(b, 17, r.Devices)
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-4))
	return b, nil
}

func (d *decoder) response(r *Response) {
	d.responseFields(r)
	if d.err != nil {
		return
	}
	if err := r.check(); err != nil {
		d.fail(err)
	}
}

// responseFields decodes r without a check of its values.
func (d *decoder) responseFields(r *Response) {
	*r = Response{}
	d.fields(func(f *field) {
		switch f.key {
		case 1<<3 | varint:
			r.Kind = Kind(f.narrow())
		case 2<<3 | sized:
			r.Name = f.text()
		case 3<<3 | varint:
			r.DType = tensor.DType(f.narrow())
		case 4<<3 | sized, 4<<3 | varint:
			decodeInts(f, &r.Shape)
		case 5<<3 | sized, 5<<3 | varint:
			decodeInts(f, &r.FirstDims)
		case 6<<3 | varint:
			r.Op = tensor.ReduceOp(f.narrow())
		case 7<<3 | fixed:
			r.Prescale = math.Float64frombits(f.number)
		case 8<<3 | fixed:
			r.Postscale = math.Float64frombits(f.number)
		case 9<<3 | varint:
			r.Root = topo.Rank(f.number)
		case 10<<3 | sized:
			r.Text = f.text()
		case 11<<3 | varint:
			r.Wire = tensor.DType(f.narrow())
		case 12<<3 | sized:
			r.Group = f.text()
		case 13<<3 | varint:
			r.GroupSize = int32(f.number)
		case 14<<3 | sized, 14<<3 | varint:
			decodeInts(f, &r.Ranks)
		case 15<<3 | varint:
			r.Set = topo.ProcessSetID(f.number)
		case 16<<3 | sized, 16<<3 | varint:
			decodeInts(f, &r.Parts)
		case 17<<3 | sized, 17<<3 | varint:
			decodeInts(f, &r.Devices)
		}
	})
}

// As in every proto3 message, fields that are zero are left out.

func appendUint(b []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func appendDouble(b []byte, field protowire.Number, v float64) []byte {
	if math.Float64bits(v) == 0 {
		return b
	}
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), math.Float64bits(v))
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

func appendInts[S ~[]T, T ~int32 | ~int64](b []byte, field protowire.Number, s S) []byte {
	if len(s) == 0 {
		return b
	}
	size := 0
	for _, v := range s {
		size += protowire.SizeVarint(uint64(v))
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(size))
	for _, v := range s {
		b = protowire.AppendVarint(b, uint64(v))
	}
	return b
}

// field is a field of a message.
type field struct {
	key    uint32 // the number of the field times 8, and its wire type
	number uint64 // of a varint or fixed field
	bytes  []byte // of a sized field
	err    error
}

// fields decodes the length of a message and the message, and calls set with each of its fields. set ignores
// unknown fields.
func (d *decoder) fields(set func(f *field)) {
	p := d.take(d.count(1))
	var f field
	for len(p) > 0 && d.err == nil && f.err == nil {
		number, kind, n := protowire.ConsumeTag(p)
		switch {
		case n < 0:
			d.fail(malformed(protowire.ParseError(n)))
			return
		case number > protowire.MaxValidNumber:
			d.fail(malformed(fmt.Errorf("got field %d", number)))
			return
		}
		p = p[n:]
		f.key = uint32(number)<<3 | uint32(kind)
		switch kind {
		case protowire.VarintType:
			f.number, n = protowire.ConsumeVarint(p)
		case protowire.Fixed64Type:
			f.number, n = protowire.ConsumeFixed64(p)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(p)
		default:
			n = protowire.ConsumeFieldValue(number, kind, p)
		}
		if n < 0 {
			d.fail(malformed(protowire.ParseError(n)))
			return
		}
		p = p[n:]
		set(&f)
	}
	if f.err != nil {
		d.fail(malformed(f.err))
	}
}

func malformed(err error) error { return fmt.Errorf("got a malformed request or response: %w", err) }

// narrow returns the number as a byte. If it is too large, the result is 255, which is not a valid value of
// any type.
func (f *field) narrow() uint8 { return uint8(min(uint32(f.number), math.MaxUint8)) }

func (f *field) text() string {
	if !utf8.Valid(f.bytes) {
		f.err = errUTF8
	}
	return string(f.bytes)
}

// decodeInts appends the numbers of a field to s. The field has one number or a packed list of them.
func decodeInts[S ~[]T, T ~int32 | ~int64](f *field, s *S) {
	if protowire.Type(f.key&7) == protowire.VarintType {
		*s = append(*s, T(f.number))
		return
	}
	for p := f.bytes; len(p) > 0; {
		v, n := protowire.ConsumeVarint(p)
		if n < 0 {
			f.err = protowire.ParseError(n)
			return
		}
		*s, p = append(*s, T(v)), p[n:]
	}
}
