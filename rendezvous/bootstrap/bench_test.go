package bootstrap

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"
)

// BenchmarkJoin has jobs of so many ranks meet, in one process, over loopback: the root, a listener for every rank, and three
// connections. It reports the time until the last has joined and the messages that a rank sends, pieces included.
func BenchmarkJoin(b *testing.B) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		b.Fatal(err)
	}
	files.Cur = files.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		b.Fatal(err)
	}
	for _, size := range []int{64, 256, 1024} {
		for _, k := range []int{1, 4} {
			b.Run(fmt.Sprintf("ranks=%d/roots=%d", size, k), func(b *testing.B) {
				// A rank has a listener and both ends of two connections here, and there is some room for more.
				if need := uint64(8*size + 100); files.Cur < need {
					b.Skipf("%d files may be open, want %d", files.Cur, need)
				}
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
				defer cancel()
				sent := 0
				for b.Loop() {
					sent = joinOnce(b, ctx, size, k)
				}
				b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/job")
				b.ReportMetric(float64(sent)/float64(size), "messages/rank")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// joinOnce returns how many messages all ranks have sent.
func joinOnce(b *testing.B, ctx context.Context, size, k int) (sent int) {
	ids, roots := openRoots(b, ctx, k, Config{}, defaultLimits)
	rings := make([]*Ring, size)
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			var err error
			if rings[rank], err = Join(ctx, ids, configOf(rank, size)); err != nil {
				b.Error(err)
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	b.StopTimer()
	defer b.StartTimer()
	for _, r := range rings {
		sent += r.sent
		r.Close()
	}
	for _, r := range roots {
		r.Close()
	}
	return sent
}
