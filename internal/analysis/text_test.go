package analysis

import (
	"testing"
	"time"
)

func TestSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 ms", 999 * time.Millisecond: "999 ms", time.Second: "1.0 s", 599 * time.Second: "599.0 s",
		10 * time.Minute: "10m0s", 90*time.Minute + 400*time.Millisecond: "1h30m0s",
	} {
		if got := span(d); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
}
