package message

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/topo"
)

// These are the limits of a frame. A decoder returns an error if a frame exceeds a limit. The caller of an
// encoder must not exceed the limits.
const (
	// MaxFrameBytes is the maximum size of an encoded frame.
	MaxFrameBytes = 64 << 20
	// MaxNameBytes is the maximum length of the name of a tensor.
	MaxNameBytes = 4096
	// MaxDims is the maximum number of dimensions of a shape.
	MaxDims = 64
	// MaxReasonBytes is the maximum length of a reason or an error text. The encoder truncates longer texts.
	MaxReasonBytes = 4096
	// MaxCacheBits is greater than every cache bit.
	MaxCacheBits = 1 << 20
	// maxWords is the maximum number of words of a bit vector.
	maxWords = 1<<16 - 1
	// MaxRanks is the maximum number of ranks of a job.
	MaxRanks = 1 << 20
	// MaxSets is the maximum number of process sets of a job. MaxFrameSets is the maximum number of process
	// sets in a frame. It is greater, because each answer to ranks that cannot add a process set by
	// themselves has the number of a set.
	MaxSets      = 1024
	MaxFrameSets = 2 * MaxSets
)

// These are the flags and types in frames, which docs/negotiation.md#frames specifies. A frame does not
// contain its own length, because the connection transmits the length.
const (
	flagShutdown = 1
	flagGranted  = 2
	flagMessage  = 4
	flagStop     = 1
	flagTuning   = 2
	flagBrief    = 4
	// vectorsType must differ from the types of Up and Down frames, which are sent over the same connections.
	vectorsType = 64
	// probeType must differ from vectorsType and from the types of Up and Down frames too.
	probeType = 65
	// combinedType and addressedType are the types of the frames between a leader and rank 0.
	combinedType  = 66
	addressedType = 67
)

var (
	errShort    = errors.New("the frame ends in the middle of a field")
	errTrailing = errors.New("the frame has bytes after its last field")
)

// AppendUp appends the encoding of u to b. It returns an error if a request cannot be encoded. It allocates
// nothing if u has no full requests and b has enough capacity.
func AppendUp(b []byte, u *Up) ([]byte, error) {
	var flags byte
	if u.Shutdown {
		flags |= flagShutdown
	}
	if u.Granted {
		flags |= flagGranted
	}
	if u.Message {
		flags |= flagMessage
	}
	b = append(b, byte(u.Type), flags)
	b = binary.LittleEndian.AppendUint64(b, u.Seen)
	switch u.Type {
	case UpNews:
		b = binary.LittleEndian.AppendUint16(b, uint16(len(u.Sets)))
		for i := range u.Sets {
			s := &u.Sets[i]
			b = binary.LittleEndian.AppendUint32(b, uint32(s.Set))
			b = binary.LittleEndian.AppendUint32(b, s.Done)
			b = appendBits(b, s.Hits)
			b = appendBits(b, s.Invalid)
			b = binary.LittleEndian.AppendUint32(b, uint32(len(s.Requests)))
			for j := range s.Requests {
				var err error
				if b, err = appendRequest(b, &s.Requests[j]); err != nil {
					return b, fmt.Errorf("message: encode request %q: %w", s.Requests[j].Name, err)
				}
			}
		}
		if u.Shutdown {
			b = binary.LittleEndian.AppendUint64(b, u.Operations)
			b = binary.LittleEndian.AppendUint32(b, u.Millis)
			b = appendText(b, u.Tensor)
			b = appendText(b, u.Reason)
			b = appendChannels(b, u.Channels)
		}
	case UpSuspect:
		b = binary.LittleEndian.AppendUint32(b, uint32(u.Set))
		b = appendRanks(b, u.Suspects)
		b = appendText(b, u.Reason)
	case UpLost, UpFault:
		b = binary.LittleEndian.AppendUint32(b, uint32(u.Suspect))
		b = appendText(b, u.Reason)
	case UpReleased:
		b = appendRanks(b, u.Released)
	case UpHeartbeat, UpTimeout:
		b = binary.LittleEndian.AppendUint32(b, uint32(u.Set))
		b = binary.LittleEndian.AppendUint32(b, u.Millis)
		b = appendText(b, u.Tensor)
		if u.Message {
			b = binary.LittleEndian.AppendUint32(b, uint32(u.Suspect))
		}
	}
	return b, nil
}

