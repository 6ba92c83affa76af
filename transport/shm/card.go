package shm

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
)

const (
	cardVersion = 1
	tokenBytes  = 32
	// maxPathBytes is the longest path that a Unix socket can have: its address has 108 bytes and ends with a zero.
	maxPathBytes = 107
	// maxReasonBytes bounds the reason on the card of a rank that shares nothing.
	maxReasonBytes = 200
	// cardHeadBytes is what comes before the text of a card.
	cardHeadBytes = 1 + 1 + 4 + 4 + tokenBytes + 2
	// MaxCardBytes is the size of the largest Card.
	MaxCardBytes = cardHeadBytes + maxReasonBytes
)

// card is what a rank publishes about itself.
//
//	version u8 | kind u8 | uid u32 | pid u32 | token [32] | length of text u16 | text      (little-endian)
//
// The text is the path of the socket or, if kind is 1, why there is none.
type card struct {
	uid, pid uint32
	token    [tokenBytes]byte
	path     string
	reason   string // path is empty if and only if this is not
}

func (c *card) encode() []byte {
	kind, text := byte(0), c.path
	if c.reason != "" {
		kind, text = 1, c.reason[:min(len(c.reason), maxReasonBytes)]
	}
	b := append(make([]byte, 0, cardHeadBytes+len(text)), cardVersion, kind)
	b = binary.LittleEndian.AppendUint32(b, c.uid)
	b = binary.LittleEndian.AppendUint32(b, c.pid)
	b = append(b, c.token[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(text)))
	return append(b, text...)
}

// decodeCard reads what a peer published.
func decodeCard(b []byte) (*card, error) {
	if len(b) < cardHeadBytes || len(b) > MaxCardBytes {
		return nil, fmt.Errorf("card of %d bytes, want %d to %d", len(b), cardHeadBytes+1, MaxCardBytes)
	}
	if b[0] != cardVersion {
		return nil, fmt.Errorf("card of version %d, want %d", b[0], cardVersion)
	}
	c := &card{
		uid:   binary.LittleEndian.Uint32(b[2:]),
		pid:   binary.LittleEndian.Uint32(b[6:]),
		token: [tokenBytes]byte(b[10:]),
	}
	text := string(b[cardHeadBytes:])
	if n := int(binary.LittleEndian.Uint16(b[cardHeadBytes-2:])); n != len(text) || n == 0 {
		return nil, fmt.Errorf("card with %d bytes of text, says %d", len(text), n)
	}
	switch b[1] {
	case 0:
		// Not absolute could also be a name in the abstract namespace, which anybody can take.
		if len(text) > maxPathBytes || !filepath.IsAbs(text) {
			return nil, fmt.Errorf("card with socket %q, want an absolute path of at most %d bytes", text, maxPathBytes)
		}
		c.path = text
	case 1:
		c.reason = text
	default:
		return nil, fmt.Errorf("card of kind %d, want 0 or 1", b[1])
	}
	return c, nil
}
