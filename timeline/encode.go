package timeline

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
)

// closing is the text at the end of every file. It closes the JSON array.
const closing = "\n]\n"

// encoder turns the text of a file into the bytes of the file, uncompressed or compressed.
type encoder interface {
	// reset prepares the encoder for a new file.
	reset()
	// encode appends the encoding of the whole text to dst and returns the result as out. The result ends at
	// a byte boundary. next is a buffer that the caller can use for its next text. If dst is empty, encode
	// may return text itself as out and dst as next.
	encode(dst, text []byte) (out, next []byte)
	// tail appends to dst the bytes that would complete the file if it ended here. It does not change the
	// state of the encoder.
	tail(dst []byte) []byte
	// most returns an upper bound for the encoded size of n bytes of text, including the tail.
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

// gzipped is an encoder whose file is one gzip member (RFC 1952). Each piece of text ends with a sync flush
// and so at a byte boundary, which allows the tail to follow any piece. The tail is a stored block with the
// closing text, then the checksum. Because the file has only one member, readers do not have to support gzip
// files with several members.
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
		// These bytes are the gzip header of RFC 1952: method deflate, no flags, no modification time,
		// fastest compression level, unknown operating system.
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
	dst = append(dst, 1) // begins the last block, which is not compressed (RFC 1951, 3.2.4)
	dst = binary.LittleEndian.AppendUint16(dst, n)
	dst = binary.LittleEndian.AppendUint16(dst, ^n)
	dst = append(dst, closing...)
	dst = binary.LittleEndian.AppendUint32(dst, crc32.Update(g.sum, crc32.IEEETable, []byte(closing)))
	return binary.LittleEndian.AppendUint32(dst, g.size+uint32(n))
}

// most implements encoder. The bound is n, plus 5 bytes for each block, because compress/flate stores
// incompressible text in blocks of at least 16 KiB, plus 80 bytes for header, flush and tail.
func (*gzipped) most(n int) int64 { return int64(n) + int64(n)/(16<<10)*5 + 80 }
