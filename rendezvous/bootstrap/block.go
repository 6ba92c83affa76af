package bootstrap

import "time"

// block is the ranks of one root of a job: those from first up to, not including, end.
type block struct{ first, end int }

// blockOf is the block of root i of k in a job of n ranks, k at most n. The first n mod k blocks are one rank larger.
func blockOf(i, k, n int) block {
	q, m := n/k, n%k
	first := i*q + min(i, m)
	end := first + q
	if i < m {
		end++
	}
	return block{first, end}
}

// rootOf is the root of rank among k for n ranks.
func rootOf(rank, k, n int) int {
	q, m := n/k, n%k
	if rank < m*(q+1) {
		return rank / (q + 1)
	}
	return m + (rank-m*(q+1))/q
}

func (b block) has(rank int) bool { return rank >= b.first && rank < b.end }

const (
	staggerAbove = 256  // ranks of a root
	staggerRate  = 7000 // connections a second; both as in NCCL 2.23
)

// stagger is how long rank waits before it connects to the root of its block.
func (b block) stagger(rank int) time.Duration {
	if b.end-b.first <= staggerAbove {
		return 0
	}
	return time.Duration(rank-b.first) * time.Second / staggerRate
}
