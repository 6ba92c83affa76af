package shm_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/ops/shm"
)

// counts returns the lengths of n blocks in the given round. The lengths differ, and some are 0.
func counts(n, round int) (c []int64) {
	lengths := []int64{0, 8, 40, 1000, 8000, 50_000, 72}
	for i := range n {
		c = append(c, lengths[(3*i+2*round+i*round)%len(lengths)])
	}
	return c
}

func sum(counts []int64) (total int64) {
	for _, c := range counts {
		total += c
	}
	return total
}

// buffer returns numBytes bytes of memory. It alternates between an arena and ordinary memory every two
// rounds, and neighbouring ranks get different kinds in the same round.
func (r *rank) buffer(round int, numBytes int64) []byte {
	if numBytes > 0 && (round/2+r.me)%2 == 0 {
		return r.mem.alloc(int(numBytes))
	}
	return aligned(int(numBytes))
}

// fill fills dst with the content of the block that one rank sends to another in the given round.
func fill(dst []byte, from, to, round int) {
	for i := range dst {
		dst[i] = byte(i + 31*from + 7*to + round)
	}
}

func TestBroadcast(t *testing.T) {
	for n := 1; n <= 5; n++ {
		run(t, n, shm.Config{StageBytes: 4 << 10}, func(r *rank) error {
			for round, size := range []int64{0, 1, 63, 64, 4096, 4097, 50_001, 8191} {
				for root := range n {
					buf, want := r.buffer(round+root, size), aligned(int(size))
					fill(want, root, 0, round)
					if root == r.me {
						copy(buf, want)
					}
					if err := r.Broadcast(t.Context(), message.Direct, root, buf); err != nil {
						return err
					}
					if !bytes.Equal(buf, want) {
						return fmt.Errorf("%d bytes from %d: %s", size, root, difference(buf, want))
					}
				}
			}
			return nil
		})
	}
}

func TestAlltoall(t *testing.T) {
	for n := 1; n <= 5; n++ {
		run(t, n, shm.Config{StageBytes: 4 << 10}, func(r *rank) error {
			gives := func(rank, round int) []int64 {
				if round == 5 {
					return make([]int64, n)
				}
				c := counts(n+1, round+rank)
				return c[rank%2:][:n]
			}
			for round := range 14 {
				// In each round one rank in three runs its operation step by step, and the other ranks block.
				r.Steps = (round+r.me)%3 == 0
				c := gives(r.me, round)
				in := r.buffer(round, sum(c))
				at := int64(0)
				for to, size := range c {
					fill(in[at:at+size], r.me, to, round)
					at += size
				}
				var want []byte
				var wantCounts []int64
				for from := range n {
					block := make([]byte, gives(from, round)[r.me])
					fill(block, from, r.me, round)
					want = append(want, block...)
					wantCounts = append(wantCounts, int64(len(block)))
				}
				var out []byte
				err := r.Alltoall(t.Context(), message.Direct, in, c, func(got []int64) ([]byte, error) {
					if !slices.Equal(got, wantCounts) {
						return nil, fmt.Errorf("got blocks of %v bytes, want %v", got, wantCounts)
					}
					out = r.buffer(round+1, sum(got))
					return out, nil
				})
				if err != nil {
					return err
				}
				if !bytes.Equal(out, want) {
					return fmt.Errorf("round %d: %s", round, difference(out, want))
				}
			}
			return nil
		})
	}
}

// Three ranks run 300 rounds of operations of several kinds and sizes, one after another and at very
// different speeds. Every operation produces the correct result.
func TestMixture(t *testing.T) {
	run(t, 3, shm.Config{StageBytes: 2 << 10}, func(r *rank) error {
		for round := range 300 {
			small, large := input(tensor.Int32, r.me, round, 5), input(tensor.Int32, r.me, round,
				400+round*17)
			c := []int64{int64(round), 64, 300}
			gathered := aligned(int(sum(c)))
			fill(gathered[sum(c[:r.me]):][:c[r.me]], r.me, 0, round)
			err := errors.Join(
				r.Allreduce(t.Context(), message.Direct, tensor.Int32, tensor.Sum, small),
				r.Allgather(t.Context(), message.Direct, gathered, c),
				r.Allreduce(t.Context(), message.Direct, tensor.Int32, tensor.Max, large),
			)
			if err != nil {
				return err
			}
			for i, size := range c {
				want := aligned(int(size))
				fill(want, i, 0, round)
				if got := gathered[sum(c[:i]):][:size]; !bytes.Equal(got, want) {
					return fmt.Errorf("round %d, block %d: %s", round, i, difference(got, want))
				}
			}
			if want := reduced(tensor.Int32, tensor.Sum, 3, round, 5); !bytes.Equal(small, want) {
				return fmt.Errorf("round %d: %s", round, difference(small, want))
			}
			if want := reduced(tensor.Int32, tensor.Max, 3, round, 400+round*17); !bytes.Equal(large, want) {
				return fmt.Errorf("round %d: %s", round, difference(large, want))
			}
		}
		return nil
	})
}
