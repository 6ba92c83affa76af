package bootstrap

import (
	"testing"
	"time"
)

func TestBlocks(t *testing.T) {
	for n := 1; n <= 40; n++ {
		for k := 1; k <= n; k++ {
			end, longer := 0, 0
			for i := range k {
				b := blockOf(i, k, n)
				size := b.end - b.first
				if b.first != end || size != n/k && size != n/k+1 {
					t.Fatalf("n=%d k=%d: block %d is %v, the one before ends at %d", n, k, i, b, end)
				}
				if size > n/k {
					longer++
					if i >= n%k {
						t.Errorf("n=%d k=%d: block %d is longer", n, k, i)
					}
				}
				for rank := b.first; rank < b.end; rank++ {
					if got := rootOf(rank, k, n); got != i {
						t.Errorf("n=%d k=%d: root of rank %d is %d, want %d", n, k, rank, got, i)
					}
				}
				end = b.end
			}
			if end != n || longer != n%k {
				t.Errorf("n=%d k=%d: blocks end at %d, %d of them are longer", n, k, end, longer)
			}
		}
	}
}

func TestStagger(t *testing.T) {
	for _, c := range []struct {
		b    block
		rank int
		want time.Duration
	}{
		{block{0, 256}, 255, 0},
		{block{0, 257}, 0, 0},
		{block{0, 257}, 256, 256 * time.Second / 7000},
		{block{7000, 20000}, 14000, time.Second},
	} {
		if got := c.b.stagger(c.rank); got != c.want {
			t.Errorf("rank %d of %v waits %v, want %v", c.rank, c.b, got, c.want)
		}
	}
}
