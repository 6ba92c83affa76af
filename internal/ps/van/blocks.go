package van

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/arena"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/shmem"
)

const (
	// SharedBytes is the size from which on a frame is passed in a block of shared memory.
	SharedBytes = 64 << 10
	// maxBlocks and maxBlockBytes bound the blocks of a sender on a link. A receiver maps at most twice as
	// many bytes. A frame for which there is no block is sent over the connection.
	maxBlocks     = 128
	maxBlockBytes = 512 << 20
	// maxFDs is the maximum number of descriptors that are sent with a message.
	maxFDs = maxFrames
	// maxRegions is the maximum number of regions of a sender on a link.
	maxRegions = 1 << 10
	// regionAlign is the alignment of blocks in a region, which suffices for all elements.
	regionAlign = 8
)

// block is shared memory with a frame, which the receiver reads in place: a segment, or a part of a region. A
// segment belongs in turn to the message that is being made, to the receiver, and to the pool of free blocks.
// A part of a region belongs to the caller that has made the frame, and is not changed before free is called.
type block struct {
	id  uint32
	seg *shmem.Segment // nil for a part of a region
	// sent says that the receiver has the descriptor, or that it is being written. writing says that the
	// message with the block is being written.
	sent, writing bool

	region *region // nil for a segment
	offset int64   // in the region
	bytes  int     // size of the part
	free   func()  // may be nil
}

// region is a chunk of the arena, which has frames of this process.
type region struct {
	id    uint32
	bytes int
	// fd is a descriptor for the receiver, and -1 when it was sent. sent says that the receiver has it, or
	// that it is being written.
	fd   int
	sent bool
}

// ownBlocks has the blocks with which this process sends frames on a link.
//
// Segments are made on demand, used again, and unmapped when the link has ended. A segment that belongs to a
// message is unmapped when the message is dropped. The segments have the numbers up to maxBlocks, and parts
// of regions have higher ones.
type ownBlocks struct {
	mu     sync.Mutex
	flying map[uint32]*block
	free   map[int][]*block // by class, the logarithm of the size
	count  int              // number of segments that were made
	bytes  int
	ended  bool

	regions map[uint32]*region
	part    uint32 // number of the last part of a region
	placed  int    // size of the parts of regions that are in flight
}

// takeBlock returns a block of at least n bytes, or nil if there is none.
func (o *ownBlocks) takeBlock(n int) *block {
	class := bits.Len(uint(n - 1))
	o.mu.Lock()
	defer o.mu.Unlock()
	if free := o.free[class]; len(free) > 0 {
		b := free[len(free)-1]
		o.free[class] = free[:len(free)-1]
		b.writing = false // from now on the block belongs to the caller
		return b
	}
	if o.ended || o.count == maxBlocks || o.bytes+1<<class > maxBlockBytes {
		return nil
	}
	seg, err := shmem.Create("gohvd-ps", 1<<class)
	if err != nil {
		return nil // the frame is sent over the connection
	}
	o.count++
	o.bytes += 1 << class
	return &block{id: uint32(o.count), seg: seg}
}

