package shm

import (
	"errors"
	"fmt"
	"path/filepath"
)

const (
	tokenBytes = 32
	// maxPathBytes is the maximum length of the path of a Unix socket. The address has room for 108 bytes,
	// and the last byte must be zero.
	maxPathBytes = 107
	// maxReasonBytes is the maximum length of Offer.Reason.
	maxReasonBytes = 200
)

// Offer contains what the other ranks need to know to share memory with a rank. The zero Offer means that the
// rank shares no memory.
type Offer struct {
	UID uint32 // the user id of the rank's process
	// Token is a secret. A process that knows it and runs as the same user can impersonate the rank until the
	// peers of the rank have connected.
	Token []byte
	// Socket is the path of the rank's socket. If the rank cannot share memory, Socket is empty and Reason
	// says why.
	Socket, Reason string
}

// check returns an error if a peer with the offer o cannot share memory. The text of the error begins with a
// verb, so that the caller can put the rank before it.
func (o *Offer) check() error {
	switch {
	case o.Reason != "":
		return errors.New(o.Reason)
	case o.Socket == "":
		return errors.New("it offers no shared memory")
	case len(o.Token) != tokenBytes:
		return fmt.Errorf("its token has %d bytes, want %d", len(o.Token), tokenBytes)
	case len(o.Socket) > maxPathBytes || !filepath.IsAbs(o.Socket):
		// A path that is not absolute may be a name in the abstract namespace, where any user can create
		// sockets.
		return fmt.Errorf("its socket is %q, want an absolute path of at most %d bytes", o.Socket,
			maxPathBytes)
	}
	return nil
}
