package shm

import (
	"errors"
	"fmt"
	"path/filepath"
)

const (
	tokenBytes = 32
	// maxPathBytes is the longest path that a Unix socket can have: its address has 108 bytes and ends with a
	// zero.
	maxPathBytes = 107
	// maxReasonBytes bounds the reason why a rank shares no memory.
	maxReasonBytes = 200
)

// Offer is what the other ranks must know to share memory with a rank. The zero Offer is none.
type Offer struct {
	UID uint32 // the user id of the rank's process
	// Token is a secret: a process that has it, and runs as the same user, can take the place of the rank
	// before its peers have connected.
	Token []byte
	// Socket is the path of the rank's socket. It is empty if the rank cannot share memory; Reason says why.
	Socket, Reason string
}

// check checks what a peer published. Its error also says that the peer cannot share.
func (o *Offer) check() error {
	switch {
	case o.Reason != "":
		return errors.New(o.Reason)
	case o.Socket == "":
		return errors.New("offers no memory")
	case len(o.Token) != tokenBytes:
		return fmt.Errorf("has a token of %d bytes, want %d", len(o.Token), tokenBytes)
	case len(o.Socket) > maxPathBytes || !filepath.IsAbs(o.Socket):
		// A path that is not absolute can be a name in the abstract namespace, at which any user can listen.
		return fmt.Errorf("has its socket at %q, want an absolute path of at most %d bytes", o.Socket,
			maxPathBytes)
	}
	return nil
}
