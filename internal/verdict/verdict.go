// Package verdict carries the surviving ranks' finding of who failed to the launcher, through the job's
// store.
//
// The launcher cannot tell by itself: a rank that gave up because of a dead neighbour may be reaped before the
// neighbour is. There is one verdict per epoch (NEGOTIATION §7); the first rank to publish it wins.
package verdict

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/gohvd/gohvd/topo"
)

// Key is where the verdict stands in the job's store.
const Key = "verdict"

const (
	// MaxReasonBytes bounds the reason: Publish cuts a longer one.
	MaxReasonBytes = 4 << 10
	// maxBytes bounds the encoding: room for a reason of control characters (6 bytes each) and
	// some 4000 ranks.
	maxBytes = 64 << 10
)

// ErrMalformed says that the store holds something else than a verdict.
var ErrMalformed = errors.New("malformed verdict")

// Verdict says which ranks ended an epoch.
type Verdict struct {
	// Epoch is the one that failed.
	Epoch uint64 `json:"epoch"`
	// Ranks are the ones that failed: rarely several, never none.
	Ranks []topo.Rank `json:"ranks"`
	// Reason is a text for people, at most MaxReasonBytes of UTF-8.
	Reason string `json:"reason"`
}

// Writer is the part of a store that Publish needs. A nil expected value means that the key must not exist;
// actual is the value after the call.
type Writer interface {
	CompareAndSet(ctx context.Context, key string, expected, desired []byte) (actual []byte, swapped bool, err error)
}

// Reader is the part of a store that Read needs. Get waits until the key exists.
type Reader interface {
	Get(ctx context.Context, key string) ([]byte, error)
}

// Publish writes v unless the store has a verdict of the same or a later epoch, which is left as it is. A
// malformed one is replaced.
func Publish(ctx context.Context, kv Writer, v Verdict) error {
	if len(v.Reason) > MaxReasonBytes {
		v.Reason = v.Reason[:MaxReasonBytes]
	}
	v.Reason = strings.ToValidUTF8(v.Reason, "")
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("verdict: publish: %w", err)
	}
	if _, err := decode(text); err != nil {
		return fmt.Errorf("verdict: publish: %w", err)
	}
	var expected []byte
	for {
		actual, swapped, err := kv.CompareAndSet(ctx, Key, expected, text)
		if err != nil {
			return fmt.Errorf("verdict: publish: %w", err)
		}
		if swapped {
			return nil
		}
		if there, err := decode(actual); err == nil && there.Epoch >= v.Epoch {
			return nil
		}
		if expected = actual; expected == nil {
			expected = []byte{} // the key exists, so nil would never swap
		}
	}
}

// Read waits for a verdict until ctx ends.
func Read(ctx context.Context, kv Reader) (Verdict, error) {
	text, err := kv.Get(ctx, Key)
	if err != nil {
		return Verdict{}, fmt.Errorf("verdict: read: %w", err)
	}
	v, err := decode(text)
	if err != nil {
		return Verdict{}, fmt.Errorf("verdict: read: %w", err)
	}
	return v, nil
}

func decode(text []byte) (Verdict, error) {
	if len(text) > maxBytes {
		return Verdict{}, fmt.Errorf("%w: got %d bytes, want at most %d", ErrMalformed, len(text), maxBytes)
	}
	var v Verdict
	if err := json.Unmarshal(text, &v); err != nil {
		return Verdict{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	switch {
	case len(v.Ranks) == 0:
		return Verdict{}, fmt.Errorf("%w: got no ranks, want at least one", ErrMalformed)
	case len(v.Reason) > MaxReasonBytes:
		return Verdict{}, fmt.Errorf("%w: got a reason of %d bytes, want at most %d", ErrMalformed, len(v.Reason), MaxReasonBytes)
	}
	for _, r := range v.Ranks {
		if r < 0 {
			return Verdict{}, fmt.Errorf("%w: got rank %d, want 0 or more", ErrMalformed, r)
		}
	}
	return v, nil
}
