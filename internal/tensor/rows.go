package tensor

// Rows returns the part of rows that rank i of n gets in a reducescatter: count of them from first on. The parts are as even
// as can be, the first ranks have one more (Horovod's rule).
func Rows(rows int64, n, i int) (first, count int64) {
	each, more := rows/int64(n), rows%int64(n)
	first, count = int64(i)*each+min(int64(i), more), each
	if int64(i) < more {
		count++
	}
	return first, count
}
