package tensor

// Rows returns the part of rows that rank i of n gets in a reducescatter: count rows, beginning with row
// first. If the rows cannot be divided evenly, the first ranks get one row more (as in Horovod).
func Rows(rows int64, n, i int) (first, count int64) {
	each, more := rows/int64(n), rows%int64(n)
	first, count = int64(i)*each+min(int64(i), more), each
	if int64(i) < more {
		count++
	}
	return first, count
}
