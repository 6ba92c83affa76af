package p2p

import "testing"

// The numbers of the kinds of frames are part of the protocol, so none may change.
func TestKindsOfFrames(t *testing.T) {
	for i, kind := range []uint8{eager, offer, share, accept, finish, data, credit, bye} {
		if int(kind) != i+1 {
			t.Errorf("got kind %d, want %d", kind, i+1)
		}
	}
}
