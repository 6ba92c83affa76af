package control_test

import (
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
)

// star opens the links of a job without leaders.
func star(tb testing.TB, meshes []transport.Mesh) []*control.Links {
	tb.Helper()
	links := make([]*control.Links, len(meshes))
	var opened sync.WaitGroup
	for r, mesh := range meshes {
		mesh.OnNotify(func() {})
		opened.Go(func() {
			var err error
			if links[r], err = control.Open(tb.Context(), control.Config{Rank: topo.Rank(r),
				Size: len(meshes), Mesh: mesh, Sent: func() {}}); err != nil {
				tb.Error(err)
			}
		})
	}
	opened.Wait()
	if tb.Failed() {
		tb.FailNow()
	}
	return links
}

// Rank 0 of many receives every frame of every rank in order, whichever ranks send and when, and the end of a
// connection, by polling and after it has parked.
func TestLinksOfMany(t *testing.T) {
	t.Run("TCP", func(t *testing.T) { testLinksOfMany(t, secret.Secret{}) })
	key, _ := secret.New()
	t.Run("TLS", func(t *testing.T) { testLinksOfMany(t, key.Encrypted()) })
}

func testLinksOfMany(t *testing.T, key secret.Secret) {
	const peers, rounds = 12, 200
	meshes := testcluster.SecretTCPMeshes(t, 1+peers, key)
	links := star(t, meshes)
	notified, parks := make(chan struct{}, 1), true
	meshes[0].OnNotify(func() {
		select {
		case notified <- struct{}{}:
		default:
		}
	})
	rng := rand.New(rand.NewPCG(1, 0))
	var sent, got [1 + peers]uint32
	ended := topo.Rank(0)
	deadline := time.Now().Add(time.Minute)
	poll := func(done func() bool) {
		for !done() {
			if time.Now().After(deadline) {
				t.Fatalf("rank 0 got %v frames of %v", got, sent)
			}
			switch {
			case links[0].Poll() || links[0].Unread():
			case parks && meshes[0].Park():
				select {
				case <-notified:
				case <-time.After(time.Until(deadline)): // reported above
				}
				meshes[0].Unpark()
			default:
				runtime.Gosched()
				continue
			}
			if err := links[0].Receive(func(ev control.Event) error {
				if ev.Err != nil {
					ended = ev.From
					return nil
				}
				if n := binary.LittleEndian.Uint32(ev.Frame); n != got[ev.From] {
					t.Errorf("rank %d: got frame %d, want %d", ev.From, n, got[ev.From])
				}
				got[ev.From]++
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range rounds {
		parks = i%2 == 0
		for range rng.IntN(2 * peers) {
			r := 1 + rng.IntN(peers)
			frame := binary.LittleEndian.AppendUint32(nil, sent[r])
			if err := links[r].Up(append(frame, make([]byte, rng.IntN(3000))...)); err != nil {
				t.Fatal(err)
			}
			sent[r]++
		}
		if rng.IntN(2) == 0 {
			poll(func() bool { return got == sent })
		}
	}
	poll(func() bool { return got == sent })
	if err := meshes[5].Close(); err != nil {
		t.Fatal(err)
	}
	poll(func() bool { return ended == 5 })
}
