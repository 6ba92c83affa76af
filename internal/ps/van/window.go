package van

import (
	"fmt"
	"time"
)

// windowMessages is the maximum number of messages to a node that are not acknowledged. So a receiver needs
// only as many bits to recognize duplicates.
const windowMessages = 1024

// inWindow recognizes duplicates among the messages of one sender. Its memory is fixed. The zero value is
// ready.
type inWindow struct {
	floor uint64 // number of messages from the first on that have all arrived
	bits  [windowMessages / 64]uint64
}

// arrive records the message with the given sequence number. It reports whether the message is new. A sender
// that obeys the protocol never gets an error.
func (w *inWindow) arrive(sequence uint64) (fresh bool, err error) {
	if sequence <= w.floor {
		return false, nil
	}
	if sequence > w.floor+windowMessages {
		return false, fmt.Errorf("got message %d before message %d, want at most %d messages in flight",
			sequence, w.floor+1, windowMessages)
	}
	if w.get(sequence) {
		return false, nil
	}
	w.bits[sequence/64%uint64(len(w.bits))] |= 1 << (sequence % 64)
	for w.get(w.floor + 1) {
		w.floor++
		w.bits[w.floor/64%uint64(len(w.bits))] &^= 1 << (w.floor % 64)
	}
	return true, nil
}

func (w *inWindow) get(sequence uint64) bool {
	return w.bits[sequence/64%uint64(len(w.bits))]&(1<<(sequence%64)) != 0
}

// flight is a message that is queued, or was sent and is not acknowledged.
type flight struct {
	m     *Message
	reply bool // counts as a reply in the link's queue
	bytes int  // size, as counted in queuedBytes or replyBytes

	// The following fields are used only for messages with a sequence number. queued says that the message
	// is to be sent again.
	queued, writing, acked bool
	tries                  int
	due                    time.Time // when the message is sent again
}

// outWindow holds the messages to one receiver that are not acknowledged. The zero value is ready.
type outWindow struct {
	base, next uint64 // base+1 is the oldest message in the window; next is the last sequence number
	flights    [windowMessages]*flight
}

// full reports whether no further message may be sent.
func (w *outWindow) full() bool { return w.next-w.base == windowMessages }

// empty reports whether all messages are acknowledged.
func (w *outWindow) empty() bool { return w.next == w.base }

// addFlight assigns the next sequence number to f. The window must not be full.
func (w *outWindow) addFlight(f *flight) {
	w.next++
	f.m.Header.Sequence = w.next
	w.flights[w.next%windowMessages] = f
}

// ack removes the message with the given sequence number and returns it. If the window does not have it, ack
// returns nil.
func (w *outWindow) ack(sequence uint64) *flight {
	if sequence <= w.base || sequence > w.next {
		return nil
	}
	f := w.flights[sequence%windowMessages]
	w.flights[sequence%windowMessages] = nil
	for w.base < w.next && w.flights[(w.base+1)%windowMessages] == nil {
		w.base++
	}
	return f
}

// late calls again for each message that is due at now and not queued, and sets when it is due next: after
// twice the time each try, up to 32 times the timeout.
func (w *outWindow) late(now time.Time, timeout time.Duration, again func(*flight)) {
	for s := w.base + 1; s <= w.next; s++ {
		f := w.flights[s%windowMessages]
		if f == nil || f.queued || f.writing || now.Before(f.due) {
			continue
		}
		f.tries++
		f.due = now.Add(timeout << min(f.tries, 5))
		again(f)
	}
}
