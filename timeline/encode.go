package timeline

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
)

// closing is the last text of every file.
const closing = "\n]\n"

// encoder turns text into the bytes of the file.
type encoder interface {
	// reset begins a file.
	reset()
	// encode appends the encoding of text to dst. The result ends at a byte boundary, and no part of the text
	// is held back. If dst is empty, encode may return the memory of text as out and dst as next, the buffer
	// for the next text.
	encode(dst, text []byte) (out, next []byte)
	// tail appends the bytes that complete the file. The state of the encoder is unchanged.
	tail(dst []byte) []byte
	// most returns an upper bound of the encoded size of n bytes of text and the tail.
	most(n int) int64
}

// plain is the encoder of uncompressed files.
type plain struct{}

func (plain) reset()                 {}
func (plain) tail(dst []byte) []byte { return append(dst, closing...) }
func (plain) most(n int) int64       { return int64(n + len(closing)) }

func (plain) encode(dst, text []byte) (out, next []byte) {
	if len(dst) == 0 {
		return text, dst
	}
	return append(dst, text...), text[:0]
}

// gzipped is an encoder that writes one gzip member (RFC 1952), which can end after every piece. Each piece
// ends at a byte boundary (a sync flush), and the tail is a stored block with the end of the text, and the
// checksum. So the file has one member, as usual, and readers need no support for several.
type gzipped struct {
	out   bytes.Buffer
	w     *flate.Writer
	begun bool
	sum   uint32
	size  uint32
}

func (g *gzipped) reset() {
	g.out.Reset()
	if g.w == nil {
		w, err := flate.NewWriter(&g.out, flate.BestSpeed)
		if err != nil {
			panic(err) // the level is a constant
		}
		g.w = w
	}
	g.w.Reset(&g.out)
	g.begun, g.sum, g.size = false, 0, 0
}

func (g *gzipped) encode(dst, text []byte) (out, next []byte) {
	if !g.begun {
		g.begun = true
		// The header of RFC 1952: deflate, no flags, no time, fastest, unknown system.
		dst = append(dst, 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255)
	}
	g.out.Reset()
	// A bytes.Buffer returns no errors.
	_, _ = g.w.Write(text)
	_ = g.w.Flush()
	g.sum = crc32.Update(g.sum, crc32.IEEETable, text)
	g.size += uint32(len(text))
	return append(dst, g.out.Bytes()...), text[:0]
}

func (g *gzipped) tail(dst []byte) []byte {
	const n = uint16(len(closing))
	dst = append(dst, 1) // the last block, stored (RFC 1951, 3.2.4)
	dst = binary.LittleEndian.AppendUint16(dst, n)
	dst = binary.LittleEndian.AppendUint16(dst, ^n)
	dst = append(dst, closing...)
	dst = binary.LittleEndian.AppendUint32(dst, crc32.Update(g.sum, crc32.IEEETable, []byte(closing)))
	return binary.LittleEndian.AppendUint32(dst, g.size+uint32(n))
}

// most counts 5 bytes for each block, because incompressible blocks are stored (compress/flate makes them of
// at least 16 KiB), and 80 bytes for header, flush and tail.
func (*gzipped) most(n int) int64 { return int64(n) + int64(n)/(16<<10)*5 + 80 }
