package joblink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/store"
)

// In an elastic job, the launcher decides which processes are the ranks of a generation, and the processes
// tell it what they do. The newest roster is a value of the store, which each process watches.
const (
	keyRoster  = "joblink/roster"  // the newest roster; exists only in an elastic job
	keyMembers = "joblink/members" // queue of what processes say
	// keyGenerations begins the keys of the ranks of a generation.
	keyGenerations = "generation/"
	keyHeard       = "joblink/heard/" // and the text of a member: the answer to its last event
)

// Place returns the prefix of the keys with which the ranks of a generation meet, in the launcher's store.
func Place(generation uint64) string { return keyGenerations + strconv.FormatUint(generation, 10) }

// ErrOver is returned by Member.Tell if the launcher ends the job.
var ErrOver = errors.New("the launcher ends the job")

// EventKind is what a process of an elastic job tells the launcher.
type EventKind string

const (
	// Building says that the process has called Init, and that its program makes the model afterwards. If
	// there is no roster yet, it is the same as Ready.
	Building EventKind = "building"
	// Ready says that the process can become a rank or, if it is one, that it has got a roster after the
	// first.
	Ready EventKind = "ready"
	// Synced says that all ranks of the generation have the state of the training.
	Synced EventKind = "synced"
	// Leave says that the process wants to leave after its current step.
	Leave EventKind = "leave"
	// Done says that the training has returned in the process.
	Done EventKind = "done"
	// Again says that another training begins in the process after Done.
	Again EventKind = "again"
)

// MemberEvent is what a process of an elastic job has told.
type MemberEvent struct {
	Member elastic.Member `json:"member"`
	Kind   EventKind      `json:"kind"`
	// Generation and Stopped belong to Synced. Stopped is how long this rank has not trained since the
	// generation before, or 0 in the first one.
	Generation uint64        `json:"generation,omitempty"`
	Stopped    time.Duration `json:"stopped,omitempty"`
	// Why belongs to Leave.
	Why string `json:"why,omitempty"`
	// Number counts the events of the process. Tell sets it.
	Number uint64 `json:"number"`
}

// Answer is what the launcher answers to an event.
type Answer struct {
	Number uint64 `json:"number"`         // of the event; Listen sets it
	Over   bool   `json:"over,omitempty"` // the launcher ends the job
	// Later belongs to Building: there are ranks already, so the process becomes one only after it is ready.
	Later bool `json:"later,omitempty"`
}

// Member is the connection of a process of an elastic job to its launcher.
type Member struct {
	kv store.Store
	me elastic.Member

	mu   sync.Mutex // held by Tell, because there is one answer at a time
	told uint64
}

// NewMember returns the connection of the process me. kv is a client of the launcher's store, which the
// caller must close.
func NewMember(kv store.Store, me elastic.Member) *Member { return &Member{kv: kv, me: me} }

// Roster waits until there is a roster of a later generation than the given one, and returns the newest.
func (m *Member) Roster(ctx context.Context, after uint64) (*elastic.Roster, error) {
	var text []byte
	for {
		next, err := m.kv.Watch(ctx, keyRoster, text)
		if err != nil {
			return nil, fmt.Errorf("joblink: waiting for the ranks of generation %d: %w", after+1, err)
		}
		r, err := decodeRoster(next)
		if err != nil {
			return nil, err
		}
		if text = next; r.Generation > after {
			return r, nil
		}
	}
}

// Tell tells the launcher an event, and returns when the launcher has handled it. So a process that ends
// after Done does not seem to have failed.
func (m *Member) Tell(ctx context.Context, e MemberEvent) (a Answer, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.told++
	e.Member, e.Number = m.me, m.told
	text, err := json.Marshal(e)
	if err != nil {
		return a, err
	}
	if err := m.kv.Push(ctx, keyMembers, text); err != nil {
		return a, fmt.Errorf("joblink: %v: telling the launcher %q: %w", m.me, e.Kind, err)
	}
	var heard []byte
	for {
		a = Answer{}
		if heard, err = m.kv.Watch(ctx, keyHeard+m.me.Text(), heard); err == nil {
			err = json.Unmarshal(heard, &a)
		}
		switch {
		case err != nil:
			return a, fmt.Errorf("joblink: %v: waiting until the launcher has handled %q: %w", m.me, e.Kind, err)
		case a.Number == e.Number && a.Over:
			return a, fmt.Errorf("joblink: %v: telling the launcher %q: %w", m.me, e.Kind, ErrOver)
		case a.Number == e.Number:
			return a, nil
		}
	}
}

func decodeRoster(text []byte) (*elastic.Roster, error) {
	r := new(elastic.Roster)
	err := json.Unmarshal(text, r)
	if err == nil && (r.Generation == 0 || len(r.Members) == 0) {
		err = fmt.Errorf("got generation %d with %d ranks, want at least 1", r.Generation, len(r.Members))
	}
	if err != nil {
		return nil, fmt.Errorf("joblink: malformed list of ranks: %w", err)
	}
	return r, nil
}

func decodeEvent(text []byte) (e MemberEvent, err error) {
	err = json.Unmarshal(text, &e)
	return e, err
}

// Members is the launcher's end of the connections to the processes of an elastic job.
type Members struct {
	kv *store.HashStore
}

// NewMembers returns the launcher's end in the launcher's store.
func NewMembers(kv *store.HashStore) *Members { return &Members{kv} }

// Publish makes r the newest roster, and removes what the ranks of others have left in the store.
func (m *Members) Publish(r *elastic.Roster) error {
	ctx := context.Background()
	text, err := json.Marshal(r)
	if err == nil {
		err = m.kv.Set(ctx, keyRoster, text)
	}
	if err != nil {
		return err
	}
	keys, err := m.kv.Keys(ctx)
	for _, k := range keys {
		if strings.HasPrefix(k, keyGenerations) && !strings.HasPrefix(k, Place(r.Generation)+"/") {
			_, deleted := m.kv.Delete(ctx, k)
			err = errors.Join(err, deleted)
		}
	}
	return err
}

// Listen calls handle with each event of the processes, and sends the process the answer, until ctx ends.
// Then it returns nil.
func (m *Members) Listen(ctx context.Context, handle func(MemberEvent) Answer) error {
	for {
		text, err := m.kv.Pop(ctx, keyMembers)
		if err != nil {
			return unlessOver(ctx, err)
		}
		e, err := decodeEvent(text)
		if err != nil {
			continue
		}
		a := handle(e)
		a.Number = e.Number
		if text, err = json.Marshal(a); err != nil {
			return err
		}
		err = m.kv.Set(ctx, keyHeard+e.Member.Text(), text)
		if err != nil && !errors.Is(err, store.ErrLimit) {
			return unlessOver(ctx, err)
		}
	}
}
