package joblink

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/store"
)

// TestMember passes events to the launcher and rosters to a process.
func TestMember(t *testing.T) {
	kv := store.NewHashStore(store.Limits{})
	defer kv.Close()
	me := elastic.Member{Slot: elastic.Slot{Host: "h1", Index: 3}, Number: 2}
	m, members := NewMember(kv, me), NewMembers(kv)
	ctx, cancel := context.WithCancel(t.Context())
	var heard []MemberEvent
	ended := make(chan error)
	go func() {
		ended <- members.Listen(ctx, func(e MemberEvent) Answer {
			heard = append(heard, e)
			return Answer{Over: e.Kind == Done, Later: e.Kind == Building}
		})
	}()
	events := []MemberEvent{{Kind: Building}, {Kind: Ready}, {Kind: Synced, Generation: 4},
		{Kind: Leave, Why: "SIGTERM"}, {Kind: Done}}
	for i, e := range events {
		a, err := m.Tell(ctx, e)
		if over := e.Kind == Done; errors.Is(err, ErrOver) != over || err != nil && !over ||
			a.Later != (e.Kind == Building) {
			t.Fatalf("event %q: got %+v and error %v", e.Kind, a, err)
		}
		events[i].Member, events[i].Number = me, uint64(i+1)
		// Tell returns only when the launcher has handled the event.
		if got := slices.Clone(heard); !reflect.DeepEqual(got, events[:i+1]) {
			t.Errorf("got events %v, want %v", got, events[:i+1])
		}
	}
	for generation := range uint64(3) {
		if err := kv.Set(ctx, Place(generation+1)+"/root", nil); err != nil {
			t.Fatal(err)
		}
		want := &elastic.Roster{Generation: generation + 1, Members: []elastic.Member{me},
			Lost: generation == 1, Change: elastic.Added, Reason: "new"}
		if err := members.Publish(want); err != nil {
			t.Fatal(err)
		}
		got, err := m.Roster(ctx, generation)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %v and error %v, want %v", got, err, want)
		}
		keys, err := kv.Keys(ctx)
		keys = slices.DeleteFunc(keys, func(k string) bool { return !strings.HasPrefix(k, keyGenerations) })
		if want := []string{Place(generation+1) + "/root"}; err != nil || !slices.Equal(keys, want) {
			t.Errorf("got keys %q and error %v, want %q", keys, err, want)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := m.Roster(ctx, 3); err == nil {
		t.Error("waiting for a roster did not end with its context")
	}
}