// regionBlock returns a block for a frame that is in the arena. It returns nil if the frame is not in the
// arena, or if the receiver cannot read it there.
func (o *ownBlocks) regionBlock(chunks *chunks, frame []byte, free func()) *block {
	at, ok := arena.Find(frame)
	if !ok || at.Offset%regionAlign != 0 {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(frame)
	if o.ended || o.placed > 0 && o.placed+n > maxBlockBytes {
		return nil
	}
	r := o.regions[at.Chunk]
	if r == nil {
		if len(o.regions) == maxRegions {
			return nil
		}
		if r = chunks.region(at.Chunk); r == nil {
			return nil
		}
		if o.regions == nil {
			o.regions = make(map[uint32]*region)
		}
		o.regions[r.id] = r
	}
	for {
		o.part = max(o.part+1, maxBlocks+1)
		if o.flying[o.part] == nil {
			break
		}
	}
	o.placed += n
	return &block{id: o.part, region: r, offset: at.Offset, bytes: n, free: free}
}

// fly records that the receiver owns a block as soon as it reads the message, which is written now. The
// receiver may release the block before written is called. It reports whether the receiver needs the
// descriptor.
func (o *ownBlocks) fly(b *block) (first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	first = !b.known()
	b.writing, b.sent = true, true
	if b.region != nil {
		b.region.sent = true
	}
	if o.flying == nil {
		o.flying = make(map[uint32]*block)
	}
	if !o.ended {
		o.flying[b.id] = b
	}
	return first
}

// known reports whether the receiver has the descriptor, or gets it before the next message.
func (b *block) known() bool {
	if b.region != nil {
		return b.region.sent
	}
	return b.sent
}

// written records that the message with a block was written.
func (o *ownBlocks) written(b *block) {
	o.mu.Lock()
	if b.region != nil {
		b.region.close()
	}
	ended := b.writing && o.ended
	b.writing = false
	o.mu.Unlock()
	if ended {
		b.close()
	}
}

// give makes a block free that belongs to a message that is not sent.
func (o *ownBlocks) give(b *block) {
	o.mu.Lock()
	ended := o.ended
	if !ended {
		o.makeFree(b)
	}
	o.mu.Unlock()
	if ended || b.region != nil {
		b.close()
	}
}

// released makes blocks free that the receiver has released.
func (o *ownBlocks) released(ids []uint32) {
	for _, id := range ids {
		o.mu.Lock()
		b := o.flying[id]
		if b != nil {
			delete(o.flying, id)
			o.makeFree(b)
		}
		o.mu.Unlock()
		if b != nil && b.region != nil {
			b.close()
		}
	}
}

// close frees a block that nobody uses any longer.
func (b *block) close() {
	switch {
	case b.seg != nil:
		b.seg.Close()
	case b.free != nil:
		b.free()
	}
}

// close closes the descriptor of a region.
func (r *region) close() {
	if r.fd >= 0 {
		_ = unix.Close(r.fd) // nothing was written through fd
		r.fd = -1
	}
}

// makeFree adds a segment to the free ones, or records that a part of a region is not in flight. The caller
// holds mu.
func (o *ownBlocks) makeFree(b *block) {
	if b.region != nil {
		o.placed -= b.bytes
		return
	}
	if o.free == nil {
		o.free = make(map[int][]*block)
	}
	class := bits.Len(uint(len(b.seg.Bytes()) - 1))
	o.free[class] = append(o.free[class], b)
}

// forgetRegion removes a region, and reports whether the receiver has mapped it.
func (o *ownBlocks) forgetRegion(id uint32) (mapped bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.regions[id]
	if r == nil {
		return false
	}
	delete(o.regions, id)
	if !r.sent {
		r.close()
	}
	return r.sent
}

// endLink frees all blocks that do not belong to a message. The peer keeps its mappings.
func (o *ownBlocks) endLink() {
	o.mu.Lock()
	o.ended = true
	var all []*block
	for _, blocks := range o.free {
		all = append(all, blocks...)
	}
	all = slices.AppendSeq(all, maps.Values(o.flying))
	all = slices.DeleteFunc(all, func(b *block) bool { return b.writing })
	for _, r := range o.regions {
		if !r.sent { // otherwise the method written closes it
			r.close()
		}
	}
	o.flying, o.free, o.regions = nil, nil, nil
	o.mu.Unlock()
	for _, b := range all {
		b.close()
	}
}

// peerBlocks has the blocks of the peer that this process has mapped for reading. They stay mapped until the
// link has ended and all messages with frames in blocks were released. A region that the peer has freed stays
// mapped until the frames in it were released.
type peerBlocks struct {
	mu       sync.Mutex
	segs     map[uint32]*shmem.Segment
	regions  map[uint32]*peerRegion
	bytes    int
	messages int // number of messages with frames in blocks
	ended    bool
}

// peerRegion is a region of the peer.
type peerRegion struct {
	seg    *shmem.Segment
	frames int  // number of frames in it that were not released
	freed  bool // the peer has freed it
}

// addBlock maps a block from a descriptor, which it closes.
func (p *peerBlocks) addBlock(id uint32, size uint64, fd int) error {
	defer unix.Close(fd)
	seg, err := shmem.Map(fd)
	if err != nil {
		return fmt.Errorf("map a block of shared memory: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(seg.Bytes())
	if p.segs[id] != nil || uint64(n) < size || p.bytes+n > 2*maxBlockBytes || p.ended {
		return errors.Join(fmt.Errorf("malformed block of shared memory: number %d with %d bytes, want %d",
			id, n, size),
			seg.Close())
	}
	if p.segs == nil {
		p.segs = make(map[uint32]*shmem.Segment)
	}
	p.segs[id] = seg
	p.bytes += n
	return nil
}

// addRegion maps a region from a descriptor, which it closes.
func (p *peerBlocks) addRegion(id uint32, fd int) error {
	defer unix.Close(fd)
	seg, err := shmem.Map(fd)
	if err != nil {
		return fmt.Errorf("map a region of shared memory: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.regions[id] != nil || len(p.regions) == 2*maxRegions || p.ended {
		return errors.Join(fmt.Errorf("malformed region of shared memory: number %d, one of %d", id,
			len(p.regions)), seg.Close())
	}
	if p.regions == nil {
		p.regions = make(map[uint32]*peerRegion)
	}
	p.regions[id] = &peerRegion{seg: seg}
	return nil
}

// frameOf returns a frame in a block. If the block is in a region, it counts the frame.
func (p *peerBlocks) frameOf(f *pspb.Frame) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seg, region := p.segs[f.Block], p.regions[f.Region]
	switch {
	case region != nil:
		seg = region.seg
	case f.Region != 0:
		seg = nil
	}
	if seg == nil || f.Bytes > uint64(len(seg.Bytes())) || f.Offset > uint64(len(seg.Bytes()))-f.Bytes ||
		f.Offset%regionAlign != 0 {
		where := fmt.Sprintf("the block %d", f.Block)
		if f.Region != 0 {
			where = fmt.Sprintf("the region %d from byte %d on", f.Region, f.Offset)
		}
		return nil, fmt.Errorf("malformed message: it has %d bytes in %s, which has fewer", f.Bytes, where)
	}
	if region != nil {
		region.frames++
	}
	return seg.Bytes()[f.Offset:][:f.Bytes:f.Bytes], nil
}

// free unmaps regions that the peer has freed, when all frames in them were released.
func (p *peerBlocks) free(ids []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		if r := p.regions[id]; r != nil {
			r.freed = true
			p.unmapRegion(id, r)
		}
	}
}

// unmapRegion unmaps a region that the peer has freed if no frame in it is read. The caller holds mu.
func (p *peerBlocks) unmapRegion(id uint32, r *peerRegion) {
	if r.freed && r.frames == 0 {
		r.seg.Close()
		delete(p.regions, id)
	}
}

// hold counts a message with frames in blocks.
func (p *peerBlocks) hold() {
	p.mu.Lock()
	p.messages++
	p.mu.Unlock()
}

// drop counts a message less, which had frames in the given regions. If the link has ended, the last message
// unmaps the blocks.
func (p *peerBlocks) drop(regions []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range regions {
		r := p.regions[id]
		r.frames--
		p.unmapRegion(id, r)
	}
	p.messages--
	p.unmap()
}

// endLink records that the link has ended.
func (p *peerBlocks) endLink() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.unmap()
}

// unmap unmaps everything if the link has ended and nothing is read. The caller holds mu.
func (p *peerBlocks) unmap() {
	if p.messages > 0 || !p.ended {
		return
	}
	for _, seg := range p.segs {
		seg.Close()
	}
	for _, r := range p.regions {
		r.seg.Close()
	}
	p.segs, p.regions = nil, nil
}

// chunks has the chunks of the arena of this process, by number.
type chunks struct {
	mu   sync.Mutex
	segs map[uint32]*shmem.Segment
}

// added records a chunk.
func (c *chunks) added(chunk arena.Chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.segs == nil {
		c.segs = make(map[uint32]*shmem.Segment)
	}
	c.segs[chunk.ID] = chunk.Segment
}

// removed forgets a chunk, whose segment is closed next.
func (c *chunks) removed(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.segs, id)
}

