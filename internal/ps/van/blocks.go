package van

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/shmem"
)

const (
	// sharedBytes is the size from which on a frame is passed in a block of shared memory.
	sharedBytes = 64 << 10
	// maxBlocks and maxBlockBytes bound the blocks of a sender on a link. A receiver maps at most twice as
	// many bytes. A frame for which there is no block is sent over the connection.
	maxBlocks     = 128
	maxBlockBytes = 512 << 20
	// maxFDs is the maximum number of descriptors that are sent with a message.
	maxFDs = maxFrames
)

// block is a segment of shared memory, whose content the receiver reads in place. It belongs in turn to the
// message that is being made, to the receiver, and to the pool of free blocks.
type block struct {
	id  uint32
	seg *shmem.Segment
	// sent says that the receiver has the descriptor, or that it is being written. writing says that the
	// message with the block is being written.
	sent, writing bool
}

// ownBlocks has the blocks with which this process sends frames on a link.
//
// Blocks are made on demand, used again, and unmapped when the link has ended. A block that belongs to a
// message is unmapped when the message is dropped.
type ownBlocks struct {
	mu     sync.Mutex
	flying map[uint32]*block
	free   map[int][]*block // by class, the logarithm of the size
	count  int              // number of blocks that were made
	bytes  int
	ended  bool
}

// take returns a block of at least n bytes, or nil if there is none.
func (o *ownBlocks) take(n int) *block {
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

// fly records that the receiver owns a block as soon as it reads the message, which is written now. The
// receiver may release the block before written is called.
func (o *ownBlocks) fly(b *block) {
	o.mu.Lock()
	defer o.mu.Unlock()
	b.writing, b.sent = true, true
	if o.flying == nil {
		o.flying = make(map[uint32]*block)
	}
	if !o.ended {
		o.flying[b.id] = b
	}
}

// written records that the message with a block was written.
func (o *ownBlocks) written(b *block) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if b.writing && o.ended {
		b.seg.Close()
	}
	b.writing = false
}

// give makes a block free that belongs to a message that is not sent.
func (o *ownBlocks) give(b *block) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		b.seg.Close()
		return
	}
	o.makeFree(b)
}

// released makes blocks free that the receiver has released.
func (o *ownBlocks) released(ids []uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range ids {
		if b := o.flying[id]; b != nil {
			delete(o.flying, id)
			o.makeFree(b)
		}
	}
}

// makeFree adds a block to the free ones. The caller holds mu.
func (o *ownBlocks) makeFree(b *block) {
	if o.free == nil {
		o.free = make(map[int][]*block)
	}
	class := bits.Len(uint(len(b.seg.Bytes()) - 1))
	o.free[class] = append(o.free[class], b)
}

// end unmaps all blocks that do not belong to a message. The peer keeps its mappings.
func (o *ownBlocks) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	for _, blocks := range append(slices.Collect(maps.Values(o.free)),
		slices.Collect(maps.Values(o.flying))) {
		for _, b := range blocks {
			if !b.writing {
				b.seg.Close()
			}
		}
	}
	o.flying, o.free = nil, nil
}

// peerBlocks has the blocks of the peer that this process has mapped for reading. They stay mapped until the
// link has ended and all messages with frames in them were released.
type peerBlocks struct {
	mu       sync.Mutex
	segs     map[uint32]*shmem.Segment
	bytes    int
	messages int // number of messages with frames in blocks
	ended    bool
}

// add maps a block from a descriptor, which it closes.
func (p *peerBlocks) add(id uint32, size uint64, fd int) error {
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

// frame returns the first n bytes of a block.
func (p *peerBlocks) frame(id uint32, n uint64) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seg := p.segs[id]
	if seg == nil || n > uint64(len(seg.Bytes())) {
		return nil, fmt.Errorf("malformed message: it has %d bytes in the block %d, which has fewer", n, id)
	}
	return seg.Bytes()[:n], nil
}

// hold counts a message with frames in blocks.
func (p *peerBlocks) hold() {
	p.mu.Lock()
	p.messages++
	p.mu.Unlock()
}

// drop counts a message less. If the link has ended, the last message unmaps the blocks.
func (p *peerBlocks) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.messages--
	p.unmap()
}

// end records that the link has ended.
func (p *peerBlocks) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.unmap()
}

// unmap unmaps all blocks if nothing needs them. The caller holds mu.
func (p *peerBlocks) unmap() {
	if !p.ended || p.messages > 0 {
		return
	}
	for _, seg := range p.segs {
		seg.Close()
	}
	p.segs = nil
}

// shares reports whether the link passes frames in shared memory.
func (l *link) shares() bool {
	_, ok := l.conn.(*net.UnixConn)
	return ok
}

// allocate gives m frames of the given sizes, whose content is undefined. Long ones are in blocks if the link
// has them.
func (l *link) allocate(m *Message, sizes []int) {
	m.link = l
	var inline [maxFrames]int
	for i, n := range sizes {
		if inline[i] = n; n < sharedBytes || !l.shares() {
			continue
		}
		if b := l.own.take(n); b != nil {
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

// share moves the long frames of m to blocks of the link.
func (l *link) share(m *Message) *Message {
	if m.own != nil && m.link != l { // another process has taken the place of the peer
		c := m.Clone()
		m.Drop()
		m = c
	}
	if m.own != nil || !l.shares() || m.Bytes() < sharedBytes {
		return m
	}
	sizes := make([]int, len(m.Data))
	for i, d := range m.Data {
		sizes[i] = len(d)
	}
	c := &Message{Header: m.Header, Batch: m.Batch, size: m.size}
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
		m.Header.Frames[i].Block = b.id
		if !b.sent {
			m.Header.Frames[i].BlockBytes = uint64(len(b.seg.Bytes()))
			fds = append(fds, b.seg.FD())
		}
		m.link.own.fly(b)
	}
	return fds
}

// release tells the peer that this process no longer reads the blocks of a message that was received.
func (l *link) release(ids []uint32) {
	m := controlMessage(&pspb.Control{Command: pspb.Command_RELEASE, Blocks: ids})
	m.lazy = true
	_ = l.reply(m) // an ended link has no blocks
	l.theirs.drop()
}