// DecodeUp decodes b into u. It reuses the memory of u and keeps no reference to b.
func DecodeUp(b []byte, u *Up) error {
	u.Reset()
	d := decoder{b: b}
	u.Type = UpType(d.u8())
	flags := d.u8()
	u.Seen = d.u64()
	switch u.Type {
	case UpNews:
		u.Shutdown = flags&flagShutdown != 0
		for range d.sets() {
			id := topo.ProcessSetID(d.u32())
			before := len(u.Sets)
			s := u.At(id)
			if len(u.Sets) == before {
				d.fail(fmt.Errorf("got process set %d twice", id))
			}
			s.Done = d.u32()
			d.bits(&s.Hits)
			d.bits(&s.Invalid)
			for range d.count(4) {
				d.request(grow(&s.Requests))
				if d.err != nil {
					break
				}
			}
			if d.err != nil {
				break
			}
		}
		if u.Shutdown {
			u.Operations, u.Millis = d.u64(), d.u32()
			u.Tensor, u.Reason = d.text(), d.text()
			d.channels(&u.Channels)
		}
	case UpBye:
	case UpHeartbeat, UpTimeout:
		u.Granted = u.Type == UpTimeout && flags&flagGranted != 0
		u.Set = topo.ProcessSetID(d.u32())
		u.Millis = d.u32()
		u.Tensor = d.text()
		u.Message = u.Type == UpTimeout && flags&flagMessage != 0
		if u.Message {
			u.Suspect = d.rank()
		}
	case UpSuspect:
		u.Set = topo.ProcessSetID(d.u32())
		d.ranks(&u.Suspects)
		u.Reason = d.text()
	case UpLost, UpFault:
		u.Suspect = d.rank()
		u.Reason = d.text()
	case UpReleased:
		d.ranks(&u.Released)
	default:
		d.fail(fmt.Errorf("got unknown type %d", u.Type))
	}
	if err := d.end(); err != nil {
		u.Reset()
		return fmt.Errorf("message: malformed Up frame: %w", err)
	}
	return nil
}

// AppendDown appends the encoding of d to b. It returns an error if a response cannot be encoded.
func AppendDown(b []byte, d *Down) ([]byte, error) {
	var flags byte
	if d.Stop {
		flags |= flagStop
	}
	if d.Tuning != nil {
		flags |= flagTuning
	}
	if d.Brief {
		flags |= flagBrief
	}
	b = append(b, byte(d.Type), flags)
	b = binary.LittleEndian.AppendUint64(b, d.Cycle)
	switch d.Type {
	case DownCycle:
		b = binary.LittleEndian.AppendUint16(b, uint16(len(d.Sets)))
		for i := range d.Sets {
			var err error
			if b, err = appendDownSet(b, &d.Sets[i]); err != nil {
				return b, err
			}
		}
		b = appendRanks(b, d.Ranks)
		b = appendText(b, d.Reason)
		if d.Tuning != nil {
			b = appendTuning(b, d.Tuning)
		}
	case DownFail:
		b = appendRanks(b, d.Ranks)
		b = appendText(b, d.Reason)
	case DownLeft, DownHeartbeat:
		b = appendRanks(b, d.Ranks)
		b = appendChannels(b, d.Channels)
	}
	return b, nil
}

func appendTuning(b []byte, t *Tuning) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(t.FusionThresholdBytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(t.CycleTime))
	b = binary.LittleEndian.AppendUint32(b, uint32(t.SegmentBytes))
	flags := byte(0)
	for i, on := range []bool{t.CacheOff, t.OneLevelAllreduce, t.OneLevelAllgather} {
		if on {
			flags |= 1 << i
		}
	}
	return append(b, flags, byte(t.Allreduce))
}

func appendDownSet(b []byte, s *DownSet) ([]byte, error) {
	b = binary.LittleEndian.AppendUint32(b, uint32(s.Set))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(s.Grants)))
	for i := range s.Grants {
		g := &s.Grants[i]
		b = append(b, byte(g.Backend), byte(g.Algorithm))
		b = appendRanks(b, g.Absent)
		b = appendWords(b, g.Bits)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(g.Full)))
		for _, r := range g.Full {
			var err error
			if b, err = appendResponse(b, r); err != nil {
				return b, fmt.Errorf("message: encode response %q: %w", r.Name, err)
			}
		}
	}
	b = appendWords(b, s.Erase)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(s.Puts)))
	for _, p := range s.Puts {
		b = binary.LittleEndian.AppendUint32(b, p.Grant)
		b = binary.LittleEndian.AppendUint32(b, p.Tensor)
		b = binary.LittleEndian.AppendUint32(b, p.Bit)
	}
	return b, nil
}

