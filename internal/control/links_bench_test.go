package control_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/control"
	"github.com/gohvd/gohvd/internal/testcluster"
)

// BenchmarkFrames measures the processor time that rank 0 needs to receive a frame from each of its
// connections and to send one to each, over TCP on loopback. It does not wait for the frames: all of them
// have arrived, or one of them ("alone"), as in a turn of its loop that finds a single frame.
func BenchmarkFrames(b *testing.B) {
	for _, peers := range []int{7, 20, 52} {
		for _, arrived := range []string{"together", "alone"} {
			b.Run(fmt.Sprintf("connections=%d/%s", peers, arrived), func(b *testing.B) {
				at := peers
				if arrived == "alone" {
					at = 1
				}
				benchmarkFrames(b, peers, at)
			})
		}
	}
}

func benchmarkFrames(b *testing.B, peers, atOnce int) {
	runtime.LockOSThread() // for threadTime
	defer runtime.UnlockOSThread()
	links := star(b, testcluster.TCPMeshes(b, 1+peers))
	frame := make([]byte, 64)
	receive := func(r, want int) {
		for got := 0; got < want; {
			if err := links[r].Receive(func(ev control.Event) error {
				got++
				return ev.Err
			}); err != nil {
				b.Fatal(err)
			}
		}
	}
	var in, out time.Duration
	for b.Loop() {
		for first := 1; first <= peers; first += atOnce {
			for r := first; r < first+atOnce; r++ {
				if err := links[r].Up(frame); err != nil {
					b.Fatal(err)
				}
			}
			began := threadTime()
			receive(0, atOnce)
			in += threadTime() - began
		}
		began := threadTime()
		links[0].DownAll(frame, nil)
		out += threadTime() - began
		for r := 1; r <= peers; r++ {
			receive(r, 1)
		}
	}
	frames := float64(b.N * peers)
	b.ReportMetric(float64(in)/1e3/frames, "us/frame-in")
	b.ReportMetric(float64(out)/1e3/frames, "us/frame-out")
}

// threadTime returns the processor time of this thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}