// region returns a chunk as a region with a descriptor of its own, or nil if it cannot be passed to a peer.
func (c *chunks) region(id uint32) *region {
	c.mu.Lock()
	defer c.mu.Unlock()
	seg := c.segs[id]
	if seg == nil || seg.Seal() != nil {
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(seg.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil // the frame is copied
	}
	return &region{id: id, bytes: len(seg.Bytes()), fd: fd}
}

// chunkRemoved tells the peers that a chunk of the arena was freed.
func (v *Van) chunkRemoved(id uint32) {
	v.chunks.removed(id)
	for peer, l := range *v.links.Load() {
		if peer == l.peer && l.own.forgetRegion(id) {
			m := controlMessage(&pspb.Control{Command: pspb.Command_UNMAP, Blocks: []uint32{id}})
			m.lazy = true
			_ = l.reply(m) // the peer of an ended link has unmapped it
		}
	}
}

// shares reports whether the link passes frames in shared memory.
func (l *link) shares() bool {
	return l.sock != nil && l.sock.passes()
}

// allocate gives m frames of the given sizes, whose content is undefined. Long ones are in blocks if the link
// has them.
func (l *link) allocate(m *Message, sizes []int) {
	m.link = l
	var inline [maxFrames]int
	for i, n := range sizes {
		inline[i] = n
		if n < SharedBytes || !l.shares() {
			continue
		}
		if b := l.own.takeBlock(n); b != nil {
			if m.own == nil {
				m.own = make([]*block, len(sizes))
			}
			inline[i], m.own[i] = 0, b
		}
	}
	m.allocate(inline[:len(sizes)])
	for i, b := range m.own {
		if b != nil {
			m.Data[i] = b.seg.Bytes()[:sizes[i]:sizes[i]]
		}
	}
}

// passInPlace makes the receiver read those long frames of m in place that are in the arena, and reports
// whether there are any. Then it moves other long frames to blocks of the link.
func (l *link) passInPlace(m *Message) bool {
	var free func()
	var left *atomic.Int32 // number of frames that are read, and one for the message
	if f := m.Free; f != nil {
		left = new(atomic.Int32)
		left.Add(1)
		free = func() {
			if left.Add(-1) == 0 {
				f()
			}
		}
	}
	for i, d := range m.Data {
		if len(d) < SharedBytes {
			continue
		}
		if b := l.own.regionBlock(&l.van.chunks, d, free); b != nil {
			if m.own == nil {
				m.own, m.link = make([]*block, len(m.Data)), l
			}
			m.own[i] = b
			if free != nil {
				left.Add(1)
			}
		}
	}
	if m.own == nil {
		return false
	}
	if free != nil {
		m.Free = free
	}
	for i, d := range m.Data {
		if len(d) < SharedBytes || m.own[i] != nil {
			continue
		}
		m.own[i] = l.own.takeBlock(len(d))
		if m.own[i] != nil {
			m.Data[i] = m.own[i].seg.Bytes()[:copy(m.own[i].seg.Bytes(), d)]
		}
	}
	return true
}

// share makes the receiver read the long frames of m in place. It moves them to blocks of the link, unless
// they are in the arena.
func (l *link) share(m *Message) *Message {
	if m.own != nil && m.link != l { // another process has taken the place of the peer
		c := m.Clone()
		m.Drop()
		m = c
	}
	if m.own != nil || !l.shares() || m.Bytes() < SharedBytes || l.passInPlace(m) {
		return m
	}
	sizes := make([]int, len(m.Data))
	for i, d := range m.Data {
		sizes[i] = len(d)
	}
	c := &Message{Header: m.Header, Batch: m.Batch, Prompt: m.Prompt, size: m.size}
	l.allocate(c, sizes)
	if c.own == nil {
		c.Drop()
		return m
	}
	for i, d := range m.Data {
		copy(c.Data[i], d)
	}
	m.Drop()
	return c
}

// describe writes the blocks of m to its header, and returns the descriptors that the peer does not have yet.
func (m *Message) describe() (fds []int) {
	for i, b := range m.own {
		if b == nil {
			continue
		}
		f := m.Header.Frames[i]
		f.Block = b.id
		fd, n := -1, 0
		if b.region != nil {
			f.Region, f.Offset = b.region.id, uint64(b.offset)
			fd, n = b.region.fd, b.region.bytes
		} else {
			fd, n = b.seg.FD(), len(b.seg.Bytes())
		}
		if m.link.own.fly(b) {
			f.BlockBytes = uint64(n)
			fds = append(fds, fd)
		}
	}
	return fds
}

// release tells the peer that this process no longer reads the given blocks of a message that was received,
// some of which are in the given regions.
func (l *link) release(ids, regions []uint32) {
	m := controlMessage(&pspb.Control{Command: pspb.Command_RELEASE, Blocks: ids})
	m.lazy = true
	_ = l.reply(m) // an ended link has no blocks
	l.theirs.drop(regions)
}

// Keep replaces frames of a message that was received by copies that the sender cannot change. The receiver
// calls Keep for frames whose content it checks before it uses it, such as lengths: the sender can change a
// frame in shared memory at any time.
func (m *Message) Keep(frames ...int) {
	for _, i := range frames {
		if n := len(m.Data[i]); n > 0 && m.Header.Frames[i].Block != 0 {
			words := make([]uint64, (n+7)/8) // aligned for all elements
			c := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
			copy(c, m.Data[i])
			m.Data[i] = c
		}
	}
}

// Reclaimed reports whether the frames of a message that was received may have changed: whether they are in a
// region, and the sender has closed the connection. Then the sender takes its memory back.
func (m *Message) Reclaimed() bool { return m.Borrowed() && m.link.sock.hungUp() }

// Borrowed reports whether frames of a message that was received are in memory of the sender's program.
func (m *Message) Borrowed() bool { return len(m.regions) > 0 }

// Intact returns an error if the frames of a message that was received may have changed. The receiver calls
// Intact when it has read frames that must be right. The error means that the sender has failed.
func (m *Message) Intact() error {
	if !m.Reclaimed() {
		return nil
	}
	l := m.link
	err := errors.New("its connection has ended")
	l.van.blames.blame(l.process, err)
	return &NodeError{l.peer, err}
}