// DecodeDown decodes b into out. It reuses the memory of out and keeps no reference to b. It allocates
// nothing if the frame has only grants for cached tensors and out has enough capacity.
func DecodeDown(b []byte, out *Down) error {
	out.Reset()
	d := decoder{b: b}
	out.Type = DownType(d.u8())
	flags := d.u8()
	out.Cycle = d.u64()
	switch out.Type {
	case DownCycle:
		out.Stop, out.Brief = flags&flagStop != 0, flags&flagBrief != 0
		for range d.sets() {
			if d.err != nil {
				break
			}
			d.downSet(out.AddSet(topo.ProcessSetID(d.u32())))
		}
		d.ranks(&out.Ranks)
		out.Reason = d.text()
		if flags&flagTuning != 0 {
			out.Tuning = d.tuning()
		}
	case DownClose:
	case DownFail:
		d.ranks(&out.Ranks)
		out.Reason = d.text()
	case DownLeft, DownHeartbeat:
		d.ranks(&out.Ranks)
		d.channels(&out.Channels)
	default:
		d.fail(fmt.Errorf("got unknown type %d", out.Type))
	}
	if err := d.end(); err != nil {
		out.Reset()
		return fmt.Errorf("message: malformed Down frame: %w", err)
	}
	return nil
}

func (d *decoder) tuning() *Tuning {
	limited := func(name string, v, most uint64) uint64 {
		if v > most && d.err == nil {
			d.fail(fmt.Errorf("tunes the %s to %d, want at most %d", name, v, most))
		}
		return v
	}
	t := &Tuning{
		FusionThresholdBytes: int64(limited("fusion threshold", d.u64(), math.MaxInt64)),
		CycleTime:            time.Duration(limited("cycle time", d.u64(), math.MaxInt64)),
		SegmentBytes:         int(limited("segment size", uint64(d.u32()), MaxSegmentBytes)),
	}
	flags := limited("switches", uint64(d.u8()), 7)
	t.CacheOff, t.OneLevelAllreduce, t.OneLevelAllgather = flags&1 != 0, flags&2 != 0, flags&4 != 0
	t.Allreduce = Algorithm(limited("algorithm", uint64(d.u8()), uint64(numAlgorithms-1)))
	return t
}

func (d *decoder) downSet(s *DownSet) {
	for range d.count(2 + 4 + 4 + 4) {
		g := s.AddGrant()
		g.Backend, g.Algorithm = Backend(d.u8()), Algorithm(d.u8())
		d.ranks(&g.Absent)
		d.words(&g.Bits)
		for range d.count(4) {
			r := new(Response)
			d.response(r)
			g.Full = append(g.Full, r)
			if d.err != nil {
				return
			}
		}
		if d.err != nil {
			return
		}
	}
	d.words(&s.Erase)
	for range d.count(12) {
		p := grow(&s.Puts)
		p.Grant, p.Tensor, p.Bit = d.u32(), d.u32(), d.bit()
		if d.err != nil {
			return
		}
		if int64(p.Grant) >= int64(len(s.Grants)) || int64(p.Tensor) >= int64(len(s.Grants[p.Grant].Full)) {
			d.fail(fmt.Errorf("got a cache bit for tensor %d of grant %d, but there is no such tensor", p.Tensor,
				p.Grant))
			return
		}
	}
}

// AppendVectors appends the encoding of the two vectors of a lock-step cycle to b. It encodes all words of
// both vectors.
func AppendVectors(b []byte, and, or []uint64) []byte {
	b = append(b, vectorsType)
	for _, v := range [][]uint64{and, or} {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(v)))
		for _, w := range v {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
	}
	return b
}

// DecodeVectors decodes two vectors that AppendVectors has encoded. It reuses the memory of the two vectors
// that are passed to it.
func DecodeVectors(b []byte, and, or []uint64) (_, _ []uint64, err error) {
	d := decoder{b: b}
	if t := d.u8(); t != vectorsType {
		d.fail(fmt.Errorf("got type %d, want %d", t, vectorsType))
	}
	and, or = and[:0], or[:0]
	d.vector(&and)
	d.vector(&or)
	if err := d.end(); err != nil {
		return and[:0], or[:0], fmt.Errorf("message: malformed Vectors frame: %w", err)
	}
	return and, or, nil
}

// AppendProbe appends the encoding of p to b.
func AppendProbe(b []byte, p *Probe) []byte {
	b = append(b, probeType)
	for _, v := range [...]uint64{p.Sent, p.Received, p.Replied, p.Monotonic} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return appendText(b, p.Domain)
}

// IsVectors reports whether the first byte of a frame is the type of the frames that contain the vectors of a
// cycle. The rest of the frame may be malformed.
func IsVectors(frame []byte) bool { return len(frame) > 0 && frame[0] == vectorsType }

