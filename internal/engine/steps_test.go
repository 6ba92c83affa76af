package engine_test

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"github.com/gohvd/gohvd/internal/engine"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/tensorqueue"
)

// A driver starts an operation of many steps, and Drive returns because another rank is late for a step. Then
// the lane executes the remaining steps.
func TestHelpLeavesSteps(t *testing.T) {
	o := testcluster.Options{Ranks: 2, Transport: testcluster.SHM, Config: func(cfg *engine.Config) {
		cfg.Spin = time.Millisecond
	}}
	release := make(chan chan struct{}, 1) // carries the channel on which the lane of rank 1 blocks
	testcluster.Run(t, o, func(r *testcluster.Rank) {
		const numBytes = 128 << 10
		buf := make([]byte, numBytes)
		want := make([]byte, numBytes)
		// The lane must take over without waiting for a heartbeat. There are so many iterations that the test
		// times out if each of them waits for a heartbeat.
		for i := range 3 * oftenEnough {
			for at := 0; at < numBytes; at += 8 {
				binary.NativeEndian.PutUint64(buf[at:], uint64(at+i)*uint64(r.Rank+1))
				binary.NativeEndian.PutUint64(want[at:], uint64(at+i)*3)
			}
			done := make(chan error, 2)
			submit := func(e *tensorqueue.Entry, then func()) {
				e.Done = func(err error) {
					done <- err
					then()
				}
				if err := r.Engine.Queue(e); err != nil {
					r.Fatalf("%v", err)
				}
			}
			hold := gather("hold", func(n int) []byte { return make([]byte, n) })
			x := sum("x", buf)
			if r.Rank == 0 {
				submit(hold, func() {})
				r.Engine.NotifyLater()
				r.Must(<-done)
				submit(x, func() {})
				r.Engine.Drive(t.Context(), never)
				if len(done) > 0 {
					r.Errorf("done without rank 1")
				}
				close(<-release)
			} else {
				held := make(chan struct{})
				release <- held
				submit(hold, func() { <-held })
				r.Engine.NotifyLater()
				r.Must(<-done)
				submit(x, func() {})
				r.Engine.NotifyLater()
			}
			r.Must(<-done)
			if !bytes.Equal(buf, want) {
				r.Errorf("step %d: wrong sum", i)
			}
		}
	})
}
