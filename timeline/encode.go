package timeline

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
)

// closing is the text that ends every file: it closes the JSON array.
const closing = "\n]\n"

// encoder encodes the text of a file: as it is, or compressed.
type encoder interface {
	// reset prepares the encoder for a new file.
	reset()
	// encode appends the encoding of the whole text to dst. The result ends at a byte boundary. If dst is
	// empty, encode may return text itself as out, and dst as next, the buffer to use for the next text.
	encode(dst, text []byte) (out, next []byte)
	// tail appends to dst the bytes that would complete the file now. It does not change the state of the
	// encoder.
	tail(dst []byte) []byte
	// most returns an upper bound for the encoded size of n bytes of text with the tail.
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

// gzipped is an encoder that writes one gzip member (RFC 1952). The file can be completed after every piece
// of text: each piece ends at a byte boundary (a sync flush), and the tail is a stored block with the closing
// text, then the checksum. So a file has only one member, and readers need no support for several.
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
			panic(err) // cannot fail: the level is a valid constant
		}
		g.w = w
	}
	g.w.Reset(&g.out)
	g.begun, g.sum, g.size = false, 0, 0
}

func (g *gzipped) encode(dst, text []byte) (out, next []byte) {
	if !g.begun {
		g.begun = true
		// The header of RFC 1952: method deflate, no flags, no modification time, fastest level, unknown
		// system.
		dst = append(dst, 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255)
	}
	g.out.Reset()
	// Write and Flush cannot fail, because a bytes.Buffer returns no errors.
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

// most adds 5 bytes for each block, because incompressible blocks are stored, and 80 bytes for header, flush
// and tail. compress/flate stores blocks of at least 16 KiB.
func (*gzipped) most(n int) int64 { return int64(n) + int64(n)/(16<<10)*5 + 80 }