// IsProbe reports whether the first byte of a frame is the type of the frames that contain a Probe. The rest
// of the frame may be malformed.
func IsProbe(frame []byte) bool { return len(frame) > 0 && frame[0] == probeType }

// DecodeProbe decodes a Probe that AppendProbe has encoded.
func DecodeProbe(b []byte) (p Probe, err error) {
	d := decoder{b: b}
	if t := d.u8(); t != probeType {
		d.fail(fmt.Errorf("got type %d, want %d", t, probeType))
	}
	p.Sent, p.Received, p.Replied, p.Monotonic = d.u64(), d.u64(), d.u64(), d.u64()
	p.Domain = d.text()
	if err := d.end(); err != nil {
		return Probe{}, fmt.Errorf("message: malformed Probe frame: %w", err)
	}
	return p, nil
}

func appendBits(b []byte, v Bits) []byte {
	n := len(v)
	for n > 0 && v[n-1] == 0 {
		n--
	}
	b = binary.LittleEndian.AppendUint16(b, uint16(n))
	for _, w := range v[:n] {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

func appendRanks(b []byte, v []topo.Rank) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(v)))
	for _, r := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(r))
	}
	return b
}

func appendChannels(b []byte, v []Channel) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(v)))
	for _, c := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(c.Set))
		b = binary.LittleEndian.AppendUint32(b, uint32(c.Rank))
	}
	return b
}

func appendWords(b []byte, v []uint32) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(v)))
	for _, w := range v {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

// truncateText truncates a text to MaxReasonBytes and removes invalid UTF-8, because protobuf requires valid
// UTF-8.
func truncateText(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), MaxReasonBytes)], "")
}

func appendText(b []byte, s string) []byte {
	s = truncateText(s)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// decoder decodes fields from the front of b. After the first error it returns the zero value for every
// field.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(err error) {
	if d.err == nil {
		d.err = err
	}
	d.b = nil
}

func (d *decoder) take(n int) []byte {
	if n > len(d.b) {
		d.fail(errShort)
		return nil
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) u8() uint8 {
	if p := d.take(1); p != nil {
		return p[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if p := d.take(2); p != nil {
		return binary.LittleEndian.Uint16(p)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if p := d.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if p := d.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

// count decodes the number of elements that come next. Each element has at least size bytes. If b has fewer
// bytes than the elements need, count fails, so that the caller allocates nothing for missing elements.
func (d *decoder) count(size int) int {
	n := int64(d.u32())
	if n*int64(size) > int64(len(d.b)) {
		d.fail(errShort)
		return 0
	}
	return int(n)
}

func (d *decoder) sets() int {
	n := d.u16()
	if n > MaxFrameSets {
		d.fail(fmt.Errorf("got %d process sets, want at most %d", n, MaxFrameSets))
		return 0
	}
	return int(n)
}

func (d *decoder) bit() uint32 {
	b := d.u32()
	if b >= MaxCacheBits {
		d.fail(fmt.Errorf("got cache bit %d, want less than %d", b, MaxCacheBits))
		return 0
	}
	return b
}

func (d *decoder) rank() topo.Rank {
	r := d.u32()
	if r >= MaxRanks {
		d.fail(fmt.Errorf("got rank %d, want less than %d", int32(r), MaxRanks))
		return 0
	}
	return topo.Rank(r)
}

func (d *decoder) ranks(v *[]topo.Rank) {
	for range d.count(4) {
		*v = append(*v, d.rank())
	}
}

func (d *decoder) channels(v *[]Channel) {
	for range d.count(8) {
		*v = append(*v, Channel{topo.ProcessSetID(d.u32()), d.rank()})
	}
}

func (d *decoder) bits(v *Bits) {
	n := int(d.u16())
	if n > maxWords || n*8 > len(d.b) {
		d.fail(errShort)
		return
	}
	for range n {
		*v = append(*v, d.u64())
	}
}

// vector decodes a bit vector that covers all process sets. Such a vector may be longer than the vector of
// one process set.
func (d *decoder) vector(v *[]uint64) {
	for range d.count(8) {
		*v = append(*v, d.u64())
	}
}

func (d *decoder) words(v *[]uint32) {
	for range d.count(4) {
		*v = append(*v, d.bit())
	}
}

func (d *decoder) text() string {
	n := int(d.u16())
	if n > MaxReasonBytes {
		d.fail(fmt.Errorf("got a string of %d bytes, want at most %d", n, MaxReasonBytes))
		return ""
	}
	// Truncate as appendText does, so that encoding the result again gives the same bytes.
	return truncateText(string(d.take(n)))
}

func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		return errTrailing
	}
	return d.err
}
