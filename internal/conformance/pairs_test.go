package conformance

import (
	"math/rand/v2"
	"testing"
)

// pairs returns rows of a table, where row[a] is from 0 to sizes[a]-1. For any two columns, each pair of
// their values occurs in some row (Lei and Tai, "In-Parameter-Order: a test generation strategy for pairwise
// testing", 1998). If the largest size is first, the number of rows is not much greater than the product of
// the two largest sizes.
func pairs(sizes []int) [][]int {
	var rows [][]int
	for a := range sizes[0] {
		for b := range sizes[1] {
			rows = append(rows, append(make([]int, 0, len(sizes)), a, b))
		}
	}
	for column := 2; column < len(sizes); column++ {
		missing := newPairSet(sizes, column)
		// First, each row gets the value that covers the most missing pairs. If several values are equally
		// good, a hash chooses one of them. If they were chosen in turn, this column would correlate with
		// other columns.
		for i, row := range rows {
			best, most := 0, -1
			first := int(hash(uint64(i), uint64(column)) % uint64(sizes[column]))
			for k := range sizes[column] {
				v := (first + k) % sizes[column]
				if n := missing.count(row, v); n > most {
					best, most = v, n
				}
			}
			missing.cover(row, best)
			rows[i] = append(row, best)
		}
		rows = missing.complete(rows)
	}
	return rows
}

// pairSet has the pairs of values that are still missing for one column and each earlier column.
type pairSet struct {
	sizes   []int
	column  int
	missing [][][]bool // the indexes are the earlier column, its value, and the value of the column
}

func newPairSet(sizes []int, column int) *pairSet {
	s := &pairSet{sizes: sizes, column: column, missing: make([][][]bool, column)}
	for c := range s.missing {
		s.missing[c] = make([][]bool, sizes[c])
		for a := range s.missing[c] {
			s.missing[c][a] = make([]bool, sizes[column])
			for v := range s.missing[c][a] {
				s.missing[c][a][v] = true
			}
		}
	}
	return s
}

// count returns how many missing pairs a row would cover if its value in the column were v.
func (s *pairSet) count(row []int, v int) (n int) {
	for c := range s.column {
		if s.missing[c][row[c]][v] {
			n++
		}
	}
	return n
}

func (s *pairSet) cover(row []int, v int) {
	for c := range s.column {
		s.missing[c][row[c]][v] = false
	}
}

// complete appends rows until no pair is missing. Each new row covers as many missing pairs as it can.
func (s *pairSet) complete(rows [][]int) [][]int {
	for v := range s.sizes[s.column] {
		for row := s.row(v); row != nil; row = s.row(v) {
			s.cover(row, v)
			rows = append(rows, row)
		}
	}
	return rows
}

// row returns a row with value v in the column. In each earlier column that has a missing pair with v, it has
// the value of such a pair. It returns nil if no pair with v is missing.
func (s *pairSet) row(v int) []int {
	row, found := make([]int, s.column+1, len(s.sizes)), false
	row[s.column] = v
	for c := range s.column {
		for a := range s.missing[c] {
			if s.missing[c][a][v] {
				row[c], found = a, true
				break
			}
		}
	}
	if !found {
		return nil
	}
	return row
}

// Every pair of values occurs in the rows that pairs returns. If there are many columns, there are fewer rows
// than combinations of all values.
func TestPairs(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	tables := [][]int{{1, 1}, {2, 3}, {2, 2, 2, 2}, {9, 4, 4, 3, 2, 1, 2}, {3, 7, 2, 9}}
	for range 50 {
		sizes := make([]int, 2+random.IntN(7))
		for i := range sizes {
			sizes[i] = 1 + random.IntN(9)
		}
		tables = append(tables, sizes)
	}
	for _, sizes := range tables {
		rows := pairs(sizes)
		seen := make(map[[4]int]bool)
		for _, row := range rows {
			if len(row) != len(sizes) {
				t.Fatalf("sizes %v: row %v", sizes, row)
			}
			for a := range row {
				if row[a] < 0 || row[a] >= sizes[a] {
					t.Fatalf("sizes %v: row %v", sizes, row)
				}
				for b := range a {
					seen[[4]int{a, b, row[a], row[b]}] = true
				}
			}
		}
		want, all := 0, 1
		for a := range sizes {
			all *= sizes[a]
			for b := range a {
				want += sizes[a] * sizes[b]
			}
		}
		if len(seen) != want {
			t.Errorf("sizes %v: %d pairs in %d rows, want %d", sizes, len(seen), len(rows), want)
		}
		if len(sizes) > 4 && len(rows) >= all {
			t.Errorf("sizes %v: %d rows, no fewer than all combinations", sizes, len(rows))
		}
	}
}
