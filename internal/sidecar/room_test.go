package sidecar

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/tensor"
)

// ofRank returns the number that rank r sends at position i.
func ofRank(r, i int) int32 { return int32(100*r + i) }

// gatherings returns the operations of rank r in a job of two ranks. The size of each result depends on the
// inputs of both ranks. Each rank sends n numbers to each rank.
func gatherings(r, n int) []*sidecarpb.Operation {
	rows := int64(n)
	return []*sidecarpb.Operation{
		{Name: "allgather", Kind: 2, Dtype: 5,
			Tensors: []*sidecarpb.Tensor{{Shape: []int64{rows}, Input: at(r, 0, 4*n)}}},
		{Name: "alltoall", Kind: 4, Dtype: 5, Splits: []int64{rows, rows},
			Tensors: []*sidecarpb.Tensor{{Shape: []int64{2 * rows}, Input: at(r, 0, 8*n)}}},
	}
}

// TestOutputOfAnotherSize lets one client provide an output of the wrong size. Only this client must get an
// error, and the job must continue.
func TestOutputOfAnotherSize(t *testing.T) {
	for _, backend := range []string{"shm", "tcp"} {
		t.Run(backend, func(t *testing.T) {
			all(job(t, 2, "HOROVOD_CPU_OPERATIONS", backend), func(r int, s *Server) {
				c := connect(t, s)
				c.Init()
				b := c.Arena(uint32(r+1), 1<<20)
				x := tensor.View[int32](b)
				for _, o := range gatherings(r, 1) {
					for _, size := range []int{0, 4, 12} {
						x[0], x[1] = ofRank(r, 0), ofRank(r, 1)
						const out = 1 << 16
						result := tensor.View[int32](b[out:])
						result[0], result[1], result[2] = -1, -1, -1
						o.Tensors[0].Output = at(r, out, 8)
						if r == 1 {
							o.Tensors[0].Output = at(r, out, size)
						}
						a := c.Run(o)
						if r == 1 {
							refused(t, o.Name, a, classMismatch,
								"the result has 8 bytes, but the output has ")
							if result[0] != -1 || result[1] != -1 || result[2] != -1 {
								t.Errorf("%s: %v was written where there is no room", o.Name, result[:3])
							}
						} else if a.Error != nil || result[0] != ofRank(0, 0) || result[1] != ofRank(1, 0) {
							t.Errorf("%s: got %v and %v", o.Name, result[:2], a)
						}
						c.MustRun(sidecartest.Sum("after", uint32(r+1), 0, 2))
					}
				}
				// The rows of this operation have no elements, so the ranks exchange only the numbers of
				// rows.
				rows := &sidecarpb.Operation{Name: "rows", Kind: 4, Dtype: 5, Tensors: []*sidecarpb.Tensor{
					{Shape: []int64{2, 0}, Input: at(r, 0, 0), Output: at(r, 0, 4*r)},
				}}
				if a := c.Run(rows); r == 1 {
					refused(t, "rows", a, classMismatch, "the result has 0 bytes, but the output has 4 bytes")
				} else if a.Error != nil {
					t.Error(a)
				}
				c.Shutdown()
				c.bye()
			})
		})
	}
}

// TestNoRoomForAResult lets the allocation of a result fail. The error must give the reason, and the job must
// continue.
func TestNoRoomForAResult(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	limit := func(most uint64) {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: most, Max: old.Max}); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() { limit(old.Cur) })
	// Each rank sends numElems elements, so that the result is larger than the memory that the sidecar has
	// kept from earlier results.
	const numElems = 10 << 20
	all(job(t, 2), func(r int, s *Server) {
		c := connect(t, s)
		c.Init()
		c.Arena(uint32(r+1), 8*numElems)
		barrier := func() { c.MustRun(&sidecarpb.Operation{Kind: 6}) }
		for _, o := range gatherings(r, numElems) {
			barrier()
			limit(1 << 10) // applies to both ranks, which are in this process
			barrier()
			refused(t, o.Name, c.Run(o), classInternal, "RLIMIT_FSIZE")
			barrier()
			limit(old.Cur)
			barrier()
			a := c.MustRun(o)
			m := a.Results[0].Memory
			c.Send(sidecartest.Free(m.Arena, m.Offset))
		}
		c.Shutdown()
		c.bye()
	})
}
