package van

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/ps/pspb"
)

// The following functions encode and decode headers to and from the same bytes as package proto does. For the
// headers of most messages, which have only numbers and frames, they take a fraction of the time and allocate
// nothing.

// usualBytes is the maximum length of a header that has only numbers and at most maxFrames frames.
const usualBytes = 512

// appendHeader appends the encoding of a header to b.
func appendHeader(b []byte, h *pspb.Header) (_ []byte, err error) {
	b = appendNumber(b, 1, uint64(int64(h.Head)))
	if len(h.Body) > 0 {
		b = protowire.AppendBytes(protowire.AppendTag(b, 2, protowire.BytesType), h.Body)
	}
	if h.Control != nil {
		if b, err = appendMessage(b, 3, h.Control); err != nil {
			return b, err
		}
	}
	b = appendBool(b, 4, h.Request)
	b = appendNumber(b, 5, uint64(int64(h.AppId)))
	b = appendNumber(b, 6, uint64(h.Timestamp))
	for _, f := range h.Frames {
		b = protowire.AppendTag(b, 7, protowire.BytesType)
		at := len(b)
		b = append(b, 0) // a frame has less than 128 bytes, so its length has one byte
		b = appendNumber(b, 1, uint64(int64(f.Type)))
		b = appendNumber(b, 2, f.Bytes)
		b = appendNumber(b, 3, uint64(f.Block))
		b = appendNumber(b, 4, f.BlockBytes)
		b = appendNumber(b, 5, uint64(f.Region))
		b = appendNumber(b, 6, f.Offset)
		b[at] = byte(len(b) - at - 1)
	}
	b = appendNumber(b, 8, uint64(int64(h.CustomerId)))
	b = appendBool(b, 9, h.Push)
	b = appendBool(b, 10, h.Pull)
	b = appendBool(b, 11, h.SimpleApp)
	b = appendNumber(b, 12, uint64(int64(h.Priority)))
	b = appendNumber(b, 13, h.Sequence)
	if h.Error != "" {
		if !utf8.ValidString(h.Error) {
			return b, errNotUTF8
		}
		b = protowire.AppendString(protowire.AppendTag(b, 14, protowire.BytesType), h.Error)
	}
	b = appendNumber(b, 15, h.KeyList)
	b = appendBool(b, 16, h.WantKeys)
	b = appendNumber(b, 17, uint64(h.Clock))
	b = appendNumber(b, 18, uint64(int64(h.Range)))
	b = appendNumber(b, 19, uint64(h.Completed))
	b = appendBool(b, 20, h.Moved)
	if h.Replica != nil {
		b, err = appendMessage(b, 21, h.Replica)
	}
	return b, err
}

var (
	errNotUTF8   = errors.New("the text of an error is not UTF-8")
	errMalformed = errors.New("its header is no protobuf message")
)

// headerBytes returns the length of the encoding of a header, or of what can be encoded.
func headerBytes(h *pspb.Header) int {
	var memory [usualBytes]byte
	b, _ := appendHeader(memory[:0], h)
	return len(b)
}

// appendMessage appends a field with a message to b.
func appendMessage(b []byte, field protowire.Number, m proto.Message) ([]byte, error) {
	text, err := proto.Marshal(m)
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), text), err
}

// appendNumber appends a field with a number to b, unless the number is 0.
func appendNumber(b []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func appendBool(b []byte, field protowire.Number, v bool) []byte {
	return appendNumber(b, field, protowire.EncodeBool(v))
}

// cutField reads the first field of an encoded message. Its value is a number, a text, or of another type. n
// is the length of the field, or negative if the message is malformed.
func cutField(b []byte) (id protowire.Number, kind protowire.Type, number uint64, text []byte, n int) {
	id, kind, n = protowire.ConsumeTag(b)
	if n < 0 || id > protowire.MaxValidNumber {
		return id, kind, 0, nil, -1
	}
	m := 0
	switch kind {
	case protowire.VarintType:
		number, m = protowire.ConsumeVarint(b[n:])
	case protowire.BytesType:
		text, m = protowire.ConsumeBytes(b[n:])
	default:
		m = protowire.ConsumeFieldValue(id, kind, b[n:])
	}
	if m < 0 {
		return id, kind, 0, nil, -1
	}
	return id, kind, number, text, n + m
}

// decode sets the header in s, which is empty, to the one with the encoding b. It drops fields of later
// versions. The header has any content after an error.
func (s *storage) decode(b []byte) error {
	for len(b) > 0 {
		id, kind, number, text, n := cutField(b)
		if n < 0 {
			return errMalformed
		}
		b = b[n:]
		switch kind {
		case protowire.VarintType:
			s.decodeNumber(id, number)
		case protowire.BytesType:
			if err := s.decodeText(id, text); err != nil {
				return err
			}
		}
	}
	return nil
}

// decodeNumber sets a field of the header in s.
func (s *storage) decodeNumber(id protowire.Number, v uint64) {
	switch h := &s.header; id {
	case 1:
		h.Head = int32(v)
	case 4:
		h.Request = protowire.DecodeBool(v)
	case 5:
		h.AppId = int32(v)
	case 6:
		h.Timestamp = int64(v)
	case 8:
		h.CustomerId = int32(v)
	case 9:
		h.Push = protowire.DecodeBool(v)
	case 10:
		h.Pull = protowire.DecodeBool(v)
	case 11:
		h.SimpleApp = protowire.DecodeBool(v)
	case 12:
		h.Priority = int32(v)
	case 13:
		h.Sequence = v
	case 15:
		h.KeyList = v
	case 16:
		h.WantKeys = protowire.DecodeBool(v)
	case 17:
		h.Clock = int64(v)
	case 18:
		h.Range = int32(v)
	case 19:
		h.Completed = int64(v)
	case 20:
		h.Moved = protowire.DecodeBool(v)
	}
}

// decodeText sets a field of the header in s that is no number.
func (s *storage) decodeText(id protowire.Number, text []byte) error {
	switch h := &s.header; id {
	case 2:
		h.Body = bytes.Clone(text)
	case 3:
		if h.Control == nil {
			h.Control = new(pspb.Control)
		}
		return merge(text, h.Control)
	case 7:
		return s.decodeFrame(text)
	case 14:
		if !utf8.Valid(text) {
			return errNotUTF8
		}
		h.Error = string(text)
	case 21:
		if h.Replica == nil {
			h.Replica = new(pspb.Replica)
		}
		return merge(text, h.Replica)
	}
	return nil
}

// merge adds the message with the encoding b to m, because a field with a message may occur in parts.
func merge(b []byte, m proto.Message) error {
	return proto.UnmarshalOptions{DiscardUnknown: true, Merge: true}.Unmarshal(b, m)
}

// decodeFrame adds a frame with the encoding b to the header in s.
func (s *storage) decodeFrame(b []byte) error {
	if len(s.header.Frames) == maxFrames {
		return fmt.Errorf("it has more than %d frames", maxFrames)
	}
	to := s.addFrame()
	for len(b) > 0 {
		id, kind, v, _, n := cutField(b)
		if n < 0 {
			return errMalformed
		}
		if b = b[n:]; kind != protowire.VarintType {
			continue
		}
		switch id {
		case 1:
			to.Type = pspb.DataType(v)
		case 2:
			to.Bytes = v
		case 3:
			to.Block = uint32(v)
		case 4:
			to.BlockBytes = v
		case 5:
			to.Region = uint32(v)
		case 6:
			to.Offset = v
		}
	}
	return nil
}
