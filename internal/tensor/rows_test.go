package tensor_test

import (
	"testing"

	"github.com/gohvd/gohvd/internal/tensor"
)

// The parts of the ranks are contiguous and cover all rows. Their lengths differ by at most one row, and
// longer parts come first.
func TestRows(t *testing.T) {
	for n := 1; n <= 9; n++ {
		for rows := range int64(40) {
			next, last := int64(0), rows
			for i := range n {
				first, count := tensor.Rows(rows, n, i)
				if first != next || count > last || count < rows/int64(n) || count > rows/int64(n)+1 {
					t.Fatalf("rank %d of %d gets %d of %d rows from %d, after one with %d", i, n, count, rows,
						first, last)
				}
				next, last = first+count, count
			}
			if next != rows {
				t.Fatalf("%d ranks get %d rows, want %d", n, next, rows)
			}
		}
	}
}
