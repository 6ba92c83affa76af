package tcp

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/testnet"
)

// TestInodes adds more sockets than there are places, and removes some. Places are used again.
func TestInodes(t *testing.T) {
	ln := testnet.Listen(t)
	defer ln.Close()
	l := inodeList{places: make([]uint64, 3)}
	var numbers []uint64
	add := func(want int) {
		t.Helper()
		s, err := newSocket(dialRaw(t, ln.Addr().String(), nil))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		var info unix.Stat_t
		if err := unix.Fstat(s.fd, &info); err != nil {
			t.Fatal(err)
		}
		numbers = append(numbers, info.Ino)
		if got, err := l.add(s.fd); got != want || err != nil {
			t.Errorf("got place %d, %v, want %d", got, err, want)
		}
	}
	add(1)
	add(2)
	add(0)
	l.remove(0)
	l.remove(1)
	if want := []uint64{2, 0, numbers[1]}; !slices.Equal(l.places, want) {
		t.Errorf("got %v, want %v", l.places, want)
	}
	add(1)
	if want := []uint64{2, numbers[3], numbers[1]}; !slices.Equal(l.places, want) {
		t.Errorf("got %v, want %v", l.places, want)
	}
	if _, err := l.add(-1); err == nil {
		t.Error("a descriptor that is not open has a place")
	}
}
