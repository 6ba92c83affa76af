// Package main is built as a shared library that has nothing to do with gohvd, except that it has a Go runtime too.
package main

import "C"

import (
	"runtime"
	"sync"
)

// other_sum returns the sum of the numbers below n, which n goroutines add.
//
//export other_sum
func other_sum(n C.int) C.int {
	var mu sync.Mutex
	var all sync.WaitGroup
	total := 0
	for i := range int(n) {
		all.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			total += i
		})
	}
	all.Wait()
	runtime.GC()
	return C.int(total)
}

func main() {}
