package tcp

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// inodes has the inode numbers of the sockets of this process, for ListInodes.
var inodes inodeList

// inodeList has places for inode numbers. The first one has the number of places that were ever used, and the
// others are 0 if they are free. It is nil if nobody needs the numbers.
type inodeList struct {
	mu     sync.Mutex
	places []uint64
	free   []int
}

// ListInodes lets this package keep the inode numbers of its open sockets in places, which are all 0. It must
// be called before the first socket is made. The first place has the number of places that were ever used,
// and the others are 0 if they are free. The sockets for which there is no place are not listed.
//
// A process that is forked from this one, without the goroutines, can close its copies of the sockets with
// the list. As long as it has them, the other ranks do not notice the end of this process. The inode number
// of a socket stays the same when its descriptor changes, and a socket may be in no poller.
func ListInodes(places []uint64) { inodes.places = places }

// add adds the socket with a descriptor and returns its place, or 0 if it has none.
func (l *inodeList) add(fd int) (place int, err error) {
	if l.places == nil {
		return 0, nil
	}
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		return 0, fmt.Errorf("tcp: the inode number of a socket: %w", os.NewSyscallError("fstat", err))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch n := len(l.free); {
	case n > 0:
		place, l.free = l.free[n-1], l.free[:n-1]
	case int(l.places[0])+1 < len(l.places):
		place = int(l.places[0]) + 1
	default:
		return 0, nil
	}
	l.places[place] = s.Ino
	l.places[0] = max(l.places[0], uint64(place))
	return place, nil
}

// remove frees a place that add has returned.
func (l *inodeList) remove(place int) {
	if place == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.places[place], l.free = 0, append(l.free, place)
}
