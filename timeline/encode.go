package timeline

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
)

// closing ends the text of every file.
const closing = "\n]\n"

// encoder turns text into what is in the file.
type encoder interface {
	// reset begins a file.
	reset()
	// encode appends what text becomes, up to the end of a byte and with nothing held back. It may give back the memory of text
	// and keep that of an empty dst for the next.
	encode(dst, text []byte) (out, next []byte)
	// tail appends what makes a complete file of all before it. It leaves the encoder as it was.
	tail(dst []byte) []byte
	// most is an upper bound of what n bytes of text and the tail become.
	most(n int) int64
}

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

// gzipped makes one gzip member (RFC 1952) that can end after every piece: each ends on a byte (a sync flush), and the tail is a
// stored block with the end of the text, and the checksum. So the file has one member as any other, and no tool needs to know
// of several.
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
		// Deflate, no flags, no time, fastest, unknown system.
		dst = append(dst, 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255)
	}
	g.out.Reset()
	// A bytes.Buffer gives no errors.
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

// most: incompressible blocks are stored, with 5 bytes for each (of 16 KiB at least, in compress/flate); header, flush and tail.
func (*gzipped) most(n int) int64 { return int64(n) + int64(n)/(16<<10)*5 + 80 }
